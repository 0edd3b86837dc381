"""From a snapshot to HTML: one template, with its style and its script inside.

Both are the same on every page, so a policy can name them by their hashes: the browser runs
nothing else, whatever a job may be called.
"""

from __future__ import annotations

import base64
import datetime as dt
import functools
import hashlib
import importlib.resources
from typing import Final

import jinja2
import markupsafe

from celery_pglock import overview
from celery_pglock.page import grid, words

REFRESH_SECONDS: Final = 5


@functools.cache
def policy() -> str:
    """Return the Content-Security-Policy under which the page works."""
    return "; ".join(
        [
            "default-src 'none'",
            f"style-src '{_hash(_text('style.css'))}'",
            f"script-src '{_hash(_text('script.js'))}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def page(seen: overview.Overview, zone: dt.tzinfo, *, root: str | None) -> str:
    """Return the page.

    Args:
        seen: what is shown.
        zone: the application's time zone.
        root: the path under which the page is served; None: it is a file, and stays as it is.
    """
    return _render(
        seen=seen,
        lines=grid.lines(seen, zone),
        skips=grid.skips(seen, zone),
        columns=1 + max((len(job.rows) for job in seen.jobs), default=0),
        now=words.instant(seen.now, zone),
        ago=functools.partial(words.ago, seen.now),
        problem=None,
        root=root,
    )


def problem(sentence: str, root: str | None) -> str:
    """Return the page that says in one sentence why there is nothing to see; it tries again."""
    return _render(seen=None, lines=[], skips=[], columns=1, problem=sentence, root=root)


def _render(**shown: object) -> str:
    return _template().render(
        style=markupsafe.Markup(_text("style.css")),  # noqa: S704 - our own file
        script=markupsafe.Markup(_text("script.js")),  # noqa: S704 - our own file
        policy=policy().partition("; frame-ancestors")[0],  # which a file cannot have
        states=grid.STATES,
        refresh=REFRESH_SECONDS,
        **shown,
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_text("page.html"))


@functools.cache
def _text(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

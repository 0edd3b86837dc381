"""What a shell offers for a name: entries, jobs, periods.

A shell waits for it at each press of a key. So it is bounded in time, whatever the database or
the application's modules do, and whatever goes wrong, nothing is offered and nothing is said.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import zoneinfo
from collections.abc import Callable, Iterable
from typing import Any, Final

import click

from celery_pglock import connections, settings, table_names

_PATIENCE: Final = 3.0
_CONNECT: Final = 2
_MOST: Final = 1000

_ENTRIES: Final = """
select entry from {entries} where namespace = %(namespace)s::text
 and (definition is not null or registered is null) limit %(most)s::integer
"""
_STORED: Final = """
select entry from {entries} where namespace = %(namespace)s::text and definition is not null
limit %(most)s::integer
"""
_PAUSED: Final = """
select entry from {entries} where namespace = %(namespace)s::text
 and paused_until > pg_catalog.clock_timestamp() limit %(most)s::integer
"""
# From one job to the next in the index, however many runs each has.
JOBS: Final = """
with recursive found as (
 (select job from {runs} where job >= %(prefix)s::text order by job limit 1)
 union all
 select (select r.job from {runs} r where r.job > f.job order by r.job limit 1)
 from found f where f.job is not null
), bounded as (select job from found limit %(most)s::integer)
select pg_catalog.substr(job, pg_catalog.length(%(prefix)s::text) + 1) as name
from bounded where pg_catalog.starts_with(job, %(prefix)s::text)
"""
_PERIODS: Final = """
select period from (
 select period, status from {runs} where job = %(job)s::text
 order by period desc limit %(most)s::integer) as newest
where status in ('failed', 'skipped', 'missed') limit 100
"""


def entries(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Offer the names of all schedule entries."""
    return _matching(incomplete, lambda: _configured(ctx), lambda: _asked(ctx, _ENTRIES))


def stored_entries(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Offer the names of the entries that are kept in the database."""
    return _matching(incomplete, lambda: _asked(ctx, _STORED))


def paused_entries(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Offer the names of the entries that are paused."""
    return _matching(incomplete, lambda: _asked(ctx, _PAUSED))


def jobs(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Offer the names of the jobs that have runs, without their namespace."""
    return _matching(incomplete, lambda: _asked(ctx, JOBS))


def periods(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Offer the periods of a job that may be run again."""
    return _matching(incomplete, lambda: _asked(ctx, _PERIODS))


def tasks(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Offer the names of the tasks that the application has, without importing any module for it."""
    return _matching(incomplete, lambda: [str(name) for name in _app(ctx).tasks])


def zones(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Offer the names of the time zones."""
    return _matching(incomplete, zoneinfo.available_timezones)


def _matching(incomplete: str, *sources: Callable[[], Iterable[str]]) -> list[str]:
    found: set[str] = set()

    def collect() -> None:
        for source in sources:
            # Names that are not to be had are not offered.
            with contextlib.suppress(Exception):
                found.update(source())

    # What the application's modules print would be taken for names.
    nowhere = io.StringIO()
    logging.disable()
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            collecting = threading.Thread(target=collect, daemon=True)
            collecting.start()
            collecting.join(_PATIENCE)
            names = sorted(found.copy())
    finally:
        logging.disable(logging.NOTSET)
    return [name for name in names if name.startswith(incomplete)]


def _app(ctx: click.Context) -> Any:
    from celery.app.utils import find_app

    # Nothing has been invoked: there is what was typed, and no object of Celery's command.
    given = getattr(ctx.obj, "app", None) or ctx.find_root().params.get("app")
    return find_app(given) if isinstance(given, str) else given


def _configured(ctx: click.Context) -> list[str]:
    return [str(name) for name in _app(ctx).conf.beat_schedule or {}]


def _asked(ctx: click.Context, template: str) -> list[str]:
    app = _app(ctx)
    config = settings.of(app)
    if config.django_alias is not None:
        app.loader.import_default_modules()
    prefix = f"{config.namespace}:"
    job = str(ctx.params.get("job") or "")
    parameters = {
        "namespace": config.namespace,
        "prefix": prefix,
        "job": job if job.startswith(prefix) else f"{prefix}{job}",
        "most": _MOST,
    }
    with contextlib.closing(
        connections.connect(
            config.target(), application="pglock completion", connect_timeout=_CONNECT
        )
    ) as connection:
        rows = connection.execute(
            table_names.statement(template, config.schema), parameters
        ).fetchall()
    return [str(name) for (name,) in rows]

"""The WSGI callable: which path is answered with what."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from celery_pglock import errors, settings, snapshots
from celery_pglock.page import rendering

if TYPE_CHECKING:
    from celery import Celery

_HTML: Final = "text/html; charset=utf-8"
_TEXT: Final = "text/plain; charset=utf-8"
_COMPRESSED_FROM: Final = 1400  # bytes: less fits into one packet
_ZIPPED: Final = 3  # a page of 200 jobs: a tenth of its size, in a few milliseconds

Answer = tuple[str, str, str]


def wsgi(app: Celery) -> WSGIApplication:
    """Return the page of an application, to be served or mounted anywhere.

    It answers ``GET`` and ``HEAD`` of its own path (the page), ``metrics`` (for Prometheus) and
    ``healthz`` (the process lives). It only reads, over a connection of its own for each request,
    in a transaction that is ``READ ONLY``. When the database cannot be used the answer is 503
    with one sentence. There is no login: whoever can reach it can see it.

    Args:
        app: the application.
    """

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method = environ.get("REQUEST_METHOD", "GET")
        path = environ.get("PATH_INFO", "").rstrip("/")
        more: list[tuple[str, str]] = []
        view = _VIEWS.get(path)
        if view is None:
            status, kind, text = "404 Not Found", _TEXT, "There is nothing here.\n"
        elif method not in ("GET", "HEAD"):
            status, kind, text = "405 Method Not Allowed", _TEXT, "This only shows things.\n"
            more.append(("Allow", "GET, HEAD"))
        else:
            status, kind, text = view(app, environ.get("SCRIPT_NAME", "").rstrip("/"))
        body = text.encode()
        if len(body) > _COMPRESSED_FROM and "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            body = gzip.compress(body, _ZIPPED, mtime=0)
            more.append(("Content-Encoding", "gzip"))
        if status.startswith("503"):
            more.append(("Retry-After", str(rendering.REFRESH_SECONDS)))
        start_response(
            status,
            [
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Content-Security-Policy", rendering.policy()),
                ("Cache-Control", "no-store"),
                ("Vary", "Accept-Encoding"),
                ("X-Content-Type-Options", "nosniff"),
                ("Referrer-Policy", "no-referrer"),
                *more,
            ],
        )
        return [] if method == "HEAD" else [body]

    return answer


def _page(app: Celery, root: str) -> Answer:
    try:
        config = settings.of(app)
        seen = reader(config).read()
    except errors.PGLockError as error:
        return "503 Service Unavailable", _HTML, rendering.problem(str(error), root)
    return "200 OK", _HTML, rendering.page(seen, config.zone, root=root)


def _metrics(app: Celery, root: str) -> Answer:
    del root
    if importlib.util.find_spec("prometheus_client") is None:
        missing = "Metrics need prometheus-client: pip install 'celery-pglock[metrics]'.\n"
        return "501 Not Implemented", _TEXT, missing
    from celery_pglock import metrics

    return "200 OK", metrics.CONTENT_TYPE, metrics.exposition(settings.of(app))


def _healthz(app: Celery, root: str) -> Answer:
    del app, root
    return "200 OK", _TEXT, "ok\n"


_VIEWS: Final[dict[str, Callable[[Any, str], Answer]]] = {
    "": _page,
    "/metrics": _metrics,
    "/healthz": _healthz,
}


def reader(config: settings.Settings) -> snapshots.Reader:
    """Return what reads the namespace of an application."""
    return snapshots.Reader(config.target(), config.schema, config.namespace)

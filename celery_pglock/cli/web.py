"""``pglock web``: the page, served for who looks after it, or written to a file."""

from __future__ import annotations

import ipaddress
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import urlsplit
from wsgiref import simple_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import click
from typing_extensions import override

from celery_pglock import errors

if TYPE_CHECKING:
    import celery

# A client that says nothing must not keep a thread for ever.
_PATIENCE: Final = 30.0


@click.command(name="web")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8787, show_default=True, help="0: any."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the page to this file and end.",
)
@click.pass_context
def command(ctx: click.Context, *, host: str, port: int, output: Path | None) -> None:
    """Serve the page: what ran, what did not, who holds what. It only shows things."""
    try:
        from celery_pglock import page
        from celery_pglock.page import application, rendering
    except ModuleNotFoundError as error:
        msg = f"the page needs {error.name}; run: pip install 'celery-pglock[web]'"
        raise errors.ConfigurationError(msg) from None
    app, config = ctx.obj.app, ctx.obj.settings
    if output is not None:
        seen = application.reader(config).read()
        output.write_text(rendering.page(seen, config.zone, root=None), encoding="utf-8")
        click.echo(f"wrote {output}")
        return
    config.target()  # without one there is nothing to serve
    if not _is_loopback(host):
        click.echo(
            f"Warning: the page has no login, and with --host {host} everybody who can reach that "
            f"address can see it.",
            err=True,
        )
    _serve(app, page.wsgi(app), host, port)


def _serve(app: celery.Celery, page: Any, host: str, port: int) -> None:
    with _Server.bound(host, port) as server:
        server.set_app(_local(page) if _is_loopback(host) else page)
        # The signal comes to the main thread, which serves: shutdown() waits for that to end.
        _end_on_signals(server)
        address, bound = server.server_address[:2]
        shown = f"[{address!s}]" if ":" in str(address) else str(address)
        click.echo(f"{app.main or 'the page'} is at http://{shown}:{bound}/ (Ctrl+C ends it)")
        server.serve_forever(poll_interval=0.2)
    click.echo("ended")


def _local(page: WSGIApplication) -> WSGIApplication:
    """Refuse requests that name another host than this one.

    Any site that somebody looks at could have its own name lead to 127.0.0.1, and read the page.
    """

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        named = urlsplit(f"//{environ.get('HTTP_HOST', '127.0.0.1')}").hostname or ""
        if _is_loopback(named):
            return page(environ, start_response)
        text = b"This page is served to this host alone; see pglock web --host.\n"
        headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))]
        start_response("421 Misdirected Request", headers)
        return [text]

    return answer


def _end_on_signals(server: _Server) -> None:
    def end(*_: object) -> None:
        threading.Thread(target=server.shutdown, daemon=True).start()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, end)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Handler(simple_server.WSGIRequestHandler):
    timeout = _PATIENCE

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request: the page asks every few seconds."""

    @override
    def address_string(self) -> str:
        return str(self.client_address[0])


class _Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True

    @classmethod
    def bound(cls, host: str, port: int) -> _Server:
        """Return a server that listens.

        Raises:
            ConfigurationError: there is no such address, or it is taken.
        """
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            cls.address_family = found[0][0]
            return cls((host, port), _Handler)
        except (OSError, UnicodeError) as error:
            _refuse(host, port, error)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of browsers that open a connection and do not use it, or go away."""
        if not isinstance(sys.exception(), TimeoutError | ConnectionError):
            super().handle_error(request, client_address)

    @override
    def server_bind(self) -> None:
        """Bind, without asking a name server for the name of this host."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()


def _refuse(host: str, port: int, error: Exception) -> NoReturn:
    msg = f"cannot listen at {host} port {port} ({error}); choose another with --host or --port"
    raise errors.ConfigurationError(msg) from None

"""One connection for the length of a command, its faults turned into sentences."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

import psycopg
from typing_extensions import override

from celery_pglock import connections, schema, settings

_PATIENCE: Final = 30.0
_LAST_ANSWER: Final = 2


class Patient(psycopg.Connection[Any]):
    """Waits for an answer for a bounded time.

    A limit of the server's would not do: behind a pooler it stays for whoever comes next, and a
    server or a pooler that hangs ends nothing.

    Attributes:
        patience: seconds for each statement.
    """

    patience: float = _PATIENCE

    @override
    def wait(self, *args: Any, **kwargs: Any) -> Any:
        given_up = threading.Event()
        # A statement that waits for a lock would go on without us, and change something later.
        timers = [
            threading.Timer(self.patience, self._cancel, [given_up]),
            threading.Timer(self.patience + _LAST_ANSWER, self._hang_up),
        ]
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            return super().wait(*args, **kwargs)
        except psycopg.OperationalError as error:  # of which QueryCanceled is one
            if not given_up.is_set():
                raise
            msg = f"no answer within {self.patience:g} s"
            raise psycopg.OperationalError(msg) from error
        finally:
            for timer in timers:
                timer.cancel()

    def _cancel(self, given_up: threading.Event) -> None:
        given_up.set()
        with contextlib.suppress(psycopg.Error, OSError):
            self.cancel_safe(timeout=_LAST_ANSWER)

    def _hang_up(self) -> None:
        with (
            contextlib.suppress(psycopg.Error, OSError),
            socket.socket(fileno=os.dup(self.fileno())) as copy,
        ):
            copy.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def opened(config: settings.Settings, command: str) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection in autocommit to a database, whatever is in it.

    Raises:
        DatabaseUnavailable, SchemaError: with the remedy.
    """
    application = f"pglock {command}"
    connection = connections.connect(config.target(), application=application, factory=Patient)
    where = connections.describe_open(connection)
    with contextlib.closing(connection), schema.translated(where, config.schema):
        yield connection


@contextlib.contextmanager
def connected(config: settings.Settings, command: str) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection in autocommit to a database that has our tables.

    Raises:
        DatabaseUnavailable, SchemaError: with the remedy.
    """
    with opened(config, command) as connection:
        schema.check(connection, config.schema)
        yield connection


def who() -> str:
    """Return who gives the command, for the record."""
    return f"{getpass.getuser()}@{socket.gethostname()}"

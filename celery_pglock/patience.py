"""A connection that does not wait for ever, for commands: somebody is waiting for them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any, Final

import psycopg
from typing_extensions import override

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

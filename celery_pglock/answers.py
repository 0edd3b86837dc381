"""What the server says to a statement for which nobody has waited yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from celery_pglock import stop_signals


class Answer:
    """The rows of a statement that was sent, which may still be on their way.

    Args:
        receive: waits for them.
        uninterrupted: a signal that stops a beat waits too. Where the wait is interrupted the
            answer is lost, and nobody knows what has become of the statement.
    """

    def __init__(self, receive: Callable[[], list[Any]], *, uninterrupted: bool = False) -> None:
        self._receive = receive
        self._uninterrupted = uninterrupted
        self._rows: list[Any] | None = None

    @property
    def arrived(self) -> bool:
        """Whether somebody has waited for it."""
        return self._rows is not None

    def rows(self) -> list[Any]:
        """Return the rows, for which it waits the first time.

        Raises:
            Exception: whatever the one raises who waits for them.
        """
        if self._rows is None:
            held_back = stop_signals.held_back if self._uninterrupted else contextlib.nullcontext
            with held_back():
                self._rows = self._receive()
        return self._rows

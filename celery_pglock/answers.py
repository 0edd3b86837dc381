"""What the server says to a statement for which nobody has waited yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_pglock import stop_signals


class Answer:
    """The rows of a statement that was sent, which may still be on their way.

    Args:
        receive: waits for them.
    """

    def __init__(self, receive: Callable[[], list[Any]]) -> None:
        self._receive = receive
        self._rows: list[Any] | None = None

    def rows(self) -> list[Any]:
        """Return the rows, for which it waits the first time.

        A signal that stops a beat waits too: the statement is not cancelled.

        Raises:
            Exception: whatever the one raises who waits for them.
        """
        if self._rows is None:
            with stop_signals.held_back():
                self._rows = self._receive()
        return self._rows

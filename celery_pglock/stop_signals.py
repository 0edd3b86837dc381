"""The signals that stop a beat, SIGTERM and SIGINT, where they must not strike.

Celery's handler ends the process where it stands: between the broker's answer and its record, what
was sent would be sent once more by the next leader. And the answer to a statement in which an
exception strikes is lost: psycopg reads what is left of it, or cancels the statement.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Have the signals that stop a beat wait for the end of the block, which must not be long.

    Masking them would not do: another thread may be given one, and Python handles it in this
    one all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for each, handler in handlers.items():
        if handler is not None:
            signal.signal(each, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for each, handler in handlers.items():
            if handler is not None:
                signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)

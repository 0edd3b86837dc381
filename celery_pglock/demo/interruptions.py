"""Ctrl-C and SIGTERM, at the moments when they may not strike. In the main thread only."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Final

_INTERRUPTIONS: Final = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let an interruption wait until the end of the block.

    Between a fork and the note of its pid it would lose a process, which then went on writing
    into a directory that is being removed.
    """
    came: list[int] = []
    before = {
        signum: signal.signal(signum, lambda number, _: came.append(number))
        for signum in _INTERRUPTIONS
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if came:
        signal.raise_signal(came[0])


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Forget an interruption: what is being cleared away would be left behind by a second one."""
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _INTERRUPTIONS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

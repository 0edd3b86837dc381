"""The server's clock, as a process knows it that reads it with each of its statements.

In between it is carried on by the monotonic clock, so that this host's wall clock, wrong or set
while the process runs, moves no occurrence. What a reading says beside what was expected tells
that the server's own clock was set.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from typing import Final

#: What a clock may be off, or be set by, without a word: a slow connection looks the same.
TOLERATED: Final = dt.timedelta(seconds=5)


def _wall_clock() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def _untold(_: dt.timedelta) -> None:
    """Keep it to oneself."""


class ServerClock:
    """Used by one thread; no I/O.

    Attributes:
        host_differs: called with what this host's clock is ahead (negative: behind) when it
            differs by more than ``TOLERATED``: once, and again after the two had agreed.
    """

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], dt.datetime] = _wall_clock,
    ) -> None:
        self.host_differs: Callable[[dt.timedelta], None] = _untold
        self._monotonic = monotonic
        self._wall_clock = wall_clock
        self._differs = False
        self._step = dt.timedelta(0)
        # What it said, when that was of ours, and how long the answer took.
        self._last: tuple[dt.datetime, float, dt.timedelta] | None = None

    def now(self) -> dt.datetime:
        """Return the server's clock; before it was ever read, this host's."""
        if self._last is None:
            return self._wall_clock()
        moment, at, _ = self._last
        return moment + dt.timedelta(seconds=self._monotonic() - at)

    def read(self, moment: dt.datetime, started: float) -> None:
        """Take over what the server said during a round trip that has just ended.

        Args:
            moment: the server's clock at some moment of the round trip.
            started: when it began, by the monotonic clock.
        """
        ended = self._monotonic()
        took = dt.timedelta(seconds=ended - started)
        if self._last is not None:
            step = moment - self.now()
            # Each of the two readings may be older than its answer, by its whole round trip.
            if step < -took - TOLERATED or step > self._last[2] + TOLERATED:
                self._step += step
        # Counted from the end of the round trip, the clock can only be late by it, never
        # early: an occurrence is not sent before it is due.
        self._last = (moment, ended, took)
        ahead = self._wall_clock() - moment
        differs = ahead < -TOLERATED or ahead > took + TOLERATED
        if differs and not self._differs:
            self.host_differs(ahead)
        self._differs = differs

    def step(self) -> dt.timedelta | None:
        """Return by how much the clock was set since this was last asked, or None.

        A host that slept for a while sees the same as a clock that is set forward.
        """
        step, self._step = self._step, dt.timedelta(0)
        return step if abs(step) > TOLERATED else None

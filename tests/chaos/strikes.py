"""What was done to whom, and when: read from the history, in which each fault is an interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Self

from tests.chaos.history import Event

#: `death` of a process, the end of its `session` or of its way to the server, a `freeze`;
#: `broker` and `none` harm no run that is in progress.
Harm = Literal["death", "session", "freeze", "broker", "none"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault, from before it was done until after it was undone.

    Attributes:
        fault: which fault of the plan.
        harm: what it does.
        victims: process ids; None: everybody.
        first: the number of the row that was written before.
        last: of the row that was written after it was over.
        at: when it began.
        over_at: when it was over.
        leader: it struck the beat that led.
        beats: it struck a beat.
        ready: how many other beats stood by at that moment.
        late: it was only noticed afterwards.
    """

    fault: str
    harm: Harm
    victims: frozenset[int] | None
    first: int
    last: float
    at: float
    over_at: float
    leader: bool = False
    beats: bool = False
    ready: int = 0
    late: bool = False

    def strikes(self, pid: int) -> bool:
        """Whether a process is among the victims."""
        return self.victims is None or pid in self.victims

    def between(self, first: float, last: float) -> bool:
        """Whether a part of it lies between two numbers."""
        return self.first < last and self.last > first


class Strikes:
    """All of them."""

    def __init__(self, strikes: Iterable[Strike]) -> None:
        self._strikes = list(strikes)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Read them from a history."""
        begun: dict[int, Event] = {}
        ended: dict[int, Event] = {}
        for event in events:
            if event.kind == "strike":
                begun[event.detail["id"]] = event
            elif event.kind == "over":
                ended[event.detail["id"]] = event
        return cls(_strike(event, ended.get(number)) for number, event in begun.items())

    def __iter__(self) -> Iterator[Strike]:
        return iter(self._strikes)

    def __len__(self) -> int:
        return len(self._strikes)

    def ended_session(self, pid: int, first: float, last: float) -> bool:
        """Whether between two numbers a process may have lost its session."""
        return any(
            strike.harm == "session" and strike.strikes(pid) and strike.between(first, last)
            for strike in self._strikes
        )

    def killed(self, pid: int, first: float, last: float = math.inf) -> Strike | None:
        """Return by what a process was killed between two numbers, or None."""
        for strike in self._strikes:
            if strike.harm == "death" and strike.strikes(pid) and strike.between(first, last):
                return strike
        return None

    def frozen(self, pid: int, since: float, until: float) -> float:
        """Return for how many of the seconds between two moments a process was frozen, at most."""
        return sum(
            max(0.0, min(until, strike.over_at) - max(since, strike.at))
            for strike in self._strikes
            if strike.harm == "freeze" and strike.strikes(pid)
        )

    def disturbed(self, since: float, until: float, *, but: Strike) -> bool:
        """Whether between two moments something else was done that keeps beats from leading."""
        return any(
            strike.at < until and strike.over_at > since
            for strike in self._strikes
            if strike is not but and (strike.victims is None or strike.beats)
        )


def _strike(event: Event, over: Event | None) -> Strike:
    detail: Any = event.detail
    victims = detail.get("victims")
    return Strike(
        fault=str(detail.get("fault", "")),
        harm=detail.get("harm", "none"),
        victims=None if victims is None else frozenset(victims),
        first=event.seq,
        last=math.inf if over is None else over.seq,
        at=event.at,
        over_at=math.inf if over is None else over.at,
        leader=bool(detail.get("leader")),
        beats=bool(detail.get("beats")),
        ready=int(detail.get("ready", 0)),
        late=bool(detail.get("late")),
    )

"""Runs as intervals of the history, and those that certainly overlap.

`begin` is written after the locks were had and `end` before they are given back, so an interval
lies inside of the real hold: two that interleave are an overlap, whatever any clock says. A run
without an `end` lasts to the last that was heard of it, or to the row that was written before its
process was killed.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from typing_extensions import override

from tests.chaos.evidence import Finding, Limits, Period
from tests.chaos.history import Event
from tests.chaos.strikes import Strikes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One run of a body.

    Attributes:
        begin: its first event.
        last: the last that is known of it while it worked.
        last_seq: up to which number it was certainly at work.
        effect: what it did, at session level.
        ended: whether the body came to its end.
        raised: whether that was an exception.
        finished: what the package said that came of it.
    """

    period: Period
    name: str
    level: str
    attempt: int
    pid: int
    begin: Event
    last: Event
    last_seq: int
    effect: Event | None = None
    ended: bool = False
    raised: bool = False
    finished: Event | None = None

    @property
    def outcome(self) -> str:
        """What the package said that came of it, or nothing."""
        return "" if self.finished is None else str(self.finished.detail.get("status", ""))

    @override
    def __str__(self) -> str:
        return (
            f"{self.period.job} {self.period.label} attempt {self.attempt} of {self.begin.who}"
            f" ({self.pid}), {self.begin.seq}..{self.last_seq} {self.outcome}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """Two runs at one time: `second` began before `first` was over."""

    first: Span
    second: Span
    seconds: float


def of(events: Iterable[Event], strikes: Strikes) -> list[Span]:
    """Return the runs of a history, in the order in which they began."""
    runs: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.run is not None and event.kind in ("begin", "effect", "end", "finished"):
            runs[event.run].append(event)
    spans = [_span(events, strikes) for events in runs.values() if _has_begun(events)]
    return sorted(spans, key=lambda span: span.begin.seq)


def _has_begun(events: Iterable[Event]) -> bool:
    return any(event.kind == "begin" for event in events)


def _span(events: list[Event], strikes: Strikes) -> Span:
    kinds = {event.kind: event for event in events}
    begin = kinds["begin"]
    last = max((event for event in events if event.kind != "finished"), key=lambda event: event.seq)
    last_seq = last.seq
    if "end" not in kinds and "finished" not in kinds:
        killed = strikes.killed(begin.pid, last.seq)
        # Only a fault that came afterwards says that the process lived until then.
        if killed is not None and killed.first > last.seq and not killed.late:
            last_seq = killed.first
    return Span(
        period=Period(begin.job or "", begin.period or ""),
        name=begin.name or "",
        level=begin.level or "session",
        attempt=begin.attempt or 0,
        pid=begin.pid,
        begin=begin,
        last=last,
        last_seq=last_seq,
        effect=kinds.get("effect"),
        ended="end" in kinds,
        raised="end" in kinds and "raised" in kinds["end"].detail,
        finished=kinds.get("finished"),
    )


def overlaps(spans: Iterable[Span]) -> Iterator[Overlap]:
    """Find each pair of one lock name, or of one period, by the numbers or by the clock."""
    found: set[tuple[int, int]] = set()
    groupings: list[Callable[[Span], object]] = [lambda span: span.name, lambda span: span.period]
    ordered = list(spans)
    for grouping in groupings:
        groups: dict[object, list[Span]] = defaultdict(list)
        for span in ordered:
            groups[grouping(span)].append(span)
        for group in groups.values():
            for first, second in _interleaved(group):
                if (pair := (first.begin.seq, second.begin.seq)) not in found:
                    found.add(pair)
                    yield Overlap(first, second, max(0.0, first.last.at - second.begin.at))


def _interleaved(group: list[Span]) -> Iterator[tuple[Span, Span]]:
    active: list[Span] = []
    for second in group:
        # Some of the files' clocks are later than the numbers by a moment: kept for one more look.
        active = [
            first
            for first in active
            if first.last_seq > second.begin.seq or first.last.mono > second.begin.mono
        ]
        yield from ((first, second) for first in active)
        active.append(second)


def judge(
    spans: Iterable[Span], strikes: Strikes, limits: Limits
) -> tuple[list[Finding], list[Overlap]]:
    """Return the overlaps that nothing explains or that lasted too long, and those explained.

    After the end of its session a run goes on until it notices, so that is when the next one may
    begin beside it: for as long as the documented window, and for as long as it was frozen.
    """
    findings, explained = [], []
    for overlap in overlaps(spans):
        first, second = overlap.first, overlap.second
        what = f"{first.name}: [{first}] and [{second}], {overlap.seconds:.3f} s"
        if not strikes.ended_session(first.pid, first.begin.seq, second.begin.seq):
            findings.append(Finding("overlap", what))
            continue
        frozen = strikes.frozen(first.pid, second.begin.at, first.last.at)
        if overlap.seconds > limits.window + frozen:
            findings.append(Finding("overlap", f"for too long after a loss: {what}"))
        explained.append(overlap)
    return findings, explained

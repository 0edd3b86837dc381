"""The accounts: each period has one effect or a reason, no more and no less, and the sums match."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests.chaos.evidence import Effect, Evidence, Finding, Period, Row
from tests.chaos.history import unwritten
from tests.chaos.spans import Overlap, Span
from tests.chaos.strikes import Strikes

# The ledger's moments and the history's are of two servers on one machine.
_SLACK = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Accounts:
    """Everything by period.

    Attributes:
        evidence: as it was given.
        strikes: the faults.
        spans: the runs of each period, in their order.
        rows: the row of each period; its last, where there are several.
        effects: what was done, by period, at either level.
    """

    evidence: Evidence
    strikes: Strikes
    spans: Mapping[Period, Sequence[Span]]
    rows: Mapping[Period, Row]
    effects: Mapping[Period, Sequence[Effect]]

    def doubled(self) -> Iterator[Finding]:
        """Find what was done twice, or begun although it was done."""
        for period, spans in self.spans.items():
            yield from self._begun_again(period, spans)
            yield from self._repeated(period, [span for span in spans if span.effect])
        for period, effects in _by_period(self.evidence.committed).items():
            if len(effects) > 1:
                yield Finding("doubled", f"{_named(period)}: committed {len(effects)} times")
        for row_period, count in Counter(
            Period(row.job, row.period) for row in self.evidence.rows
        ).items():
            if count > 1:
                yield Finding("doubled", f"{_named(row_period)} has {count} rows")

    def _begun_again(self, period: Period, spans: Sequence[Span]) -> Iterator[Finding]:
        done = [span for span in spans if span.outcome == "done"]
        if len(done) > 1:
            yield Finding("doubled", f"{_named(period)}: done {len(done)} times: {_list(done)}")
        if period.job in self.evidence.fragile:
            # One that failed has an outcome, and is open to another message.
            died = [span for span in spans[:-1] if not span.finished and not span.raised]
            if died:
                yield Finding("doubled", f"{_named(period)}: at most once, begun: {_list(spans)}")
        settled = min((span.finished.seq for span in done if span.finished), default=None)
        for span in spans:
            if settled is not None and span.begin.seq > settled:
                yield Finding("doubled", f"{_named(period)}: begun after it was done: {span}")

    def _repeated(self, period: Period, spans: Sequence[Span]) -> Iterator[Finding]:
        for first, second in itertools.pairwise(spans):
            if not self.harmed(first, second.begin.seq):
                yield Finding(
                    "doubled", f"{_named(period)}: done again for no reason: {_list(spans)}"
                )

    def harmed(self, span: Span, until: float) -> bool:
        """Whether a run was killed or lost its session before its outcome was known."""
        return self.strikes.killed(
            span.pid, span.begin.seq, until
        ) is not None or self.strikes.ended_session(span.pid, span.begin.seq, until)

    def lost(self) -> Iterator[Finding]:
        """Find what was due and neither ran nor has a row that says why not."""
        for period in self.evidence.expected():
            if (why := self._why_lost(period)) is not None:
                yield Finding("lost", f"{_named(period)}: {why}")

    def _why_lost(self, period: Period) -> str | None:
        row = self.rows.get(period)
        if row is None:
            return "there is no row"
        if row.status == "done":
            attempts = {effect.attempt for effect in self.effects.get(period, ())}
            if row.attempts not in attempts:
                return f"done in attempt {row.attempts}, without an effect (of {sorted(attempts)})"
            return None
        if row.status not in ("failed", "skipped", "missed"):
            return f"it was left {row.status}"
        if not row.reason:
            return f"{row.status}, and the row does not say why"
        if not self._excused(period, row):
            return f"{row.status}: {row.reason}; but nothing happened to it"
        return None

    def _excused(self, period: Period, row: Row) -> bool:
        spans = self.spans.get(period, ())
        if any(self.harmed(span, float("inf")) for span in spans) or self._died_untold(period):
            return True
        begun = min(filter(None, (row.sent_at, row.started_at)), default=row.due_at)
        finished = row.finished_at
        return (
            begun is not None
            and finished is not None
            and any(
                strike.victims is None
                and strike.harm != "none"
                and strike.at < finished + _SLACK
                and strike.over_at > begun - _SLACK
                for strike in self.strikes
            )
        )

    def _died_untold(self, period: Period) -> bool:
        """Whether a process was killed that had the message, before a row told of its run."""
        events = self.evidence.events
        messages = {
            event.task_id
            for event in (*events, *self.evidence.local)
            if (event.job, event.period) == period and event.task_id
        }
        answered = {event.run for event in events if event.kind == "answered"}
        return any(
            event.kind == "delivered"
            and event.task_id in messages
            and event.run not in answered
            and self.strikes.killed(event.pid, event.seq) is not None
            for event in (*events, *unwritten(self.evidence.local, events))
        )

    def unexpected(self) -> Iterator[Finding]:
        """Find runs of entries for instants at which nothing was due."""
        grids = {entry.job: entry for entry in self.evidence.entries}
        due = set(self.evidence.expected())
        until = self.evidence.until.timestamp()
        for period in self.spans:
            row = self.rows.get(period)
            late = row is not None and row.due_at is not None and row.due_at > until
            if period.job in grids and period not in due and not late:
                yield Finding("undue", f"{_named(period)} ran and was not due")

    def uncommitted(self) -> Iterator[Finding]:
        """Find what was committed at transaction level without its `done`."""
        for period in _by_period(self.evidence.committed):
            row = self.rows.get(period)
            if row is None or row.status != "done":
                status = "no row" if row is None else row.status
                yield Finding("sums", f"{_named(period)}: committed, but {status}")

    def sums(self, overlaps: Iterable[Overlap]) -> Iterator[Finding]:
        """Find effects that were told of and are not there, and updates that were lost."""
        told = Counter(
            Effect(*span.period, span.name, span.attempt)
            for spans in self.spans.values()
            for span in spans
            if span.effect
        )
        there = Counter(self.evidence.effects)
        for effect in (told - there) + (there - told):
            yield Finding("sums", f"{effect}: told {told[effect]} times, there {there[effect]}")
        tolerated = Counter(overlap.first.name for overlap in overlaps)
        yield from _lost_updates(self.evidence.effects, self.evidence.counters, tolerated)
        # Two at once cannot both commit, whatever became of their sessions.
        yield from _lost_updates(
            self.evidence.committed, self.evidence.committed_counters, Counter()
        )

    def attempts(self) -> Iterator[Finding]:
        """Find attempts whose number is not higher than that of those before."""
        for period, spans in self.spans.items():
            for first, second in itertools.pairwise(spans):
                # One that was frozen before its first word may say it after its successor.
                late = self.strikes.ended_session(second.pid, 0, second.begin.seq)
                if second.attempt == first.attempt or (second.attempt < first.attempt and not late):
                    yield Finding("attempts", f"{_named(period)}: {_list([first, second])}")
            row = self.rows.get(period)
            highest = max(span.attempt for span in spans)
            if row is not None and row.attempts < highest:
                yield Finding("attempts", f"{_named(period)}: {row.attempts} in its row, {highest}")


def _lost_updates(
    effects: Iterable[Effect], counters: Mapping[str, int], tolerated: Counter[str]
) -> Iterator[Finding]:
    done = Counter(effect.name for effect in effects)
    for name, count in done.items():
        if not count - tolerated[name] <= counters.get(name, 0) <= count:
            yield Finding("sums", f"{name}: {count} effects, counted {counters.get(name, 0)}")


def open_accounts(evidence: Evidence, strikes: Strikes, spans: Iterable[Span]) -> Accounts:
    """Sort what there is by period."""
    by_period: dict[Period, list[Span]] = defaultdict(list)
    for span in spans:
        by_period[span.period].append(span)
    rows = {Period(row.job, row.period): row for row in evidence.rows}
    effects = _by_period([*evidence.effects, *evidence.committed])
    return Accounts(evidence, strikes, by_period, rows, effects)


def _by_period(effects: Iterable[Effect]) -> dict[Period, list[Effect]]:
    found: dict[Period, list[Effect]] = defaultdict(list)
    for effect in effects:
        found[Period(effect.job, effect.label)].append(effect)
    return found


def _named(period: Period) -> str:
    return f"{period.job} {period.label}"


def _list(spans: Iterable[Span]) -> str:
    return "; ".join(map(str, spans))

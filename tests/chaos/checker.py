"""The checker: a pure function from what a run left behind to what does not hold."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.chaos import accounts, history, leaders, spans
from tests.chaos.evidence import Evidence, Finding, Period
from tests.chaos.strikes import Strikes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found, and what was counted.

    Attributes:
        findings: what does not hold; nothing, if all is well.
        periods: how many had to be settled.
        outcomes: how these ended, with the reasons of those that were not done.
        runs: how many bodies began.
        deaths: how many of them were killed, and how many lost their session.
        overlaps: those that a lost session explains.
        takeovers: after each fault that struck a leader.
        lateness: of each occurrence that was sent: seconds after it was due.
        faults: how many of each were done.
    """

    findings: list[Finding]
    periods: int
    outcomes: Counter[str]
    runs: int
    deaths: Counter[str]
    overlaps: list[spans.Overlap]
    takeovers: list[leaders.Takeover]
    lateness: list[float]
    faults: Counter[str]

    @property
    def holds(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def count(self, *kinds: str) -> int:
        """Return how many findings there are of some kinds."""
        return sum(finding.kind in kinds for finding in self.findings)


def check(evidence: Evidence) -> Verdict:
    """Check every invariant."""
    strikes = Strikes.of(evidence.events)
    runs = spans.of(evidence.events, strikes)
    books = accounts.open_accounts(evidence, strikes, runs)
    unexplained, explained = spans.judge(runs, strikes, evidence.limits)
    handed_over = leaders.takeovers(evidence.events, strikes)
    findings = [
        *unexplained,
        *books.doubled(),
        *books.lost(),
        *books.unexpected(),
        *books.uncommitted(),
        *books.sums(explained),
        *books.attempts(),
        *leaders.terms(evidence.events),
        *leaders.slow(handed_over, evidence.limits),
        *_unanswered(evidence, strikes),
        *_unwitnessed(evidence, strikes),
        *_left_over(evidence),
    ]
    return Verdict(
        findings=findings,
        periods=len(evidence.expected()),
        outcomes=Counter(_outcomes(books)),
        runs=len(runs),
        deaths=Counter(_deaths(runs, strikes)),
        overlaps=explained,
        takeovers=handed_over,
        lateness=[
            row.sent_at - row.due_at
            for row in evidence.rows
            if row.sent_at is not None and row.due_at is not None
        ],
        faults=Counter(strike.fault for strike in strikes),
    )


def _unanswered(evidence: Evidence, strikes: Strikes) -> Iterator[Finding]:
    """Find messages that a worker took and that came to no end, although it lived."""
    delivered = {event.run: event for event in evidence.events if event.kind == "delivered"}
    answered = Counter(event.run for event in evidence.events if event.kind == "answered")
    for run, event in delivered.items():
        if answered[run] > 1:
            yield Finding("unanswered", f"{event.task_id} was answered {answered[run]} times")
        elif not answered[run] and strikes.killed(event.pid, event.seq) is None:
            yield Finding("unanswered", f"{event.task_id}: {event.who} ({event.pid}) took it")


def _unwitnessed(evidence: Evidence, strikes: Strikes) -> Iterator[Finding]:
    """Find what the two witnesses disagree about, unless the writer was killed in between."""
    for event in history.unwritten(evidence.local, evidence.events):
        interrupted = strikes.ended_session(event.pid, 0, float("inf"))
        if not interrupted and strikes.killed(event.pid, 0) is None:
            yield Finding("witnesses", f"{event.kind} of {event.who} ({event.pid}) has no row")
    if evidence.local:
        for event in history.unwritten(evidence.events, evidence.local):
            yield Finding("witnesses", f"{event.kind} {event.seq} of {event.who} is in no file")


def _left_over(evidence: Evidence) -> Iterator[Finding]:
    if evidence.locks:
        yield Finding("leftover", f"{evidence.locks} advisory locks are held and nobody is there")


def _outcomes(books: accounts.Accounts) -> Iterator[str]:
    for period in books.evidence.expected():
        row = books.rows.get(Period(*period))
        if row is None:
            yield "no row"
        else:
            yield row.status if row.status == "done" else f"{row.status}: {row.reason}"


def _deaths(runs: Iterable[spans.Span], strikes: Strikes) -> Iterator[str]:
    for run in runs:
        if not run.ended and strikes.killed(run.pid, run.begin.seq) is not None:
            yield "killed"
        elif run.outcome != "done" and strikes.ended_session(run.pid, run.begin.seq, run.last_seq):
            yield "session lost"

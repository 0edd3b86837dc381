"""The verdict: what is in the books, against what the schedule says should be there.

What is due is computed from the schedule, not taken from what was sent or logged: an
occurrence that everybody has forgotten has to show up as missing.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from celery_pglock.demo import app as application
from celery_pglock.demo import books, observer

_EVERY: Final = re.compile(r"every ([\d.]+) s")

_INVOICES: Final = b"select period, customer from demo.invoices"
_RESIGNED: Final = b"select resigned_at from pglock.beat_terms where namespace = %(namespace)s"
_RUNS: Final = b"""
select due_at, status, attempts, lost_attempts, postponements, sent_at, started_at, finished_at,
 reason, error, node, term, task_id from pglock.job_runs where job = %(job)s order by due_at
"""
_SETTLED: Final = frozenset({"done", "failed", "skipped", "missed"})


@dataclasses.dataclass(frozen=True, slots=True)
class Wrong:
    """A period whose invoices are not one for each customer."""

    period: dt.datetime
    doubles: int
    missing: int


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """The invoices, counted against the periods that were due.

    Attributes:
        due: periods due.
        billed: those of them with one invoice for each customer.
        invoices: all invoices.
        doubles: invoices beyond the first for one customer in one period.
        missing: customers without an invoice, over all periods due.
        undue: invoices for periods that were not due.
        wrong: the periods that are not as they should be.
    """

    due: int
    billed: int
    invoices: int
    doubles: int
    missing: int
    undue: int
    wrong: tuple[Wrong, ...]

    @property
    def right(self) -> bool:
        """Whether everybody was billed once in each period, and for nothing else."""
        return not (self.doubles or self.missing or self.undue)


@dataclasses.dataclass(frozen=True, slots=True)
class Late:
    """The first occurrence due after a leader was killed; None: it was never sent."""

    killed_at: dt.datetime
    due: dt.datetime
    seconds: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """All that the last table shows.

    Attributes:
        count: the invoices.
        done: runs that were recorded as done; None without a ledger.
        attempts: how often somebody began.
        lost: how many of these died without an outcome; None without a ledger.
        late: after each kill of a leader.
        latest: the largest lateness of all occurrences that were sent, in seconds.
    """

    count: Count
    done: int | None
    attempts: int
    lost: int | None
    late: tuple[Late, ...] = ()
    latest: float | None = None


def instants(anchor: dt.datetime, every: dt.timedelta, until: dt.datetime) -> list[dt.datetime]:
    """Return anchor + k x every, for k = 1, 2 …, up to a moment."""
    return [anchor + every * k for k in range(1, (until - anchor) // every + 1)]


def count(
    due: Iterable[dt.datetime], invoices: Iterable[tuple[dt.datetime, int]], customers: int
) -> Count:
    """Count invoices, given as (period, customer), against the periods that were due."""
    periods = set(due)
    written = Counter(invoices)
    doubles = Counter[dt.datetime]()
    billed = Counter[dt.datetime]()
    for (period, _), copies in written.items():
        doubles[period] += copies - 1
        billed[period] += 1
    wrong = [
        Wrong(period, doubles[period], max(0, customers - billed[period]))
        for period in sorted(periods | set(billed))
        if doubles[period] or period not in periods or billed[period] != customers
    ]
    return Count(
        due=len(periods),
        billed=sum(billed[period] == customers and not doubles[period] for period in periods),
        invoices=written.total(),
        doubles=doubles.total(),
        missing=sum(max(0, customers - billed[period]) for period in periods),
        undue=sum(copies for (period, _), copies in written.items() if period not in periods),
        wrong=tuple(wrong),
    )


def lateness(
    kills: Sequence[dt.datetime],
    due: Sequence[dt.datetime],
    sent: Mapping[dt.datetime, dt.datetime | None],
) -> tuple[Late, ...]:
    """Return, for each kill of a leader, how late the first occurrence due after it was sent."""
    found = []
    for killed_at in kills:
        first = min((instant for instant in due if instant > killed_at), default=None)
        if first is not None:
            sent_at = sent.get(first)
            seconds = None if sent_at is None else (sent_at - first).total_seconds()
            found.append(Late(killed_at, first, seconds))
    return tuple(found)


class Judge:
    """Reads the books; of a guarded run also the schedule and the ledger.

    Args:
        eyes: reads the database.
        until: when the last beat was stopped, where no leader says so itself.
    """

    def __init__(self, eyes: observer.Observer, *, guarded: bool, until: dt.datetime) -> None:
        self._eyes = eyes
        self._guarded = guarded
        self.due = self._due_by_schedule(until) if guarded else self._due_by_clock(until)

    def settled(self) -> bool:
        """Whether every period that was due has an end in the ledger; always so without one."""
        if not self._guarded:
            return True
        settled = {row.due_at for row in self._runs() if row.status in _SETTLED}
        return settled.issuperset(self.due)

    def judge(self, leader_kills: Sequence[dt.datetime]) -> Verdict:
        """Return the verdict."""
        invoices = ((row.period, row.customer) for row in self._eyes.rows(_INVOICES))
        counted = count(self.due, invoices, books.CUSTOMERS)
        if not self._guarded:
            return Verdict(counted, None, len(self._eyes.attempts()), None)
        runs = self._runs()
        sent = {row.due_at: row.sent_at for row in runs}
        late = [(sent_at - due).total_seconds() for due, sent_at in sent.items() if sent_at]
        return Verdict(
            counted,
            done=sum(row.status == "done" for row in runs),
            attempts=sum(row.attempts for row in runs),
            lost=sum(row.lost_attempts for row in runs),
            late=lateness(leader_kills, self.due, sent),
            latest=max(late, default=None),
        )

    def ledger(self, period: dt.datetime | None = None) -> list[str]:
        """Return what the ledger has, or has about one period, for somebody who wonders."""
        rows = self._runs() if self._guarded else []
        return [
            " ".join(f"{name}={value}" for name, value in row._asdict().items())
            for row in rows
            if period in (None, row.due_at)
        ]

    def _due_by_schedule(self, until: dt.datetime) -> list[dt.datetime]:
        scheduled = self._eyes.scheduled()
        every = scheduled and _EVERY.fullmatch(scheduled.schedule)
        if not scheduled or not every:
            return []
        (row,) = self._eyes.rows(_RESIGNED, namespace=application.NAMESPACE)
        seconds = dt.timedelta(seconds=float(every[1]))
        return instants(scheduled.anchor, seconds, row.resigned_at or until)

    def _due_by_clock(self, until: dt.datetime) -> list[dt.datetime]:
        # Stock beats store no schedule that could be read: every period, from the first that
        # somebody began to write to the last one before the beats were stopped.
        begun = [attempt.period for attempt in self._eyes.attempts()]
        begun = [period for period in begun if period <= until]
        if not begun:
            return []
        every = dt.timedelta(seconds=books.EVERY)
        return instants(min(begun) - every, every, max(begun))

    def _runs(self) -> list[Any]:
        job = f"{application.NAMESPACE}:{application.ENTRY}"
        return self._eyes.rows(_RUNS, job=job)

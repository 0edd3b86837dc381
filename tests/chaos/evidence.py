"""What the checker is given: the history, the schedule, the ledger, and what the bodies left."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tests.chaos.history import Event

EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Period(NamedTuple):
    """A job in a period."""

    job: str
    label: str


class Effect(NamedTuple):
    """What a body did, in a table without constraints: under which lock name, in which attempt."""

    job: str
    label: str
    name: str
    attempt: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the ledger; moments are seconds since 1970."""

    job: str
    period: str
    status: str
    attempts: int
    lost_attempts: int = 0
    reason: str | None = None
    due_at: float | None = None
    sent_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A schedule entry, by the configuration; only the anchor is what the package stored."""

    job: str
    anchor: dt.datetime
    every: dt.timedelta

    def dues(self, until: dt.datetime) -> list[dt.datetime]:
        """Return every instant that is due up to a moment."""
        return [
            self.anchor + self.every * k for k in range(1, (until - self.anchor) // self.every + 1)
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things may take, in seconds.

    Attributes:
        window: from the loss of a session until its run has noticed.
        takeover: from the death of a leader to the next one, when nothing else is hurt.
    """

    window: float = 6.0
    takeover: float = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that a run left behind.

    Attributes:
        events: the rows of the history.
        local: what the files of the processes say.
        rows: the ledger.
        entries: what the schedule was.
        until: up to when what falls due has to be accounted for.
        by_hand: the periods that were sent by hand until they were settled.
        fragile: the jobs of which a run that died is not begun again.
        effects: of runs at session level, on a server that nothing hurts.
        committed: of runs at transaction level, in the database of the locks.
        counters: by lock name, of session level: read, then written by each run.
        committed_counters: the same of transaction level.
        locks: how many advisory locks are held after everybody has stopped.
        limits: what takes longer is a finding.
    """

    events: Sequence[Event]
    local: Sequence[Event] = ()
    rows: Sequence[Row] = ()
    entries: Sequence[Entry] = ()
    until: dt.datetime = EPOCH
    by_hand: frozenset[Period] = frozenset()
    fragile: frozenset[str] = frozenset()
    effects: Sequence[Effect] = ()
    committed: Sequence[Effect] = ()
    counters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    committed_counters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    locks: int = 0
    limits: Limits = dataclasses.field(default_factory=Limits)

    def expected(self) -> list[Period]:
        """Return every period that has to be settled, the schedule's computed from the schedule."""
        scheduled = {
            Period(entry.job, label(due))
            for entry in self.entries
            for due in entry.dues(self.until)
        }
        return sorted(scheduled | self.by_hand)


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not hold.

    Attributes:
        kind: which invariant: `overlap`, `doubled`, `lost`, `undue`, `sums`, `leftover`, `terms`,
            `attempts`, `takeover`, `unanswered`, `witnesses`.
        text: what exactly, for people.
    """

    kind: str
    text: str


def label(due: dt.datetime) -> str:
    """Return the period of an occurrence, written out here and not asked of the package."""
    return due.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f+00:00")

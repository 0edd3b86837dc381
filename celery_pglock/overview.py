"""What a namespace is doing and has done of late: the words in which it is told; pure."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """A row of the ledger, without what is nobody's business here.

    Attributes:
        error: the class of the exception that failed it; its text may be anything.
    """

    job: str
    period: str
    status: str
    attempts: int
    lost_attempts: int
    due_at: dt.datetime | None
    sent_at: dt.datetime | None
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    retry_at: dt.datetime | None
    task: str | None
    node: str | None
    backend_pid: int | None
    name_key: int | None
    reason: str | None
    error: str | None

    @property
    def moment(self) -> dt.datetime | None:
        """When its period was due, or whatever else tells where it stands among others."""
        return self.due_at or self.started_at or self.sent_at or self.finished_at


@dataclasses.dataclass(frozen=True, slots=True)
class Leader:
    """The beat that leads.

    Attributes:
        node: host and process.
        term: the number of its leadership.
        pid: the server process of its session.
        elected_at: since when.
        last_tick_at: its last sign of life.
    """

    node: str
    term: int
    pid: int
    elected_at: dt.datetime
    last_tick_at: dt.datetime


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a job's lock name.

    Attributes:
        key: the lock key.
        pid: the server process of the session.
        application: its ``application_name``.
        run: the run that it is for; None where no row says so.
        session_since: since when the session exists; of another role's session it is hidden.
    """

    key: int
    pid: int
    application: str | None
    run: Row | None
    session_since: dt.datetime | None

    @property
    def since(self) -> dt.datetime | None:
        """Since when the lock is held, or else since when at the earliest."""
        return self.session_since if self.run is None else self.run.started_at


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job, with its newest periods.

    Attributes:
        name: ``<namespace>:<name>``.
        task: its task, where it is a schedule entry or has a row.
        schedule: the entry's schedule as it is stored; None if there is no such entry.
        next_due_at: when the entry is due next.
        unconfirmed: the occurrence that is claimed and perhaps not sent, or None.
        paused_until: until when it is paused, or None.
        paused_reason: who has paused it, and why.
        last_done_at: when a run of it was last recorded as done.
        holder: who holds its lock name.
        rows: its newest periods, the newest first.
        dead: the labels of those that are running for nobody: their session is gone.
    """

    name: str
    task: str | None
    schedule: str | None
    next_due_at: dt.datetime | None
    unconfirmed: dt.datetime | None
    paused_until: dt.datetime | None
    paused_reason: str | None
    last_done_at: dt.datetime | None
    holder: Holder | None
    rows: Sequence[Row]
    dead: Collection[str]

    @property
    def skips(self) -> int:
        """How many periods in a row were skipped since one was last run."""
        return skips_in_a_row(row.status for row in self.rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A namespace in one snapshot.

    Attributes:
        namespace: its name.
        database: ``host:port/database``.
        now: the server's clock.
        in_recovery: the server is a standby, which shows rows but no locks.
        version: of the server.
        leader: the beat that leads, or None.
        last_term: the number of the last leadership, or None if there was none.
        resigned_at: when the last leader resigned, if it did.
        last_tick_at: the last sign of life of any leader.
        standbys: the nodes that stand by.
        jobs: those that are shown, by their names.
        omitted: how many more there are, at least.
        skips: the latest, the newest first.
    """

    namespace: str
    database: str
    now: dt.datetime
    in_recovery: bool
    version: str
    leader: Leader | None
    last_term: int | None
    resigned_at: dt.datetime | None
    last_tick_at: dt.datetime | None
    standbys: Sequence[str]
    jobs: Sequence[Job]
    omitted: int
    skips: Sequence[Row]


def skips_in_a_row(statuses: Iterable[str]) -> int:
    """Return how many periods were skipped since one was last run, the newest first."""
    count = 0
    for status in statuses:
        if status == "skipped":
            count += 1
        elif status not in ("sent", "missed"):
            break
    return count

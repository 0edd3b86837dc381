"""What is claimed, and what the answer to a claim can be: the words of the engine room; pure."""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from typing import Final, Literal

from celery_pglock import quick

Refusal = Literal["closed", "exhausted", "running", "held", "moved", "stale"]
Status = Literal["done", "failed", "retrying"]

Window = tuple[dt.datetime, dt.datetime]

EXHAUSTED: Final = "exhausted"


@quick.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be run once: a job in a period, the two lock keys, and whom to name.

    Attributes:
        job: ``<namespace>:<name>``.
        period: its label (see ``periods``); None when only the lock is wanted.
        name: the lock name, for messages.
        name_key: the key of the name lock.
        run_key: the key of the run lock; None without a period.
        task: the registered name of the Celery task.
        task_id: the id of the message, or None for a direct call.
        node: the worker, for messages.
        max_lost: how many attempts may die without an outcome.
        due_at: the due instant, where there is one.
        entry: the schedule entry, where there is one.
        term: the leader's term in which the message was sent, where there is one.
        seen: with a rescue copy, how many attempts the row had when it was sent.
        again: that copy was delivered before, so a run that died may have been its own.
        origin: job and period of the beat's own row, where a calendar rule records the run
            under another; it is closed together with the run.
    """

    job: str
    period: str | None
    name: str
    name_key: int
    run_key: int | None
    task: str
    task_id: str | None = None
    node: str = ""
    max_lost: int = 3
    due_at: dt.datetime | None = None
    entry: str | None = None
    term: int | None = None
    seen: int | None = None
    again: bool = False
    origin: tuple[str, str] | None = None

    @property
    def lock_keys(self) -> frozenset[int]:
        """The keys that a run holds."""
        keys = {self.name_key} if self.run_key is None else {self.name_key, self.run_key}
        return frozenset(keys)

    @property
    def application(self) -> str:
        """What ``pg_stat_activity`` shows while the locks are held (63 bytes at most)."""
        return f"pglock:{self.task}@{self.node}"[:63]

    @property
    def idle_application(self) -> str:
        """What ``pg_stat_activity`` shows once they are given back."""
        return f"pglock:idle@{self.node}"[:63]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row as a claim found it."""

    status: str
    reason: str | None
    task_id: str | None
    attempts: int
    lost_attempts: int
    postponements: int
    node: str | None
    backend_pid: int | None
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    claim: uuid.UUID | None


@quick.dataclass(frozen=True, slots=True)
class Claimed:
    """The period is ours.

    Attributes:
        claim: the identity of this claim, which fences the settling.
        attempt: how many times the period has been claimed: a fencing token that only grows.
        lost_attempts: how many attempts died without an outcome.
        before: the row as it was, or None.
    """

    claim: uuid.UUID
    attempt: int
    lost_attempts: int
    before: Row | None


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a name lock, for people to read, and the run it is for where there is a row.

    Attributes:
        pid: the server process of the session that holds the lock.
        application: its ``application_name``; of another role's session nothing else is seen.
        job: the job of the run, or None where no row says so.
        period: its period.
        task_id: its message.
        node: its worker.
        started_at: since when.
        session_since: since when its session exists: the lock is not older. Of another role's
            session it is hidden.
    """

    pid: int
    application: str | None
    job: str | None = None
    period: str | None = None
    task_id: str | None = None
    node: str | None = None
    started_at: dt.datetime | None = None
    session_since: dt.datetime | None = None

    @property
    def ours(self) -> bool:
        """Whether the session calls itself one of celery-pglock's."""
        return (self.application or "").startswith("pglock")


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """The period is not ours, and nothing is held.

    Attributes:
        kind: ``closed`` (settled for good), ``exhausted`` (given up by this very claim),
            ``running`` (this period is being run), ``held`` (another run has the lock name),
            ``moved`` (the server's clock is outside the period that was asked for), ``stale``
            (due longer ago than history is kept, and there is no row that could tell).
        before: the row as it was, or None.
        now: the server's clock, with ``moved``.
        lost_attempts: with ``exhausted``, how many attempts died.
        holder: with ``held``, who has the lock.
    """

    kind: Refusal
    before: Row | None
    now: dt.datetime | None = None
    lost_attempts: int = 0
    holder: Holder | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a body's exception means for its period.

    Attributes:
        status: what is recorded.
        reason: in a word.
        error: the error's text, for people.
        retry_in: seconds until the retry, with ``retrying``.
        keep: at transaction level, commit what the body wrote although it raised.
    """

    status: Status
    reason: str | None = None
    error: str | None = None
    retry_in: float | None = None
    keep: bool = False

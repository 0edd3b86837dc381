"""What is said of a schedule entry in ``beat_entries``, and of one occurrence of it; values."""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from typing import Final

from celery_pglock import periods

_TASK_IDS: Final = uuid.uuid5(uuid.NAMESPACE_DNS, "celery-pglock.task-id.v1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An entry as it was left by the leader before.

    Attributes:
        schedule: its schedule in canonical text.
        anchor: from where intervals are counted.
        due_at: the occurrence that was claimed last, or None.
        task_id: the id of its message.
        published_at: when its message was confirmed; None: perhaps it was never sent.
        total_run_count: how many occurrences were claimed.
        next_due_at: the occurrence that comes next; None: there is none.
        paused_until: no occurrence that is due before it is sent; None: never paused.
        task: the name of the task that was registered.
        definition: the JSON text of an entry that is kept in the database, or None.
        revision: which edit of the definition it is.
        edited_at: when that was made.
        added: the edit since which there has been a definition.
        registered: the edit whose schedule is stored; 0: none yet; None: that of a configuration.
    """

    schedule: str
    anchor: dt.datetime
    due_at: dt.datetime | None
    task_id: str | None
    published_at: dt.datetime | None
    total_run_count: int
    next_due_at: dt.datetime | None
    paused_until: dt.datetime | None = None
    task: str | None = None
    definition: str | None = None
    revision: int = 0
    edited_at: dt.datetime | None = None
    added: int | None = None
    registered: int | None = None

    @property
    def unconfirmed(self) -> bool:
        """Whether an occurrence is claimed whose message was perhaps never sent."""
        return self.due_at is not None and self.published_at is None

    @property
    def sent(self) -> bool:
        """Whether the message of its last occurrence has been handed over."""
        return self.due_at is not None and self.published_at is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An entry that is new, or whose schedule or task was edited.

    Attributes:
        entry: the entry's name.
        task: the task's name.
        schedule: its schedule in canonical text.
        anchor: from where its intervals are counted.
        next_due_at: the occurrence that comes next; None: there is none.
        registered: which edit of its definition in the database it is, or None.
    """

    entry: str
    task: str
    schedule: str
    anchor: dt.datetime
    next_due_at: dt.datetime | None
    registered: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """An entry whose claims are of a time that has not come yet, since the clock was set back.

    Attributes:
        entry: the entry's name.
        anchor: from where its intervals are counted now.
        due_at: the newest occurrence that is due, or None.
        next_due_at: the one after it.
    """

    entry: str
    anchor: dt.datetime
    due_at: dt.datetime | None
    next_due_at: dt.datetime | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """An entry of whose missed occurrences none is made up, or that is paused.

    Attributes:
        entry: the entry's name.
        task: the task's name.
        next_due_at: when it is due again; None: as long as it is paused it is not.
        recorded: the task keeps a row in the ledger.
        missed: the occurrences that nobody sends any more.
        revision: as of ``Occurrence``.
    """

    entry: str
    task: str
    next_due_at: dt.datetime | None
    recorded: bool
    missed: tuple[dt.datetime, ...]
    revision: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """One occurrence of one entry, from its claim to its confirmation.

    Attributes:
        entry: the entry's name.
        task: the task's name.
        due_at: when it is due.
        next_due_at: when the entry is due after it.
        task_id: the id of its message, the same whoever sends it.
        recorded: the task keeps a row in the ledger.
        late: it is made up for, together with others of its entry: when its run meets the one
            before, it waits for it instead of being skipped as an overlap.
        missed: earlier occurrences that nobody sends any more.
        revision: the edit of the definition in the database that it is planned by; None: it is
            planned by the configuration.
        period: the label under which it is recorded.
    """

    entry: str
    task: str
    due_at: dt.datetime
    next_due_at: dt.datetime | None
    task_id: str
    recorded: bool
    late: bool = False
    missed: tuple[dt.datetime, ...] = ()
    revision: int | None = None
    period: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Made once: it is asked for at each step of a burst.
        object.__setattr__(self, "period", periods.occurrence(self.due_at))


def task_id(namespace: str, entry: str, due_at: dt.datetime) -> str:
    """Return the id of the message of an occurrence: a function of these three alone."""
    return str(uuid.uuid5(_TASK_IDS, f"{namespace}:{entry}\0{periods.occurrence(due_at)}"))

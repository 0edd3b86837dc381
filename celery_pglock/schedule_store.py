"""``beat_entries``: what each schedule entry was last sent for, and when it is due next.

An occurrence goes through three steps, so that no crash loses or doubles it:

1. *claim*: ``due_at`` moves on to the occurrence and ``published_at`` becomes null, together
   with the ``sent`` row of the ledger;
2. *publish*, with a task id that depends on entry and due instant alone;
3. *confirm*: ``published_at`` is set.

A leader that finds a claim without its confirmation publishes it again, with the same id and
for the same instant, before it claims anything else for that entry.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from psycopg import sql

from celery_pglock import periods, tables

_TASK_IDS: Final = uuid.uuid5(uuid.NAMESPACE_DNS, "celery-pglock.task-id.v1")

_LOAD: Final = """
select entry, schedule, anchor, due_at, task_id, published_at, total_run_count, next_due_at,
 pg_catalog.clock_timestamp() as now
from {entries} where namespace = %(namespace)s::text
"""

_REGISTER: Final = """
insert into {entries} as e (namespace, entry, task, schedule, anchor, next_due_at)
select %(namespace)s::text, w.entry, w.task, w.schedule, w.anchor, w.next_due_at
from rows from (pg_catalog.unnest(%(entry)s::text[]), pg_catalog.unnest(%(task)s::text[]),
 pg_catalog.unnest(%(schedule)s::text[]), pg_catalog.unnest(%(anchor)s::timestamptz[]),
 pg_catalog.unnest(%(next_due_at)s::timestamptz[]))
 as w(entry, task, schedule, anchor, next_due_at)
on conflict (namespace, entry) do update set task = excluded.task,
 schedule = excluded.schedule, anchor = excluded.anchor, next_due_at = excluded.next_due_at,
 seen_at = pg_catalog.clock_timestamp()
"""

# A part of the two statements after it.
_MISSED: Final = """
 insert into {runs} (job, period, due_at, status, task, entry, term, finished_at, reason)
 select %(namespace)s::text || ':' || m.entry, m.period, m.due_at, 'missed', w.task, m.entry,
  %(term)s::bigint, pg_catalog.clock_timestamp(), 'no beat was leading when it was due'
 from rows from (pg_catalog.unnest(%(missed_entry)s::text[]),
  pg_catalog.unnest(%(missed_due_at)s::timestamptz[]),
  pg_catalog.unnest(%(missed_period)s::text[])) as m(entry, due_at, period)
 join w using (entry) join c using (entry) where w.recorded
 on conflict (job, period) do nothing
"""

_CLAIM: Final = """
with w as materialized (
 select * from rows from (pg_catalog.unnest(%(entry)s::text[]),
  pg_catalog.unnest(%(due_at)s::timestamptz[]), pg_catalog.unnest(%(next_due_at)s::timestamptz[]),
  pg_catalog.unnest(%(task)s::text[]), pg_catalog.unnest(%(task_id)s::text[]),
  pg_catalog.unnest(%(period)s::text[]), pg_catalog.unnest(%(recorded)s::boolean[]))
  as w(entry, due_at, next_due_at, task, task_id, period, recorded)
), c as (
 update {entries} e set due_at = w.due_at, next_due_at = w.next_due_at, task_id = w.task_id,
  published_at = null, total_run_count = e.total_run_count + 1,
  seen_at = pg_catalog.clock_timestamp()
 from w
 where e.namespace = %(namespace)s::text and e.entry = w.entry
  and (e.due_at is null or e.published_at is not null and e.due_at < w.due_at)
  and exists (select from {terms} t
   where t.namespace = %(namespace)s::text and t.term = %(term)s::bigint)
 returning e.entry
), r as (
 insert into {runs} (job, period, due_at, status, task, task_id, entry, term)
 select %(namespace)s::text || ':' || w.entry, w.period, w.due_at, 'sent', w.task, w.task_id,
  w.entry, %(term)s::bigint
 from w join c using (entry) where w.recorded
 on conflict (job, period) do nothing
), m as ({missed})
select entry, pg_catalog.clock_timestamp() as now from c
"""

_MOVE_ON: Final = """
with w as materialized (
 select * from rows from (pg_catalog.unnest(%(entry)s::text[]), pg_catalog.unnest(%(task)s::text[]),
  pg_catalog.unnest(%(next_due_at)s::timestamptz[]), pg_catalog.unnest(%(recorded)s::boolean[]))
  as w(entry, task, next_due_at, recorded)
), c as (
 update {entries} e set next_due_at = w.next_due_at, seen_at = pg_catalog.clock_timestamp()
 from w
 where e.namespace = %(namespace)s::text and e.entry = w.entry
  and exists (select from {terms} t
   where t.namespace = %(namespace)s::text and t.term = %(term)s::bigint)
 returning e.entry
), m as ({missed})
select entry, pg_catalog.clock_timestamp() as now from c
"""

# Only these two columns: a fast worker may have finished the run by now.
_CONFIRM: Final = """
with w as materialized (
 select * from rows from (pg_catalog.unnest(%(entry)s::text[]),
  pg_catalog.unnest(%(due_at)s::timestamptz[]), pg_catalog.unnest(%(period)s::text[]))
  as w(entry, due_at, period)
), r as (
 update {runs} r set sent_at = pg_catalog.clock_timestamp() from w
 where r.job = %(namespace)s::text || ':' || w.entry and r.period = w.period and r.sent_at is null
)
update {entries} e set published_at = pg_catalog.clock_timestamp() from w
where e.namespace = %(namespace)s::text and e.entry = w.entry and e.due_at = w.due_at
returning pg_catalog.clock_timestamp() as now
"""


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
    """

    schedule: str
    anchor: dt.datetime
    due_at: dt.datetime | None
    task_id: str | None
    published_at: dt.datetime | None
    total_run_count: int
    next_due_at: dt.datetime | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An entry that is new, or whose schedule was edited."""

    entry: str
    task: str
    schedule: str
    anchor: dt.datetime
    next_due_at: dt.datetime | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """An entry of whose missed occurrences none is made up.

    Attributes:
        entry: the entry's name.
        task: the task's name.
        next_due_at: when it is due again.
        recorded: the task keeps a row in the ledger.
        missed: the occurrences that nobody sends any more.
    """

    entry: str
    task: str
    next_due_at: dt.datetime
    recorded: bool
    missed: tuple[dt.datetime, ...]


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
    """

    entry: str
    task: str
    due_at: dt.datetime
    next_due_at: dt.datetime | None
    task_id: str
    recorded: bool
    late: bool = False
    missed: tuple[dt.datetime, ...] = ()

    @property
    def period(self) -> str:
        """The label under which it is recorded."""
        return periods.occurrence(self.due_at)


def task_id(namespace: str, entry: str, due_at: dt.datetime) -> str:
    """Return the id of the message of an occurrence: a function of these three alone."""
    return str(uuid.uuid5(_TASK_IDS, f"{namespace}:{entry}\0{periods.occurrence(due_at)}"))


class ScheduleStore:
    """The statements over ``beat_entries`` of one namespace, run by its leader.

    Args:
        namespace: whose entries.
        schema_name: where the tables are.
        execute: runs a statement over the leader's lock session.
    """

    def __init__(
        self,
        namespace: str,
        schema_name: str,
        execute: Callable[[bytes, Mapping[str, Any]], list[Any]],
    ) -> None:
        self.namespace = namespace
        self._schema = schema_name
        self._execute = execute

    def load(self) -> dict[str, Stored]:
        """Return all entries of the namespace that were ever seen.

        Raises:
            LeadershipLost: as all of these methods do.
        """
        rows = self._run(_LOAD, {})
        names = [field.name for field in dataclasses.fields(Stored)]
        return {row.entry: Stored(**{name: getattr(row, name) for name in names}) for row in rows}

    def register(self, registrations: Sequence[Registration]) -> None:
        """Store entries that are new or edited."""
        self._run(_REGISTER, _columns(registrations, Registration))

    def claim(self, occurrences: Sequence[Occurrence], term: int) -> set[str]:
        """Claim one occurrence for each of several entries; return the entries it worked for.

        It does not for an entry whose last claim is not confirmed, nor in another's term.
        """
        rows = self._run(
            _CLAIM,
            {
                **_columns(occurrences, Occurrence),
                **_missed(occurrences),
                "period": [o.period for o in occurrences],
                "term": term,
            },
        )
        return {row.entry for row in rows}

    def pass_over(self, passed: Sequence[Passed], term: int) -> None:
        """Record what nobody sends any more, and when these entries are due again."""
        self._run(_MOVE_ON, {**_columns(passed, Passed), **_missed(passed), "term": term})

    def confirm(self, occurrences: Sequence[Occurrence]) -> None:
        """Record that the messages of these occurrences have been handed to the broker."""
        self._run(
            _CONFIRM,
            {
                "entry": [o.entry for o in occurrences],
                "due_at": [o.due_at for o in occurrences],
                "period": [o.period for o in occurrences],
            },
        )

    def _run(self, template: str, parameters: Mapping[str, Any]) -> list[Any]:
        query = _statement(template, self._schema)
        return self._execute(query, {**parameters, "namespace": self.namespace})


def _columns(items: Sequence[Any], kind: type[Any]) -> dict[str, list[Any]]:
    return {
        field.name: [getattr(item, field.name) for item in items]
        for field in dataclasses.fields(kind)
        if field.name not in ("late", "missed")
    }


def _missed(items: Sequence[Occurrence | Passed]) -> dict[str, list[Any]]:
    missed = [(item.entry, due) for item in items for due in item.missed]
    return {
        "missed_entry": [entry for entry, _ in missed],
        "missed_due_at": [due for _, due in missed],
        "missed_period": [periods.occurrence(due) for _, due in missed],
    }


@functools.cache
def _statement(template: str, schema_name: str) -> bytes:
    names = tables.names(schema_name)
    missed = sql.SQL(_MISSED).format(**names)
    return sql.SQL(template).format(**names, missed=missed).as_bytes()

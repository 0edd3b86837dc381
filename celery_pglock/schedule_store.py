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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from psycopg import sql

from celery_pglock import periods, table_names

NOBODY_LED: Final = "no beat was leading when it was due"
CLOCK_SET_FORWARD: Final = "the server's clock was set forward over it"

_TASK_IDS: Final = uuid.uuid5(uuid.NAMESPACE_DNS, "celery-pglock.task-id.v1")

_LOAD: Final = """
select entry, task, schedule, anchor, due_at, task_id, published_at, total_run_count, next_due_at,
 paused_until, definition::text as definition, revision, edited_at, added, registered,
 pg_catalog.clock_timestamp() as now
from {entries} where namespace = %(namespace)s::text
"""
_LOAD_PAGE: Final = f"{_LOAD} and entry > %(after)s::text order by entry limit %(most)s::integer"
_LOAD_SOME: Final = f"{_LOAD} and entry = any (%(names)s::text[])"
# So many rows at once: while a leader is busy with more of them its session is idle, and would end.
_PAGE: Final = 10_000

_PAUSED: Final = """
select entry, paused_until, pg_catalog.clock_timestamp() as now from {entries}
where namespace = %(namespace)s::text and paused_until is not null
"""

_REGISTER: Final = """
insert into {entries} as e (namespace, entry, task, schedule, anchor, next_due_at, registered)
select %(namespace)s::text, w.entry, w.task, w.schedule, w.anchor, w.next_due_at, w.registered
from rows from (pg_catalog.unnest(%(entry)s::text[]), pg_catalog.unnest(%(task)s::text[]),
 pg_catalog.unnest(%(schedule)s::text[]), pg_catalog.unnest(%(anchor)s::timestamptz[]),
 pg_catalog.unnest(%(next_due_at)s::timestamptz[]), pg_catalog.unnest(%(registered)s::bigint[]))
 as w(entry, task, schedule, anchor, next_due_at, registered)
on conflict (namespace, entry) do update set task = excluded.task,
 schedule = excluded.schedule, anchor = excluded.anchor, next_due_at = excluded.next_due_at,
 registered = excluded.registered, seen_at = pg_catalog.clock_timestamp()
"""

# A part of the two statements after it.
_MISSED: Final = """
 insert into {runs} (job, period, due_at, status, task, entry, term, finished_at, reason)
 select %(namespace)s::text || ':' || m.entry, m.period, m.due_at, 'missed', w.task, m.entry,
  %(term)s::bigint, pg_catalog.clock_timestamp(), %(why_missed)s::text
 from rows from (pg_catalog.unnest(%(missed_entry)s::text[]),
  pg_catalog.unnest(%(missed_due_at)s::timestamptz[]),
  pg_catalog.unnest(%(missed_period)s::text[])) as m(entry, due_at, period)
 join w using (entry) join c using (entry) where w.recorded
 on conflict (job, period) do nothing
"""

# The clock that was set forward over an occurrence and then back again comes to it once more: so
# what is recorded as missed is sent after all.
_CLAIM: Final = """
with w as materialized (
 select * from rows from (pg_catalog.unnest(%(entry)s::text[]),
  pg_catalog.unnest(%(due_at)s::timestamptz[]), pg_catalog.unnest(%(next_due_at)s::timestamptz[]),
  pg_catalog.unnest(%(task)s::text[]), pg_catalog.unnest(%(task_id)s::text[]),
  pg_catalog.unnest(%(period)s::text[]), pg_catalog.unnest(%(recorded)s::boolean[]),
  pg_catalog.unnest(%(revision)s::bigint[]))
  as w(entry, due_at, next_due_at, task, task_id, period, recorded, revision)
), c as (
 update {entries} e set due_at = w.due_at, next_due_at = w.next_due_at, task_id = w.task_id,
  published_at = null, total_run_count = e.total_run_count + 1,
  seen_at = pg_catalog.clock_timestamp()
 from w
 where e.namespace = %(namespace)s::text and e.entry = w.entry
  and (e.due_at is null or e.published_at is not null and e.due_at < w.due_at)
  and (e.paused_until is null or e.paused_until <= w.due_at)
  and (w.revision is null or e.revision = w.revision)
  and exists (select from {terms} t
   where t.namespace = %(namespace)s::text and t.term = %(term)s::bigint)
 returning e.entry
), r as (
 insert into {runs} as r (job, period, due_at, status, task, task_id, entry, term)
 select %(namespace)s::text || ':' || w.entry, w.period, w.due_at, 'sent', w.task, w.task_id,
  w.entry, %(term)s::bigint
 from w join c using (entry) where w.recorded
 on conflict (job, period) do update set status = 'sent', task_id = excluded.task_id,
  term = excluded.term, sent_at = null, finished_at = null, reason = null
 where r.status = 'missed' and r.attempts = 0
), m as ({missed})
select entry, pg_catalog.clock_timestamp() as now from c
"""

_MOVE_ON: Final = """
with w as materialized (
 select * from rows from (pg_catalog.unnest(%(entry)s::text[]), pg_catalog.unnest(%(task)s::text[]),
  pg_catalog.unnest(%(next_due_at)s::timestamptz[]), pg_catalog.unnest(%(recorded)s::boolean[]),
  pg_catalog.unnest(%(revision)s::bigint[]))
  as w(entry, task, next_due_at, recorded, revision)
), c as (
 update {entries} e set next_due_at = w.next_due_at, seen_at = pg_catalog.clock_timestamp()
 from w
 where e.namespace = %(namespace)s::text and e.entry = w.entry
  and (w.revision is null or e.revision = w.revision)
  and exists (select from {terms} t
   where t.namespace = %(namespace)s::text and t.term = %(term)s::bigint)
 returning e.entry
), m as ({missed})
select entry, pg_catalog.clock_timestamp() as now from c
"""

# Never an entry whose last claim is not confirmed: it is published under its own instant first.
_RESET: Final = """
update {entries} e set anchor = w.anchor, due_at = w.due_at, next_due_at = w.next_due_at,
 task_id = null, published_at = case when w.due_at is not null then pg_catalog.clock_timestamp() end,
 seen_at = pg_catalog.clock_timestamp()
from rows from (pg_catalog.unnest(%(entry)s::text[]), pg_catalog.unnest(%(anchor)s::timestamptz[]),
 pg_catalog.unnest(%(due_at)s::timestamptz[]), pg_catalog.unnest(%(next_due_at)s::timestamptz[]))
 as w(entry, anchor, due_at, next_due_at)
where e.namespace = %(namespace)s::text and e.entry = w.entry
 and (e.due_at is null or e.published_at is not null)
 and exists (select from {terms} t
  where t.namespace = %(namespace)s::text and t.term = %(term)s::bigint)
returning pg_catalog.clock_timestamp() as now
"""

# As new entries they begin anew, should they come back: nothing is due of them until then. Nor is
# a claim sent by then that was not sent yet: its row is left to the rescue, which closes it.
_LEAVE: Final = """
with l as (
 update {entries} e set schedule = '', next_due_at = null, seen_at = pg_catalog.clock_timestamp(),
  published_at = case when e.due_at is not null
   then coalesce(e.published_at, pg_catalog.clock_timestamp()) end
 where e.namespace = %(namespace)s::text and e.entry = any (%(names)s::text[])
  and exists (select from {terms} t
   where t.namespace = %(namespace)s::text and t.term = %(term)s::bigint)
 returning e.entry, pg_catalog.to_char(e.due_at at time zone 'UTC',
  'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"') as period
)
update {runs} r set sent_at = pg_catalog.clock_timestamp() from l
where r.job = %(namespace)s::text || ':' || l.entry and r.period = l.period
 and r.status = 'sent' and r.sent_at is null
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


class ScheduleStore:
    """The statements over ``beat_entries`` of one namespace, run by its leader.

    Args:
        namespace: whose entries.
        schema_name: where the tables are.
        execute: runs a statement over the leader's lock session.

    Attributes:
        why_missed: the reason in the rows of occurrences that are missed from now on.
    """

    def __init__(
        self,
        namespace: str,
        schema_name: str,
        execute: Callable[[bytes, Mapping[str, Any]], list[Any]],
    ) -> None:
        self.namespace = namespace
        self.why_missed = NOBODY_LED
        self._schema = schema_name
        self._execute = execute

    def load(self, only: Collection[str] | None = None) -> dict[str, Stored]:
        """Return all entries of the namespace that were ever seen, or those with these names.

        Raises:
            LeadershipLost: as all of these methods do.
        """
        names = [field.name for field in dataclasses.fields(Stored)]
        pages = self._pages() if only is None else self._pages_of([*only])
        return {
            row.entry: Stored(**{name: getattr(row, name) for name in names})
            for rows in pages
            for row in rows
        }

    def _pages(self) -> Iterator[list[Any]]:
        after = ""
        rows: list[Any] = [None] * _PAGE
        while len(rows) == _PAGE:
            rows = self._run(_LOAD_PAGE, {"after": after, "most": _PAGE})
            yield rows
            after = rows[-1].entry if rows else after

    def _pages_of(self, names: list[str]) -> Iterator[list[Any]]:
        for start in range(0, len(names), _PAGE):
            yield self._run(_LOAD_SOME, {"names": names[start : start + _PAGE]})

    def paused(self) -> dict[str, dt.datetime]:
        """Return until when entries are or were paused; what was due before that is not sent."""
        return {row.entry: row.paused_until for row in self._run(_PAUSED, {})}

    def register(self, registrations: Sequence[Registration]) -> None:
        """Store entries that are new or edited."""
        for start in range(0, len(registrations), _PAGE):
            page = registrations[start : start + _PAGE]
            self._run(_REGISTER, _columns(page, Registration))

    def leave(self, names: Collection[str], term: int) -> None:
        """Record that nothing is due of these entries any more, because they were removed.

        What is claimed and was perhaps never sent is not sent any more.
        """
        self._run(_LEAVE, {"names": [*names], "term": term})

    def reset(self, resets: Sequence[Reset], term: int) -> None:
        """Bring entries back to the present whose last claim was due after it."""
        self._run(_RESET, {**_columns(resets, Reset), "term": term})

    def claim(self, occurrences: Sequence[Occurrence], term: int) -> set[str]:
        """Claim one occurrence for each of several entries; return the entries it worked for.

        It does not for an entry whose last claim is not confirmed, nor in another's term, nor
        for an occurrence that is due while its entry is paused, nor where somebody has edited
        the definition in the database since it was read.
        """
        rows = self._run(
            _CLAIM,
            {
                **_columns(occurrences, Occurrence),
                **_missed(occurrences),
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
        return self._execute(
            query, {**parameters, "namespace": self.namespace, "why_missed": self.why_missed}
        )


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
    names = table_names.names(schema_name)
    missed = sql.SQL(_MISSED).format(**names)
    return sql.SQL(template).format(**names, missed=missed).as_bytes()

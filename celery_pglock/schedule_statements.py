"""The SQL of the schedule store, one text for each thing that a leader says to ``beat_entries``.

Kept apart from ``schedule_store``, which knows when each is said. The texts are templates:
``statement`` puts the names of the tables in.
"""

from __future__ import annotations

import functools
from typing import Final

from psycopg import sql

from celery_pglock import table_names

_LOAD: Final = """
select entry, task, schedule, anchor, due_at, task_id, published_at, total_run_count, next_due_at,
 paused_until, definition::text as definition, revision, edited_at, added, registered,
 pg_catalog.clock_timestamp() as now
from {entries} where namespace = %(namespace)s::text
"""
LOAD_PAGE: Final = f"{_LOAD} and entry > %(after)s::text order by entry limit %(most)s::integer"
LOAD_SOME: Final = f"{_LOAD} and entry = any (%(names)s::text[])"

PAUSED: Final = """
select entry, paused_until, pg_catalog.clock_timestamp() as now from {entries}
where namespace = %(namespace)s::text and paused_until is not null
"""

REGISTER: Final = """
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
CLAIM: Final = """
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

MOVE_ON: Final = """
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
RESET: Final = """
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
LEAVE: Final = """
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
CONFIRM: Final = """
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


@functools.cache
def statement(template: str, schema: str) -> bytes:
    """Return a template as it is sent, for the tables in this schema."""
    names = table_names.names(schema)
    missed = sql.SQL(_MISSED).format(**names)
    return sql.SQL(template).format(**names, missed=missed).as_bytes()

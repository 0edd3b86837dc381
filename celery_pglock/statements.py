"""The SQL of the ledger, one text for each thing that it says to ``job_runs``.

Kept apart from ``ledger``, which knows when each is said and what its answers mean. The
texts are templates: ``statement`` and ``claim`` put the schema's name in, quoted. They stay
below 4,096 characters, above which psycopg does not remember their conversion.
"""

from __future__ import annotations

import functools
from typing import Final

from psycopg import sql

from celery_pglock import locks, sessions, table_names

# At transaction level the claim is committed a moment before the locks of the working
# transaction are taken. A copy that comes in between must not take the claimer for dead.
CLAIM_GRACE_SECONDS: Final = 2

# "is not distinct": with "=" a failed row without a reason would be neither closed nor open.
# A rescue copy says how many attempts there were when it was sent; with one more the message
# that was thought lost has been started, and what came of it stands (``moved``: in which states).
_CLOSED: Final = (
    "{r}.status in ('done', 'skipped', 'missed')"
    " or %(moved)s::text ~ {r}.status and {r}.attempts > %(seen)s::int"
    " or {r}.status = 'failed' and {r}.reason is not distinct from 'exhausted'"
)
_JUST_CLAIMED: Final = (
    "{r}.status = 'running' and {r}.backend_pid is null"
    " and {r}.claim is distinct from %(claim)s::uuid"
    " and {r}.started_at > pg_catalog.clock_timestamp()"
    f" - interval '{CLAIM_GRACE_SECONDS} s'"
)
# A claim that was sent again over a new session, because the old one broke while it was
# answered, is the same attempt and not a crash of the one before.
_DIED: Final = "(r.status = 'running' and r.claim is distinct from excluded.claim)"
_GIVEN_UP: Final = f"r.lost_attempts + {_DIED}::int > %(max_lost)s::int"

# A row that is pruned between this statement's snapshot and its upsert is inserted anew: its
# attempts go on from what the snapshot saw.
_CLAIM: Final = f"""
with s as materialized (
 select status, reason, task_id, attempts, lost_attempts, postponements, node, backend_pid,
  started_at, finished_at, claim from {{runs}}
 where job = %(job)s::text and period = %(period)s::text
), g as materialized (
 select case
  when pg_catalog.clock_timestamp() < %(since)s::timestamptz
   or pg_catalog.clock_timestamp() >= %(until)s::timestamptz then 'moved'
  when exists (select from s where {_CLOSED.format(r="s")}) then 'closed'
  when %(due_at)s::timestamptz < pg_catalog.clock_timestamp() - %(keep)s::interval
   and not exists (select from s) then 'stale'
  when exists (select from s where {_JUST_CLAIMED.format(r="s")}) then 'running'
 end as refusal
), l as materialized (
 select case when refusal is null then {{try_lock}}(%(run_key)s::bigint) end as run from g
), n as materialized (
 select case when run then {{try_lock}}(%(name_key)s::bigint) end as name from l
), c as (
 insert into {{runs}} as r (job, period, due_at, status, attempts, claim, name_key, task,
  task_id, entry, node, backend_pid, term, started_at)
 select %(job)s::text, %(period)s::text, %(due_at)s::timestamptz, 'running',
  1 + coalesce((select attempts from s), 0),
  %(claim)s::uuid, %(name_key)s::int8, %(task)s::text, %(task_id)s::text, %(entry)s::text,
  %(node)s::text, {{backend_pid}}, %(term)s::int8, pg_catalog.clock_timestamp()
 from n where name
 on conflict (job, period) do update set
  (status, reason, finished_at, attempts) = (
   select case when given_up then 'failed' else 'running' end,
    case when given_up then 'exhausted' when r.reason ~ '^(opened|triggered) ' then r.reason end,
    case when given_up then excluded.started_at end,
    r.attempts + (r.claim is distinct from excluded.claim and not given_up)::int
   from (select {_GIVEN_UP} as given_up) as d),
  lost_attempts = r.lost_attempts + {_DIED}::int,
  claim = excluded.claim, name_key = excluded.name_key, task = excluded.task,
  task_id = excluded.task_id, node = excluded.node, backend_pid = excluded.backend_pid,
  due_at = coalesce(r.due_at, excluded.due_at), entry = coalesce(r.entry, excluded.entry),
  term = coalesce(excluded.term, r.term), started_at = excluded.started_at, retry_at = null,
  rescues = 0
 where not ({_CLOSED.format(r="r")}) and not ({_JUST_CLAIMED.format(r="r")})
 returning r.status, r.attempts, r.lost_attempts
)
select case
  when g.refusal is not null then g.refusal
  when not l.run then 'running'
  when not n.name then {{free_run}} 'held' {{end}}
  when c.status = 'running' then 'claimed'
  when c.status = 'failed' then {{free_both}} 'exhausted' {{end}}
  else {{free_both}} 'changed' {{end}}
 end as answer, c.attempts as attempt, c.lost_attempts as lost,
 pg_catalog.clock_timestamp() as now, s.*{{announce}}
from g cross join l cross join n left join c on true left join s on true
"""

_SESSION_LEVEL: Final = {
    "try_lock": sql.SQL("pg_catalog.pg_try_advisory_lock"),
    "backend_pid": sql.SQL("pg_catalog.pg_backend_pid()"),
    "free_run": sql.SQL("case when pg_catalog.pg_advisory_unlock(%(run_key)s::bigint) then"),
    "free_both": sql.SQL(
        "case when pg_catalog.pg_advisory_unlock(%(name_key)s::bigint)"
        " and pg_catalog.pg_advisory_unlock(%(run_key)s::bigint) then"
    ),
    "end": sql.SQL("end"),
    "announce": sql.SQL(
        ", case when c.status = 'running' then pg_catalog.set_config('application_name',"
        " %(application)s::text, false) end"
    ),
}
# In a statement of its own a transaction-level lock lasts just as long as the statement: long
# enough to claim under it, and there is nothing to give back. No backend_pid: a pooler may
# serve the next statement with another server process.
_TRANSACTION_LEVEL: Final = {
    "try_lock": sql.SQL("pg_catalog.pg_try_advisory_xact_lock"),
    "backend_pid": sql.SQL("null::integer"),
    "free_run": sql.SQL(""),
    "free_both": sql.SQL(""),
    "end": sql.SQL(""),
    "announce": sql.SQL(""),
}

# Who opened a period again stays in its row, once it is done.
# With "status = 'running'" the planner takes the small index of the rows that are not settled,
# without a condition, and walks its dead entries: all of those since the oldest snapshot that
# somebody holds, a backup's for instance. So it must not see what it says.
#
# The beat's own row of an occurrence that is recorded under a calendar period is settled by
# the same statement, so that nobody takes it for lost.
_SETTLE: Final = """
u as (
 update {runs} set status = %(status)s::text, error = %(error)s::text,
  reason = coalesce(case when %(status)s::text <> 'retrying' then %(reason)s::text end,
   case when reason ~ '^(opened|triggered) ' then reason end, %(reason)s::text),
  finished_at = case when %(status)s::text <> 'retrying' then pg_catalog.clock_timestamp() end,
  retry_at = pg_catalog.clock_timestamp() + %(retry_in)s::double precision * interval '1 s'
 where job = %(job)s::text and period = %(period)s::text and claim = %(claim)s::uuid
  and status || '' = 'running'
 returning 1
), o as (
 update {runs} set status = %(status)s::text, reason = %(origin_reason)s::text,
  finished_at = pg_catalog.clock_timestamp()
 where job = %(origin_job)s::text and period = %(origin_period)s::text
  and status in ('sent', 'failed') and %(status)s::text <> 'retrying' and exists (select from u)
)
"""
# The name lock goes first: a copy of this period that comes in between must meet the run
# lock, and be told that the period is running, not that somebody else has its lock name.
# Both go before the statement's commit is visible; that is safe, because the next claim
# waits for this row and reads it again.
SETTLE_AND_UNLOCK: Final = (
    "with "
    + _SETTLE
    + """, n as materialized (select pg_catalog.count(*) as n from u)
select n.n as settled, pg_catalog.pg_advisory_unlock(%(name_key)s::bigint) as name_freed,
 pg_catalog.pg_advisory_unlock(%(run_key)s::bigint) as run_freed,
 pg_catalog.set_config('application_name', %(application)s::text, false) from n
"""
)
SETTLE_ONLY: Final = "with " + _SETTLE + " select pg_catalog.count(*) as settled from u"

CLOSE_ORIGIN: Final = """
update {runs} set status = 'skipped', reason = %(reason)s::text,
 finished_at = pg_catalog.clock_timestamp()
where job = %(origin_job)s::text and period = %(origin_period)s::text
 and status || '' = 'sent'
"""

# One snapshot of both rows: the run's under a calendar rule, and the beat's own of its message.
ORIGIN: Final = """
select o.status as origin, r.attempts, r.status, r.task_id
from (select 1) as one
left join {runs} o on o.job = %(origin_job)s::text and o.period = %(origin_period)s::text
left join {runs} r on r.job = %(job)s::text and r.period = %(period)s::text
"""

STILL_MINE: Final = """
select from {runs} where job = %(job)s::text and period = %(period)s::text
 and claim = %(claim)s::uuid and status || '' = 'running'
"""

RETURN: Final = """
update {runs} set status = 'sent', claim = null,
 reason = case when reason ~ '^(opened|triggered) ' then reason else %(reason)s::text end
where job = %(job)s::text and period = %(period)s::text and claim = %(claim)s::uuid
 and status || '' = 'running'
"""

# How far back a skip looks for a run.
SKIPS_COUNTED: Final = 100
_SETTLED_LOOKED_AT: Final = 1000

# How many periods in a row were skipped since one was run is counted in the same statement: by the
# labels, which stand in the index in their order. Random ones (``id:…``) are looked for among the
# rows that were settled last. Both are bounded. The labels are walked one by one and no further than
# to the last run: of a hundred at once the planner, as long as it has no statistics of the table,
# reads and sorts all that the job ever had.
SKIP: Final = f"""
with recursive w as (
insert into {{runs}} as r (job, period, due_at, status, name_key, task, task_id, entry, node, term,
 finished_at, reason)
values (%(job)s::text, %(period)s::text, %(due_at)s::timestamptz, 'skipped',
 %(name_key)s::bigint, %(task)s::text, %(task_id)s::text, %(entry)s::text, %(node)s::text,
 %(term)s::bigint, pg_catalog.clock_timestamp(), %(reason)s::text)
on conflict (job, period) do update set status = 'skipped', reason = excluded.reason,
 name_key = excluded.name_key, node = excluded.node, finished_at = excluded.finished_at
where r.status = 'sent'
), b (period, status, place) as (
 (select r.period, r.status, 1 from {{runs}} r
  where r.job = %(job)s::text and r.period < %(period)s::text
   and not pg_catalog.starts_with(%(period)s::text, 'id:')
  order by r.period desc limit 1)
 union all
 select o.period, o.status, b.place + 1 from b cross join lateral (
  select r.period, r.status from {{runs}} r
  where r.job = %(job)s::text and r.period < b.period order by r.period desc limit 1) o
 where b.place < {SKIPS_COUNTED} and b.status in ('sent', 'skipped', 'missed')
), e as (
 select b.status, b.place from b
 union all
 (select t.status, pg_catalog.row_number() over (order by t.moment desc) as place from (
  (select r.job, r.period, r.status, r.finished_at as moment from {{runs}} r
   where r.status in ('done', 'failed', 'skipped', 'missed') and r.finished_at is not null
    and pg_catalog.starts_with(%(period)s::text, 'id:')
   order by r.finished_at desc limit {_SETTLED_LOOKED_AT})
  union all
  select r.job, r.period, r.status, r.started_at from {{runs}} r
  where r.status in ('running', 'retrying') and pg_catalog.starts_with(%(period)s::text, 'id:')
  ) t where t.job = %(job)s::text and pg_catalog.starts_with(t.period, 'id:')
  order by t.moment desc limit {SKIPS_COUNTED})
), f as (
 select e.status, pg_catalog.bool_or(e.status not in ('sent', 'skipped', 'missed'))
  over (order by e.place) as ran from e
)
select 1 + pg_catalog.count(*) filter (where f.status = 'skipped' and not f.ran) as skips from f
"""

POSTPONE: Final = """
insert into {runs} as r (job, period, due_at, status, name_key, task, task_id, entry, node, term,
 sent_at, postponements, reason)
values (%(job)s::text, %(period)s::text, %(due_at)s::timestamptz, 'sent', %(name_key)s::bigint,
 %(task)s::text, %(task_id)s::text, %(entry)s::text, %(node)s::text, %(term)s::bigint,
 pg_catalog.clock_timestamp(), %(number)s::integer, %(reason)s::text)
on conflict (job, period) do update set postponements = excluded.postponements,
 name_key = coalesce(r.name_key, excluded.name_key),
 sent_at = case when r.status = 'sent' then excluded.sent_at else r.sent_at end
where r.postponements < excluded.postponements
 and r.status in ('sent', 'running', 'retrying', 'failed')
"""

REVOKE: Final = """
update {runs} set reason = %(reason)s::text, finished_at = pg_catalog.clock_timestamp(),
 retry_at = null, status = case when status = 'sent' then 'skipped' else 'failed' end
where status in ('sent', 'running', 'retrying') and (status <> 'running' or %(running)s::boolean)
 and task_id = %(task_id)s::text and pg_catalog.starts_with(job, %(prefix)s::text)
"""

HOLDER: Final = """
select l.pid, a.application_name as application, r.job, r.period, r.task_id, r.node, r.started_at,
 a.backend_start as session_since
from pg_catalog.pg_locks l left join pg_catalog.pg_stat_activity a on a.pid = l.pid
left join {runs} r on r.name_key = %(key)s::bigint and r.status = 'running'
where {held_by}
order by (r.backend_pid = l.pid) desc nulls last, r.started_at desc nulls last limit 1
"""

READ: Final = """
select status, reason, task_id, attempts, lost_attempts, postponements, node, backend_pid,
 started_at, finished_at, claim
from {runs} where job = %(job)s::text and period = %(period)s::text
"""

PERIOD_OF: Final = """
select period from {runs} where job = %(job)s::text and task_id = %(task_id)s::text
order by coalesce(started_at, sent_at) desc nulls last limit 1
"""


@functools.cache
def statement(template: str, schema: str) -> bytes:
    """Return a template as it is sent, for the tables in this schema."""
    return sql.SQL(template).format(**table_names.names(schema), held_by=locks.HELD_BY).as_bytes()


@functools.cache
def claim(schema: str, level: sessions.Level) -> bytes:
    """Return the claim as it is sent, for a schema and a lock level."""
    parts = _SESSION_LEVEL if level == "session" else _TRANSACTION_LEVEL
    return sql.SQL(_CLAIM).format(**table_names.names(schema), **parts).as_bytes()

"""What is asked for an overview of a namespace: one text for each question.

However long the history is, only its end is read. All rows of a job that are asked for stand
together in the unique index, the jobs are walked from one to the next in the same index, and
what was settled last is found in the index of settled rows. Each of these reads is bounded.

Messages without an occurrence have random labels (``id:…``), whose newest no index finds: of
these the ones are shown that are among the rows settled last, or still open.
"""

from __future__ import annotations

from typing import Final

from celery_pglock import locks

SKIPS_SHOWN: Final = 20

# No page and no scrape may keep a server busy.
PATIENCE: Final = b"set local statement_timeout = '10s'"
# Under a calendar rule each lock name is a job, so there may be more of them than can be shown.
_WALK: Final = 2000
_RECENT: Final = 2000
_DEEP: Final = 2000

_SETTLED: Final = "r.status in ('done', 'failed', 'skipped', 'missed')"
_COLUMNS: Final = """
 r.job, r.period, r.status, r.attempts, r.lost_attempts, r.due_at, r.sent_at, r.started_at,
 r.finished_at, r.retry_at, r.task, r.node, r.backend_pid, r.name_key, r.reason,
 pg_catalog.split_part(r.error, ':', 1) as error
"""
_LAST_SETTLED: Final = f"""
 select r.* from {{runs}} r where {_SETTLED} and r.finished_at is not null
 order by r.finished_at desc limit {_RECENT}
"""

BEATS: Final = """
select pg_catalog.now() as now, pg_catalog.pg_is_in_recovery() as in_recovery,
 pg_catalog.split_part(pg_catalog.current_setting('server_version'), ' ', 1) as version,
 t.node, t.term, t.elected_at, t.last_tick_at, t.resigned_at, t.backend_pid,
 array(select pg_catalog.split_part(a.application_name, '@', 2) from pg_catalog.pg_stat_activity a
  where a.datname = pg_catalog.current_database()
   and pg_catalog.starts_with(a.application_name, %(standby)s::text)
  order by 1) as standbys
from (select 1) as one left join {terms} t on t.namespace = %(namespace)s::text
"""

# An entry that was removed, or not seen by any leader for long, is a job only while it has rows.
JOBS: Final = f"""
with recursive settled as materialized ({_LAST_SETTLED}
), walked as (
 (select r.job, 1 as number from {{runs}} r order by r.job limit 1)
 union all
 select n.job, w.number + 1 from walked w cross join lateral (
  select r.job from {{runs}} r where r.job > w.job order by r.job limit 1) n
 where w.number < {_WALK}
), known as (
 select %(prefix)s::text || e.entry as job, e.task, e.schedule, e.due_at, e.published_at,
  e.next_due_at, e.paused_until, e.paused_reason
 from {{entries}} e where e.namespace = %(namespace)s::text
  and (e.definition is not null or e.registered is null)
), named as (
 select k.job from known k
 union select s.job from settled s
 union select w.job from walked w
 union select r.job from {{runs}} r where r.status in ('sent', 'running', 'retrying')
), chosen as materialized (
 select n.job, k.task, k.schedule, k.due_at, k.published_at, k.next_due_at, k.paused_until,
  k.paused_reason, pg_catalog.count(*) over () as of
 from named n left join known k on k.job = n.job
 where pg_catalog.starts_with(n.job, %(prefix)s::text)
 order by k.job is null, n.job limit %(jobs)s::integer
)
select c.*, (
 select d.finished_at from (
  select r.status, r.finished_at from {{runs}} r where r.job = c.job and r.period < 'id:'
  order by r.period desc limit {_DEEP}) d
 where d.status = 'done' limit 1) as last_done_at
from chosen c order by c.job
"""

# Labels that begin with a digit, as those of occurrences and calendars do, come before "id:" in
# every collation; what a function of the user's returns may come after.
RUNS: Final = f"""
with settled as materialized ({_LAST_SETTLED})
select {_COLUMNS}
from pg_catalog.unnest(%(names)s::text[]) as j(job) cross join lateral (
 (select * from {{runs}} r where r.job = j.job and r.period < 'id:'
  order by r.period desc limit %(periods)s::integer)
 union all
 (select * from {{runs}} r where r.job = j.job and r.period > 'ie'
  order by r.period desc limit %(periods)s::integer)) r
union all
select {_COLUMNS} from settled r
where pg_catalog.starts_with(r.period, 'id:') and r.job = any (%(names)s::text[])
union all
select {_COLUMNS} from {{runs}} r
where r.status in ('sent', 'running', 'retrying') and pg_catalog.starts_with(r.period, 'id:')
 and r.job = any (%(names)s::text[])
"""
SKIPPED: Final = f"""
with settled as materialized ({_LAST_SETTLED})
select {_COLUMNS} from settled r
where r.status = 'skipped' and pg_catalog.starts_with(r.job, %(prefix)s::text)
order by r.finished_at desc limit {SKIPS_SHOWN}
"""
HELD: Final = f"""
select h.key, h.pid, a.application_name as application, a.backend_start
from ({locks.HELD_KEYS}) h left join pg_catalog.pg_stat_activity a on a.pid = h.pid
where h.key = any (%(keys)s::bigint[])
"""
# A lock is seen as it is, a row as it was when the snapshot was taken. So a run may have ended in
# between; one whose row says "running" afterwards, too, is dead.
STILL_RUNNING: Final = """
select r.job, r.period
from rows from (pg_catalog.unnest(%(names)s::text[]), pg_catalog.unnest(%(periods)s::text[]),
 pg_catalog.unnest(%(attempts)s::integer[])) as d(job, period, attempts)
join {runs} r on r.job = d.job and r.period = d.period and r.attempts = d.attempts
where r.status = 'running'
"""
TALLY: Final = f"""
select r.job, r.status, pg_catalog.count(*) as runs from {{runs}} r
where {_SETTLED} and r.finished_at > pg_catalog.now() - interval '1 hour'
 and pg_catalog.starts_with(r.job, %(prefix)s::text)
group by r.job, r.status
"""

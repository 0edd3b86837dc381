"""What a namespace is doing and has done of late, read in one snapshot: for the page and metrics.

However long the history is, only its end is read. All rows of a job that are asked for stand
together in the unique index, the jobs are walked from one to the next in the same index, and
what was settled last is found in the index of settled rows. Each of these reads is bounded.

Messages without an occurrence have random labels (``id:…``), whose newest no index finds: of
these the ones are shown that are among the rows settled last, or still open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import psycopg
from psycopg.rows import args_row, namedtuple_row

from celery_pglock import (
    connections,
    elections,
    keys,
    locks,
    overview,
    schema,
    statements,
    table_names,
)

PERIODS: Final = 60
JOBS: Final = 500
SKIPS: Final = 20

# No page and no scrape may keep a server busy.
_PATIENCE: Final = b"set local statement_timeout = '10s'"
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

_BEATS: Final = """
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
_JOBS: Final = f"""
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
_RUNS: Final = f"""
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
_SKIPPED: Final = f"""
with settled as materialized ({_LAST_SETTLED})
select {_COLUMNS} from settled r
where r.status = 'skipped' and pg_catalog.starts_with(r.job, %(prefix)s::text)
order by r.finished_at desc limit {SKIPS}
"""
_HELD: Final = f"""
select h.key, h.pid, a.application_name as application, a.backend_start
from ({locks.HELD_KEYS}) h left join pg_catalog.pg_stat_activity a on a.pid = h.pid
where h.key = any (%(keys)s::bigint[])
"""
# A lock is seen as it is, a row as it was when the snapshot was taken. So a run may have ended in
# between; one whose row says "running" afterwards, too, is dead.
_STILL_RUNNING: Final = """
select r.job, r.period
from rows from (pg_catalog.unnest(%(names)s::text[]), pg_catalog.unnest(%(periods)s::text[]),
 pg_catalog.unnest(%(attempts)s::integer[])) as d(job, period, attempts)
join {runs} r on r.job = d.job and r.period = d.period and r.attempts = d.attempts
where r.status = 'running'
"""
_TALLY: Final = f"""
select r.job, r.status, pg_catalog.count(*) as runs from {{runs}} r
where {_SETTLED} and r.finished_at > pg_catalog.now() - interval '1 hour'
 and pg_catalog.starts_with(r.job, %(prefix)s::text)
group by r.job, r.status
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """Reads one namespace, over a connection of its own for each look.

    Attributes:
        target: the database; a standby of it will do.
        schema: where the tables are.
        namespace: whose rows.
    """

    target: connections.Target
    schema: str
    namespace: str

    def read(self, *, periods: int = PERIODS, jobs: int = JOBS) -> overview.Overview:
        """Return what there is to see.

        Args:
            periods: how many of each job.
            jobs: how many at most; schedule entries come first.

        Raises:
            DatabaseUnavailable, SchemaError: with the remedy.
        """
        with self._looking() as look:
            return look.take(periods, jobs)

    def read_tally(
        self, *, periods: int, jobs: int = JOBS
    ) -> tuple[overview.Overview, dict[str, Any]]:
        """Return the same, and how many runs were settled in the last hour.

        The latter by job and then by status.
        """
        with self._looking() as look:
            return look.take(periods, jobs), look.tally()

    @contextlib.contextmanager
    def _looking(self) -> Iterator[_Look]:
        # Prepared statements would not survive a transaction pooler.
        connection = connections.connect(
            self.target, application="pglock page", prepare_threshold=None
        )
        with (
            contextlib.closing(connection),
            schema.translated(connections.describe_open(connection), self.schema),
        ):
            # By BEGIN, not by a setting of the session: that would stay on a server connection
            # which a pooler lends to others.
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            yield _Look(connection, self.schema, self.namespace)


class _Look:
    def __init__(self, connection: psycopg.Connection[Any], schema_name: str, name: str) -> None:
        self._connection = connection
        self._schema = schema_name
        self._namespace = name
        self._prefix = f"{name}:"

    def _rows(self, template: str, factory: Any = namedtuple_row, **parameters: Any) -> list[Any]:
        named = {"namespace": self._namespace, "prefix": self._prefix}
        with self._connection.cursor(row_factory=factory) as cursor:
            cursor.execute(table_names.statement(template, self._schema), {**named, **parameters})
            return cursor.fetchall()

    def take(self, periods: int, most: int) -> overview.Overview:
        """Read all but what lets runs be told dead in one transaction, that in another."""
        with self._snapshot():
            seen = self._take(periods, most)
        suspects = [row for job in seen.jobs for row in job.rows if row.period in job.dead]
        if not suspects:
            return seen
        with self._snapshot():
            dead = self._rows(
                _STILL_RUNNING,
                names=[row.job for row in suspects],
                periods=[row.period for row in suspects],
                attempts=[row.attempts for row in suspects],
            )
        told: dict[str, set[str]] = {}
        for job, period in dead:
            told.setdefault(job, set()).add(period)
        jobs = [dataclasses.replace(job, dead=told.get(job.name, set())) for job in seen.jobs]
        return dataclasses.replace(seen, jobs=jobs)

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[None]:
        with self._connection.transaction():
            self._connection.execute(_PATIENCE)
            yield

    def _take(self, periods: int, most: int) -> overview.Overview:
        standby = elections.application("standby", self._namespace)
        (beats,) = self._rows(_BEATS, standby=standby)
        found = self._rows(_JOBS, jobs=most)
        rows: dict[str, list[overview.Row]] = {job.job: [] for job in found}
        for row in self._rows(_RUNS, args_row(overview.Row), names=[*rows], periods=periods):
            rows[row.job].append(row)
        for of_job in rows.values():
            of_job.sort(key=_newness, reverse=True)
            del of_job[periods:]
        held = self._held(rows.values())
        leader_key = keys.from_name(self._namespace, "beat", "leader")
        return overview.Overview(
            namespace=self._namespace,
            database=connections.describe_open(self._connection),
            now=beats.now,
            in_recovery=beats.in_recovery,
            version=beats.version,
            leader=overview.Leader(
                beats.node, beats.term, held[leader_key].pid, beats.elected_at, beats.last_tick_at
            )
            if leader_key in held and beats.node is not None
            else None,
            last_term=beats.term,
            resigned_at=beats.resigned_at,
            last_tick_at=beats.last_tick_at,
            standbys=beats.standbys,
            jobs=[self._job(job, rows[job.job], held, beats) for job in found],
            omitted=max(0, found[0].of - len(found)) if found else 0,
            skips=self._rows(_SKIPPED, args_row(overview.Row)),
        )

    def tally(self) -> dict[str, dict[str, int]]:
        with self._snapshot():
            rows = self._rows(_TALLY)
        found: dict[str, dict[str, int]] = {}
        for row in rows:
            found.setdefault(row.job, {})[row.status] = row.runs
        return found

    def _held(self, jobs: Iterable[Sequence[overview.Row]]) -> dict[int, Any]:
        wanted = {keys.from_name(self._namespace, "beat", "leader")}
        for rows in jobs:
            running = [row for row in rows if row.status == "running"]
            wanted |= {self._run_key(row) for row in running}
            wanted |= {row.name_key for row in running if row.name_key is not None}
            wanted |= {key for key in (_name_key(rows),) if key is not None}
        return {lock.key: lock for lock in self._rows(_HELD, keys=[*wanted])}

    def _run_key(self, row: overview.Row) -> int:
        return keys.of_run(self._namespace, row.job, row.period)

    def _job(
        self, job: Any, rows: Sequence[overview.Row], held: dict[int, Any], beats: Any
    ) -> overview.Job:
        running = [row for row in rows if row.status == "running"]
        alive = [row for row in running if self._run_key(row) in held]
        # At transaction level the lock follows the claim a moment later.
        begun = beats.now - dt.timedelta(seconds=statements.CLAIM_GRACE_SECONDS)
        done = [row.finished_at for row in rows if row.status == "done" and row.finished_at]
        done += [job.last_done_at] if job.last_done_at is not None else []
        return overview.Job(
            name=job.job,
            task=job.task or next((row.task for row in rows if row.task), None),
            schedule=job.schedule,
            next_due_at=job.next_due_at,
            unconfirmed=job.due_at if job.published_at is None else None,
            paused_until=job.paused_until,
            paused_reason=job.paused_reason,
            last_done_at=max(done, default=None),
            holder=_holder(rows, alive, held),
            rows=rows,
            dead=set()
            if beats.in_recovery
            else {
                row.period
                for row in running
                if row not in alive and row.started_at is not None and row.started_at < begun
            },
        )


def _holder(
    rows: Sequence[overview.Row], alive: Sequence[overview.Row], held: dict[int, Any]
) -> overview.Holder | None:
    for run in alive:
        if (lock := held.get(run.name_key or 0)) is not None:
            return overview.Holder(lock.key, lock.pid, lock.application, run, lock.backend_start)
    # Not by a run of this job: by one of another under the same name, a script, or a stranger.
    lock = held.get(_name_key(rows) or 0)
    if lock is None:
        return None
    return overview.Holder(lock.key, lock.pid, lock.application, None, lock.backend_start)


def _name_key(rows: Iterable[overview.Row]) -> int | None:
    """Return the newest key of a job's lock name; a beat's own row has none."""
    return next((row.name_key for row in rows if row.name_key is not None), None)


_LONG_AGO: Final = dt.datetime.min.replace(tzinfo=dt.UTC)


def _newness(row: overview.Row) -> tuple[dt.datetime, str]:
    return (row.moment or _LONG_AGO, row.period)

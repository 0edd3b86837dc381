"""An overview of a namespace, read in one snapshot: for the page and metrics."""

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
    overview,
    overview_statements,
    schema,
    statements,
    table_names,
)

PERIODS: Final = 60
JOBS: Final = 500

# A new leader has been through its schedule by then.
_TAKING_OVER: Final = dt.timedelta(minutes=1)


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
                overview_statements.STILL_RUNNING,
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
            self._connection.execute(overview_statements.PATIENCE)
            yield

    def _take(self, periods: int, most: int) -> overview.Overview:
        standby = elections.application("standby", self._namespace)
        (beats,) = self._rows(overview_statements.BEATS, standby=standby)
        found = self._rows(overview_statements.JOBS, jobs=most)
        rows: dict[str, list[overview.Row]] = {job.job: [] for job in found}
        for row in self._rows(
            overview_statements.RUNS, args_row(overview.Row), names=[*rows], periods=periods
        ):
            rows[row.job].append(row)
        for of_job in rows.values():
            of_job.sort(key=_newness, reverse=True)
            del of_job[periods:]
        held = self._held(rows.values())
        leader_key = keys.from_name(self._namespace, "beat", "leader")
        leader = None
        if leader_key in held and beats.node is not None:
            pid = held[leader_key].pid
            leader = overview.Leader(
                beats.node, beats.term, pid, beats.elected_at, beats.last_tick_at
            )
        found = [_without_entry(job) if _is_left(job, leader, beats.now) else job for job in found]
        return overview.Overview(
            namespace=self._namespace,
            database=connections.describe_open(self._connection),
            now=beats.now,
            in_recovery=beats.in_recovery,
            version=beats.version,
            leader=leader,
            last_term=beats.term,
            resigned_at=beats.resigned_at,
            last_tick_at=beats.last_tick_at,
            standbys=beats.standbys,
            jobs=[
                self._job(job, rows[job.job], held, beats)
                for job in found
                if job.schedule is not None or rows[job.job]
            ],
            omitted=max(0, found[0].of - len(found)) if found else 0,
            skips=self._rows(overview_statements.SKIPPED, args_row(overview.Row)),
        )

    def tally(self) -> dict[str, dict[str, int]]:
        with self._snapshot():
            rows = self._rows(overview_statements.TALLY)
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
        return {lock.key: lock for lock in self._rows(overview_statements.HELD, keys=[*wanted])}

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


def _is_left(job: Any, leader: overview.Leader | None, now: dt.datetime) -> bool:
    """Whether an entry is not in the leader's schedule any more, although its row is there.

    What a leader finds due when it is elected it sends, or passes over, at once. With another
    release an entry may be gone; nothing of it is due until it comes back.
    """
    due = job.next_due_at if job.published_at is not None else job.due_at or job.next_due_at
    if leader is None or due is None or now - leader.elected_at < _TAKING_OVER:
        return False
    return bool(due < leader.elected_at)


def _without_entry(job: Any) -> Any:
    return job._replace(
        schedule=None, due_at=None, next_due_at=None, paused_until=None, paused_reason=None
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

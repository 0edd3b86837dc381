"""What can be seen in PostgreSQL while the demonstration runs: who leads, who holds, who works."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.rows import class_row, namedtuple_row

from celery_pglock import keys
from celery_pglock.demo import app as application
from celery_pglock.demo import books

_LEADER: Final = b"""
select t.node, t.term, t.elected_at as since from pglock.beat_terms t
where t.namespace = %(namespace)s and t.resigned_at is null
 and exists (select from pg_catalog.pg_locks l where l.pid = t.backend_pid
  and l.locktype = 'advisory' and l.granted)
"""
_RUNNING: Final = b"""
select job, period, due_at as due, node, started_at as since, attempts as attempt
from pglock.job_runs where status = 'running' order by started_at
"""
_LOCKED: Final = b"""
select (classid::bigint << 32) + objid::bigint as key from pg_catalog.pg_locks
where locktype = 'advisory' and granted and objsubid = 1
"""
_TALLY: Final = b"""
select pg_catalog.count(*) as invoices,
 pg_catalog.count(*) - pg_catalog.count(distinct (period, customer)) as doubles,
 pg_catalog.count(distinct period) as periods from demo.invoices
"""
_ATTEMPTS: Final = b"""
select id, period, task_id, worker, pid,
 extract(epoch from pg_catalog.clock_timestamp() - began_at)::float8 as age
from demo.attempts where id > %(after)s order by id
"""
_OCCURRENCE: Final = b"""
select job, period, due_at as due, entry, term from pglock.job_runs
where status = %(status)s and entry is not null order by due_at desc limit 1
"""
_ANCHOR: Final = b"""
select anchor, schedule from pglock.beat_entries
where namespace = %(namespace)s and entry = %(entry)s
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Leader:
    """Who leads: ``node`` is ``host:pid``."""

    node: str
    term: int
    since: dt.datetime

    @property
    def pid(self) -> int:
        """The process id of the beat."""
        return int(self.node.rpartition(":")[2])


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a job's lock, and for which occurrence."""

    job: str
    period: str
    due: dt.datetime | None
    node: str
    since: dt.datetime
    attempt: int


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """How many invoices there are, how many of them too many, and for how many periods."""

    invoices: int
    doubles: int
    periods: int


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """Somebody who began to write, ``age`` seconds ago."""

    id: int
    period: dt.datetime
    task_id: str
    worker: str
    pid: int
    age: float


@dataclasses.dataclass(frozen=True, slots=True)
class Occurrence:
    """An occurrence as the ledger has it."""

    job: str
    period: str
    due: dt.datetime
    entry: str
    term: int


class Scheduled(NamedTuple):
    """From where the intervals of the entry are counted, and its schedule in words."""

    anchor: dt.datetime
    schedule: str


class Observer:
    """Asks the database; nothing is asked of the ledger where there is none.

    Args:
        url: the database.
        guarded: whether the tables of the ledger are there.
    """

    def __init__(self, url: str, *, guarded: bool) -> None:
        self._connection = psycopg.connect(url, autocommit=True, application_name="demo")
        self._guarded = guarded
        self._connection.execute(books.TABLES)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def now(self) -> dt.datetime:
        """Return the server's clock."""
        (row,) = self.rows(b"select pg_catalog.clock_timestamp() as now")
        moment: dt.datetime = row.now
        return moment

    def leader(self) -> Leader | None:
        """Return who leads now: whose session holds the lock."""
        found = self._objects(Leader, _LEADER, namespace=application.NAMESPACE)
        return found[0] if found else None

    def holders(self) -> list[Holder]:
        """Return the runs that hold a lock now."""
        running: list[Holder] = self._objects(Holder, _RUNNING)
        if not running:
            return []
        locked = {row.key for row in self.rows(_LOCKED)}
        # The row of a run that was killed still says "running"; its lock is gone.
        return [
            run
            for run in running
            if keys.of_run(application.NAMESPACE, run.job, run.period) in locked
        ]

    def tally(self) -> Tally:
        """Count the invoices."""
        with self._connection.cursor(row_factory=class_row(Tally)) as cursor:
            return cursor.execute(_TALLY).fetchall()[0]

    def attempts(self, after: int = 0) -> list[Attempt]:
        """Return the attempts with higher numbers, in their order; in guarded runs or not."""
        with self._connection.cursor(row_factory=class_row(Attempt)) as cursor:
            return cursor.execute(_ATTEMPTS, {"after": after}).fetchall()

    def occurrence(self, status: str) -> Occurrence | None:
        """Return the newest occurrence that has a status in the ledger."""
        found = self._objects(Occurrence, _OCCURRENCE, status=status)
        return found[0] if found else None

    def scheduled(self) -> Scheduled | None:
        """Return the entry of the job, once a leader has stored it."""
        if not self._guarded:
            return None
        rows = self.rows(_ANCHOR, namespace=application.NAMESPACE, entry=application.ENTRY)
        return Scheduled(*rows[0]) if rows else None

    def rows(self, query: bytes, **parameters: Any) -> list[Any]:
        """Return the rows of a query, as named tuples."""
        with self._connection.cursor(row_factory=namedtuple_row) as cursor:
            return cursor.execute(query, parameters or None).fetchall()

    def _objects(self, kind: type[Any], query: bytes, **parameters: Any) -> list[Any]:
        if not self._guarded:
            return []
        with self._connection.cursor(row_factory=class_row(kind)) as cursor:
            return cursor.execute(query, parameters or None).fetchall()

"""Every advisory lock that is held in this database, with the name of its key where it is ours.

``pg_locks`` shows numbers. A number cannot be turned back into a name, so all names that may be
meant are turned into numbers: those of the tasks, of the runs that are recorded as running, of
the leaders. A session that says in its ``application_name`` what it holds is taken at its word
only when the key of that name is the one that it holds.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import psycopg
from psycopg.rows import namedtuple_row

from celery_pglock import keys, table_names

Kind = Literal["name", "run", "leader", "migration"]

# objsubid 2 marks the form with two 32-bit keys, which celery-pglock does not use. Of another
# role's session the start is hidden, the application_name is not.
_HELD: Final = b"""
select l.classid::bigint as high, l.objid::bigint as low, l.objsubid, l.mode, l.pid,
 a.application_name as application, a.backend_start
from pg_catalog.pg_locks l left join pg_catalog.pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.granted
 and l.database = (select d.oid from pg_catalog.pg_database d
  where d.datname = pg_catalog.current_database())
order by a.backend_start, l.pid, l.classid, l.objid
"""
_RUNNING: Final = """
select job, period, task, node, started_at, name_key, backend_pid from {runs}
where status = 'running' order by started_at
"""
_TERMS: Final = "select namespace, node, elected_at, backend_pid from {terms}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One lock that one session holds.

    Attributes:
        key: its key; None for one that was taken with two keys.
        pair: the two keys, or None.
        shared: it was taken in shared mode, which celery-pglock never does.
        pid: the server process of the session.
        application: its ``application_name``.
        kind: what the lock is for; None if its key is none that is known.
        name: the lock name; of a run lock, job and period; of a leader's, the namespace.
        ours: its session calls itself one of celery-pglock's.
        job: the job that is being run, where a row says so.
        period: its period.
        task: its task.
        node: the worker or beat.
        since: since when it is held, where a row says so.
        session_since: since when the session exists: the lock is not older.
    """

    key: int | None
    pair: tuple[int, int] | None
    shared: bool
    pid: int
    application: str | None
    kind: Kind | None
    name: str | None
    ours: bool
    job: str | None = None
    period: str | None = None
    task: str | None = None
    node: str | None = None
    since: dt.datetime | None = None
    session_since: dt.datetime | None = None


def held(
    connection: psycopg.Connection[Any],
    *,
    namespace: str,
    schema: str | None,
    schema_lock: str,
    names: Mapping[int, str],
) -> list[Held]:
    """Return all locks that are held, the oldest sessions first.

    Args:
        connection: in autocommit.
        namespace: of the application.
        schema: where the tables are, or None where there are none.
        schema_lock: the schema whose migration has a lock.
        names: the lock names of the application's tasks, by their keys.

    Raises:
        psycopg.Error: the connection broke.
    """
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        # The locks first: a run that begins in between has no lock here, instead of no row.
        found = cursor.execute(_HELD).fetchall()
        running, terms = [], []
        if schema is not None:
            running = cursor.execute(table_names.statement(_RUNNING, schema)).fetchall()
            terms = cursor.execute(table_names.statement(_TERMS, schema)).fetchall()
    known = _Known(namespace, schema_lock, names, running, terms)
    return [known.name(row) for row in found]


class _Known:
    """The names that may be meant, by their keys."""

    def __init__(
        self,
        namespace: str,
        schema_lock: str,
        names: Mapping[int, str],
        running: Iterable[Any],
        terms: Iterable[Any],
    ) -> None:
        self._namespace = namespace
        self._names = names
        self._migration = keys.from_name("pglock", "migrate", schema_lock), schema_lock
        self._leaders: dict[int, tuple[str, Any]] = {_leader(namespace): (namespace, None)}
        self._leaders.update({_leader(term.namespace): (term.namespace, term) for term in terms})
        self._runs: dict[int, Any] = {}
        self._by_name: dict[int, list[Any]] = {}
        for run in running:
            of = run.job.partition(":")[0]
            self._runs[keys.of_run(of, run.job, run.period)] = run
            self._by_name.setdefault(run.name_key, []).append(run)

    def name(self, row: Any) -> Held:
        application = row.application or ""
        plain = {
            "shared": row.mode != "ExclusiveLock",
            "pid": row.pid,
            "application": row.application,
            "ours": application.startswith("pglock"),
            "session_since": row.backend_start,
        }
        if row.objsubid != 1:
            return Held(
                key=None, pair=(_signed(row.high), _signed(row.low)), kind=None, name=None, **plain
            )
        key = _signed(row.high) << 32 | row.low
        if key in self._leaders:
            namespace, term = self._leaders[key]
            term = term if term is not None and term.backend_pid == row.pid else None
            more = {} if term is None else {"node": term.node, "since": term.elected_at}
            return Held(key=key, pair=None, kind="leader", name=namespace, **more, **plain)
        if key == self._migration[0]:
            return Held(key=key, pair=None, kind="migration", name=self._migration[1], **plain)
        if (run := self._runs.get(key)) is not None:
            name = f"{run.job} {run.period}"
            return Held(key=key, pair=None, kind="run", name=name, **_of(run), **plain)
        return self._of_name(key, row, plain)

    def _of_name(self, key: int, row: Any, plain: dict[str, Any]) -> Held:
        # Rows of attempts that died say running too; at transaction level a row names no session.
        candidates = self._by_name.get(key, []) if plain["ours"] else []
        run = next((run for run in reversed(candidates) if run.backend_pid == row.pid), None)
        if run is None:
            run = next((run for run in reversed(candidates) if run.backend_pid is None), None)
        name = self._names.get(key) or self._told(key, row.application or "", run)
        return Held(
            key=key,
            pair=None,
            kind="name" if name is not None or run is not None else None,
            name=name,
            **({} if run is None else _of(run)),
            **plain,
        )

    def _told(self, key: int, application: str, run: Any) -> str | None:
        """Return the name of a key that the holder tells, if it is one of this key."""
        told = [(self._namespace, application.removeprefix("pglock:").partition("@")[0])]
        if run is not None:
            namespace, _, name = run.job.partition(":")
            told.append((namespace, name))
        return next((name for of, name in told if keys.from_name(of, "task", name) == key), None)


def _of(run: Any) -> dict[str, Any]:
    return {
        "job": run.job,
        "period": run.period,
        "task": run.task,
        "node": run.node,
        "since": run.started_at,
    }


def _leader(namespace: str) -> int:
    return keys.from_name(namespace, "beat", "leader")


def _signed(half: int) -> int:
    """Return a half of a key, which the server shows without a sign, with it."""
    return half - 2**32 if half >= 2**31 else half

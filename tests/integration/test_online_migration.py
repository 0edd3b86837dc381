"""The tables are brought to the next release while this one goes on claiming and settling.

`PGLOCK_TEST_ROWS` sets how long the history is (1000000 for the documented case). That a claim
waits is read from the server: in `pg_locks`, where every wait has its beginning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from celery_pglock import (
    attempts,
    claims,
    errors,
    keys,
    ledger,
    migrating,
    retention,
    schema,
    sessions,
)
from tests.integration import online
from tests.integration.workbench import Sessions, advisory_locks, in_thread, terminate
from tests.support.databases import Database
from tests.support.pgbouncer import StartPgBouncer
from tests.support.processes import Process, Processes, eventually

ROWS = int(os.environ.get("PGLOCK_TEST_ROWS", "100000"))
NEW = [online.COLUMN.name, online.INDEX.name]

FILL = """
insert into pglock.job_runs (job, period, due_at, status, attempts, claim, name_key, task, task_id,
 node, started_at, finished_at)
select 'online:old-' || n %% 100, to_char(n, 'FM000000000'), due, 'done', 1, gen_random_uuid(),
 n %% 100, 'old', n::text, 'worker@host:1', due, due
from (select n, now() - n * interval '1 s' as due from generate_series(1, %s) as n) as t
"""
WAITS = """
select a.application_name, l.pid, l.waitstart,
 extract(epoch from clock_timestamp() - l.waitstart)::float8
from pg_locks l join pg_stat_activity a on a.pid = l.pid
where not l.granted and l.locktype = 'relation' and l.waitstart is not null
 and l.database = (select oid from pg_database where datname = current_database())
"""
INDEX = """
select i.indisvalid from pg_class c join pg_index i on i.indexrelid = c.oid
where c.relname = 'job_runs_task_idx'
"""
# Who builds an index waits for others' transactions by their virtual ids.
BUILDER = """
select pid from pg_stat_activity where datname = current_database()
 and starts_with(query, 'CREATE INDEX CONCURRENTLY') and state = 'active' and wait_event = 'virtualxid'
"""


class Waits:
    """Watches who waits for a table, and for how long."""

    def __init__(self, database: Database) -> None:
        self._connection = database.connect(application_name="watch")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._seen: dict[tuple[bool, int, object], float] = {}
        self.looks = 0
        self.stalled = 0.0  # the longest time for which nothing was seen

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        interval, last = 0.01, time.monotonic()
        while not self._stop.wait(interval):
            for application, pid, since, waited in self._connection.execute(WAITS):
                key = (application == "pglock migrate", pid, since)
                self._seen[key] = max(self._seen.get(key, 0.0), waited)
            self.looks += 1
            now = time.monotonic()
            self.stalled = max(self.stalled, now - last - interval)
            last = now

    def of_migration(self) -> list[float]:
        return [waited for (migrates, *_), waited in self._seen.copy().items() if migrates]

    def of_claims(self) -> list[float]:
        return [waited for (migrates, *_), waited in self._seen.copy().items() if not migrates]

    def longest_claim(self) -> float:
        return max(self.of_claims(), default=0.0)

    def claims_have_waited(self) -> bool:
        """Whether a claim has waited for more than 100 ms.

        Added is for how long this machine has let this very thread wait, as it may have let the
        migration wait that had to give up.
        """
        assert self.looks > 10, "nobody has looked"
        return self.longest_claim() > 0.1 + self.stalled


@contextlib.contextmanager
def held_run(url: str, *, writes: bool = False) -> Iterator[None]:
    """A run at transaction level that goes on for as long as the block.

    With `writes`, its body has a lock such as it would have had it written to `job_runs` itself.
    """
    begun, end = threading.Event(), threading.Event()
    executor = online.executor(url, "transaction")

    def body(run: Any) -> None:
        if writes:
            run.connection.exec_driver_sql("lock table pglock.job_runs in row exclusive mode")
        begun.set()
        assert end.wait(60)

    def run() -> attempts.Ran[None] | claims.Refused:
        return executor.execute(online.work(f"long-{uuid.uuid4().hex[:8]}", 0), body)

    with in_thread(run) as future:
        try:
            eventually(lambda: begun.is_set() or future.done(), what="the long run has begun")
            yield
        finally:
            end.set()
        # What has happened meanwhile has not kept it from committing its outcome.
        assert isinstance(future.result(30), attempts.Ran)
    executor.stack.close()


def migrator(processes: Processes, database: Database, **more: Any) -> Process:
    orders = online.Migrating(**{"url": database.url, "steps": NEW, **more})
    return start(processes, "migrate", orders)


def start(processes: Processes, what: str, orders: Any) -> Process:
    given = json.dumps(dataclasses.asdict(orders))
    return processes.python("-m", "tests.integration.online", what, given, name=what)


def result(process: Process) -> Any:
    found = json.loads(process.wait_for_line(r"^result: (.*)$", 60)[1])
    assert process.wait() == 0
    return found


@contextlib.contextmanager
def claimers(database: Database, processes: Processes) -> Iterator[None]:
    """Two claimers of this release at each level; in the end each has claimed without fault."""
    levels: list[sessions.Level] = ["session", "session", "transaction", "transaction"]
    started = [
        start(
            processes,
            "claim",
            online.Claiming(url=database.url, level=level, node=f"{level}-{number}"),
        )
        for number, level in enumerate(levels)
    ]
    for process in started:
        process.wait_for_line("^claiming$")
    wait_for_claims(database)
    yield
    wait_for_claims(database)  # they go on
    for process in started:
        process.terminate()
    times: dict[sessions.Level, list[float]] = {"session": [], "transaction": []}
    for level, process in zip(levels, started, strict=True):
        times[level] += result(process)
    for kind, found in times.items():
        cuts = statistics.quantiles(found, n=100, method="inclusive")
        print(
            f"\n{kind} level: {len(found)} claims, p50 {cuts[49] * 1e3:.1f} ms,"
            f" p99 {cuts[98] * 1e3:.1f} ms, max {max(found) * 1e3:.1f} ms",
            end="",
        )
    query = "select count(*) from pglock.job_runs where job = 'online:job' and status <> 'done'"
    assert database.rows(query) == [(0,)]


def wait_for_claims(database: Database) -> None:
    """Wait until each of the four claimers has finished another 20 runs."""
    query = (
        "select node, count(*) from pglock.job_runs where job = 'online:job' and status = 'done'"
        " and node ~ '^(session|transaction)-' group by node"
    )

    def counts() -> dict[str, int]:
        return dict(database.rows(query))

    before = counts()

    def gone_on() -> bool:
        now = counts()
        return len(now) == 4 and all(now[node] >= before.get(node, 0) + 20 for node in now)

    eventually(gone_on, 30, what="the claimers claim")


@pytest.fixture
def history(database: Database) -> Database:
    """A database with many settled rows."""
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(FILL, [ROWS])
        connection.execute("vacuum (analyze) pglock.job_runs")
    return database


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """This very process is of the next release."""
    steps = (*schema.migrations(), online.COLUMN, online.INDEX)
    monkeypatch.setattr(schema, "migrations", lambda: steps)


def assert_migrated(database: Database) -> None:
    assert database.rows(INDEX) == [(True,)]
    assert database.rows(
        "select name from pglock.schema_version where number > 9000 order by number"
    ) == [(name,) for name in NEW]
    # The default stands in the old rows too.
    query = "select distinct urgency from pglock.job_runs"
    assert database.rows(query) in ([(7,)], [])
    query = "select convalidated from pg_constraint where conname = 'job_runs_urgency_check'"
    assert database.rows(query) == [(False,)]
    assert not [lock for lock in advisory_locks(database) if lock[0] == migration_key()]


def migration_key() -> int:
    return keys.from_name("pglock", "migrate", "pglock")


# --- beside claims --------------------------------------------------------------------------


@pytest.mark.slow
def test_no_claim_waits_for_a_migration_even_when_a_long_run_makes_it_wait(
    history: Database, processes: Processes
) -> None:
    with claimers(history, processes), Waits(history) as waits:
        with held_run(history.url):
            process = migrator(processes, history)
            # At least three seconds: each time it waits 50 ms, and pauses for as long.
            eventually(lambda: len(waits.of_migration()) >= 30, 40, what="thirty refusals")
            wait_for_claims(history)
        assert result(process) == NEW
    print(
        f"\n{ROWS:,} rows: the migration waited for a table {len(waits.of_migration())} times, at"
        f" most {max(waits.of_migration()) * 1e3:.0f} ms; claims {len(waits.of_claims())} times,"
        f" at most {waits.longest_claim() * 1e3:.0f} ms (the watch stood still for"
        f" {waits.stalled * 1e3:.0f} ms)"
    )
    assert not waits.claims_have_waited()
    assert_migrated(history)


@pytest.mark.chaos
@pytest.mark.slow
def test_control_a_migration_that_waits_for_its_lock_makes_all_claims_wait(
    database: Database, processes: Processes
) -> None:
    with claimers(database, processes), Waits(database) as waits:
        with held_run(database.url):
            process = migrator(processes, database, lock_timeout="0")
            eventually(lambda: waits.longest_claim() > 1.5, 30, what="a claim that waits")
            queries = (
                "select distinct pid from pg_locks where locktype = 'relation' and not granted"
                " and database = (select oid from pg_database where datname = current_database())"
            )
            assert len(database.rows(queries)) == 5  # the migration, and every claimer
        assert result(process) == NEW
    print(f"\nclaims waited for a table for up to {waits.longest_claim() * 1e3:.0f} ms")
    assert waits.claims_have_waited()


@pytest.mark.chaos
@pytest.mark.slow
def test_no_claim_waits_while_an_index_is_built_or_waits_for_others(
    history: Database, processes: Processes
) -> None:
    with claimers(history, processes), Waits(history) as waits:
        with held_run(history.url, writes=True):
            process = migrator(processes, history, steps=[online.INDEX.name])
            eventually(lambda: history.rows(BUILDER), 30, what="the index waits")
            wait_for_claims(history)
            assert history.rows(INDEX) == [(False,)]
        assert result(process) == [online.INDEX.name]
        assert history.rows(INDEX) == [(True,)]
        history.rows("drop index pglock.job_runs_task_idx")
        history.rows("delete from pglock.schema_version where number = %s", online.INDEX.number)
        # Nor is a run waited for that does not write to this table.
        with held_run(history.url):
            assert result(migrator(processes, history, steps=[online.INDEX.name]))
    print(
        f"\n{ROWS:,} rows: claims waited for a table {len(waits.of_claims())} times, at most"
        f" {waits.longest_claim() * 1e3:.0f} ms"
    )
    assert not waits.claims_have_waited()


@pytest.mark.usefixtures("next_release")
def test_tables_in_use_without_a_pause_are_told(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrating, "_PATIENCE", 0.5)
    with held_run(database.url):
        with pytest.raises(errors.SchemaError) as caught:
            migrating.migrate(database.url)
        told = str(caught.value)
        assert (
            "could not be migrated by step 9001_urgency, because its tables are in use without a"
            " pause (canceling statement due to lock timeout)" in told
        )
        assert "wait for long runs at transaction level to end, or stop them, and run migrate" in (
            told
        )
        query = "select 1 from pglock.schema_version where number > 9000"
        assert not database.rows(query)
        eventually(
            lambda: not [lock for lock in advisory_locks(database) if lock[0] == migration_key()],
            what="the migration's lock is free",
        )
    assert migrating.migrate(database.url) == NEW
    assert_migrated(database)


# --- a step outside of a transaction --------------------------------------------------------


SNAPSHOTS = """
select backend_xmin, backend_xid from pg_stat_activity
where datname = current_database() and state = 'idle in transaction' and application_name = %s
"""


def test_who_keeps_others_from_migrating_holds_no_snapshot(
    database: Database, processes: Processes
) -> None:
    """Else a step that builds an index would wait for it, and it for that step."""
    with held_run(database.url, writes=True):
        process = migrator(processes, database, steps=[online.INDEX.name])
        eventually(lambda: database.rows(BUILDER), 30, what="the index waits")
        assert database.rows(SNAPSHOTS, "pglock migrate") == [(None, None)]
    assert result(process) == [online.INDEX.name]


def test_control_the_query_for_the_lock_alone_would_keep_its_snapshot(database: Database) -> None:
    with database.connect(application_name="keeper") as connection, connection.transaction():
        connection.execute("select pg_try_advisory_xact_lock(%s::bigint)", [1])
        ((xmin, _),) = database.rows(SNAPSHOTS, "keeper")
        assert xmin is not None
        connection.execute("set local lock_timeout = 0")
        assert database.rows(SNAPSHOTS, "keeper") == [(None, None)]


@pytest.mark.usefixtures("next_release")
def test_an_index_that_was_left_half_built_is_built_again(
    database: Database, processes: Processes
) -> None:
    """The migrator is killed and its server process ended, in the middle of the building."""
    with held_run(database.url, writes=True):
        process = migrator(processes, database, steps=[online.INDEX.name])
        ((builder,),) = eventually(lambda: database.rows(BUILDER), 30, what="the index waits")
        process.kill()
        terminate(database, builder)
    assert database.rows(INDEX) == [(False,)]
    with pytest.raises(errors.SchemaError, match="is older than this release needs"):
        schema.verify(database.url)
    assert migrating.migrate(database.url) == NEW
    assert_migrated(database)
    assert migrating.migrate(database.url) == []


@pytest.mark.slow
@pytest.mark.usefixtures("next_release")
def test_a_killed_migrator_whose_server_process_builds_on_is_waited_for(
    database: Database, processes: Processes
) -> None:
    """The server does not notice the death of a client for which it is at work.

    What comes next may end in a deadlock, because who waits for the table to drop the index has a
    snapshot already, for which the builder waits in turn.
    """
    steps = [online.INDEX.name]
    with held_run(database.url, writes=True):
        killed = migrator(processes, database, steps=steps)
        ((builder,),) = eventually(lambda: database.rows(BUILDER), 30, what="the index waits")
        killed.kill()
        second = migrator(processes, database, steps=steps)
        query = (
            "select 1 from pg_stat_activity where strpos(query, 'DROP INDEX CONCURRENTLY') > 0"
            " and state = 'active' and wait_event_type = 'Lock'"
            " and datname = current_database()"
        )
        eventually(lambda: database.rows(query), 30, what="the second one waits")
        assert database.rows("select 1 from pg_stat_activity where pid = %s", builder)
    assert result(second) == steps
    assert database.rows(INDEX) == [(True,)]
    assert migrating.migrate(database.url) == [online.COLUMN.name]
    assert_migrated(database)


@pytest.mark.slow
@pytest.mark.usefixtures("next_release")
def test_eight_at_once_apply_each_step_once(history: Database) -> None:
    """Those that wait for the lock are in nobody's way, the builder of the index included."""
    barrier = threading.Barrier(8, timeout=30)

    def migrate() -> list[str]:
        barrier.wait()
        return migrating.migrate(history.url)

    with ThreadPoolExecutor(8) as pool:
        applied = [future.result() for future in [pool.submit(migrate) for _ in range(8)]]
    assert sorted(applied) == [[]] * 7 + [NEW]
    assert_migrated(history)


# --- rights, poolers, scripts ---------------------------------------------------------------


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """The URL for a role that was granted what `migrate` prints, before the next release."""
    name = f"role_{database.name}"
    database.rows(f"create role {name} login password 'secret'")
    database.rows(schema.grants("pglock", name))
    parts = urlsplit(database.url)
    netloc = f"{name}:secret@{parts.hostname}:{parts.port or 5432}"
    yield urlunsplit(parts._replace(netloc=netloc))
    database.rows(f"drop owned by {name}")
    database.rows(f"drop role {name}")


@pytest.mark.usefixtures("next_release")
def test_a_role_without_rights_to_create_anything_runs_everything_afterwards(
    database: Database, role: str, lock_sessions: Sessions
) -> None:
    with pytest.raises(errors.SchemaError, match=r"cannot be migrated by role .*must be owner"):
        migrating.migrate(role)
    assert migrating.migrate(database.url) == NEW
    assert migrating.migrate(role) == []
    schema.verify(role)
    session = lock_sessions.open(role)
    levels: list[sessions.Level] = ["session", "transaction"]
    for level in levels:
        executor = online.executor(role, level)
        ran = executor.execute(online.work(level, 1), lambda _: "value")
        assert isinstance(ran, attempts.Ran)
        executor.stack.close()
    ledger.Ledger().skip(session, online.work("skipped", 1), "why")
    walk = retention.Pass(execute=session.rows, schema="pglock", namespace="online", keep=-4e7)
    assert walk.step() == 2
    assert_migrated(database)


@pytest.mark.usefixtures("next_release")
def test_behind_a_pooler_in_transaction_mode(
    blank_database: Database, pgbouncer: StartPgBouncer
) -> None:
    url = pgbouncer(blank_database, "transaction", default_pool_size=3).url
    barrier = threading.Barrier(2, timeout=30)

    def migrate() -> list[str]:
        barrier.wait()
        return migrating.migrate(url)

    with ThreadPoolExecutor(2) as pool:
        applied = [future.result() for future in [pool.submit(migrate) for _ in range(2)]]
    assert sorted(applied) == [[], [step.name for step in schema.migrations()]]
    schema.verify(url)
    assert_migrated(blank_database)


@pytest.mark.usefixtures("next_release")
def test_the_script_can_be_applied_statement_by_statement(
    blank_database: Database, database: Database
) -> None:
    text = schema.script()
    assert text.count("BEGIN;") == 1
    before, commit, after = text.partition("COMMIT;\n")
    assert online.COLUMN.text.split()[-1] in before
    assert commit
    assert "CONCURRENTLY" in after
    with psycopg.connect(blank_database.url, autocommit=True) as connection:
        for statement in text.split(";\n"):
            if statement.strip():
                connection.execute(statement.encode())
    assert_migrated(blank_database)
    assert migrating.migrate(blank_database.url) == []
    migrating.migrate(database.url)
    assert columns(blank_database) == columns(database)


def columns(database: Database) -> list[Any]:
    return database.rows(
        "select table_name, column_name, data_type, column_default from"
        " information_schema.columns where table_schema = 'pglock' order by 1, ordinal_position"
    ) + database.rows("select indexdef from pg_indexes where schemaname = 'pglock' order by 1")

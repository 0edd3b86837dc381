"""(e) What all this is to the server: connections, memory, statements while nothing happens, WAL."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import psycopg

from celery_pglock import attempts, claims, execution, ledger, migrating, runs, stacks
from celery_pglock import sessions as lock_sessions
from celery_pglock.demo.servers import PostgresServer
from tests.benchmarks import guards, schedulers, tasks
from tests.benchmarks.measuring import Figures, Ground, alone, memory, own_database
from tests.benchmarks.processes import celery

# Each statement is a line that begins with who made it.
LOGGED: Final = {
    "log_statement": "all",
    "log_line_prefix": "%m <%a> ",
    "autovacuum": "off",
    "max_wal_size": "2GB",
}
_STATEMENT: Final = re.compile(r"<([a-z:]+)@[^>]*> LOG:  (?:statement|execute [^:]*): ")
HOLDERS: Final = 4
ROLES: Final = {
    "leader": "pglock:leader:bench",
    "standby": "pglock:standby:bench",
    "run in progress": "pglock:run",
    "session between runs": "pglock:idle",
}


def measure(ground: Ground) -> Figures:
    seconds = ground.few(60, 2)
    found: Figures = {"seconds": seconds}
    with PostgresServer(LOGGED) as server:
        ground.say(f"(e) statements in {seconds} s in which nothing happens")
        with own_database(server.url()) as url:
            found["idle"] = _idle(ground, server, url, seconds)
        ground.say("(e) memory of holders, WAL of runs")
        with own_database(server.url()) as url:
            migrating.migrate(url)
            found["memory"] = _memory(url)
            found["wal"] = alone(_wal_of_runs, url, ground.redis_database(13), ground.few(200, 20))
        with own_database(server.url()) as url:
            migrating.migrate(url)
            found["wal"]["an occurrence, sent by the beat"] = alone(
                _wal_of_beat, url, ground.redis_database(14), ground.few(2000, 100)
            )
    return found


def _idle(ground: Ground, server: PostgresServer, url: str, seconds: float) -> Figures:
    """Return how many statements a leader, a standby, a run and idle sessions make in a minute."""
    migrating.migrate(url)
    env = {
        "APP_DATABASE_URL": url,
        "APP_BROKER_URL": ground.redis_database(15),
        "APP_NAMESPACE": "bench",
        "APP_QUEUE": "bench",
        "APP_ENTRIES": json.dumps({"daily": 86400.0}),
    }
    begin = ("-A", "tests.apps.beat_app", "beat", "-S", "pglock", "-l", "INFO", "--pidfile=")
    with celery() as start, _run_in_progress(url), contextlib.closing(_session(url)):
        leader = start(*begin, "-s", os.devnull, env=env)
        leader.wait_for("leadership gained")
        standby = start(*begin, "-s", os.devnull, env=env)
        standby.wait_for("standby: ")
        # What they do at their beginning is over.
        time.sleep(1.0)
        before = server.log_file.stat().st_size
        time.sleep(seconds)
        with server.log_file.open(encoding="utf-8", errors="replace") as log:
            log.seek(before)
            said = Counter(match[1] for match in _STATEMENT.finditer(log.read()))
        connections = _connections(url)
    return {
        role: {
            "connections": connections[application],
            "statements a minute": round(said[application] * 60 / seconds, 1),
        }
        for role, application in ROLES.items()
    }


def _session(url: str) -> lock_sessions.Session:
    return stacks.open_session(_plan(url))


def _plan(url: str) -> lock_sessions.Plan:
    return lock_sessions.Plan(target=url, level="session", application="pglock:idle@bench")


@contextlib.contextmanager
def _run_in_progress(url: str) -> Iterator[None]:
    """Have a run hold its locks in a thread, watched as it is in a worker."""
    begun, ended = threading.Event(), threading.Event()
    stack = stacks.Stack(_plan(url))
    executor = execution.Executor(
        stack=stack,
        records=ledger.Ledger(),
        terms=attempts.Terms(classify=lambda _: claims.Verdict(status="failed")),
    )

    def body(_: runs.Run) -> None:
        begun.set()
        ended.wait()

    thread = threading.Thread(target=executor.execute, args=(_work(0), body))
    thread.start()
    try:
        if not begun.wait(10):
            raise TimeoutError("the run does not begin")
        yield
    finally:
        ended.set()
        thread.join()
        stack.close()


def _work(number: int) -> claims.Work:
    return claims.Work(
        job="bench:run",
        period=str(number),
        name=f"name-{number}",
        name_key=number,
        run_key=1_000_000 + number,
        task="run",
        task_id=str(number),
        node="bench",
    )


def _connections(url: str) -> Counter[str]:
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "select split_part(application_name, '@', 1) from pg_catalog.pg_stat_activity"
            " where datname = current_database() and application_name like 'pglock%'"
        ).fetchall()
    return Counter(name for (name,) in rows)


def _memory(url: str) -> Figures:
    """Return how many KiB a holder's server process has for itself, and a bare connection's."""
    records = ledger.Ledger()
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(contextlib.closing(_session(url))) for _ in range(HOLDERS)]
        for number, session in enumerate(holders):
            answer = records.claim(session, _work(number), claim=uuid.uuid4())
            if not isinstance(answer, claims.Claimed):
                raise TypeError(answer)
        bare = stack.enter_context(psycopg.connect(url, autocommit=True))
        bare.execute("select 1")
        return {
            "holder": round(statistics.mean(_private(session.pid) for session in holders)),
            "bare connection": _private(bare.info.backend_pid),
        }


def _private(pid: int) -> int:
    return memory(pid, "Private_Dirty") + memory(pid, "Private_Clean")


def _wal_of_runs(url: str, redis: str, count: int) -> Figures:
    """Return how many bytes of WAL a run writes, each kind measured by so many."""
    bench = tasks.application(url, "memory://", redis, tasks.Here)
    with guards.acts(bench, url) as acts, psycopg.connect(url, autocommit=True) as connection:
        found: Figures = {}
        for name in (
            guards.SAME_WRITES,
            tasks.LOCK_ONLY,
            tasks.LEDGER,
            tasks.TRANSACTION,
            guards.REFUSED,
        ):
            # A page that is changed for the first time after a checkpoint is written as a whole.
            for number in range(50):
                acts[name](number)
            before = _position(connection)
            for number in range(count):
                acts[name](number)
            found[name] = round((_position(connection) - before) / count)
    return found


def _wal_of_beat(url: str, broker: str, entries: int) -> int:
    """Return how many bytes of WAL an occurrence costs the beat, and its `sent` row."""
    subject = schedulers.Leader(schedulers.Place(url, broker, entries))
    subject.make()
    subject.make_due()
    with psycopg.connect(url, autocommit=True) as connection:
        before = _position(connection)
        subject.send()
        written = _position(connection) - before
    sent = subject.purge()
    subject.close()
    if sent != entries:
        raise RuntimeError(sent)
    return round(written / sent)


def _position(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute(
        "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint"
    ).fetchone()
    return int(row[0]) if row else 0

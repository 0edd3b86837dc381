"""What becomes of a run's locks when its worker is hurt, limited, frozen, shut down or recycled.

`test_worker_death.py` is about what a run that died had written, and how often it is tried
again; here it is about the locks: how long after a fault they are free, or that they are kept.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from celery.result import AsyncResult

from celery_pglock import LockLost, migrating
from celery_pglock.demo.servers import PostgresServer, children
from tests.acceptance.bench import Bench, Note, due, occurrence
from tests.acceptance.conftest import MakeBench
from tests.support.databases import SCHEMA, Database
from tests.support.processes import Process, eventually
from tests.support.servers import CRASH_SAFE

PATIENCE = 30.0
# How often each fault is tried; 5 show that it works, 50 show the tail.
TRIALS = int(os.environ.get("PGLOCK_TEST_FAULTS", "5"))
# How many tasks the recycled children share: one child for each.
TASKS = int(os.environ.get("PGLOCK_TEST_TASKS", "60"))
# Seconds until a lock is free: of a session that was idle, and of one that the server was just
# working for, which looks each half of a second whether its client is still there.
IDLE_BOUND = 1.0
BUSY_BOUND = 2.0
CLAIM_GRACE = dt.timedelta(seconds=2)
LEVELS = {"session": "job", "transaction": "transactional"}
LATE_LEVELS = {"session": "late", "transaction": "late_transactional"}

levels = pytest.mark.parametrize("task", LEVELS.values(), ids=LEVELS)


class Watch:
    """Looks at the locks of a database every few milliseconds, and dates them by its clock."""

    def __init__(self, database: Database) -> None:
        self._connection = database.connect()

    def now(self) -> float:
        return self._look()[0]

    def held(self) -> set[tuple[int, int]]:
        """Return the advisory locks that are held, as backend and key."""
        return self._look()[1]

    def free_after(
        self, locks: set[tuple[int, int]], since: float, *, patience: float = 10.0
    ) -> float:
        """Wait until none of these locks is held; return the seconds from `since` to then."""
        moment = since

        def free() -> bool:
            nonlocal moment
            moment, held = self._look()
            return not held & locks

        eventually(free, patience, f"{locks} are free", interval=0.003)
        return moment - since

    def wait_for_statement(self, locks: set[tuple[int, int]]) -> None:
        """Wait until the server works at a `pg_sleep` for whoever holds these locks."""
        query = (
            "SELECT 1 FROM pg_stat_activity"
            " WHERE pid = ANY(%s) AND state = 'active' AND query LIKE '%%pg_sleep%%'"
        )
        backends = [backend for backend, _ in locks]
        eventually(
            lambda: self._connection.execute(query, (backends,)).fetchall(),
            what="the statement runs",
        )

    def sessions(self) -> int:
        """Return how many lock sessions there are, idle ones included."""
        query = (
            "SELECT pid FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'pglock%'"
        )
        return len(self._connection.execute(query).fetchall())

    def _look(self) -> tuple[float, set[tuple[int, int]]]:
        query = (
            "SELECT extract(epoch FROM clock_timestamp())::float8, l.pid,"
            " (l.classid::bigint << 32) | l.objid::bigint"
            " FROM (SELECT oid FROM pg_database WHERE datname = current_database()) d"
            " LEFT JOIN pg_locks l"
            " ON l.locktype = 'advisory' AND l.granted AND l.database = d.oid"
        )
        rows = self._connection.execute(query).fetchall()
        return rows[0][0], {(pid, key) for _, pid, key in rows if pid is not None}


class Started(NamedTuple):
    """A run that has begun and waits at its gate.

    Attributes:
        result: of its message.
        note: what its body left when it began.
        key: its gate, and what its lock name is made of.
        job: its job.
        headers: of its message, which make it the occurrence of an entry.
    """

    result: AsyncResult[Any]
    note: Note
    key: str
    job: str
    headers: dict[str, str]


def begin(bench: Bench, task: str, **options: Any) -> Started:
    key = f"key-{uuid.uuid4()}"
    options = {
        "params": {"gate": key},
        "headers": occurrence(key, due(minutes=1)),
        **options,
    }
    result = bench.send(task, key, **options)
    (note,) = bench.wait_for_notes("start", task_id=result.id, timeout=PATIENCE)
    return Started(result, note, key, note.detail["job"], options["headers"])


def expect_a_next_run(bench: Bench, task: str, first: Started) -> None:
    """Have another run under the same lock name, which begins and ends."""
    assert bench.send(task, first.key).get(timeout=PATIENCE) is None
    assert not bench.skips(task=task)


def expect_another_attempt(bench: Bench, task: str, *firsts: Started) -> None:
    """Send the occurrences once more: they run, and their rows tell of both attempts."""
    for first in firsts:
        before = bench.run(job=first.job)
        assert before.status in ("failed", "running"), before
        if before.status == "running":
            # A claim at transaction level holds no lock until its transaction has begun, so a
            # young one is not taken over.
            age = CLAIM_GRACE + dt.timedelta(seconds=0.1)
            ripe = first.note.at + age
            eventually(partial(_has_come, bench, ripe), what="the claim is not young any more")
            before = bench.run(job=first.job)
        bench.send(task, first.key, headers=first.headers).get(timeout=PATIENCE)
        after = bench.run(job=first.job)
        assert (after.status, after.attempts) == ("done", 2)
        # What could not be recorded any more was found out by the next attempt.
        assert after.lost_attempts == (before.status == "running")
        assert not bench.skips(job=first.job)


def _has_come(bench: Bench, moment: dt.datetime) -> bool:
    return bench.now() > moment


def hurt(worker: Process, pid: int, signum: signal.Signals) -> None:
    """Send a signal to a child of the worker, and to nothing else."""
    mine = worker.children()
    assert pid in mine, f"{pid} is none of {mine}"
    os.kill(pid, signum)


def tell(fault: str, task: str, delays: Sequence[float]) -> None:
    print(
        f"{fault}, {task}: free after median {statistics.median(delays) * 1000:.0f} ms,"
        f" maximum {max(delays) * 1000:.0f} ms (n = {len(delays)})"
    )


# --- A child is hurt -------------------------------------------------------------------------


class Stage(NamedTuple):
    """A worker that many tests hurt, one after the other."""

    bench: Bench
    worker: Process
    watch: Watch


@pytest.fixture(scope="module")
def stage(make_shared_bench: MakeBench) -> Stage:
    bench = make_shared_bench()
    # Killed children are replaced, but not at once.
    worker = bench.worker(concurrency=4)
    return Stage(bench, worker, Watch(bench.database))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGTERM], ids=lambda fault: fault.name)
@levels
def test_the_locks_of_a_child_that_is_ended_are_free_at_once(
    stage: Stage, task: str, fault: signal.Signals
) -> None:
    bench, worker, watch = stage
    delays, firsts = [], []
    for _ in range(TRIALS):
        first = begin(bench, task)
        firsts.append(first)
        locks = watch.held()
        assert len(locks) == 2, "the run lock and the name lock"
        since = watch.now()
        hurt(worker, first.note.pid, fault)
        delays.append(watch.free_after(locks, since))
        if fault == signal.SIGTERM:
            bench.wait_for_run("failed", job=first.job)
        expect_a_next_run(bench, task, first)
    expect_another_attempt(bench, task, *firsts)
    tell(fault.name, task, delays)
    assert max(delays) < IDLE_BOUND


# Seconds; long enough to be looked at before, on a busy machine too.
LIMIT = 2
WITHIN_LIMITS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "soft limit": ({"soft_time_limit": LIMIT}, SoftTimeLimitExceeded),
    "hard limit": ({"time_limit": LIMIT}, TimeLimitExceeded),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM", *WITHIN_LIMITS])
def test_a_child_that_is_ended_within_a_statement_of_its_lock_session(
    stage: Stage, fault: str
) -> None:
    """The server frees the lock, although its own work would last for much longer."""
    bench, worker, watch = stage
    delays, firsts = [], []
    limit, error = WITHIN_LIMITS.get(fault, ({}, None))
    for _ in range(TRIALS if error is None else min(TRIALS, 2)):
        first = begin(bench, "in_a_statement", params={"seconds": 60}, **limit)
        firsts.append(first)
        locks = watch.held()
        watch.wait_for_statement(locks)
        if error is None:
            since = watch.now()
            hurt(worker, first.note.pid, signal.Signals[fault])
        else:
            with pytest.raises(error):
                first.result.get(timeout=PATIENCE)
            since = watch.now()
        delays.append(watch.free_after(locks, since))
        if fault in ("SIGTERM", "soft limit"):
            bench.wait_for_run("failed", job=first.job)
        bench.send("in_a_statement", first.key, 0).get(timeout=PATIENCE)
    expect_another_attempt(bench, "transactional", *firsts)
    tell(f"{fault} within a statement", "in_a_statement", delays)
    assert max(delays) < BUSY_BOUND


@pytest.mark.slow
def test_control_a_server_that_does_not_look_keeps_the_lock(stage: Stage) -> None:
    bench, worker, watch = stage
    first = begin(bench, "in_a_statement", params={"seconds": 4, "check_interval": "0"})
    locks = watch.held()
    watch.wait_for_statement(locks)
    since = watch.now()
    hurt(worker, first.note.pid, signal.SIGKILL)
    assert watch.free_after(locks, since) > BUSY_BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "error", "state"),
    [
        ("hard limit", TimeLimitExceeded, "FAILURE"),
        ("soft limit", SoftTimeLimitExceeded, "FAILURE"),
        ("revoked by SIGTERM", TaskRevokedError, "REVOKED"),
        ("revoked by SIGKILL", TaskRevokedError, "REVOKED"),
    ],
)
@levels
def test_a_run_that_is_ended_by_celery_leaves_its_locks(
    stage: Stage, task: str, end: str, error: type[Exception], state: str
) -> None:
    bench, _, watch = stage
    limits: dict[str, dict[str, Any]] = {
        "hard limit": {"time_limit": LIMIT},
        "soft limit": {"soft_time_limit": LIMIT},
    }
    first = begin(bench, task, **limits.get(end, {}))
    locks = watch.held()
    assert len(locks) == 2, "ended before it was looked at"
    since = watch.now()
    if end in limits:
        with pytest.raises(error):
            first.result.get(timeout=PATIENCE)
        since = watch.now()
    else:
        first.result.revoke(terminate=True, signal=end.rpartition(" ")[2])
    delay = watch.free_after(locks, since)
    tell(end, task, [delay])
    assert delay < IDLE_BOUND
    with pytest.raises(error):
        first.result.get(timeout=PATIENCE)
    assert first.result.state == state
    assert not bench.notes("end", key=first.key)
    if end == "soft limit":
        run = bench.run(job=first.job)
        assert (run.status, run.reason) == ("failed", "error")
        assert run.error is not None
        assert run.error.startswith("SoftTimeLimitExceeded")
    expect_a_next_run(bench, task, first)
    expect_another_attempt(bench, task, first)
    assert first.result.state == state, "nobody else's result"


# --- Processes that are frozen ---------------------------------------------------------------

# Seconds, several times what a session may be silent for.
LOST_AFTER = 1.0
FROZEN_FOR = 3.5 * LOST_AFTER


class Frozen(NamedTuple):
    """A worker with one run of each level, to be frozen, and another one to ask."""

    bench: Bench
    worker: Process
    watch: Watch
    runs: dict[str, Started]
    other: str


@pytest.fixture
def frozen(make_bench: MakeBench) -> Frozen:
    bench = make_bench()
    # A queue of its own: the broker may hand a frozen worker what is meant for the other.
    other = f"{bench.queue}-other"
    worker = bench.start_worker(concurrency=3, pglock_lost_after=LOST_AFTER)
    bench.expect(worker, bench.start_worker("-Q", other, pglock_lost_after=LOST_AFTER))
    # Without an occurrence of its own, so that the second message is of the same job.
    runs = {task: begin(bench, task, headers={}) for task in LEVELS.values()}
    return Frozen(bench, worker, Watch(bench.database), runs, other)


def freeze(frozen: Frozen, who: str) -> None:
    if who == "worker":
        frozen.worker.stop(group=True)
    else:
        for run in frozen.runs.values():
            hurt(frozen.worker, run.note.pid, signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["child", "worker"])
def test_a_frozen_run_keeps_its_locks_and_ends_when_it_is_woken(frozen: Frozen, who: str) -> None:
    bench, worker, watch, runs, other = frozen
    locks = watch.held()
    assert len(locks) == 4
    thawed_at = watch.now() + FROZEN_FOR
    freeze(frozen, who)
    while True:
        for task, run in runs.items():
            second = bench.send(task, run.key, queue=other)
            (skip,) = bench.wait_for_notes(
                "signal", name="run_skipped", task_id=second.id, timeout=PATIENCE
            )
            assert skip.detail["task"] == task
        if watch.now() > thawed_at:
            break
        time.sleep(LOST_AFTER / 2)
    assert watch.held() == locks
    worker.cont()
    for run in runs.values():
        bench.open_gate(run.key)
        assert run.result.get(timeout=PATIENCE) is None
        row = bench.run(task_id=run.result.id)
        assert (row.status, row.attempts) == ("done", 1)
        assert len(bench.notes("start", key=run.key)) == 1
    assert not bench.notes("signal", name="lock_lost")
    eventually(lambda: not watch.held(), what="no lock is held")


@pytest.mark.slow
def test_a_worker_whose_parent_alone_is_frozen_keeps_its_locks_and_ends_its_runs(
    frozen: Frozen,
) -> None:
    """The child has the lock session and the thread that watches it; the parent has neither."""
    bench, worker, watch, runs, _ = frozen
    locks = watch.held()
    assert len(locks) == 4
    thawed_at = watch.now() + FROZEN_FOR
    worker.stop(group=False)
    looks = 0
    while watch.now() < thawed_at:
        assert watch.held() == locks
        looks += 1
        time.sleep(0.05)
    for run in runs.values():
        bench.open_gate(run.key)
        bench.wait_for_run("done", task_id=run.result.id, timeout=PATIENCE)
    eventually(lambda: not watch.held(), what="no lock is held")
    for run in runs.values():
        assert run.result.get(timeout=PATIENCE) is None
    stat = Path(f"/proc/{worker.pid}/stat").read_text()
    assert stat.rpartition(")")[2].split()[0] == "T", "the parent has been frozen all the time"
    print(f"parent frozen for {FROZEN_FOR:g} s: locks kept in {looks} looks")
    worker.cont(group=False)
    for run in runs.values():
        assert bench.run(task_id=run.result.id).attempts == 1
        assert len(bench.notes("start", key=run.key)) == 1
    assert not bench.notes("signal", name="lock_lost")


@pytest.mark.slow
def test_a_run_that_loses_its_locks_while_it_is_frozen_is_told_when_it_wakes(
    frozen: Frozen,
) -> None:
    bench, worker, watch, runs, other = frozen
    freeze(frozen, "worker")
    locks = watch.held()
    for backend in {backend for backend, _ in locks}:
        bench.database.rows("SELECT pg_terminate_backend(%s)", backend)
    watch.free_after(locks, watch.now())
    for task, run in runs.items():
        # Another period of the same lock name.
        assert bench.send(task, run.key, queue=other).get(timeout=PATIENCE) is None
    worker.cont()
    for run in runs.values():
        with pytest.raises(LockLost):
            run.result.get(timeout=PATIENCE)
        assert bench.run(task_id=run.result.id).status == "failed"
        assert not [note for note in bench.notes("end", key=run.key) if note.pid == run.note.pid]


# --- The worker ends -------------------------------------------------------------------------


class Working(NamedTuple):
    """A worker in the middle of one run of each level."""

    bench: Bench
    worker: Process
    watch: Watch
    runs: dict[str, Started]
    locks: set[tuple[int, int]]


def working(bench: Bench, tasks: dict[str, str], **settings: Any) -> Working:
    worker = bench.worker(concurrency=3, **settings)
    watch = Watch(bench.database)
    runs = {task: begin(bench, task) for task in tasks.values()}
    locks = watch.held()
    assert len(locks) == 4
    return Working(bench, worker, watch, runs, locks)


@pytest.mark.slow
def test_a_warm_shutdown_lets_the_runs_end_under_their_locks(make_bench: MakeBench) -> None:
    bench, worker, watch, runs, locks = working(make_bench(), LEVELS)
    worker.terminate()
    worker.wait_for_line(r"Warm shutdown")
    assert watch.held() == locks
    for run in runs.values():
        bench.open_gate(run.key)
    assert worker.wait() == 0
    assert not watch.held()
    eventually(lambda: not watch.sessions(), IDLE_BOUND, "the sessions are gone")
    for run in runs.values():
        assert run.result.get(timeout=PATIENCE) is None
        assert bench.run(job=run.job).status == "done"


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "cold",
        pytest.param("cold after warm", marks=pytest.mark.chaos),
        pytest.param("soft", marks=pytest.mark.chaos),
        pytest.param("all at once", marks=pytest.mark.chaos),
    ],
)
def test_after_a_cold_shutdown_the_locks_are_free_and_the_next_worker_runs_the_period(
    make_bench: MakeBench, how: str
) -> None:
    settings = {"worker_soft_shutdown_timeout": 2.0} if how == "soft" else {}
    bench, worker, watch, runs, locks = working(make_bench(), LATE_LEVELS, **settings)
    if how == "cold after warm":
        worker.terminate()
        worker.wait_for_line(r"Warm shutdown")
    since = watch.now()
    if how == "all at once":
        # As a service manager may do it: the parent and its children get the signal.
        worker.send(signal.SIGTERM, group=True)
    else:
        worker.send(signal.SIGQUIT)
    if how == "soft":
        worker.wait_for_line(r"Soft Shutdown")
        assert watch.held() == locks
    delay = watch.free_after(locks, since, patience=PATIENCE)
    tell(f"{how} shutdown, from its signal", "both levels", [delay])
    assert delay < settings.get("worker_soft_shutdown_timeout", 0.0) + IDLE_BOUND
    worker.wait()
    eventually(lambda: not watch.sessions(), IDLE_BOUND, "the sessions are gone")
    for run in runs.values():
        assert not bench.notes("end", key=run.key)
        bench.open_gate(run.key)
    bench.worker()
    for run in runs.values():
        after = bench.wait_for_run("done", job=run.job, timeout=PATIENCE)
        assert after.attempts == 2
        assert len(bench.notes("end", key=run.key)) == 1
    eventually(lambda: not bench.messages(), PATIENCE, "the broker has no message left")


@pytest.mark.chaos
@pytest.mark.slow
def test_a_run_that_ends_within_a_soft_shutdown_is_done_once(make_bench: MakeBench) -> None:
    bench, worker, watch, runs, _ = working(
        make_bench(), LATE_LEVELS, worker_soft_shutdown_timeout=3.0
    )
    worker.send(signal.SIGQUIT)
    worker.wait_for_line(r"Soft Shutdown")
    for run in runs.values():
        bench.open_gate(run.key)
        bench.wait_for_run("done", job=run.job, timeout=PATIENCE)
    worker.wait()
    eventually(lambda: not watch.sessions(), IDLE_BOUND, "the sessions are gone")
    # Celery may give back even the messages of runs that have ended; those end without a run.
    bench.worker()
    eventually(lambda: not bench.messages(), PATIENCE, "the broker has no message left")
    for run in runs.values():
        assert bench.run(job=run.job).attempts == 1
        assert len(bench.notes("start", key=run.key)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True], ids=["parent", "whole worker"])
def test_the_locks_of_a_worker_that_is_killed_are_free_at_once(
    make_bench: MakeBench, *, group: bool
) -> None:
    """Also when only the parent is killed: Celery has its children killed with it, on Linux."""
    bench, worker, watch, runs, locks = working(make_bench(), LEVELS)
    since = watch.now()
    worker.kill(group=group)
    delay = watch.free_after(locks, since)
    tell(f"SIGKILL of the {'whole worker' if group else 'parent'}", "both levels", [delay])
    assert delay < IDLE_BOUND
    eventually(lambda: not worker.children(), what="no child is left")
    eventually(lambda: not watch.sessions(), IDLE_BOUND, "the sessions are gone")
    bench.worker()
    for task, run in runs.items():
        assert not bench.notes("end", key=run.key)
        expect_a_next_run(bench, task, run)
        expect_another_attempt(bench, task, run)


# --- Processes that come and go --------------------------------------------------------------

LOST_CLIENT = "unexpected EOF on client connection"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that logs every client that goes without a word."""
    # Outside a transaction that is only worth DEBUG1 to it.
    with PostgresServer({**CRASH_SAFE, "log_min_messages": "debug1"}) as server:
        migrating.migrate(server.url(), schema=SCHEMA)
        yield server


class Log:
    """What a server logs from now on."""

    def __init__(self, server: PostgresServer) -> None:
        self._file = server.log_file
        self._begin = len(self._text())

    def lines(self, *words: str) -> list[str]:
        lines = self._text()[self._begin :].splitlines()
        return [line for line in lines if any(word in line for word in words)]

    def _text(self) -> str:
        return self._file.read_text(errors="replace")


@pytest.fixture
def own_database(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    # Else the server would miss the connections for notes too.
    monkeypatch.setenv("APP_KEEPS_NOTHING", "1")
    name = f"pglock_test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE postgres".encode())
    database = Database(name, server.url(name))
    yield database
    database.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "pool",
    [
        "prefork",
        *(pytest.param(pool, marks=pytest.mark.chaos) for pool in ("solo", "threads", "gevent")),
    ],
)
def test_a_worker_says_good_bye_to_the_server_when_it_ends(
    make_bench: MakeBench, own_database: Database, server: PostgresServer, pool: str
) -> None:
    bench = make_bench(database=own_database)
    worker = bench.worker(pool=pool, concurrency=1 if pool == "solo" else 2)
    watch = Watch(bench.database)
    assert not watch.sessions(), "none before the first run"
    for task in LEVELS.values():
        for number in range(3):
            bench.send(task, f"key-{number}").get(timeout=PATIENCE)
    assert watch.sessions(), "idle, for the next run"
    log = Log(server)
    worker.terminate()
    worker.wait()
    eventually(lambda: not watch.sessions(), IDLE_BOUND, "the sessions are gone")
    assert not log.lines(LOST_CLIENT, "ERROR:")


@pytest.mark.slow
def test_control_without_the_receiver_the_server_misses_its_clients(
    make_bench: MakeBench,
    own_database: Database,
    server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("APP_SAYS_NO_GOOD_BYE", "1")
    bench = make_bench(database=own_database)
    worker = bench.worker(app="tests.apps.early")
    bench.send("job", "key").get(timeout=PATIENCE)
    log = Log(server)
    worker.terminate()
    worker.wait()
    eventually(lambda: log.lines(LOST_CLIENT), what="the server misses a client")


@pytest.mark.slow
@pytest.mark.timeout(120 + TASKS)
def test_children_that_are_recycled_leave_no_session_behind(
    make_bench: MakeBench, own_database: Database, server: PostgresServer
) -> None:
    """The parent has a lock session when it forks, which each child could end or prolong."""
    concurrency = 4
    bench = make_bench(database=own_database)
    log = Log(server)
    worker = bench.worker(
        "--max-tasks-per-child=1", concurrency=concurrency, app="tests.apps.early"
    )
    watch = Watch(bench.database)
    base = watch.sessions()
    assert base == 1, "the parent's"
    tasks = list(LEVELS.values())
    for number in range(TASKS):
        bench.send(tasks[number % 2], f"key-{number}")
    counts = []

    def all_done() -> bool:
        counts.append(watch.sessions())
        return len(bench.runs(status="done")) == TASKS

    began = time.monotonic()
    eventually(all_done, 60 + TASKS, "all have run", interval=0.01)
    print(
        f"{TASKS} tasks by as many children in {time.monotonic() - began:.1f} s: at most"
        f" {max(counts)} lock sessions ({len(counts)} samples)"
    )
    assert 1 < max(counts) <= concurrency + 1
    eventually(lambda: watch.sessions() <= base, 5.0, "back to the base number")
    # At transaction level no backend is noted, because a pooler may change it.
    query = "SELECT count(backend_pid), count(DISTINCT backend_pid), count(DISTINCT node)"
    ((noted, backends, nodes),) = bench.database.rows(f"{query} FROM pglock.job_runs")
    assert noted == backends == TASKS - TASKS // 2
    assert nodes == TASKS
    assert len(bench.notes("disposed")) >= TASKS
    worker.terminate()
    worker.wait()
    assert not children.session_members(worker.pid)
    eventually(lambda: not watch.sessions(), IDLE_BOUND, "the sessions are gone")
    assert not log.lines(LOST_CLIENT, "ERROR:", "FATAL:")
    assert " ERROR/" not in worker.output()


IMPORTING = """
import importlib, json, os, sys, threading
import psycopg
app = importlib.import_module(sys.argv[1]).app
app.finalize()
assert type(app.tasks["job"]).__mro__[1].__name__ == "LockedTask"
with psycopg.connect(os.environ["APP_DATABASE_URL"]) as connection:
    rows = connection.execute(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'pglock%'"
    ).fetchall()
threads = [thread.name for thread in threading.enumerate() if "pglock" in thread.name]
print("found:", json.dumps([rows[0][0], threads]))
"""


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("tests.apps.tasks", [0, []]),
        # The control: one that takes a lock while it is imported.
        ("tests.apps.early", [1, ["celery-pglock-monitor"]]),
    ],
    ids=["as it is", "control"],
)
def test_no_connection_is_opened_and_no_thread_started_by_importing_and_finalizing(
    make_bench: MakeBench, module: str, found: list[Any]
) -> None:
    bench = make_bench()
    _, _, told = bench.script(IMPORTING, module).rpartition("found: ")
    assert json.loads(told) == found

"""Cases about locks, connections and outages, from real reports, with real workers.

Others are elsewhere: a key that somebody else holds (C29) is named in `test_visibility`, of many
at once one runs on every pool (C35) in `test_pools`, a lost lock (C39) in `test_lost_locks`, all
ways in which a body may end its transaction (C37) in `tests/integration/test_execution`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_pglock import DatabaseUnavailable, LockLost, TransactionEnded, keys, migrating
from celery_pglock.demo.servers import PostgresServer
from tests.acceptance.bench import NAMESPACE, Bench, due, label, occurrence
from tests.acceptance.conftest import MakeBench
from tests.support.databases import Database
from tests.support.processes import eventually
from tests.support.stage import MakeStage

PATIENCE = 30.0
APP = "tests.apps.cases"


@pytest.fixture(scope="module")
def bench(make_shared_bench: MakeBench) -> Bench:
    bench = make_shared_bench()
    bench.worker(app=APP, concurrency=4)
    return bench


@pytest.fixture(scope="module")
def threads(make_shared_bench: MakeBench) -> Bench:
    bench = make_shared_bench()
    bench.worker(app=APP, pool="threads", concurrency=8)
    return bench


def complaints(bench: Bench, period: str) -> list[dict[str, Any]]:
    """Return the records of WARNING and above about a period."""
    levels = ("WARNING", "ERROR", "CRITICAL")
    return [
        note.detail for note in bench.notes("log", period=period) if note.detail["level"] in levels
    ]


def end_session_of(bench: Bench, lock_key: int) -> int:
    pid: int
    (pid,) = {lock["pid"] for lock in bench.locks() if lock["key"] == lock_key}
    bench.database.rows("SELECT pg_terminate_backend(%s)", pid)
    return pid


# --- C18: an error in the body's SQL ----------------------------------------------------------


@pytest.mark.parametrize("task", ["division", "division_inside"])
def test_c18_an_sql_error_is_the_result_and_the_lock_is_free(
    bench: Bench, key: str, task: str
) -> None:
    result = bench.send(task, key, params={"fail": True})
    error = repr(result.get(timeout=PATIENCE, propagate=False))
    assert result.state == "FAILURE"
    assert "division by zero" in error
    run = bench.run(task_id=result.id)
    assert (run.status, run.reason) == ("failed", "error")
    assert "DivisionByZero" in (run.error or "")
    assert not complaints(bench, run.period)
    assert not bench.locks()
    assert bench.send(task, key, params={"fail": False}).get(timeout=PATIENCE) is None


def test_c18_where_the_unlock_cannot_be_confirmed_the_error_is_still_the_result(
    bench: Bench, key: str
) -> None:
    """Its session is gone: that is told once, and no other run gets that session."""
    result = bench.send("division_warned", key, params={"fail": True, "end_session": True})
    assert "division by zero" in repr(result.get(timeout=PATIENCE, propagate=False))
    run = bench.run(task_id=result.id)
    assert (run.status, run.reason) == ("failed", "error")
    assert [record["event"] for record in complaints(bench, run.period)] == ["lock_lost"]
    assert not bench.locks()
    assert bench.send("division_warned", key, params={"fail": False}).get(timeout=PATIENCE) is None


# --- C29: others in the same database, and other databases ------------------------------------


@pytest.mark.slow
def test_c29_somebody_elses_locks_are_in_nobodys_way(
    make_stage: MakeStage, database: Database
) -> None:
    stranger = database.connect(application_name="stranger")
    for number in (1, 42):
        stranger.execute("SELECT pg_advisory_lock(%s)", [number])
    for number in range(10):
        stranger.execute("SELECT pg_advisory_lock(0, %s)", [number])
    entries = {f"entry-{number}": 2.0 for number in range(10)}
    stage = make_stage(entries)
    worker = stage.worker("-B", "--scheduler", "pglock", "-s", "/dev/null")
    worker.wait_for_line("leadership gained: ")
    eventually(
        lambda: stage.rows("SELECT count(DISTINCT entry) FROM ran") == [(10,)],
        PATIENCE,
        "all ten run",
    )
    # Both the worker and its beat say where their locks are.
    told = rf"locks of namespace stage are in database {database.name} of the server at 127\.0\.0\.1:\d+$"
    worker.wait_for_line(told, count=2)
    worker.terminate()
    assert worker.wait() == 0
    assert "run skipped" not in worker.output()


def test_c29_two_databases_do_not_exclude_each_other_and_are_named(
    make_bench: MakeBench, key: str
) -> None:
    benches = [make_bench(), make_bench()]
    workers = [one.start_worker(app=APP, concurrency=1) for one in benches]
    for one, worker in zip(benches, workers, strict=True):
        one.expect(worker)
        told = re.findall("are in database (.*) of the server", worker.output())
        assert told == [one.database.name]
        (note,) = one.notes("log", event="database")
        assert (note.detail["level"], note.detail["namespace"]) == ("INFO", NAMESPACE)
    with benches[0].held(key), benches[1].held(key):
        locks = [{lock["key"] for lock in one.locks()} for one in benches]
        name = keys.from_name(NAMESPACE, "task", f'job{{"key":"{key}"}}')
        assert all(name in held for held in locks)


# --- C30: tenants -----------------------------------------------------------------------------


def send_for(bench: Bench, task: str, tenant: str | None, key: str, gate: str) -> Any:
    if task == "by_parameter":
        return bench.send(task, tenant, key, params={"gate": gate})
    headers = {} if tenant is None else {"_schema_name": tenant}
    return bench.send(task, key, params={"gate": gate}, headers=headers)


@pytest.mark.parametrize("task", ["by_header", "by_header_daily", "by_parameter"])
def test_c30_tenants_run_beside_each_other_and_each_only_once(
    bench: Bench, key: str, task: str
) -> None:
    first, other = (send_for(bench, task, tenant, key, key) for tenant in ("t1", "t2"))
    for result in (first, other):
        bench.wait_for_notes("start", task_id=result.id, timeout=PATIENCE)
    copy = send_for(bench, task, "t1", key, key)
    bench.wait_for_notes("signal", name="run_skipped", task_id=copy.id, timeout=PATIENCE)
    assert not bench.notes("end", key=key)
    bench.open_gate(key)
    for result in (first, other):
        assert result.get(timeout=PATIENCE) is None
    assert len(bench.notes("start", key=key)) == 2
    names = {note.detail["name"] for note in bench.notes("start", key=key)}
    text = 'by_parameter{{"key":"{}","schema":"{}"}}'
    if task != "by_parameter":
        text = "report of {1}: {0}"
    assert names == {text.format(key, tenant) for tenant in ("t1", "t2")}
    rows = [bench.run(task_id=result.id, status="done") for result in (first, other)]
    # Under a calendar rule a job is called as its lock; otherwise each message is a period.
    assert len({(row.job, row.period) for row in rows}) == 2
    if task == "by_header_daily":
        assert {row.job for row in rows} == {f"{NAMESPACE}:{name}" for name in names}
        assert len({row.period for row in rows}) == 1


def test_c30_a_message_without_its_tenant_fails_and_takes_nobody_elses_lock(
    bench: Bench, key: str
) -> None:
    """In each process a tenant's run has just ended."""
    for number in range(8):
        send_for(bench, "by_header", "t1", f"{key}-{number}", "").get(timeout=PATIENCE)
    before = len(bench.runs())
    for _ in range(8):
        result = send_for(bench, "by_header", None, key, "")
        assert "_schema_name" in repr(result.get(timeout=PATIENCE, propagate=False))
        assert result.state == "FAILURE"
    assert not bench.notes("start", key=key)
    assert len(bench.runs()) == before
    assert not bench.locks()


# --- C34: the application's pool --------------------------------------------------------------


def test_c34_a_lock_is_never_on_the_applications_own_connection(bench: Bench, key: str) -> None:
    for number in range(20):
        result = bench.send("committing_twice", key, number)
        with pytest.raises(ValueError, match=str(number)):
            result.get(timeout=PATIENCE)
        assert not bench.locks(), number
    notes = bench.notes("start", key=key)
    assert len(notes) == 20
    of_the_pool = {backend for note in notes for backend in note.detail["backends"]}
    rows = bench.database.rows(
        "SELECT backend_pid FROM pglock.job_runs WHERE task = 'committing_twice'"
    )
    assert len(rows) == 20
    assert not of_the_pool & {pid for (pid,) in rows}


# --- C35: threads -----------------------------------------------------------------------------


def test_c35_of_eight_threads_with_one_key_one_runs(threads: Bench, key: str) -> None:
    with threads.held(key, task="job") as holder:
        others = [threads.send("job", key) for _ in range(7)]
        for other in others:
            with pytest.raises(TaskRevokedError, match="skipped: lock"):
                other.get(timeout=PATIENCE)
    assert holder.get(timeout=PATIENCE) is None
    (start,) = threads.notes("start", key=key)
    assert {note.pid for note in threads.skips(kind="held")} == {start.pid}, "it is one process"


def test_c35_eight_threads_with_eight_keys_all_run_at_the_same_time(
    threads: Bench, key: str
) -> None:
    results = [threads.send("job", f"{key}-{n}", params={"gate": key}) for n in range(8)]
    for result in results:
        threads.wait_for_notes("start", task_id=result.id, timeout=PATIENCE)
    # All have begun and none can have ended: the gate is closed.
    assert len({lock["pid"] for lock in threads.locks()}) == 8
    threads.open_gate(key)
    for result in results:
        assert result.get(timeout=PATIENCE) is None


# --- C36: greenlets ---------------------------------------------------------------------------


@pytest.mark.slow
def test_c36_fifty_greenlets_want_one_lock_and_the_loop_goes_on(
    make_bench: MakeBench, key: str
) -> None:
    bench = make_bench()
    bench.worker(app=APP, pool="gevent", concurrency=50)
    bench.send("job", f"{key}-first").get(timeout=PATIENCE)
    bench.send("ticks", params={"anew": True}).get(timeout=PATIENCE)
    results = [bench.send("job", key, params={"gate": key}) for _ in range(50)]
    bench.wait_for_notes("signal", name="run_skipped", count=49, timeout=PATIENCE)
    longest, ticks = bench.send("ticks").get(timeout=PATIENCE)
    bench.open_gate(key)
    ends = [result.get(timeout=PATIENCE, propagate=False) for result in results]
    assert sum(end is None for end in ends) == 1
    assert sum(isinstance(end, TaskRevokedError) for end in ends) == 49
    assert len(bench.notes("start", key=key)) == 1
    assert not bench.locks()
    print(f"50 greenlets: longest pause {longest:.3f} s in {ticks} ticks of 0.05 s")
    assert ticks
    assert longest < 1.0


# --- C37: a body that commits half-way --------------------------------------------------------


@pytest.mark.parametrize(("how", "written"), [("commit()", []), ("COMMIT", [(1,)])])
def test_c37_a_body_that_commits_half_way_is_not_done_and_of_four_copies_one_runs(
    bench: Bench, key: str, how: str, written: list[tuple[int]]
) -> None:
    headers = occurrence(key, due(minutes=1))
    copies = [bench.send("committing_inside", key, how, key, headers=headers) for _ in range(4)]
    (start,) = bench.wait_for_notes("start", key=key, timeout=PATIENCE)
    bench.wait_for_notes(
        "signal", name="run_skipped", count=3, job=f"{NAMESPACE}:{key}", timeout=PATIENCE
    )
    bench.open_gate(key)
    (result,) = [copy for copy in copies if copy.id == start.detail["task_id"]]
    with pytest.raises(TransactionEnded):
        result.get(timeout=PATIENCE)
    assert len(bench.notes("start", key=key)) == 1
    run = bench.run(job=f"{NAMESPACE}:{key}")
    assert (run.status, run.attempts) == ("failed", 1)
    assert bench.database.rows("SELECT number FROM written WHERE job = %s", key) == written
    assert not bench.locks()


# --- C39: a lock that is lost while the body works --------------------------------------------


def test_c39_after_a_lost_lock_a_copy_of_the_period_takes_it_over_and_the_first_is_not_done(
    threads: Bench, key: str
) -> None:
    """On a pool whose bodies cannot be interrupted, so that the first goes on."""
    bench = threads
    this, following = due(minutes=2), due(minutes=1)
    job = f"{NAMESPACE}:{key}"

    def send(moment: Any, gate: str) -> Any:
        return bench.send("job", key, params={"gate": gate}, headers=occurrence(key, moment))

    first = send(this, f"{key}-1")
    bench.wait_for_notes("start", task_id=first.id, timeout=PATIENCE)
    # As long as the lock is held, a copy of the period does not run.
    refused = send(this, f"{key}-2")
    with pytest.raises(TaskRevokedError):
        refused.get(timeout=PATIENCE)
    end_session_of(bench, keys.of_run(NAMESPACE, job, label(this)))
    (told,) = bench.wait_for_notes("log", event="lock_lost", job=job, timeout=PATIENCE)
    assert told.detail["level"] == "ERROR"
    copy = send(this, f"{key}-2")
    (start,) = bench.wait_for_notes("start", task_id=copy.id, timeout=PATIENCE)
    assert (start.detail["attempt"], start.detail["lost_attempts"]) == (2, 1)
    assert not bench.notes("end", key=key), "they overlap, which is logged"
    (taken_over,) = bench.notes("log", event="run_taken_over", job=job)
    assert taken_over.detail["level"] == "WARNING"
    bench.open_gate(f"{key}-1")
    with pytest.raises(LockLost):
        first.get(timeout=PATIENCE)
    assert bench.run(job=job, period=label(this)).status == "running"
    bench.open_gate(f"{key}-2")
    assert copy.get(timeout=PATIENCE) is None
    run = bench.run(job=job, period=label(this))
    assert (run.status, run.attempts, run.task_id) == ("done", 2, copy.id)
    assert send(following, f"{key}-2").get(timeout=PATIENCE) is None
    assert len(bench.notes("log", event="lock_lost", job=job)) == 1


def test_c39_after_a_lost_lock_the_next_period_runs_beside_the_first_attempt(
    threads: Bench, key: str
) -> None:
    bench = threads
    this, following = due(minutes=2), due(minutes=1)
    job = f"{NAMESPACE}:{key}"
    first = bench.send("job", key, params={"gate": key}, headers=occurrence(key, this))
    bench.wait_for_notes("start", task_id=first.id, timeout=PATIENCE)
    end_session_of(bench, keys.of_run(NAMESPACE, job, label(this)))
    bench.wait_for_notes("log", event="lock_lost", job=job, timeout=PATIENCE)
    after = bench.send("job", key, headers=occurrence(key, following))
    assert after.get(timeout=PATIENCE) is None
    assert not bench.notes("end", task_id=first.id)
    bench.open_gate(key)
    with pytest.raises(LockLost):
        first.get(timeout=PATIENCE)
    assert bench.run(job=job, period=label(following)).status == "done"
    run = bench.run(job=job, period=label(this))
    assert (run.status, run.reason) == ("failed", "lock lost")


# --- C40: no database when the lock is wanted -------------------------------------------------


@pytest.fixture
def outage(make_bench: MakeBench, own_postgres: PostgresServer) -> Bench:
    """A bench whose database is down, with a worker that was started before."""
    url = own_postgres.url("postgres")
    migrating.migrate(url, "pglock")
    bench = make_bench(database=Database("postgres", url))
    bench.worker(app=APP, concurrency=1, cases_quiet=True)
    own_postgres.stop()
    return bench


@pytest.mark.slow
def test_c40_without_a_database_a_message_waits_and_runs_once(
    outage: Bench, own_postgres: PostgresServer, key: str
) -> None:
    worker = outage._workers[0]  # noqa: SLF001 - the fixture's
    result = outage.send("unavailable_postpone", key)
    worker.wait_for_line(r"WARNING.*run postponed: .* \(copy 2\): cannot use PostgreSQL")
    # Neither a failure, nor a skip, nor a success, nor a retry of Celery's.
    assert result.state == "PENDING"
    own_postgres.start()
    assert result.get(timeout=PATIENCE) == 0, "no retry was used up"
    assert len(outage.notes("start", key=key)) == 1
    run = outage.run(task_id=result.id)
    assert (run.status, run.attempts) == ("done", 1)


@pytest.mark.slow
def test_c40_without_a_database_a_task_may_fail_which_autoretry_for_does_not_change(
    outage: Bench, own_postgres: PostgresServer, key: str
) -> None:
    """`autoretry_for` wraps the body, not what is raised around it."""
    result = outage.send("unavailable_raise", key)
    with pytest.raises(DatabaseUnavailable):
        result.get(timeout=PATIENCE)
    assert result.state == "FAILURE"
    own_postgres.start()
    assert not outage.notes("start", key=key)
    # The control: the body's own database error is retried.
    again = outage.send("unavailable_raise", key, params={"break_once": True})
    assert again.get(timeout=PATIENCE) == 1
    assert len(outage.notes("start", key=key)) == 2
    assert outage.run(task_id=again.id).status == "done"

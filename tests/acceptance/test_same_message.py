"""A message that is delivered again is never acknowledged away, and never runs twice."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections import Counter

import pytest

from tests.acceptance.bench import (
    FAST_REDELIVERY,
    NAMESPACE,
    Bench,
    due,
    label,
    occurrence,
    rabbitmqctl,
)
from tests.acceptance.conftest import MakeBench
from tests.support.processes import Process, eventually

PATIENCE = 30.0
# For each broker; 2,000 by hand.
RETRIES = int(os.environ.get("PGLOCK_TEST_RETRIES", "30"))
# Of the same, where they are not known for the same message.
CONTROLS = min(RETRIES, 20)
BOTH = pytest.mark.parametrize("broker", ["redis", "rabbitmq"])


@pytest.fixture
def key() -> str:
    return f"key-{uuid.uuid4()}"


@pytest.fixture(scope="module")
def idle_workers(request: pytest.FixtureRequest, make_shared_bench: MakeBench) -> Bench:
    """Workers with nothing else to do: a retry finds a free process at once."""
    bench = make_shared_bench(request.param, backend="redis")
    bench.expect(bench.start_worker(concurrency=2), bench.start_worker(concurrency=2))
    return bench


ON_BOTH = pytest.mark.parametrize("idle_workers", ["redis", "rabbitmq"], indirect=True)


def node(note_pid: int, workers: tuple[Process, ...]) -> tuple[Process, Process]:
    """Return the worker that a process belongs to, and the other one."""
    first, second = workers
    return (first, second) if note_pid in first.children() else (second, first)


def started_pid(bench: Bench, key: str) -> int:
    return bench.wait_for_notes("start", timeout=PATIENCE, key=key)[0].pid


# --- Redis: the visibility time-out ---------------------------------------------------------


@pytest.mark.slow
def test_redis_delivers_a_running_task_again_and_it_runs_once(
    make_bench: MakeBench, key: str
) -> None:
    bench = make_bench(**FAST_REDELIVERY)
    bench.expect(bench.start_worker(concurrency=2), bench.start_worker(concurrency=2))
    moment = due(minutes=1)
    job = f"{NAMESPACE}:{key}"
    result = bench.send("late", key, params={"seconds": 8}, headers=occurrence(key, moment))
    most = 0

    def done() -> bool:
        nonlocal most
        most = max(most, bench.messages())
        return bool(bench.runs(job=job, status="done"))

    eventually(done, PATIENCE, "the run is done")
    assert bench.run(job=job).postponements >= 1, "Redis delivered it again"
    eventually(lambda: bench.messages() == 0, PATIENCE, "every copy is acknowledged")
    run = bench.run(job=job)
    assert (run.period, run.status, run.attempts) == (label(moment), "done", 1)
    assert len(bench.notes("start", key=key)) == 1
    assert result.get(timeout=PATIENCE) is None
    assert not bench.skips(job=job), "its own copies are no skips"
    # The first delivery and one copy, each perhaps handed over at this moment.
    assert most <= 4


@pytest.mark.chaos
@pytest.mark.slow
def test_a_message_for_later_that_redis_delivers_many_times_runs_once(
    make_bench: MakeBench, key: str
) -> None:
    """Its countdown is longer than the visibility time-out, so workers hold several copies."""
    bench = make_bench(**FAST_REDELIVERY)
    bench.expect(bench.start_worker(concurrency=2), bench.start_worker(concurrency=2))
    result = bench.send("job", key, countdown=9)
    assert result.get(timeout=PATIENCE) is None
    delivered = bench.wait_for_notes("delivered", task_id=result.id, count=2, timeout=PATIENCE)
    assert len(delivered) >= 2, "Redis delivered it again"
    eventually(lambda: bench.messages() == 0, PATIENCE, "every copy is acknowledged")
    assert len(bench.notes("start", key=key)) == 1
    assert bench.run(task_id=result.id).attempts == 1
    assert not bench.skips(task_id=result.id)


@pytest.mark.slow
def test_when_the_first_run_dies_its_postponed_copy_runs(make_bench: MakeBench, key: str) -> None:
    bench = make_bench(**FAST_REDELIVERY)
    workers = bench.expect(bench.start_worker(concurrency=2), bench.start_worker(concurrency=2))
    job = f"{NAMESPACE}:{key}"
    bench.send("late", key, params={"gate": key}, headers=occurrence(key, due(minutes=1)))
    pid = started_pid(bench, key)
    bench.wait_for_notes("signal", name="run_postponed", job=job, timeout=PATIENCE)
    dying, other = node(pid, workers)
    dying.kill(group=True)
    assert not bench.notes("end", key=key), "the first run died in the middle"
    bench.open_gate(key)
    run = bench.wait_for_run("done", job=job, timeout=PATIENCE)
    assert (run.attempts, run.lost_attempts) == (2, 1)
    starts = bench.notes("start", key=key)
    assert [note.detail["attempt"] for note in starts] == [1, 2]
    assert starts[1].pid in other.children()
    assert len(bench.notes("end", key=key)) == 1
    assert not bench.skips(job=job)


@pytest.mark.slow
def test_copies_do_not_multiply(make_bench: MakeBench, key: str) -> None:
    """A run of many visibility time-outs: one copy at a time is on its way."""
    bench = make_bench(**FAST_REDELIVERY)
    bench.expect(bench.start_worker(concurrency=2), bench.start_worker(concurrency=2))
    job = f"{NAMESPACE}:{key}"
    bench.send("late", key, params={"gate": key}, headers=occurrence(key, due(minutes=1)))
    started_pid(bench, key)
    most = 0

    def postponed(number: int) -> bool:
        nonlocal most
        most = max(most, bench.messages())
        return bench.run(job=job).postponements >= number

    eventually(lambda: postponed(8), 40, "8 copies, one after the other", interval=0.05)
    bench.open_gate(key)
    run = bench.wait_for_run("done", job=job)
    eventually(lambda: bench.messages() == 0, PATIENCE, "every copy is acknowledged")
    assert most <= 4
    told = bench.notes("signal", name="run_postponed", job=job)
    numbers = Counter(note.detail["number"] for note in told)
    assert max(numbers) == bench.run(job=job).postponements
    # The original may have come back several times, each time as a first copy.
    assert sum(numbers.values()) <= 2 * run.postponements
    assert len(bench.notes("start", key=key)) == 1


@pytest.mark.chaos
@pytest.mark.slow
def test_control_copies_that_wait_beyond_the_visibility_time_out_multiply(
    make_bench: MakeBench, key: str
) -> None:
    """The wait and the countdown are not kept within a third of it, nor older copies dropped."""
    bench = make_bench(**FAST_REDELIVERY)
    workers = bench.expect(
        *(
            bench.start_worker(app="tests.apps.trials", trials_impatient=True, concurrency=2)
            for _ in "12"
        )
    )
    bench.send("late", key, params={"gate": key}, headers=occurrence(key, due(minutes=1)))
    started_pid(bench, key)
    began = time.monotonic()
    seen: list[tuple[float, int]] = []

    def multiplied() -> bool:
        seen.append((time.monotonic() - began, bench.messages()))
        return seen[-1][1] > 4

    try:
        eventually(multiplied, 100, "more than four", interval=0.05)
    finally:
        # Before there are many more.
        for worker in workers:
            worker.kill(group=True)
    print(f"{seen[-1][1]} messages of one after {seen[-1][0]:.1f} s")


# --- RabbitMQ: the worker or its connection goes --------------------------------------------


def test_rabbitmq_gives_the_message_of_a_killed_worker_to_another(
    make_bench: MakeBench, key: str
) -> None:
    bench = make_bench("rabbitmq")
    workers = bench.expect(bench.start_worker(concurrency=2), bench.start_worker(concurrency=2))
    job = f"{NAMESPACE}:{key}"
    bench.send("late", key, params={"gate": key}, headers=occurrence(key, due(minutes=1)))
    dying, other = node(started_pid(bench, key), workers)
    dying.kill(group=True)
    (_, again) = bench.wait_for_notes("start", key=key, count=2, timeout=PATIENCE)
    assert again.pid in other.children()
    bench.open_gate(key)
    run = bench.wait_for_run("done", job=job)
    assert (run.attempts, run.lost_attempts) == (2, 1)
    eventually(lambda: bench.messages() == 0, PATIENCE, "nothing is left in the broker")
    assert len(bench.notes("end", key=key)) == 1


def close_connections(name: str) -> int:
    """Have RabbitMQ close the connections that call themselves so; return how many."""
    closed = 0
    for line in rabbitmqctl("list_connections", "pid", "client_properties"):
        if name in line and (pid := re.match(r"<[\d.]+>|<\S+>", line)):
            rabbitmqctl("close_connection", pid[0], "closed by a test")
            closed += 1
    return closed


@pytest.mark.slow
@pytest.mark.parametrize(
    "dies", [pytest.param(False, marks=pytest.mark.chaos), True], ids=["lives", "dies"]
)
def test_a_run_whose_worker_lost_its_connection_is_not_run_a_second_time(
    make_bench: MakeBench, key: str, *, dies: bool
) -> None:
    """RabbitMQ delivers the message again while the first run goes on; that run may still die."""
    bench = make_bench("rabbitmq", client_properties={"connection_name": key})
    workers = bench.expect(bench.start_worker(concurrency=2), bench.start_worker(concurrency=2))
    job = f"{NAMESPACE}:{key}"
    bench.send("late", key, params={"gate": key}, headers=occurrence(key, due(minutes=1)))
    pid = started_pid(bench, key)
    assert close_connections(key) >= 2, "both workers were connected"
    bench.wait_for_notes("signal", name="run_postponed", job=job, timeout=PATIENCE)
    assert len(bench.notes("start", key=key)) == 1
    if dies:
        dying, _ = node(pid, workers)
        dying.kill(group=True)
        assert not bench.notes("end", key=key), "the first run died in the middle"
    bench.open_gate(key)
    run = bench.wait_for_run("done", job=job, timeout=PATIENCE)
    assert (run.attempts, run.lost_attempts) == ((2, 1) if dies else (1, 0))
    eventually(lambda: bench.messages() == 0, PATIENCE, "nothing is left in the broker")
    assert len(bench.notes("end", key=key)) == 1
    assert not bench.skips(job=job)


# --- The process is lost --------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("task", ["crashing", "crashing_transaction"])
def test_a_run_whose_process_was_killed_is_run_again(
    idle_workers: Bench, key: str, task: str
) -> None:
    bench = idle_workers
    result = bench.send(task, key, headers=occurrence(key, due(minutes=1)))
    assert result.get(timeout=PATIENCE) == "survived"
    run = bench.run(job=f"{NAMESPACE}:{key}")
    assert (run.status, run.attempts, run.lost_attempts) == ("done", 2, 1)
    assert run.task_id == result.id
    first, second = bench.notes("start", key=key)
    assert first.pid != second.pid
    assert [note.detail["attempt"] for note in (first, second)] == [1, 2]
    assert len(bench.notes("end", key=key)) == 1
    assert len(bench.notes("log", event="run_taken_over", job=run.job)) == 1


@ON_BOTH
def test_without_late_acknowledgement_the_period_stays_open(idle_workers: Bench, key: str) -> None:
    """The broker has forgotten the message; a later one of the same period may run."""
    bench = idle_workers
    headers = occurrence(key, due(minutes=1))
    bench.send("job", key, params={"gate": key}, headers=headers)
    (first,) = bench.wait_for_notes("start", key=key)
    bench.kill(first.pid)
    # Sooner it would be told, rightly, that the period is being run.
    eventually(lambda: not bench.locks(), what="the locks are free")
    bench.open_gate(key)
    bench.send("job", key, headers=headers)
    run = bench.wait_for_run("done", job=f"{NAMESPACE}:{key}", timeout=PATIENCE)
    assert (run.attempts, run.lost_attempts) == (2, 1)


# --- Retries --------------------------------------------------------------------------------


@ON_BOTH
@pytest.mark.slow
@pytest.mark.timeout(100 + RETRIES)
def test_immediate_retries_on_idle_workers_are_all_run(idle_workers: Bench) -> None:
    """`retry()` publishes while the lock is still held; here each retry surely comes before.

    Thirty, or as many as `PGLOCK_TEST_RETRIES` says.
    """
    bench = idle_workers
    prefix = f"retry-{uuid.uuid4()}"
    names = [f"{prefix}-{number}" for number in range(RETRIES)]
    for name in names:
        result = bench.send("retrying", name, 1, params={"linger": True})
        assert result.get(timeout=PATIENCE) == 1
    starts = Counter(
        note.detail["key"] for note in bench.notes("start", job=f"{NAMESPACE}:retrying")
    )
    lost = sum(starts[name] < 2 for name in names)
    doubled = sum(starts[name] > 2 for name in names)
    print(f"{RETRIES} retries: {lost} lost, {doubled} doubled")
    assert (lost, doubled) == (0, 0)
    came_early = Counter(note.detail["key"] for note in bench.notes("came early"))
    assert [came_early[name] for name in names] == [1] * RETRIES, "each met its own lock"
    runs = bench.runs(job=f"{NAMESPACE}:retrying")
    assert Counter(run.status for run in runs)["done"] >= RETRIES
    assert not [run for run in runs if run.status != "done"]
    assert not bench.skips(job=f"{NAMESPACE}:retrying")


@pytest.mark.slow
@pytest.mark.parametrize(
    "forgetful",
    [pytest.param(True, marks=pytest.mark.chaos), False],
    ids=["control", "as it is"],
)
def test_only_where_a_repeated_message_is_known_is_no_immediate_retry_lost(
    make_bench: MakeBench, *, forgetful: bool
) -> None:
    """Each retry surely comes while the run that asked for it has the lock."""
    bench = make_bench()
    bench.expect(
        *(
            bench.start_worker(app="tests.apps.trials", trials_forgetful=forgetful, concurrency=2)
            for _ in "12"
        )
    )
    names = [f"retry-{uuid.uuid4()}" for _ in range(CONTROLS)]
    for name in names:
        result = bench.send("retrying", name, 1, params={"linger": True})
        bench.wait_for_notes("came early", key=name, timeout=PATIENCE)
        if forgetful:
            bench.wait_for_run("retrying", task_id=result.id)
        else:
            assert result.get(timeout=PATIENCE) == 1
    eventually(lambda: bench.messages() == 0, PATIENCE, "every copy is acknowledged")
    starts = [len(bench.notes("start", key=name)) for name in names]
    lost = starts.count(1)
    print(f"{CONTROLS} retries: {lost} lost")
    assert lost == (CONTROLS if forgetful else 0)
    statuses = Counter(run.status for run in bench.runs())
    assert statuses == {("retrying" if forgetful else "done"): CONTROLS}


@ON_BOTH
@pytest.mark.parametrize(
    ("task", "times"), [("retrying", 2), ("auto_retrying", 2)], ids=["by hand", "autoretry_for"]
)
def test_a_task_that_asks_for_retries_is_done_in_one_period(
    idle_workers: Bench, key: str, task: str, times: int
) -> None:
    bench = idle_workers
    moment = due(minutes=1)
    result = bench.send(task, key, times, headers=occurrence(key, moment))
    assert result.get(timeout=PATIENCE) == times
    run = bench.run(job=f"{NAMESPACE}:{key}")
    assert (run.status, run.attempts, run.lost_attempts) == ("done", times + 1, 0)
    starts = bench.notes("start", key=key)
    assert [note.detail["retries"] for note in starts] == [0, 1, 2]
    assert {note.detail["period"] for note in starts} == {label(moment)}
    assert {note.detail["task_id"] for note in starts} == {result.id}


@ON_BOTH
def test_retries_that_are_used_up_leave_a_failed_row(idle_workers: Bench, key: str) -> None:
    bench = idle_workers
    headers = occurrence(key, due(minutes=1))
    result = bench.send("auto_retrying", key, 99, headers=headers)
    with pytest.raises(ValueError, match=key):
        result.get(timeout=PATIENCE)
    run = bench.run(job=f"{NAMESPACE}:{key}")
    assert (run.status, run.attempts) == ("failed", 3)
    assert run.error is not None
    assert key in run.error
    # Open to the next delivery of the same period.
    again = bench.send("auto_retrying", key, 0, headers=headers)
    assert again.get(timeout=PATIENCE) == 0
    assert bench.run(job=f"{NAMESPACE}:{key}").status == "done"


@ON_BOTH
def test_while_a_retry_waits_another_copy_may_run_and_the_retry_finds_it_done(
    idle_workers: Bench, key: str
) -> None:
    bench = idle_workers
    headers = occurrence(key, due(minutes=1))
    job = f"{NAMESPACE}:{key}"
    first = bench.send("retrying", key, 1, 3, headers=headers)
    bench.wait_for_run("retrying", job=job)
    copy = bench.send("retrying", key, 0, headers=headers)
    assert copy.get(timeout=PATIENCE) == 0
    (skip,) = bench.wait_for_notes("signal", name="run_skipped", task_id=first.id, timeout=PATIENCE)
    assert skip.detail["reason"].startswith(f"already ran in this period (task {copy.id}")
    run = bench.run(job=job)
    assert (run.status, run.attempts, run.task_id) == ("done", 2, copy.id)
    assert len(bench.notes("start", key=key)) == 2


@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.chaos)])
@pytest.mark.slow
def test_a_waiting_retry_uses_up_no_retry(make_bench: MakeBench, key: str, broker: str) -> None:
    """The retry meets another job under its lock name: it is postponed with `retries` unchanged."""
    bench = make_bench(broker, backend="redis", visibility_timeout=6)
    bench.worker(concurrency=3)
    result = bench.send("retrying", key, 1, 2)
    bench.wait_for_run("retrying", task_id=result.id)
    with bench.held(key, task="retrying_lock"):
        bench.wait_for_notes(
            "signal", name="run_postponed", task_id=result.id, count=2, timeout=PATIENCE
        )
    assert result.get(timeout=PATIENCE) == 1
    assert [note.detail["retries"] for note in bench.notes("start", task_id=result.id)] == [0, 1]
    assert bench.run(task_id=result.id).attempts == 2

"""A process that is killed leaves no lock, no half-done work, and no period without an end."""

from __future__ import annotations

import random
import secrets
from collections import Counter

import pytest

from celery_pglock import CrashRetriesExhausted
from tests.acceptance.bench import FAST_REDELIVERY, NAMESPACE, Bench, due, label, occurrence
from tests.acceptance.conftest import MakeBench
from tests.acceptance.reaper import Reaper
from tests.support.processes import eventually

PATIENCE = 30.0
ROWS = 50


@pytest.fixture(scope="module")
def bench(make_shared_bench: MakeBench) -> Bench:
    bench = make_shared_bench(visibility_timeout=60)
    bench.worker(concurrency=3)
    return bench


@pytest.mark.parametrize("task", ["job", "in_a_query"])
def test_a_killed_process_leaves_no_lock(bench: Bench, key: str, task: str) -> None:
    """Also while the server is busy with a query of the body: the lock has its own session."""
    params = {"gate": key} if task == "job" else {}
    bench.send(task, key, params=params)
    (first,) = bench.wait_for_notes("start", key=key, timeout=PATIENCE)
    held = {lock["key"] for lock in bench.locks()}
    assert len(held) == 2, "the run lock and the name lock"
    if task == "in_a_query":
        eventually(lambda: busy(bench, first.detail["backend"]), what="the query runs")
    bench.kill(first.pid)
    eventually(lambda: not held & {lock["key"] for lock in bench.locks()}, 1.0, "the keys are free")
    if task == "in_a_query":
        assert busy(bench, first.detail["backend"]), "the query goes on without its client"
    bench.send(task, key, params=params)
    (_, second) = bench.wait_for_notes("start", key=key, count=2, timeout=PATIENCE)
    assert second.pid != first.pid
    assert not bench.skips(job=f"{NAMESPACE}:{task}")
    # Leave nothing behind for the next test of this worker.
    bench.open_gate(key)
    if task == "in_a_query":
        bench.kill(second.pid)
    eventually(lambda: not bench.locks(), PATIENCE, "no lock is held")


def busy(bench: Bench, backend: int) -> bool:
    return bool(
        bench.database.rows(
            "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND state = 'active'", backend
        )
    )


def test_a_run_that_may_not_be_repeated_starts_once(bench: Bench, key: str) -> None:
    result = bench.send("at_most_once", key, 99, headers=occurrence(key, due(minutes=1)))
    with pytest.raises(CrashRetriesExhausted):
        result.get(timeout=PATIENCE)
    run = bench.run(job=f"{NAMESPACE}:{key}")
    assert (run.status, run.reason, run.attempts) == ("failed", "exhausted", 1)
    assert run.lost_attempts == 1
    assert len(bench.notes("start", key=key)) == 1


# Celery may need 5 s to see that a process is gone.
@pytest.mark.slow
@pytest.mark.parametrize(("task", "most"), [("once_again", 1), ("crashing", 3)])
def test_a_run_that_always_dies_is_given_up(bench: Bench, key: str, task: str, most: int) -> None:
    moment = due(minutes=1)
    result = bench.send(task, key, 99, headers=occurrence(key, moment))
    with pytest.raises(CrashRetriesExhausted) as caught:
        result.get(timeout=PATIENCE)
    assert result.state == "FAILURE"
    assert (caught.value.job, caught.value.period) == (f"{NAMESPACE}:{key}", label(moment))
    run = bench.run(job=f"{NAMESPACE}:{key}")
    assert (run.status, run.reason) == ("failed", "exhausted")
    assert (run.attempts, run.lost_attempts) == (most + 1, most + 1)
    assert caught.value.lost_attempts == most + 1
    assert len(bench.notes("start", key=key)) == most + 1
    # Terminal: another message of the period does not open it again.
    late = bench.send(task, key, 0, headers=occurrence(key, moment))
    bench.wait_for_notes("signal", name="run_skipped", task_id=late.id, timeout=PATIENCE)
    assert len(bench.notes("start", key=key)) == most + 1
    # The next period is another matter.
    bench.send(task, key, 0, headers=occurrence(key, due(minutes=0)))
    bench.wait_for_run("done", job=run.job, timeout=PATIENCE)


# --- Transaction level ----------------------------------------------------------------------

TRIALS = 100


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_what_a_killed_transaction_wrote_is_gone_and_what_is_done_is_whole(
    make_bench: MakeBench,
) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    bench = make_bench(**FAST_REDELIVERY)
    reaper = Reaper(bench, random.Random(seed))  # noqa: S311 - only moments
    moment = due(minutes=1)
    sent_again = reaper.work(
        [f"trial-{number}" for number in range(TRIALS)],
        lambda key: bench.send("write_rows", key, ROWS, seed, headers=occurrence(key, moment)),
        patience=150,
        told=f"seed {seed}",
    )
    runs = bench.runs()
    assert len(runs) == TRIALS
    outcomes = Counter((run.status, run.reason) for run in runs)
    assert outcomes.keys() <= {("done", None), ("failed", "exhausted")}
    written: dict[str, int] = dict(
        bench.database.rows("SELECT job, count(*) FROM written GROUP BY job")
    )
    assert written == {run.job: ROWS for run in runs if run.status == "done"}
    numbers = bench.database.rows("SELECT count(DISTINCT (job, number)) FROM written")
    assert numbers == [(ROWS * outcomes["done", None],)]
    # The faults happened: processes died with their transactions open, and workers too.
    deaths = sum(run.lost_attempts for run in runs)
    print(
        f"{len(reaper.killed)} kills, {reaper.workers_killed} of them of a whole worker; "
        f"{deaths} attempts died; {dict(outcomes)}; the broker has lost {sent_again}"
    )
    # On a machine that does much else most runs have ended before anybody looks.
    assert len(reaper.killed) >= TRIALS / 10
    assert deaths >= TRIALS / 20
    assert reaper.workers_killed >= (1 if len(reaper.killed) > 21 else 0)
    assert not bench.locks()

"""What `docs/howto/retries-and-acknowledgements.md` says of retries and nothing else proves."""

from __future__ import annotations

import uuid

import pytest

from celery_pglock import LockLost, keys
from tests.acceptance.bench import NAMESPACE, Bench
from tests.acceptance.conftest import MakeBench

PATIENCE = 20.0


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def bench(request: pytest.FixtureRequest, make_shared_bench: MakeBench) -> Bench:
    bench = make_shared_bench(request.param, backend="redis")
    bench.worker(app="tests.apps.skipping", concurrency=2)
    return bench


def begin_and_lose(bench: Bench, task: str) -> tuple[str, str]:
    """Start a task and end the session that holds its lock; return its id and its key."""
    key = f"key-{uuid.uuid4()}"
    result = bench.send(task, key)
    bench.wait_for_notes("start", key=key, timeout=PATIENCE)
    run = bench.run(task_id=result.id)
    run_key = keys.of_run(NAMESPACE, run.job, run.period)
    (lock,) = {lock["pid"] for lock in bench.locks() if lock["key"] == run_key}
    bench.database.rows("SELECT pg_terminate_backend(%s)", lock)
    bench.wait_for_notes("log", event="lock_lost", timeout=PATIENCE)
    return str(result.id), key


def test_a_lost_lock_is_retried_where_everything_is(bench: Bench) -> None:
    """`LockLost` is raised in the body, so `autoretry_for=(Exception,)` means it too."""
    task_id, key = begin_and_lose(bench, "retried_after_a_loss")
    assert bench.app.AsyncResult(task_id).get(timeout=PATIENCE) == 2
    run = bench.run(task_id=task_id)
    assert (run.status, run.attempts) == ("done", 2)
    # Nothing holds the period any more when the retry is sent. If it is claimed before the run that
    # sent it has said so, that one counts as lost, which it is.
    assert run.lost_attempts in (0, 1)
    assert len(bench.notes("start", key=key)) == 2


def test_dont_autoretry_for_leaves_a_lost_lock_failed(bench: Bench) -> None:
    task_id, key = begin_and_lose(bench, "failed_after_a_loss")
    with pytest.raises(LockLost):
        bench.app.AsyncResult(task_id).get(timeout=PATIENCE)
    run = bench.run(task_id=task_id)
    assert (run.status, run.attempts, run.reason) == ("failed", 1, "lock lost")
    assert len(bench.notes("start", key=key)) == 1

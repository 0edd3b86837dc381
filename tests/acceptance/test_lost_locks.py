"""A run whose lock session is ended while it works, on every pool that is supported."""

from __future__ import annotations

from typing import Any

import pytest

from celery_pglock import LockLost
from tests.acceptance.bench import Bench
from tests.acceptance.conftest import MakeBench
from tests.support.processes import eventually

PATIENCE = 20.0
# Where the body works in the main thread of a process, it is interrupted.
INTERRUPTED = {"prefork": True, "solo": True, "threads": False, "gevent": False}


@pytest.fixture(scope="module", params=INTERRUPTED)
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bench(pool: str, make_shared_bench: MakeBench) -> Bench:
    bench = make_shared_bench()
    bench.worker(pool=pool, concurrency=1 if pool == "solo" else 2)
    return bench


def end_session(bench: Bench) -> tuple[int, int]:
    """End the session that holds locks; return its pid and one of its keys."""
    held = eventually(bench.locks, what="a lock is held")
    (pid,) = {lock["pid"] for lock in held}
    bench.database.rows("SELECT pg_terminate_backend(%s)", pid)
    return pid, held[0]["key"]


def records(bench: Bench, result: Any) -> list[dict[str, Any]]:
    """Return the log records that tell of the loss of a run."""
    job = bench.run(task_id=result.id)
    found = [note.detail for note in bench.notes("log", event="lock_lost", period=job.period)]
    assert all(record["level"] == "ERROR" for record in found)
    return found


@pytest.mark.parametrize("task", ["job", "transactional"])
def test_a_run_that_loses_its_lock_fails_and_is_told_of_once(
    bench: Bench, pool: str, key: str, task: str
) -> None:
    result = bench.send(task, key, params={"gate": key})
    bench.wait_for_notes("start", key=key, timeout=PATIENCE)
    pid, _ = end_session(bench)
    # Told while the body works.
    (told,) = bench.wait_for_notes("log", event="lock_lost", backend_pid=pid, timeout=PATIENCE)
    assert not bench.notes("end", key=key)
    assert told.detail["reason"] == "its session was ended by the server"
    assert told.detail["silent_for"] < PATIENCE
    assert told.detail["lock_key"]
    if not INTERRUPTED[pool]:
        bench.open_gate(key)
    with pytest.raises(LockLost):
        result.get(timeout=PATIENCE)
    assert len(bench.notes("end", key=key)) == (not INTERRUPTED[pool])
    run = bench.run(task_id=result.id)
    assert (run.status, run.reason) == ("failed", "lock lost")
    assert len(records(bench, result)) == 1
    assert len(bench.notes("signal", name="lock_lost", job=run.job, period=run.period)) == 1
    assert [note.detail["status"] for note in bench.notes("signal", name="run_finished")][-1] == (
        "failed"
    )
    # The next run has a session of its own, and nothing strikes it.
    assert bench.send(task, f"{key}-later").get(timeout=PATIENCE) is None


def test_a_run_that_only_wants_a_warning_goes_on(bench: Bench, key: str) -> None:
    result = bench.send("warned", key, params={"gate": key, "value": "value"})
    bench.wait_for_notes("start", key=key, timeout=PATIENCE)
    end_session(bench)
    bench.wait_for_notes("signal", name="lock_lost", task="warned", timeout=PATIENCE)
    bench.open_gate(key)
    assert result.get(timeout=PATIENCE) == "value"
    assert len(bench.notes("end", key=key)) == 1
    assert bench.run(task_id=result.id).status == "done"  # nobody had taken it over
    assert len(records(bench, result)) == 1


@pytest.mark.parametrize(
    "pool", [pool for pool, interrupted in INTERRUPTED.items() if interrupted], indirect=True
)
def test_a_body_that_sleeps_is_interrupted(bench: Bench, key: str) -> None:
    result = bench.send("job", key, params={"seconds": 60})
    bench.wait_for_notes("start", key=key, timeout=PATIENCE)
    end_session(bench)
    with pytest.raises(LockLost):
        result.get(timeout=5)
    assert not bench.notes("end", key=key)

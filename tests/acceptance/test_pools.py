"""The same promises on every pool that is supported."""

from __future__ import annotations

import uuid

import pytest

from tests.acceptance.bench import NAMESPACE, Bench, due, occurrence
from tests.acceptance.conftest import MakeBench
from tests.support.processes import eventually

PATIENCE = 20.0


@pytest.fixture(
    scope="module",
    params=[("prefork", 6, 1), ("threads", 6, 1), ("gevent", 6, 1), ("solo", 1, 3)],
    ids=["prefork", "threads", "gevent", "solo"],
)
def bench(request: pytest.FixtureRequest, make_shared_bench: MakeBench) -> Bench:
    pool, concurrency, workers = request.param
    bench = make_shared_bench()
    bench.expect(*(bench.start_worker(pool=pool, concurrency=concurrency) for _ in range(workers)))
    return bench


@pytest.fixture
def key() -> str:
    return f"key-{uuid.uuid4()}"


@pytest.mark.parametrize("task", ["job", "transactional"])
def test_of_many_at_once_one_runs(bench: Bench, key: str, task: str) -> None:
    with bench.held(key, task=task) as holder:
        others = [bench.send(task, key) for _ in range(5)]
        for other in others:
            bench.wait_for_notes("signal", name="run_skipped", task_id=other.id, timeout=PATIENCE)
    assert holder.get(timeout=PATIENCE) is None
    assert len(bench.notes("start", key=key)) == 1
    for other in others:
        assert len(bench.skips(task_id=other.id)) == 1
        assert bench.run(task_id=other.id).status == "skipped"
    # The lock is given back, on the session that took it.
    later = bench.send(task, key)
    assert later.get(timeout=PATIENCE) is None
    eventually(lambda: not bench.locks(), what="no lock is held")


@pytest.mark.parametrize("task", ["job", "transactional"])
def test_different_keys_run_side_by_side_each_with_its_own_run(
    bench: Bench, key: str, task: str
) -> None:
    keys = [f"{key}-{number}" for number in range(3)]
    for name in keys:
        bench.send(task, name, params={"gate": key}, headers=occurrence(name, due(minutes=1)))
    for name in keys:
        bench.wait_for_notes("start", key=name, timeout=PATIENCE)
    # All have begun and none has ended.
    assert not [note for name in keys for note in bench.notes("end", key=name)]
    sessions = {lock["pid"] for lock in bench.locks()}
    assert len(sessions) == 3, "each run has a session of its own"
    assert len(bench.locks()) == 6
    bench.open_gate(key)
    for name in keys:
        bench.wait_for_run("done", job=f"{NAMESPACE}:{name}", timeout=PATIENCE)
        for what in ("start", "end"):
            (note,) = bench.notes(what, key=name)
            assert note.detail["job"] == f"{NAMESPACE}:{name}"
            assert note.detail["name"] == f'{task}{{"key":"{name}"}}'
    eventually(lambda: not bench.locks(), what="no lock is held")


def test_no_run_is_in_progress_after_a_run_or_after_an_error(bench: Bench, key: str) -> None:
    """`plain` notes the current run, in whatever process or thread it comes to be."""
    for number in range(6):
        bench.send("job", f"{key}-{number}").get(timeout=PATIENCE)
        bench.send("auto_retrying", f"{key}-{number}", 1).get(timeout=PATIENCE)
    for number in range(12):
        bench.send("plain", key, number).get(timeout=PATIENCE)
    notes = [note for note in bench.notes("plain") if note.detail["args"][0] == key]
    assert len(notes) == 12
    assert not [note for note in notes if "job" in note.detail]


def test_an_error_gives_the_lock_back(bench: Bench, key: str) -> None:
    result = bench.send("auto_retrying", key, 99)
    with pytest.raises(ValueError, match=key):
        result.get(timeout=PATIENCE)
    assert bench.run(task_id=result.id).status == "failed"
    eventually(lambda: not bench.locks(), what="no lock is held")
    assert bench.send("auto_retrying", key, 0).get(timeout=PATIENCE) == 0

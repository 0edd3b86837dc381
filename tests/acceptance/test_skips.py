"""A skip ends every wait at once, looks like no work that was done, and is told once.

C23 and C24; eager mode, `apply()` and direct calls: C25.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import celery
import pytest
import redis
from celery.exceptions import TaskRevokedError

from celery_pglock import LockNotAcquired
from tests.acceptance.bench import Bench
from tests.acceptance.conftest import MakeBench
from tests.support.versions import MESSAGE_OUTWEIGHS_TASK

# From the skip, or from get() if that came later.
AT_ONCE = 2.0
# For what is not about time.
PATIENCE = 20.0
SOON = 1.0


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def bench(request: pytest.FixtureRequest, make_shared_bench: MakeBench) -> Bench:
    bench = make_shared_bench(broker=request.param, backend="redis")
    bench.worker("-E", concurrency=3)
    return bench


def raised(wait: Callable[[], object]) -> Exception:
    """Return what a wait raised."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - looked at by the caller
        wait()
    return caught.value


def state(result: Any) -> str:
    return str(result.state)


def expect_skip(error: Exception) -> None:
    assert isinstance(error, TaskRevokedError), error
    assert str(error).startswith("skipped: ")


def get(
    bench: Bench,
    result: Any,
    skipped: str,
    *,
    before: bool | None = None,
) -> Exception:
    """Call `get()` before the skip happens, or after; return what it raised, at once."""
    if before:
        assert not bench.skips(task_id=skipped), "get() was to be called before the skip"
    elif before is not None:
        bench.wait_for_notes("signal", name="run_skipped", task_id=skipped)
    called = bench.now()
    error = raised(lambda: result.get(timeout=PATIENCE))
    ended = bench.now()
    (skip,) = bench.skips(task_id=skipped)
    assert (ended - max(skip.at, called)).total_seconds() < AT_ONCE
    return error


def not_before(step: Any, *, before: bool) -> Any:
    """Have a step wait a moment in the worker, so that there is time to call `get()`."""
    return step.set(countdown=SOON) if before else step


def expect_nothing_more(bench: Bench, task: str, text: str) -> None:
    """Fail if a task has been sent in the meantime: it would run before one that is sent now."""
    bench.send("plain", text, "last").get(timeout=PATIENCE)
    assert not [note for note in bench.notes(task) if note.detail.get("args") == [text]]


when = pytest.mark.parametrize("before", [True, False], ids=["before", "after"])


@when
def test_a_lone_wait_ends(bench: Bench, taken: str, *, before: bool) -> None:
    result = not_before(bench.step("job", taken), before=before).apply_async()
    expect_skip(get(bench, result, result.id, before=before))
    assert state(result) == "REVOKED"
    assert bench.run(task_id=result.id).status == "skipped"
    assert bench.run(task_id=result.id).attempts == 0
    assert not bench.notes("start", task_id=result.id)


@when
def test_a_chain_ends_at_its_first_step(bench: Bench, taken: str, *, before: bool) -> None:
    first = not_before(bench.step("job", taken), before=before)
    result = bench.chain(first, bench.step("plain", taken), bench.step("plain", taken))
    expect_skip(get(bench, result, result.parent.parent.id, before=before))
    expect_nothing_more(bench, "plain", taken)


@when
def test_a_chain_ends_at_its_second_step(bench: Bench, taken: str, *, before: bool) -> None:
    second = not_before(bench.step("job", taken), before=before)
    result = bench.chain(bench.step("plain", "first"), second, bench.step("plain", taken))
    expect_skip(get(bench, result, result.parent.id, before=before))
    assert result.parent.parent.get(timeout=PATIENCE) == "plain"
    expect_nothing_more(bench, "plain", taken)


@when
def test_a_group_ends(bench: Bench, taken: str, *, before: bool) -> None:
    free = f"free-{taken}"
    result = bench.group(
        not_before(bench.step("job", taken), before=before), bench.step("job", free)
    )
    expect_skip(get(bench, result, result[0].id, before=before))
    assert result[1].get(timeout=PATIENCE) is None
    assert result.ready()
    assert [part.state for part in result] == ["REVOKED", "SUCCESS"]


@when
def test_a_chord_ends_and_its_body_does_not_run(bench: Bench, taken: str, *, before: bool) -> None:
    result = bench.chord(
        not_before(bench.step("job", taken), before=before),
        bench.step("job", f"free-{taken}"),
        body=bench.step("plain", taken),
    )
    error = get(bench, result, result.parent[0].id, before=before)
    assert "skipped: " in str(error)
    expect_nothing_more(bench, "plain", taken)


@when
def test_who_knows_only_the_last_step_does_not_wait_for_ever(
    bench: Bench, taken: str, *, before: bool
) -> None:
    """`get()` on a whole chain or chord looks at the earlier steps too; this one cannot."""
    chain = bench.chain(
        not_before(bench.step("job", taken), before=before),
        bench.step("plain", taken),
        bench.step("plain", taken),
    )
    last = bench.app.AsyncResult(chain.id)
    expect_skip(get(bench, last, chain.parent.parent.id, before=before))
    assert state(last) == "REVOKED"
    chord = bench.chord(
        not_before(bench.step("job", taken), before=before),
        bench.step("job", f"free-{taken}"),
        body=bench.step("plain", taken),
    )
    body = bench.app.AsyncResult(chord.id)
    assert "skipped: " in str(get(bench, body, chord.parent[0].id, before=before))
    expect_nothing_more(bench, "plain", taken)


def test_a_chord_in_which_all_are_skipped_ends(bench: Bench, taken: str) -> None:
    result = bench.chord(
        bench.step("job", taken), bench.step("job", taken), body=bench.step("plain", taken)
    )
    error = raised(lambda: result.get(timeout=PATIENCE))
    assert "skipped: " in str(error)
    expect_nothing_more(bench, "plain", taken)


def test_a_chain_of_a_group_and_more_ends(bench: Bench, taken: str) -> None:
    """The same as a chord whose body is itself a chain."""
    result = bench.chain(
        celery.group(bench.step("job", taken), bench.step("job", f"free-{taken}")),
        bench.step("plain", taken),
        bench.step("plain", taken),
    )
    error = raised(lambda: result.get(timeout=PATIENCE))
    assert "skipped: " in str(error)
    expect_nothing_more(bench, "plain", taken)


def test_no_callback_is_called(bench: Bench, taken: str) -> None:
    result = bench.send(
        "job", taken, link=bench.step("plain", taken), link_error=bench.step("plain", taken)
    )
    expect_skip(get(bench, result, result.id))
    expect_nothing_more(bench, "plain", taken)


def test_no_result_is_written_where_results_are_ignored(bench: Bench, key: str) -> None:
    with bench.held(key, task="quiet"):
        by_task = bench.send("quiet", key)
        bench.wait_for_notes("signal", name="run_skipped", task_id=by_task.id)
    with bench.held(key):
        by_message = bench.send("job", key, ignore_result=True)
        bench.wait_for_notes("signal", name="run_skipped", task_id=by_message.id)
        control = bench.send("job", key)
        expect_skip(get(bench, control, control.id))
    assert bench.backend is not None
    with contextlib.closing(redis.Redis.from_url(bench.backend)) as client:
        written = [
            client.exists(f"celery-task-meta-{result.id}")
            for result in (by_task, by_message, control)
        ]
    assert written == [int(MESSAGE_OUTWEIGHS_TASK), 0, 1]
    for result in (by_task, by_message):
        assert len(bench.skips(task_id=result.id)) == 1
        assert bench.run(task_id=result.id).status == "skipped"


def test_a_state_of_started_does_not_stay(bench: Bench, key: str) -> None:
    with bench.held(key, task="tracked") as holder:
        assert holder.state == "STARTED", "the start is tracked"
        result = bench.send("tracked", key)
        expect_skip(get(bench, result, result.id))
        assert state(result) == "REVOKED"


def test_a_skip_may_be_a_success_with_a_typed_value(bench: Bench, key: str) -> None:
    with bench.held(key, task="polite"):
        result = bench.send("polite", key)
        value = result.get(timeout=PATIENCE)
    assert result.state == "SUCCESS"
    assert value.keys() == {"skipped", "job", "period", "reason"}
    assert value["skipped"] is True
    assert value["job"] == "acceptance:polite"
    assert value["period"] == f"id:{result.id}"
    assert value["reason"].startswith("lock ")
    assert len(bench.skips(task_id=result.id)) == 1


def test_a_conflict_may_be_an_error(bench: Bench, key: str) -> None:
    with bench.held(key, task="raising"):
        result = bench.send("raising", key, link_error=bench.step("plain", key))
        error = raised(lambda: result.get(timeout=PATIENCE))
    assert isinstance(error, LockNotAcquired)
    assert error.job == "acceptance:raising"
    assert result.state == "FAILURE"
    assert not bench.skips(task_id=result.id)
    bench.wait_for_notes("plain", args=[key])


def test_an_event_tells_monitors(bench: Bench, taken: str) -> None:
    seen: list[dict[str, Any]] = []
    with bench.app.connection_for_read() as connection:
        receiver = bench.app.events.Receiver(connection, handlers={"task-revoked": seen.append})
        with receiver.consumer_context(wakeup=False) as (consuming, _, _):
            result = bench.send("job", taken)
            deadline = time.monotonic() + 5
            while not any(event["uuid"] == result.id for event in seen):
                assert time.monotonic() < deadline, seen
                with contextlib.suppress(TimeoutError):
                    consuming.drain_events(timeout=0.5)
    (event,) = [event for event in seen if event["uuid"] == result.id]
    assert (event["terminated"], event["signum"], event["expired"]) == (False, None, False)


def test_a_skip_is_told_once(bench: Bench, taken: str) -> None:
    result = bench.send("job", taken)
    expect_skip(get(bench, result, result.id))
    assert len(bench.notes("log", event="run_skipped", task_id=result.id)) == 1
    assert len(bench.skips(task_id=result.id, kind="held", job="acceptance:job")) == 1


def test_a_finished_result_is_not_overwritten(bench: Bench, key: str) -> None:
    """A copy of a message whose run is done leaves the result of that run alone."""
    result = bench.send("job", key, params={"value": 42})
    assert result.get(timeout=PATIENCE) == 42
    copy = bench.send("job", key, params={"value": 43}, task_id=result.id)
    bench.wait_for_notes("log", event="copy_dropped", task_id=copy.id)
    expect_nothing_more(bench, "plain", key)
    assert bench.app.AsyncResult(result.id).get(timeout=PATIENCE) == 42


@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.chaos)])
def test_without_a_result_backend_nothing_hangs_and_nothing_fails(
    make_bench: MakeBench, broker: str, key: str
) -> None:
    bench = make_bench(broker, backend=None)
    worker = bench.worker("-E", concurrency=3)
    with bench.held(key):
        alone = bench.send("job", key, link=bench.step("plain", key))
        chained = bench.chain(bench.step("job", key), bench.step("plain", key))
        for result in (alone, chained.parent):
            bench.wait_for_notes("signal", name="run_skipped", task_id=result.id)
        bench.send("plain", "after")
        bench.wait_for_notes("plain", args=["after"])
        for result in (alone, chained.parent):
            assert bench.run(task_id=result.id).status == "skipped"
            assert len(bench.skips(task_id=result.id)) == 1
            assert len(bench.notes("log", event="run_skipped", task_id=result.id)) == 1
    assert not bench.notes("plain", args=[key])
    later = bench.send("job", key)
    bench.wait_for_run("done", task_id=later.id)
    assert worker.running()
    assert not bench.notes("log", level="ERROR")
    assert bench.messages() == 0


def test_over_the_rpc_backend_a_wait_ends_too(
    make_bench: MakeBench, key: str, rabbitmq_url: str
) -> None:
    assert rabbitmq_url
    bench = make_bench("rabbitmq", backend="rpc://")
    bench.worker(concurrency=3)
    with bench.held(key):
        alone = bench.send("job", key)
        expect_skip(get(bench, alone, alone.id))
        assert state(alone) == "REVOKED"
        result = bench.chain(bench.step("job", key), bench.step("plain", key))
        expect_skip(get(bench, result, result.parent.id))
        expect_nothing_more(bench, "plain", key)
        group = bench.group(bench.step("job", key), bench.step("job", f"free-{key}"))
        expect_skip(get(bench, group, group[0].id))


IN_THIS_PROCESS = """
import sys
import celery.exceptions
import celery_pglock
from tests.apps.tasks import app, retrying

job = app.tasks["job"]
key, eager = sys.argv[1], sys.argv[2] == "eager"
if eager:
    app.conf.task_always_eager = True
call = job.apply_async if eager else job.apply

result = call((key,))
assert result.state == "REVOKED", result.state
try:
    result.get()
except celery.exceptions.TaskRevokedError as error:
    assert str(error).startswith("skipped: "), error
else:
    raise AssertionError("get() returned")

free = call(("free",), {"value": 7}, task_id="id-" + key)
assert (free.state, free.get()) == ("SUCCESS", 7)

again = (retrying.apply_async if eager else retrying.apply)(("free", 2))
assert (again.state, again.get()) == ("SUCCESS", 2), again

if eager:
    app.conf.task_eager_propagates = True
    try:
        job.delay(key)
    except celery.exceptions.TaskRevokedError as error:
        print("propagated", error)

try:
    job(key)
except celery_pglock.JobSkipped as error:
    assert error.job == app.main + ":job", error.job
    assert error.period.startswith("id:"), error.period
    assert error.reason.startswith("lock "), error.reason
else:
    raise AssertionError("a direct call ran")
assert job("free", value=8) == 8
"""


@pytest.fixture(scope="module")
def redis_bench(make_shared_bench: MakeBench) -> Bench:
    bench = make_shared_bench()
    bench.worker(concurrency=2)
    return bench


@pytest.mark.parametrize("how", ["eager", pytest.param("apply", marks=pytest.mark.chaos)])
def test_eager_mode_and_apply_behave_as_a_worker_does(
    redis_bench: Bench, key: str, how: str
) -> None:
    bench = redis_bench
    with bench.held(key):
        bench.script(IN_THIS_PROCESS, key, how)
    assert len(bench.notes("start", key=key)) == 1, "only the holder has run"
    assert len(bench.notes("start", task_id=f"id-{key}")) == 1
    retried = bench.notes("start", key="free", job="acceptance:retrying")
    assert [note.detail["retries"] for note in retried[-3:]] == [0, 1, 2]
    assert len({note.detail["period"] for note in retried[-3:]}) == 1

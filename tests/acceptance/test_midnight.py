"""A run that is due just before midnight and retried after it stays in its day."""

from __future__ import annotations

import datetime as dt
import uuid
from zoneinfo import ZoneInfo

import pytest

from tests.acceptance.bench import NAMESPACE, Bench, occurrence
from tests.acceptance.conftest import MakeBench

PATIENCE = 20.0
# That of tests.apps.configured: not that of the machine, and not UTC.
ZONE = ZoneInfo("Europe/Berlin")


@pytest.fixture(scope="module", params=["redis", pytest.param("rabbitmq", marks=pytest.mark.chaos)])
def bench(request: pytest.FixtureRequest, make_shared_bench: MakeBench) -> Bench:
    bench = make_shared_bench(request.param, backend="redis")
    bench.worker(app="tests.apps.skipping", concurrency=2)
    return bench


def midnight() -> dt.datetime:
    """Return the last midnight in the application's zone; in UTC it is another date."""
    return dt.datetime.now(ZONE).replace(hour=0, minute=0, second=0, microsecond=0)


@pytest.mark.parametrize("ending", ["retry", "crash", "fail and retry"])
def test_what_was_due_before_midnight_keeps_its_day_over_a_retry(bench: Bench, ending: str) -> None:
    key = f"key-{uuid.uuid4()}"
    turn = midnight()
    late, early = turn - dt.timedelta(seconds=1), turn
    yesterday = f"{turn.date() - dt.timedelta(days=1)}"
    job = f'{NAMESPACE}:nightly{{"key":"{key}"}}'
    result = bench.send("nightly", key, ending, headers=occurrence(f"entry-{key}", late))
    assert result.get(timeout=PATIENCE) == yesterday
    starts = bench.notes("start", key=key)
    assert [note.detail["attempt"] for note in starts] == [1, 2]
    assert {note.detail["period"] for note in starts} == {yesterday}
    # The control: by the clock both attempts were made today.
    assert all(note.at.astimezone(ZONE) > turn for note in starts)
    run = bench.run(job=job)
    assert (run.period, run.status, run.task_id) == (yesterday, "done", result.id)
    assert (run.attempts, run.lost_attempts) == (2, 1 if ending == "crash" else 0)
    # And today's run, due one second later, is another one.
    again = bench.send("nightly", key, "", headers=occurrence(f"entry-{key}", early))
    assert again.get(timeout=PATIENCE) == f"{turn.date()}"
    assert {run.period for run in bench.runs(job=job)} == {yesterday, f"{turn.date()}"}


@pytest.mark.parametrize("label", ["", 5, None, "a\0b"])
def test_a_rule_that_names_no_period_fails_its_task_and_nothing_else(
    bench: Bench, label: object
) -> None:
    """A function is called with each message, so a worker must outlive what it returns."""
    key = f"key-{uuid.uuid4()}"
    result = bench.send("by_rule", key, label)
    with pytest.raises(Exception, match="once_per function of task 'by_rule' must return a text"):
        result.get(timeout=PATIENCE)
    assert type(result.result).__name__ == "ConfigurationError"
    assert not bench.runs(task="by_rule", task_id=result.id)
    assert not bench.notes("start", task_id=result.id)
    assert not bench.locks()
    good = bench.send("by_rule", key, f"good {key}")
    assert good.get(timeout=PATIENCE) == f"good {key}"
    assert bench.run(task_id=good.id).period == f"good {key}"


def test_a_rule_that_raises_fails_its_task_with_its_own_error(bench: Bench) -> None:
    key = f"key-{uuid.uuid4()}"
    result = bench.send("by_rule", key, "raise")
    with pytest.raises(LookupError, match="no such period"):
        result.get(timeout=PATIENCE)
    assert not bench.runs(task="by_rule", task_id=result.id)
    assert not bench.locks()

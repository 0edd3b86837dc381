"""Who holds what, who was skipped and why: for operators, in records, signals and the server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.acceptance.bench import NAMESPACE, Bench, due, label, occurrence
from tests.acceptance.conftest import MakeBench
from tests.support.processes import eventually
from tests.support.servers import TestedPostgres

PATIENCE = 20.0


@pytest.fixture(scope="module")
def bench(make_shared_bench: MakeBench) -> Bench:
    bench = make_shared_bench(visibility_timeout=60)
    bench.worker(concurrency=3)
    return bench


def pglock(bench: Bench, *arguments: str) -> tuple[int, str]:
    process = bench.processes.celery(
        "tests.apps.tasks", "pglock", *arguments, env=bench.environment(), name="pglock"
    )
    return process.wait(), process.output()


@pytest.mark.parametrize("task", ["job", "transactional"])
def test_a_skip_tells_who_holds_the_lock(bench: Bench, key: str, task: str) -> None:
    first, second = due(minutes=2), due(minutes=1)
    job = f"{NAMESPACE}:{key}"
    with bench.held(key, task=task, headers=occurrence(key, first)) as holder:
        (start,) = bench.notes("start", key=key)
        pids = {lock["pid"] for lock in bench.locks()}
        assert len(pids) == 1
        skipped = bench.send(task, key, headers=occurrence(key, second))
        bench.wait_for_notes("signal", name="run_skipped", task_id=skipped.id, timeout=PATIENCE)
        (record,) = bench.notes("log", event="run_skipped", task_id=skipped.id)
        (signal,) = bench.skips(task_id=skipped.id)
    fields = record.detail
    assert fields["level"] == "INFO"
    assert (fields["job"], fields["period"]) == (job, label(second))
    assert fields["kind"] == "held"
    assert fields["lock_name"] == f'{task}{{"key":"{key}"}}'
    assert fields["redelivered"] is False
    assert {fields["holder_pid"]} == pids
    assert fields["holder_task_id"] == holder.id
    assert fields["holder_started_at"] is not None
    for text in (fields["reason"], fields["message"]):
        for part in (holder.id, label(first), f":{start.pid}", str(fields["holder_pid"])):
            assert part in text, (part, text)
    assert {name: signal.detail[name] for name in ("task", "job", "period", "kind", "reason")} == {
        "task": task,
        "job": job,
        "period": label(second),
        "kind": "held",
        "reason": fields["reason"],
    }
    assert bench.run(job=job, period=label(second)).reason == fields["reason"]


def test_a_skip_of_a_running_period_tells_the_attempt(bench: Bench, key: str) -> None:
    headers = occurrence(key, due(minutes=1))
    with bench.held(key, headers=headers) as holder:
        ((pid, started),) = bench.database.rows(
            "SELECT backend_pid, started_at FROM pglock.job_runs WHERE task_id = %s", holder.id
        )
        copy = bench.send("job", key, headers=headers)
        bench.wait_for_notes("signal", name="run_skipped", task_id=copy.id, timeout=PATIENCE)
    (record,) = bench.notes("log", event="run_skipped", task_id=copy.id)
    assert record.detail["kind"] == "running"
    assert record.detail["holder_pid"] == pid
    assert record.detail["holder_task_id"] == holder.id
    assert record.detail["holder_started_at"] == str(started)
    assert holder.id in record.detail["reason"]


def test_each_part_of_a_run_is_signalled_once(bench: Bench, key: str) -> None:
    result = bench.send("job", key, headers=occurrence(key, due(minutes=1)))
    bench.wait_for_notes("signal", name="run_finished", job=f"{NAMESPACE}:{key}", timeout=PATIENCE)
    assert result.get(timeout=PATIENCE) is None
    signals = bench.notes("signal", job=f"{NAMESPACE}:{key}")
    assert [note.detail["name"] for note in signals] == ["run_started", "run_finished"]
    assert signals[1].detail["status"] == "done"


def names_of_sessions(bench: Bench) -> dict[str, int]:
    """Return the names of the package's sessions in the server, and how many bear each."""
    return dict(
        bench.database.rows(
            "SELECT application_name, count(*) FROM pg_stat_activity"
            " WHERE application_name LIKE 'pglock%%' AND datname = current_database()"
            " GROUP BY 1"
        )
    )


@pytest.mark.parametrize("task", ["job", "transactional"])
def test_the_server_shows_which_task_holds_a_lock_and_where(
    bench: Bench, key: str, task: str
) -> None:
    with bench.held(key, task=task):
        (start,) = bench.notes("start", key=key)
        (name,) = {lock["application_name"] for lock in bench.locks()}
        assert name.startswith(f"pglock:{task}@worker")
        (node,) = bench.database.rows(
            "SELECT node FROM pglock.job_runs WHERE task = %s AND status = 'running'", task
        )[0]
        assert name == f"pglock:{task}@{node}"[:63]
        assert node.endswith(f":{start.pid}")
        assert names_of_sessions(bench)[name] == 1
    eventually(lambda: name not in names_of_sessions(bench), what="it is named so no more")
    assert any(other.startswith("pglock:idle@") for other in names_of_sessions(bench))


def test_who_does_not_hold_a_lock_does_not_give_it_back(
    bench: Bench, key: str, postgres_server: TestedPostgres
) -> None:
    """A holds the lock, B is refused; C, that comes after B, is refused as well."""
    before = len(postgres_server.log())
    with bench.held(key) as holder:
        locks = bench.locks()
        for _ in range(2):
            refused = bench.send("job", key)
            (skip,) = bench.wait_for_notes(
                "signal",
                name="run_skipped",
                kind="held",
                task_id=refused.id,
                timeout=PATIENCE,
            )
            assert holder.id in skip.detail["reason"]
            assert bench.locks() == locks
    assert len(bench.notes("start", key=key)) == 1
    # Its body has noted its end before its locks are given back.
    eventually(lambda: not bench.locks(), what="its locks are free")
    assert "you don't own a lock" not in postgres_server.log()[before:]


def test_a_lock_of_somebody_else_is_called_so(bench: Bench, key: str) -> None:
    """A colliding key is not reported as "already running"."""
    with bench.held(key):
        (name_key,) = bench.database.rows(
            "SELECT name_key FROM pglock.job_runs WHERE status = 'running'"
        )[0]
    stranger = bench.database.connect(application_name="nightly report")
    stranger.execute("SELECT pg_advisory_lock(%s)", (name_key,))
    result = bench.send("job", key)
    (skip,) = bench.wait_for_notes(
        "signal", name="run_skipped", task_id=result.id, timeout=PATIENCE
    )
    backend = stranger.info.backend_pid
    stranger.close()
    assert "not of celery-pglock" in skip.detail["reason"]
    assert "nightly report" in skip.detail["reason"]
    assert f"backend {backend}" in skip.detail["reason"]
    assert str(name_key) in skip.detail["reason"]


def test_the_command_line_shows_what_ran_and_what_did_not(bench: Bench, key: str) -> None:
    first, second = due(minutes=2), due(minutes=1)
    with bench.held(key, headers=occurrence(key, first)) as holder:
        skipped = bench.send("job", key, headers=occurrence(key, second))
        bench.wait_for_notes("signal", name="run_skipped", task_id=skipped.id, timeout=PATIENCE)
        code, output = pglock(bench, "runs", "--job", key, "--json")
        assert code == 0, output
        shown: list[dict[str, Any]] = json.loads(output)
    by_period = {row["period"]: row for row in shown}
    assert by_period.keys() == {label(first), label(second)}
    running, refused = by_period[label(first)], by_period[label(second)]
    assert (running["status"], running["task_id"]) == ("running", holder.id)
    assert running["node"]
    assert refused["status"] == "skipped"
    assert holder.id in refused["reason"]
    code, output = pglock(bench, "runs", "--job", key, "--status", "skipped")
    assert code == 0, output
    assert label(second) in output
    assert label(first) not in output.replace(refused["reason"], "")
    assert "skipped" in output

"""`pglock rerun` and `pglock prune`, the real commands, with real workers; C44 and C45.

C44 (a), a claim whose message was never sent, is
`test_beat_failover.py::test_a_leader_that_dies_between_two_steps_neither_loses_nor_doubles`;
(b), a run whose process died, is `test_worker_death.py`; (c) to (e) are here.
"""

from __future__ import annotations

import getpass
import json
import uuid
from typing import Any

import pytest

from tests.acceptance.bench import NAMESPACE, Bench, Run, due, label, occurrence
from tests.acceptance.conftest import MakeBench
from tests.acceptance.test_bad_input import Ended, ended, url_for
from tests.support.databases import Database
from tests.support.processes import Processes, eventually
from tests.support.stage import MakeStage

MONTH = {"days": 40}


def pglock(
    bench: Bench, *arguments: str, broker: str = "", url: str = "", **settings: Any
) -> Ended:
    env = bench.environment(**settings)
    env["APP_BROKER_URL"] = broker or env["APP_BROKER_URL"]
    if url:
        env["APP_SETTINGS"] = json.dumps({**settings, "pglock_database_url": url})
    command = ("pglock", *arguments)
    return ended(bench.processes.celery("tests.apps.tasks", *command, env=env, name="pglock"))


def whole(bench: Bench) -> Any:
    return bench.database.rows("select r::text from pglock.job_runs r order by job, period")


def entry(**more: Any) -> dict[str, Any]:
    """Return settings with one schedule entry, which never comes due here."""
    return {"beat_schedule": {"nightly": {"schedule": 1e6, **more}}}


def insert(bench: Bench, status: str, **columns: object) -> Run:
    columns = {
        "job": f"{NAMESPACE}:nightly",
        "period": "2026-11-03",
        "status": status,
        "attempts": 2,
        "task": "entry_task",
        "task_id": "old",
        "entry": "nightly",
        "finished_at": "2026-11-03 03:00Z",
        **columns,
    }
    bench.database.rows(
        f"insert into pglock.job_runs ({', '.join(columns)})"  # noqa: S608 - names of this file
        f" values ({', '.join(['%s'] * len(columns))})",
        *columns.values(),
    )
    return bench.run(job=columns["job"], period=columns["period"])


# --- rerun -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failed_period_is_run_again_and_the_old_message_finds_it_done(
    make_bench: MakeBench,
) -> None:
    """C44 (c): a failure is open to the next message, and to an operator."""
    bench = make_bench()
    bench.worker()
    moment = due(days=35)
    headers = occurrence("nightly", moment)
    # Exhausted: no message opens it any more.
    insert(bench, "failed", period=label(moment), due_at=moment, reason="exhausted")
    refused = bench.send("entry_task", "k", headers=headers)
    bench.wait_for_notes("signal", name="run_skipped")
    sent = pglock(
        bench, "rerun", "nightly", label(moment), **entry(task="entry_task", kwargs={"key": "k"})
    )
    assert sent.code == 0, sent.output
    # Beyond the horizon, and not stale: there is a row.
    run = bench.wait_for_run("done", job=f"{NAMESPACE}:nightly")
    assert (run.attempts, run.lost_attempts, run.entry) == (3, 0, "nightly")
    assert f"sent entry_task[{run.task_id}] for {NAMESPACE}:nightly {label(moment)}, which was" in (
        sent.output
    )
    (note,) = bench.notes("start")
    assert (note.detail["job"], note.detail["period"]) == (f"{NAMESPACE}:nightly", label(moment))
    assert bench.app.AsyncResult(str(run.task_id)).state == "SUCCESS"
    eventually(lambda: str(refused.state) == "REVOKED", what="the refused message is skipped")
    again = bench.send("entry_task", "k", headers=headers)
    bench.wait_for_notes("signal", name="run_skipped", count=2)
    eventually(lambda: str(again.state) == "REVOKED", what="so is the old one")
    assert len(bench.notes("start")) == 1


@pytest.mark.slow
def test_a_done_period_needs_force_and_says_who_forced_it(make_bench: MakeBench) -> None:
    """C44 (d)."""
    bench = make_bench()
    bench.worker()
    before = insert(bench, "done")
    rows = whole(bench)
    settings = entry(task="entry_task", args=["k"])
    refused = pglock(bench, "rerun", f"{NAMESPACE}:nightly", "2026-11-03", **settings)
    refused.says("it was done at 2026-11-03", 1)
    assert "add --force" in refused.output
    assert whole(bench) == rows
    assert bench.messages() == 0
    forced = pglock(bench, "rerun", "nightly", "2026-11-03", "--force", **settings)
    assert forced.code == 0, forced.output
    (note,) = bench.wait_for_notes("start")
    assert note.detail["attempt"] == before.attempts + 1
    run = bench.wait_for_run("done", job=f"{NAMESPACE}:nightly", attempts=3)
    assert run.reason is not None
    assert f"opened again with --force by {getpass.getuser()}@" in run.reason
    assert run.reason.endswith("it was done")


@pytest.mark.slow
def test_what_runs_is_not_opened_and_a_message_of_its_own_is_run_once(
    make_bench: MakeBench,
) -> None:
    """C44 (e): a plain message has its own period; it is opened again like any other."""
    bench = make_bench()
    bench.worker()
    with bench.held("k", task="job") as result:
        period = f"id:{result.id}"
        running = pglock(bench, "rerun", "job", period, "--force", "--args", '["k"]')
        running.says("it is being run since", 1)
    bench.wait_for_run("done", period=period)
    # Which arguments it had nobody knows.
    unknown = pglock(bench, "rerun", "job", period, "--force")
    unknown.says("no schedule entry tells with which arguments", 1)
    again = pglock(bench, "rerun", "job", period, "--force", "--args", '["k2"]')
    assert again.code == 0, again.output
    bench.wait_for_notes("end", count=2)
    assert [note.detail["key"] for note in bench.notes("start")] == ["k", "k2"]
    assert bench.wait_for_run("done", period=period, attempts=2).task_id != result.id


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        (("nightly", "2026-11-04"), "no such run is recorded", 1),
        (("other:nightly", "2026-11-03"), "no such run is recorded", 1),
        (("nightly", "2026-11-03", "--args", "{}"), "must be a JSON list; got '{}'", 2),
        (("nightly", "2026-11-03", "--kwargs", "[]"), "must be a JSON object; got '[]'", 2),
        (("nightly", "2026-11-03", "--kwargs", "{'a': 1}"), "must be a JSON object", 2),
    ],
)
def test_a_wrong_request_changes_nothing(
    make_bench: MakeBench, arguments: tuple[str, ...], sentence: str, code: int
) -> None:
    bench = make_bench()
    insert(bench, "failed")
    before = whole(bench)
    pglock(bench, "rerun", *arguments).says(sentence, code)
    assert whole(bench) == before
    assert bench.messages() == 0


def test_a_broker_that_does_not_answer_leaves_everything_as_it_was(make_bench: MakeBench) -> None:
    bench = make_bench()
    insert(bench, "failed", reason="exhausted", error="what", claim=uuid.uuid4())
    before = whole(bench)
    settings = entry(task="entry_task", args=["k"])
    nobody = "redis://127.0.0.1:1/0"
    pglock(bench, "rerun", "nightly", "2026-11-03", broker=nobody, **settings).says(
        "its message could not be sent", 1
    )
    assert whole(bench) == before


def test_a_message_that_cannot_be_sent_leaves_everything_as_it_was(make_bench: MakeBench) -> None:
    """The task does not take these arguments: no broker is to blame."""
    bench = make_bench()
    insert(bench, "failed")
    before = whole(bench)
    settings = entry(task="entry_task", kwargs={"unknown": 1})
    pglock(bench, "rerun", "nightly", "2026-11-03", **settings).says("TypeError", 1)
    assert whole(bench) == before
    assert bench.messages() == 0


# --- prune -------------------------------------------------------------------------------------

HISTORY = """
insert into pglock.job_runs (job, period, due_at, status, finished_at)
select %s, to_char(m at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US') || '+00:00', m, 'done', m
from (select now() - make_interval(days => 40, secs => n) as m
 from generate_series(1, %s) as n) as moments
"""


def count(database: Database, job: str) -> int:
    ((number,),) = database.rows("select count(*) from pglock.job_runs where job = %s", job)
    return int(number)


def test_prune_counts_first_and_then_deletes_its_own(make_bench: MakeBench) -> None:
    """C45."""
    bench = make_bench()
    jobs = [f"{NAMESPACE}:nightly", "another:nightly"]
    for job in jobs:
        bench.database.rows(HISTORY, job, 2500)
    insert(bench, "running", period="2025-01-01", job=jobs[0])
    before = whole(bench)
    dry = pglock(bench, "prune", "--dry-run")
    assert (dry.code, dry.output.splitlines()[-1]) == (
        *(0, "2499 runs older than 30 days, 0:00:00 would be deleted"),
    )
    assert whole(bench) == before
    kept = pglock(bench, "prune", pglock_retention=None)
    assert "history is kept for ever" in kept.output
    assert whole(bench) == before
    pruned = pglock(bench, "prune")
    assert (pruned.code, pruned.output.splitlines()[-1]) == (
        *(0, "2499 runs older than 30 days, 0:00:00 deleted"),
    )
    assert [count(bench.database, job) for job in jobs] == [2, 2500]
    assert pglock(bench, "prune").output.splitlines()[-1].startswith("0 runs")


@pytest.mark.parametrize("command", [("prune",), ("rerun", "nightly", "2026-11-03")])
def test_a_database_that_does_not_answer_is_told_so(
    make_bench: MakeBench, command: tuple[str, ...]
) -> None:
    bench = make_bench()
    nowhere = url_for(bench.database.url, host="127.0.0.1", port="1")
    pglock(bench, *command, url=nowhere).says("cannot use PostgreSQL at 127.0.0.1:1", 69)


def test_without_the_right_to_delete_prune_names_the_remedy(
    make_bench: MakeBench, processes: Processes
) -> None:
    del processes
    bench = make_bench()
    role = f"pglock_role_{uuid.uuid4().hex[:12]}"
    bench.database.rows(f"create role {role} login password 'secret'")
    try:
        bench.database.rows(f"grant usage on schema pglock to {role}")
        bench.database.rows(f"grant select on all tables in schema pglock to {role}")
        url = url_for(bench.database.url, user=role, password="secret")
        pglock(bench, "prune", url=url).says("run the GRANTs", 1)
    finally:
        bench.database.rows(f"drop owned by {role}")
        bench.database.rows(f"drop role {role}")


@pytest.mark.slow
def test_a_leader_deletes_old_history_and_says_so(
    make_stage: MakeStage, database: Database
) -> None:
    """C45: by the way, while its entries go on, and never what belongs to somebody else."""
    stage = make_stage({"one": 1.0}, settings={"pglock_retention": 60})
    for job in ("stage:old", "another:old"):
        database.rows(HISTORY, job, 2500)
    stage.worker()
    beat = stage.beat(scheduler="tests.apps.beat_upkeep:CleansUpSoon")
    beat.wait_for_line(r"pruned: 2499 runs of stage, older than its history is kept")
    assert (count(database, "stage:old"), count(database, "another:old")) == (1, 2500)
    stage.wait_for_runs(4)
    beat.terminate()
    assert beat.wait() == 0
    assert "leadership lost" not in beat.output()
    stage.expect_each_once()

"""Each job runs once per period, whoever sends it and however often."""

from __future__ import annotations

import datetime as dt
import uuid
from collections import Counter
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance.bench import NAMESPACE, Bench, due, label, occurrence
from tests.acceptance.conftest import MakeBench
from tests.support.databases import Database
from tests.support.processes import Process, eventually
from tests.support.servers import TestedPostgres
from tests.support.versions import FROM_5_7

PATIENCE = 20.0
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture(scope="module")
def bench(make_shared_bench: MakeBench) -> Bench:
    """Two workers, because one could be right by being slow."""
    bench = make_shared_bench(visibility_timeout=60)
    # Some of what is due here was due months ago.
    workers = (bench.start_worker(concurrency=3, pglock_retention=None) for _ in range(2))
    bench.expect(*workers)
    return bench


def refused(bench: Bench, task_id: str) -> str:
    """Wait for the skip of a message and return its reason."""
    (skip,) = bench.wait_for_notes("signal", name="run_skipped", task_id=task_id, timeout=PATIENCE)
    return str(skip.detail["reason"])


# --- Occurrences ----------------------------------------------------------------------------


def test_the_second_message_of_an_occurrence_is_skipped_although_the_lock_is_free(
    bench: Bench, key: str
) -> None:
    headers = occurrence(key, due(minutes=1))
    first = bench.send("job", key, params={"seconds": 0.02}, headers=headers)
    bench.wait_for_run("done", job=f"{NAMESPACE}:{key}")
    (ended,) = bench.notes("end", key=key)
    # The lock has been given back; the other beat's clock is 0.4 s behind.
    eventually(lambda: (bench.now() - ended.at).total_seconds() > 0.4, what="0.4 s are over")
    second = bench.send("job", key, params={"seconds": 0.02}, headers=headers)
    reason = refused(bench, second.id)
    assert reason.startswith(f"already ran in this period (task {first.id}")
    assert "lock" not in reason
    assert len(bench.notes("start", key=key)) == 1
    run = bench.run(job=f"{NAMESPACE}:{key}")
    assert (run.status, run.attempts, run.task_id) == ("done", 1, first.id)


def test_the_period_is_the_due_instant_and_not_when_the_message_came(
    bench: Bench, key: str
) -> None:
    moment = due(hours=5)
    for zone in (dt.UTC, BERLIN):
        bench.send("job", key, headers=occurrence(key, moment.astimezone(zone)))
    bench.wait_for_notes("signal", name="run_skipped", job=f"{NAMESPACE}:{key}", timeout=PATIENCE)
    run = bench.run(job=f"{NAMESPACE}:{key}")
    assert run.period == label(moment)
    assert run.entry == key
    (start,) = bench.notes("start", key=key)
    assert start.detail["period"] == label(moment)


def test_many_copies_of_many_occurrences_run_once_each(
    bench: Bench, key: str, postgres_server: TestedPostgres
) -> None:
    """And no error of the server is part of how it works."""
    moments = [due(minutes=minute) for minute in range(1, 11)]
    for _ in range(4):
        for number, moment in enumerate(moments):
            bench.send("job", f"{key}-{number}", headers=occurrence(key, moment))
    told: dict[str, Any] = {"job": f"{NAMESPACE}:{key}"}
    bench.wait_for_notes("signal", name="run_skipped", count=30, timeout=PATIENCE, **told)
    bench.wait_for_notes("end", count=10, **told)
    runs = bench.runs(job=f"{NAMESPACE}:{key}")
    assert Counter(run.status for run in runs) == {"done": 10}
    assert {run.period for run in runs} == set(map(label, moments))
    starts = Counter(note.detail["period"] for note in bench.notes("start", **told))
    assert set(starts.values()) == {1}
    logged = postgres_server.log().splitlines()
    assert not [line for line in logged if bench.database.name in line and "ERROR" in line]


def test_two_entries_of_one_task_are_two_jobs(bench: Bench, key: str) -> None:
    """As well with other arguments as with the same, at the same instant."""
    moment = due(minutes=1)
    for entry, tenant in (("eu", "eu"), ("us", "us"), ("again", "eu")):
        for _ in range(2):
            headers = occurrence(f"{entry}-{key}", moment)
            bench.send("entry_task", f"{tenant}-{key}", headers=headers)
    for entry in ("eu", "us", "again"):
        run = bench.wait_for_run(
            "done", job=f"{NAMESPACE}:{entry}-{key}", period=label(moment), timeout=PATIENCE
        )
        assert run.attempts == 1
        (start,) = bench.notes("start", job=run.job)
        assert start.detail["period"] == label(moment)


def test_another_job_under_the_same_lock_name_waits_and_is_never_skipped(
    bench: Bench, key: str
) -> None:
    moment = due(minutes=1)
    other = f"{NAMESPACE}:other-{key}"
    with bench.held(key, task="named", headers=occurrence(f"holder-{key}", moment)):
        bench.send("same_name", key, headers=occurrence(f"other-{key}", moment))
        bench.wait_for_notes("signal", name="run_postponed", job=other, timeout=PATIENCE)
        assert not bench.notes("start", job=other)
        assert bench.run(job=other).status == "sent"
    run = bench.wait_for_run("done", job=other, timeout=PATIENCE)
    assert run.attempts == 1
    assert run.postponements >= 1
    assert len(bench.notes("start", job=other)) == 1
    assert not bench.skips(job=other)
    (holder_ended,) = bench.notes("end", job=f"{NAMESPACE}:holder-{key}")
    (other_started,) = bench.notes("start", job=other)
    assert other_started.at >= holder_ended.at


@pytest.mark.slow
def test_what_has_waited_once_is_not_skipped_later(bench: Bench, key: str) -> None:
    """Two occurrences wait for another job; then the one runs, and the other meets it."""
    moments = due(minutes=2), due(minutes=1)
    job = f"{NAMESPACE}:other-{key}"
    gate = f"other-{key}"
    with bench.held(key, task="named", headers=occurrence(f"holder-{key}", due(minutes=1))):
        for moment in moments:
            headers = occurrence(f"other-{key}", moment)
            bench.send("same_name", key, params={"gate": gate}, headers=headers)
        for moment in moments:
            bench.wait_for_notes(
                "signal", name="run_postponed", job=job, period=label(moment), timeout=PATIENCE
            )
    (first,) = bench.wait_for_notes("start", job=job, timeout=PATIENCE)
    (waiting,) = {label(moment) for moment in moments} - {first.detail["period"]}
    eventually(
        lambda: [
            note
            for note in bench.notes("signal", name="run_postponed", job=job, period=waiting)
            if note.at > first.at and f'held by job "{job}"' in note.detail["reason"]
        ],
        PATIENCE,
        "it meets the run of its own job and waits again",
    )
    bench.open_gate(gate)
    for moment in moments:
        run = bench.wait_for_run("done", job=job, period=label(moment), timeout=PATIENCE)
        assert run.attempts == 1
    assert not bench.skips(job=job)


def test_the_next_occurrence_of_a_job_that_still_runs_is_skipped_with_a_row(
    bench: Bench, key: str
) -> None:
    first, second, third = due(minutes=2), due(minutes=1), due(minutes=0)
    job = f"{NAMESPACE}:{key}"
    with bench.held(key, headers=occurrence(key, first)) as holder:
        overlapping = bench.send("job", key, headers=occurrence(key, second))
        reason = refused(bench, overlapping.id)
        run = bench.wait_for_run("skipped", job=job, period=label(second))
        assert run.attempts == 0
        assert run.reason == reason
        assert f"task {holder.id}" in reason
        assert not bench.notes("signal", name="run_postponed", job=job)
    bench.send("job", key, headers=occurrence(key, third))
    bench.wait_for_run("done", job=job, period=label(third), timeout=PATIENCE)
    # What was skipped is settled, also when the lock is free again.
    late = bench.send("job", key, headers=occurrence(key, second))
    assert refused(bench, late.id).startswith("this period is settled as skipped")
    assert len(bench.notes("start", job=job)) == 2


@pytest.mark.parametrize("task", ["patient", "waiting"])
def test_a_job_may_wait_for_its_own_earlier_run(bench: Bench, key: str, task: str) -> None:
    """By postponing its message, or inside the worker; either way it runs and is no skip."""
    first, second = due(minutes=2), due(minutes=1)
    job = f"{NAMESPACE}:{key}"
    with bench.held(key, task=task, headers=occurrence(key, first)):
        later = bench.send(task, key, headers=occurrence(key, second))
        if task == "patient":
            bench.wait_for_notes("signal", name="run_postponed", job=job, timeout=PATIENCE)
        else:
            bench.wait_for_delivery(later.id)
        assert len(bench.notes("start", job=job)) == 1
    run = bench.wait_for_run("done", job=job, period=label(second), timeout=PATIENCE)
    assert run.attempts == 1
    assert bool(run.postponements) == (task == "patient")
    assert not bench.skips(job=job)
    (ended, _) = bench.notes("end", job=job)
    (_, started) = bench.notes("start", job=job)
    assert started.at >= ended.at


@pytest.mark.slow
def test_a_postponed_message_waits_until_it_expires(bench: Bench, key: str) -> None:
    moment = due(minutes=1)
    other = f"{NAMESPACE}:other-{key}"
    with bench.held(key, task="named", headers=occurrence(f"holder-{key}", moment)):
        result = bench.send("same_name", key, headers=occurrence(f"other-{key}", moment), expires=6)
        with pytest.raises(TaskRevokedError, match=r"^skipped: "):
            result.get(timeout=PATIENCE)
        assert bench.notes("signal", name="run_postponed", job=other)
        run = bench.run(job=other)
        assert (run.status, run.attempts) == ("skipped", 0)
        assert run.postponements >= 1
    assert len(bench.skips(job=other)) == 1
    assert not bench.notes("start", job=other)


# --- Calendar rules -------------------------------------------------------------------------


def calendar_label(rule: str, moment: dt.datetime) -> str:
    """Return the label of a bucket, written out here and not asked of the package."""
    local = moment.astimezone(BERLIN)
    offset = local.strftime("%z")
    return {
        "per_minute": f"{local:%Y-%m-%dT%H:%M}{offset[:3]}:{offset[3:]}",
        "per_hour": f"{local:%Y-%m-%dT%H}{offset[:3]}:{offset[3:]}",
        "per_day": f"{local:%Y-%m-%d}",
        "per_week": f"{local:%G-W%V}",
        "per_month": f"{local:%Y-%m}",
    }[rule]


@pytest.mark.parametrize("rule", ["per_minute", "per_hour", "per_day", "per_week", "per_month"])
def test_a_calendar_rule_runs_once_in_each_bucket(bench: Bench, key: str, rule: str) -> None:
    """The bucket is that of the due instant, in the application's zone; the entry is no part."""
    # 23:30 UTC is the next day, and on a Sunday the next week, in Berlin.
    sunday = due(days=7).replace(hour=23, minute=30, second=7)
    sunday -= dt.timedelta(days=sunday.isoweekday() % 7)
    length = {"per_minute": 20, "per_hour": 60, "per_day": 600, "per_week": 600, "per_month": 600}
    same = sunday + dt.timedelta(seconds=length[rule])
    other = sunday - dt.timedelta(days=32)
    job = f'{NAMESPACE}:{rule}{{"key":"{key}"}}'
    for moment in (sunday, other):
        bench.send(rule, key, headers=occurrence(f"one-{key}", moment))
        bench.wait_for_run("done", job=job, period=calendar_label(rule, moment), timeout=PATIENCE)
    again = bench.send(rule, key, headers=occurrence(f"two-{key}", same))
    assert refused(bench, again.id).startswith("already ran in this period")
    runs = bench.runs(job=job)
    assert {run.period for run in runs} == {
        calendar_label(rule, moment) for moment in (sunday, other)
    }
    assert all(run.status == "done" and run.attempts == 1 for run in runs)
    assert len(bench.notes("start", key=key)) == 2


def test_a_calendar_rule_counts_each_tenant_by_itself(bench: Bench, key: str) -> None:
    moment = due(days=1)
    for _ in range(2):
        for tenant in ("eu", "us"):
            bench.send("per_day", f"{tenant}-{key}", headers=occurrence(f"{tenant}-{key}", moment))
    for tenant in ("eu", "us"):
        job = f'{NAMESPACE}:per_day{{"key":"{tenant}-{key}"}}'
        bench.wait_for_run("done", job=job, timeout=PATIENCE)
        bench.wait_for_notes("signal", name="run_skipped", job=job, timeout=PATIENCE)
        assert len(bench.notes("start", job=job)) == 1


def test_without_an_occurrence_a_calendar_rule_takes_the_bucket_of_the_first_claim(
    bench: Bench, key: str
) -> None:
    before = bench.now()
    first, second = (bench.send("per_month", key) for _ in range(2))
    eventually(lambda: bench.skips(task_id=first.id) or bench.skips(task_id=second.id))
    job = f'{NAMESPACE}:per_month{{"key":"{key}"}}'
    run = bench.wait_for_run("done", job=job, timeout=PATIENCE)
    buckets = {calendar_label("per_month", moment) for moment in (before, bench.now())}
    assert run.period in buckets


@pytest.mark.parametrize("ending", ["retry", "crash"])
def test_a_period_outlasts_midnight(bench: Bench, key: str, ending: str) -> None:
    """The rule is a function; the label that it returns changes between the attempts."""
    bench.open_gate("label", f"monday {key}")
    result = bench.send("by_label", key, ending)
    (first,) = bench.wait_for_notes("start", key=key, timeout=PATIENCE)
    bench.open_gate("label", f"tuesday {key}")
    bench.open_gate(key)
    bench.wait_for_notes("end", key=key, timeout=PATIENCE)
    assert [note.detail["period"] for note in bench.notes("start", key=key)] == [
        f"monday {key}",
        f"monday {key}",
    ]
    run = bench.wait_for_run("done", job=first.detail["job"])
    assert (run.period, run.attempts, run.task_id) == (f"monday {key}", 2, result.id)
    assert run.lost_attempts == (1 if ending == "crash" else 0)
    # The control: what comes now belongs to the new day.
    bench.send("by_label", key, "")
    bench.wait_for_run("done", job=run.job, period=f"tuesday {key}", timeout=PATIENCE)


# --- Messages without an occurrence ---------------------------------------------------------


def test_a_message_without_an_occurrence_runs_once_however_often_it_is_delivered(
    bench: Bench, key: str
) -> None:
    task_id = str(uuid.uuid4())
    for _ in range(5):
        bench.send("job", key, task_id=task_id)
    bench.wait_for_run("done", task_id=task_id, timeout=PATIENCE)
    eventually(lambda: bench.messages() == 0, PATIENCE, "all copies are dealt with")
    bench.send("job", key, task_id=task_id)
    bench.wait_for_notes("log", event="copy_dropped", task_id=task_id)
    assert len(bench.notes("start", key=key)) == 1
    assert bench.run(task_id=task_id).period == f"id:{task_id}"
    # The control: another message is another run.
    bench.send("job", key)
    bench.wait_for_notes("start", key=key, count=2)


# --- Beats that know nothing of it ----------------------------------------------------------


def stock_beats(bench: Bench, directory: Path, **schedule: Any) -> list[Process]:
    """Start two beats with Celery's own scheduler, each with a schedule file of its own."""
    settings = {"beat_schedule": schedule, "beat_max_loop_interval": 1}
    return [
        bench.processes.celery(
            "tests.apps.tasks",
            "beat",
            f"--schedule={directory / name}",
            f"--pidfile={directory / name}.pid",
            env=bench.environment(**settings),
            name=name,
        )
        for name in ("beat-a", "beat-b")
    ]


@pytest.mark.slow
def test_two_stock_beats_run_a_calendar_rule_once_per_minute(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    """And the default rule only keeps their messages apart, which is told once per process."""
    bench = make_bench()
    bench.worker(concurrency=2)
    beats = stock_beats(
        bench,
        tmp_path,
        minutely={"task": "per_minute", "schedule": 2.0, "args": ["minute"]},
        default={"task": "entry_task", "schedule": 2.0, "args": ["default"]},
    )

    def minutes() -> Counter[str]:
        messages = [*bench.notes("start", key="minute"), *bench.skips(task="per_minute")]
        return Counter(calendar_label("per_minute", note.at) for note in messages)

    # Several messages on both sides of a boundary.
    eventually(
        lambda: sum(1 for number in minutes().values() if number >= 3) >= 2,
        75,
        "messages in two minutes",
        interval=0.2,
    )
    assert all(beat.running() for beat in beats)
    for beat in beats:
        beat.kill(group=True)
    runs = bench.runs(job=f'{NAMESPACE}:per_minute{{"key":"minute"}}')
    assert len(runs) == len(minutes()) >= 2
    assert all((run.status, run.attempts) == ("done", 1) for run in runs)
    starts = Counter(note.detail["period"] for note in bench.notes("start", key="minute"))
    assert starts == {run.period: 1 for run in runs}

    started = Counter(note.pid for note in bench.notes("start", key="default"))
    warned = Counter(note.pid for note in bench.notes("log", event="stock_beat", level="WARNING"))
    assert started.total() > 5, "both beats' messages ran"
    assert max(started.values()) > 1
    # Before Celery 5.7 nothing tells a stock beat's message.
    assert warned == (dict.fromkeys(started, 1) if FROM_5_7 else {})
    for note in bench.notes("log", event="stock_beat"):
        assert "-S pglock" in note.detail["message"]
        assert "once_per" in note.detail["message"]


# --- Locks without a ledger -----------------------------------------------------------------


def test_a_lock_without_a_period_needs_no_tables(
    make_bench: MakeBench, blank_database: Database
) -> None:
    bench = make_bench(database=blank_database)
    bench.worker(app="tests.apps.lock_only", concurrency=2)
    assert blank_database.rows("SELECT to_regnamespace('pglock')") == [(None,)]
    holder = bench.send("lock_only", "k", "first")
    bench.wait_for_notes("start", task_id=holder.id)
    other = bench.send("lock_only", "k", "first")
    assert "is held by pglock:lock_only@" in refused(bench, other.id)
    bench.open_gate("first")
    assert holder.get(timeout=PATIENCE) is None
    later = bench.send("lock_only", "k", "first")
    assert later.get(timeout=PATIENCE) is None
    assert len(bench.notes("end", key="k")) == 2
    assert not bench.locks()
    assert blank_database.rows("SELECT to_regnamespace('pglock')") == [(None,)]


def test_without_a_period_the_same_message_may_run_again(bench: Bench, key: str) -> None:
    """There is no row to tell by: only overlapping is prevented."""
    task_id = str(uuid.uuid4())
    for number in (1, 2):
        bench.send("unledgered", key, task_id=task_id)
        bench.wait_for_notes("end", key=key, count=number)
    assert not bench.runs(task="unledgered")

"""Whatever dies at whichever step of an occurrence: each one runs exactly once."""

from __future__ import annotations

import datetime as dt
import os
import signal
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import TupleRow

from celery_pglock import migrating
from celery_pglock.demo.servers import PostgresServer
from tests.acceptance import bursts
from tests.support.processes import eventually
from tests.support.stage import MakeStage

FAULTS = "tests.apps.beat_faults"
STEPS = [
    pytest.param("DiesAfterClaiming", marks=pytest.mark.chaos),
    pytest.param("DiesBeforePublishing", marks=pytest.mark.chaos),
    "DiesAfterPublishing",
    pytest.param("DiesBeforeConfirming", marks=pytest.mark.chaos),
    pytest.param("DiesAfterConfirming", marks=pytest.mark.chaos),
]


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.chaos)])
def broker(request: pytest.FixtureRequest) -> str:
    """The URL of a broker, of either kind."""
    names = {"redis": "fresh_redis_url", "rabbitmq": "rabbitmq_url"}
    return str(request.getfixturevalue(names[request.param]))


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_leader_that_is_killed_at_any_step_neither_loses_nor_doubles(
    make_stage: MakeStage, broker: str, step: str
) -> None:
    """C03 (b): one of three beats, with SIGKILL."""
    stage = make_stage({"one": 1.0}, broker=broker)
    stage.worker()
    doomed = stage.beat(scheduler=f"{FAULTS}:{step}")
    stage.leader([doomed])
    heirs = [stage.beat(), stage.beat()]
    assert doomed.wait(20) == -signal.SIGKILL
    stage.leader(heirs, not_before_term=2)
    ran = len(stage.rows("SELECT 1 FROM ran"))
    stage.wait_for_runs(max(ran, 3) + 2)
    bursts.end([bursts.standing(beat) for beat in heirs])
    count = stage.expect_each_once()
    print(f"\n{step}: {count} occurrences")
    assert count >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [pytest.param("DiesBeforePublishing", marks=pytest.mark.chaos), "DiesAfterPublishing"]
)
def test_a_leader_that_is_killed_in_the_middle_of_a_burst_neither_loses_nor_doubles(
    make_stage: MakeStage, broker: str, step: str
) -> None:
    """Of thirty messages it has handed over twelve or thirteen, and recorded none or some."""
    stage = make_stage(bursts.names(30), broker=broker, extra={"APP_STRIKE_AT": "13"})
    bursts.due_at_once(stage, 5)
    doomed = stage.beat(scheduler=f"{FAULTS}:{step}")
    stage.leader([doomed])
    heir = stage.beat()
    assert doomed.wait(30) == -signal.SIGKILL
    recorded = bursts.confirmed(stage)
    stage.leader([heir])
    stage.worker()
    eventually(lambda: bursts.done(stage) == 30, 30, "all are done")
    bursts.end([heir])
    assert stage.expect_each_once() == 30
    print(f"\n{step}: 30 occurrences, {recorded} recorded as sent before the kill")
    assert recorded < 30


@pytest.mark.parametrize(
    "scheduler", ["pglock", pytest.param(f"{FAULTS}:ForgetsDowntimes", marks=pytest.mark.chaos)]
)
def test_what_a_downtime_has_missed_is_missed_also_when_the_first_leader_after_it_dies(
    make_stage: MakeStage, scheduler: str
) -> None:
    """It dies before its first claim; who does not know of the downtime sends it all."""
    stage = make_stage(
        {"one": 1.0}, settings={"pglock_leader_lease": 1.0, "pglock_standby_poll": 0.25}
    )
    worker = stage.worker()
    first = stage.beat()
    stage.wait_for_runs(2)
    bursts.end([first])
    eventually(
        lambda: stage.rows(
            "SELECT 1 FROM pglock.beat_terms WHERE clock_timestamp() > last_tick_at + '6 s'"
        ),
        what="nobody has led for a while",
    )
    stage.extra["APP_STRIKE_AT"] = "1"
    doomed = stage.beat(scheduler=f"{FAULTS}:DiesBeforeClaiming")
    assert doomed.wait(30) == -signal.SIGKILL
    heir = stage.beat(scheduler=scheduler)
    stage.leader([heir], not_before_term=3)
    ran = len(stage.rows("SELECT 1 FROM ran"))
    stage.wait_for_runs(ran + 3)
    bursts.end([heir])
    missed = len(stage.rows("SELECT 1 FROM pglock.job_runs WHERE status = 'missed'"))
    print(f"{missed} missed, {ran} and more ran")
    assert (missed >= 4) is (scheduler == "pglock")
    assert worker.running()


def test_a_message_that_is_recorded_before_it_is_sent_is_lost(make_stage: MakeStage) -> None:
    """The control for the order of the steps; without rescue, which would help here."""
    stage = make_stage({"one": 1.0}, settings={"pglock_rescue_sent_after": None})
    stage.worker()
    doomed = stage.beat(scheduler=f"{FAULTS}:ConfirmsTooEarly")
    stage.leader([doomed])
    heir = stage.beat()
    assert doomed.wait(20) == -signal.SIGKILL
    ((lost,),) = stage.rows("SELECT max(due_at) FROM pglock.job_runs")
    stage.leader([heir])
    eventually(
        lambda: len(stage.rows("SELECT 1 FROM ran WHERE due > %s", lost)) >= 2,
        30,
        "what is due later runs",
    )
    assert stage.rows("SELECT 1 FROM ran WHERE due = %s", lost) == []
    assert stage.rows("SELECT status FROM pglock.job_runs WHERE due_at = %s", lost) == [("sent",)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("fast", marks=pytest.mark.chaos),
        "immediate",
        pytest.param("backend", marks=pytest.mark.chaos),
    ],
)
def test_a_database_that_restarts_in_the_middle_of_a_burst_costs_and_doubles_nothing(
    make_stage: MakeStage, own_postgres: PostgresServer, tmp_path: Path, fault: str
) -> None:
    """`backend`: SIGKILL of the leader's own, after which PostgreSQL restarts by itself."""
    url = own_postgres.url("postgres")
    migrating.migrate(url, "pglock")
    marker = tmp_path / "marker"
    stage = make_stage(
        bursts.names(100), url=url, extra={"APP_STRIKE_AT": "50", "APP_MARKER": str(marker)}
    )
    bursts.due_at_once(stage, 5)
    leader = stage.beat(scheduler=f"{FAULTS}:Waits")
    stage.leader([leader])
    other = bursts.standing(stage.beat())
    eventually(marker.exists, 20, "half of the burst was handed over")
    recorded = bursts.confirmed(stage)
    ((backend,),) = stage.rows("SELECT backend_pid FROM pglock.beat_terms")
    if fault == "backend":
        with psycopg.connect(url, autocommit=True) as bystander:
            os.kill(backend, signal.SIGKILL)
            # All sessions end before it restarts: until then a new one would not last.
            eventually(lambda: _ended(bystander), 20, "PostgreSQL has seen it")
        eventually(lambda: _new_backend_can_start(url), 20, "PostgreSQL is there again")
    else:
        own_postgres.stop("fast" if fault == "fast" else "immediate")
        own_postgres.start()
    marker.unlink()
    stage.leader([leader, other], not_before_term=2)
    stage.worker()
    eventually(lambda: bursts.done(stage) == 100, 60, "all are done")
    leader.wait_for_line("leadership lost: ")
    bursts.end([leader, other])
    assert stage.expect_each_once() == 100
    print(f"\n{fault}: 100 occurrences, {recorded} recorded as sent before it")
    assert recorded < 100


def test_the_account_of_what_ran_notices_a_loss_and_a_double(make_stage: MakeStage) -> None:
    """The control for all of the above: a table that hides neither."""
    stage = make_stage({"one": 1.0})
    anchor = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    due = [anchor + dt.timedelta(seconds=number) for number in (1, 2, 3)]
    with psycopg.connect(stage.url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO pglock.beat_entries (namespace, entry, task, schedule, anchor, due_at,"
            " published_at) VALUES (%s, 'one', 'job', 'every 1 s', %s, %s, %s)",
            (stage.namespace, anchor, due[-1], due[-1]),
        )

        def run(moment: dt.datetime) -> None:
            connection.execute("INSERT INTO ran VALUES ('one', %s, 1)", (moment,))

        for moment in due:
            run(moment)
        assert stage.expect_each_once() == 3
        run(due[1])
        with pytest.raises(AssertionError, match="3 due, 4 ran"):
            stage.expect_each_once()
        connection.execute("DELETE FROM ran WHERE due = %s", (due[1],))
        with pytest.raises(AssertionError, match="3 due, 2 ran"):
            stage.expect_each_once()
        # As many as there should be, and not the right ones.
        run(due[0])
        with pytest.raises(AssertionError, match="3 due, 3 ran"):
            stage.expect_each_once()


def _ended(connection: psycopg.Connection[TupleRow]) -> bool:
    try:
        connection.execute("SELECT")
    except psycopg.OperationalError:
        return True
    return False


def _new_backend_can_start(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True

"""Beats whose database or broker goes away, and beats that are replaced all the time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from celery_pglock import migrating
from celery_pglock.demo.servers import PostgresServer, ValkeyServer
from tests.support.processes import Process, eventually
from tests.support.stage import MakeStage, Stage


@pytest.fixture
def lasting_valkey() -> Iterator[ValkeyServer]:
    """A broker that keeps its queues over a restart."""
    with ValkeyServer({"appendonly": "yes", "appendfsync": "always"}) as server:
        yield server


@pytest.fixture
def lasting_postgres(own_postgres: PostgresServer) -> PostgresServer:
    """A server of this test's own, with our tables."""
    migrating.migrate(own_postgres.url("postgres"), "pglock")
    return own_postgres


def _standing(beat: Process) -> Process:
    beat.wait_for_line("standby: |leadership gained: ")
    return beat


def _end(stage: Stage, beats: list[Process]) -> None:
    for beat in beats:
        beat.terminate()
        assert beat.wait() == 0
    stage.expect_each_once()


@pytest.mark.slow
def test_a_restart_of_the_database_costs_no_occurrence_and_no_process(
    make_stage: MakeStage, lasting_postgres: PostgresServer
) -> None:
    """C04, C05 (b): fast and immediate; the same processes go on."""
    stage = make_stage({"one": 1.0}, url=lasting_postgres.url("postgres"))
    stage.worker()
    beats = [_standing(stage.beat()), _standing(stage.beat())]
    for mode in ("fast", "immediate"):
        ran = len(stage.rows("SELECT 1 FROM ran"))
        stage.wait_for_runs(ran + 2)
        term = stage.term()
        lasting_postgres.stop(mode)
        _watch(2.0, lambda: all(beat.running() for beat in beats))
        lasting_postgres.start()
        stage.leader(beats, not_before_term=term + 1)
        ran = len(stage.rows("SELECT 1 FROM ran"))
        stage.wait_for_runs(ran + 2)
    _end(stage, beats)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [5.0, pytest.param(60.0, marks=pytest.mark.chaos)])
def test_a_broker_that_is_down_costs_no_occurrence(
    make_stage: MakeStage, lasting_valkey: ValkeyServer, seconds: float
) -> None:
    """C08: claims are kept and sent when the broker is back, with their own instants."""
    stage = make_stage({"one": 1.0, "two": 3.0}, broker=lasting_valkey.url())
    stage.worker()
    beats = [_standing(stage.beat()), _standing(stage.beat())]
    stage.wait_for_runs(3)
    leader = stage.leader(beats)
    lasting_valkey.stop()
    leader.wait_for_line("occurrence not sent: entry one, due ")
    _watch(seconds, lambda: all(beat.running() for beat in beats))
    # Each in its turn hands over to the other, which might have a way to the broker.
    assert stage.leader(beats) in beats
    ran = len(stage.rows("SELECT 1 FROM ran"))
    lasting_valkey.start()
    back = time.monotonic()
    stage.wait_for_runs(ran + 1)
    took = time.monotonic() - back
    stage.wait_for_runs(ran + int(seconds), 60.0)
    _end(stage, beats)
    assert not any("leadership lost" in beat.output() for beat in beats)
    print(f"\ndown for {seconds:g} s: the first run {took:.1f} s after the broker's return")
    # The longest back-off is 5 s; the worker has one of its own.
    assert took < 30.0


@pytest.mark.chaos
@pytest.mark.slow
def test_what_is_recorded_as_sent_and_not_taken_by_the_broker_is_lost(
    make_stage: MakeStage, lasting_valkey: ValkeyServer
) -> None:
    """The control for the one above; without rescue, which would help here."""
    stage = make_stage(
        {"one": 1.0},
        broker=lasting_valkey.url(),
        settings={"pglock_rescue_sent_after": None},
        extra={"APP_STRIKE_AT": "0"},
    )
    stage.worker()
    scheduler = "tests.apps.beat_faults:ConfirmsTooEarly"
    beats = [_standing(stage.beat(scheduler=scheduler)) for _ in range(2)]
    stage.wait_for_runs(2)
    leader = stage.leader(beats)
    lasting_valkey.stop()
    leader.wait_for_line("leadership handed over: ")
    stage.leader([beat for beat in beats if beat is not leader])
    lasting_valkey.start()
    ((back,),) = stage.rows("SELECT clock_timestamp()")
    eventually(
        lambda: stage.rows("SELECT 1 FROM ran WHERE due > %s", back), 60, "what is due later runs"
    )
    lost = stage.rows(
        "SELECT 1 FROM pglock.job_runs WHERE due_at < %s AND status = 'sent'"
        " AND sent_at IS NOT NULL",
        back,
    )
    print(f"\n{len(lost)} occurrences lost")
    assert lost


def test_beats_start_before_their_database_does(
    make_stage: MakeStage, lasting_postgres: PostgresServer
) -> None:
    """C05 (a): they warn, stay, and lead when the server is there."""
    stage = make_stage({"one": 1.0}, url=lasting_postgres.url("postgres"))
    stage.worker()
    lasting_postgres.stop()
    beat = stage.beat()
    beat.wait_for_line("starting although cannot use PostgreSQL at 127.0.0.1")
    beat.wait_for_line("cannot use PostgreSQL at 127.0.0.1", count=3)
    assert "Sending due task" not in beat.output()
    lasting_postgres.start()
    beat.wait_for_line("leadership gained: ")
    stage.wait_for_runs(2)
    _end(stage, [beat])


def test_a_long_loop_interval_does_not_lengthen_the_take_over(make_stage: MakeStage) -> None:
    """C05 (c): possession is looked at on our own interval."""
    stage = make_stage({"rare": 3600.0}, settings={"beat_max_loop_interval": 300})
    beats = [_standing(stage.beat()), _standing(stage.beat())]
    leader = stage.leader(beats)
    leader.kill()
    beats.remove(leader)
    killed = time.monotonic()
    beats[0].wait_for_line("leadership gained: ", 5)
    assert time.monotonic() - killed < 3.0


def test_a_stop_after_the_lock_is_lost_is_clean(
    make_stage: MakeStage, lasting_postgres: PostgresServer
) -> None:
    """C05 (d)."""
    stage = make_stage({"one": 1.0}, url=lasting_postgres.url("postgres"))
    beat = _standing(stage.beat())
    stage.leader([beat])
    lasting_postgres.stop("immediate")
    beat.terminate()
    assert beat.wait(10) == 0
    assert "Traceback" not in beat.output()


@pytest.mark.chaos
def test_a_standby_takes_over_with_the_state_of_the_database(make_stage: MakeStage) -> None:
    """C06: nothing that was sent is sent again, and long intervals go on where they were."""
    stage = make_stage({"one": 1.0, "five": 5.0, "rare": 3600.0})
    stage.worker()
    leader = _standing(stage.beat())
    stage.leader([leader])
    standby = _standing(stage.beat())
    stage.rows(
        "UPDATE pglock.beat_entries SET anchor = clock_timestamp() - interval '1800 s',"
        " next_due_at = clock_timestamp() + interval '1800 s' WHERE entry = 'rare' RETURNING 1"
    )
    stage.wait_for_runs(7)
    leader.kill()
    stage.leader([standby])
    ran = len(stage.rows("SELECT 1 FROM ran"))
    stage.wait_for_runs(ran + 3)
    standby.terminate()
    assert standby.wait() == 0
    assert stage.rows("SELECT 1 FROM ran WHERE entry = 'rare'") == []
    ((left,),) = stage.rows(
        "SELECT extract(epoch FROM next_due_at - clock_timestamp())::float FROM"
        " pglock.beat_entries WHERE entry = 'rare'"
    )
    assert 1700 < left < 1800
    for entry in ("one", "five"):
        due, ran_at = stage.account(entry)
        assert ran_at == due


def test_two_applications_in_one_database_both_lead(make_stage: MakeStage) -> None:
    """C07."""
    stages = [
        make_stage({"one": 1.0}, namespace=name, queue=f"pglock-test-{name}")
        for name in ("shop", "billing")
    ]
    beats = [_standing(stage.beat()) for stage in stages]
    for stage, beat in zip(stages, beats, strict=True):
        assert stage.leader([beat]) is beat
        stage.worker()
    eventually(
        lambda: (
            {
                job.partition(":")[0]
                for (job,) in stages[0].rows(
                    "SELECT job FROM pglock.job_runs WHERE status = 'done'"
                )
            }
            == {"shop", "billing"}
        ),
        20,
        "jobs of both run",
    )


@pytest.mark.chaos
@pytest.mark.slow
def test_a_beat_that_is_replaced_more_often_than_its_interval_still_sends(
    make_stage: MakeStage,
) -> None:
    """C11: the last occurrence is in PostgreSQL, not in a file or in memory."""
    stage = make_stage({"slow": 5.0})
    stage.worker()
    ended = time.monotonic() + 21
    while time.monotonic() < ended:
        beat = _standing(stage.beat())
        _watch(1.0, beat.running)
        beat.terminate()
        assert beat.wait() == 0
    due, ran = stage.account("slow")
    assert ran == due
    assert len(ran) >= 3


@pytest.mark.parametrize("fault", ["garbage", pytest.param("directory", marks=pytest.mark.chaos)])
def test_no_schedule_file_is_used(make_stage: MakeStage, tmp_path: Path, fault: str) -> None:
    """C12: one that is damaged or cannot be written makes no difference."""
    stage = make_stage({"one": 1.0})
    path = tmp_path / "schedule"
    if fault == "garbage":
        path.write_bytes(b"\0not a schedule" * 100)
    else:
        path.mkdir()
    before = sorted(tmp_path.glob("schedule*"))
    stage.worker()
    beat = stage.beat("--schedule", str(path))
    stage.wait_for_runs(2)
    assert sorted(tmp_path.glob("schedule*")) == before
    _end(stage, [beat])


@pytest.mark.chaos
def test_an_entry_whose_arguments_cannot_be_sent_does_not_stop_the_others(
    make_stage: MakeStage,
) -> None:
    stage = make_stage({"one": 1.0}, extra={"APP_UNSENDABLE": json.dumps("bad")})
    stage.worker()
    beat = stage.beat()
    beat.wait_for_line("occurrence not sent: entry bad, ")
    stage.wait_for_runs(4)
    beat.terminate()
    assert beat.wait() == 0


def test_status_tells_leader_standbys_and_what_is_due(make_stage: MakeStage) -> None:
    stage = make_stage({"one": 1.0})
    nobody = stage.processes.celery("tests.apps.beat_app", "pglock", "status", env=stage.env())
    assert nobody.wait() == 1
    assert "leader     none: start celery beat -S pglock" in nobody.output()
    beats = [_standing(stage.beat()), _standing(stage.beat())]
    leader = stage.leader(beats)
    (standby,) = [beat for beat in beats if beat is not leader]
    told = stage.processes.celery(
        "tests.apps.beat_app", "pglock", "status", "--json", env=stage.env()
    )
    assert told.wait() == 0
    status = json.loads(told.output())
    assert status["leader"]["node"].endswith(f":{leader.pid}")
    assert [row["node"].rpartition(":")[2] for row in status["standbys"]] == [str(standby.pid)]
    assert [row["entry"] for row in status["next"]] == ["one"]


def test_a_session_that_is_not_the_leaders_cannot_claim(make_stage: MakeStage) -> None:
    """The term in the claim is a second guard; without a matching one nothing is written."""
    stage = make_stage({"one": 1.0})
    beat = _standing(stage.beat())
    stage.leader([beat])
    with psycopg.connect(stage.url, autocommit=True) as connection:
        connection.execute("UPDATE pglock.beat_terms SET term = term + 100")
    beat.wait_for_line("leadership lost: ")
    beat.wait_for_line("leadership gained: .* in term 102")


def _watch(seconds: float, holds: Callable[[], bool]) -> None:
    """Look for some time whether something stays true; fail when it does not."""
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        assert holds()
        time.sleep(0.05)

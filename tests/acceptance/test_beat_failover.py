"""Several beats, one leads: killed, stopped, cut off; every occurrence runs exactly once."""

from __future__ import annotations

import datetime as dt
import os
import signal
import statistics
from pathlib import Path

import psycopg
import pytest

from tests.support.processes import Process, eventually
from tests.support.stage import MakeStage, Stage

# The figures in the documentation are of 30 kills and 20 stops.
KILLS = int(os.environ.get("PGLOCK_TEST_KILLS", "5"))
STOPS = int(os.environ.get("PGLOCK_TEST_STOPS", "5"))


def _first_after(stage: Stage, moment: dt.datetime) -> tuple[dt.datetime, float]:
    """Wait for the first occurrence due after a moment to be sent; return it and its lateness."""

    def sent() -> list[tuple[dt.datetime, dt.datetime]]:
        return stage.rows(
            "SELECT due_at, sent_at FROM pglock.job_runs WHERE due_at > %s AND sent_at IS NOT NULL"
            " ORDER BY due_at LIMIT 1",
            moment,
        )

    ((due, at),) = eventually(sent, 20, f"an occurrence after {moment} is sent")
    return due, (at - due).total_seconds()


def _now(stage: Stage) -> dt.datetime:
    ((now,),) = stage.rows("SELECT pg_catalog.clock_timestamp()")
    assert isinstance(now, dt.datetime)
    return now


def _standing(beat: Process) -> Process:
    beat.wait_for_line("standby: |leadership gained: ")
    return beat


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_leader_is_replaced_and_each_occurrence_runs_once(
    make_stage: MakeStage,
) -> None:
    """C03 (a): SIGKILL; the lateness of the first occurrence that falls due afterwards."""
    stage = make_stage({"one": 1.0, "two": 1.0})
    stage.worker()
    beats = [_standing(stage.beat()), _standing(stage.beat())]
    lateness = []
    for _ in range(KILLS):
        term = stage.term()
        leader = stage.leader(beats)
        killed_at = _now(stage)
        leader.kill()
        beats.remove(leader)
        lateness.append(_first_after(stage, killed_at)[1])
        (survivor,) = beats
        gained = survivor.wait_for_line(rf"leadership gained: .* in term {term + 1}; (.*)")
        assert f":{leader.pid} vanished in term {term}" in gained[1]
        beats.append(_standing(stage.beat()))
    for beat in beats:
        beat.terminate()
        assert beat.wait() == 0
    count = stage.expect_each_once()
    print(
        f"\n{KILLS} kills, {count} occurrences: lateness median {statistics.median(lateness):.3f}"
        f" s, max {max(lateness):.3f} s"
    )
    assert statistics.median(lateness) <= 0.5
    assert max(lateness) <= 1.0 + _slack()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_leader_hands_over_at_once(make_stage: MakeStage) -> None:
    """C02: SIGTERM; the standby is told, so nothing waits for a poll."""
    stage = make_stage({"one": 1.0})
    stage.worker()
    beats = [_standing(stage.beat()), _standing(stage.beat())]
    lateness = []
    for _ in range(STOPS):
        leader = stage.leader(beats)
        stopped_at = _now(stage)
        leader.terminate()
        assert leader.wait() == 0
        assert "Traceback" not in leader.output()
        beats.remove(leader)
        lateness.append(_first_after(stage, stopped_at)[1])
        (survivor,) = beats
        survivor.wait_for_line(rf":{leader.pid} resigned from term")
        beats.append(_standing(stage.beat()))
    for beat in beats:
        beat.terminate()
        assert beat.wait() == 0
    count = stage.expect_each_once()
    print(f"\n{STOPS} stops, {count} occurrences: lateness max {max(lateness):.3f} s")
    assert max(lateness) <= 0.2 + _slack()


@pytest.mark.parametrize("step", ["DiesBeforePublishing", "DiesBeforeConfirming"])
def test_a_leader_that_dies_between_two_steps_neither_loses_nor_doubles(
    make_stage: MakeStage, tmp_path: Path, step: str
) -> None:
    """C03 (b): after the claim, and after the publication."""
    stage = make_stage({"one": 1.0}, extra={"APP_MARKER": str(tmp_path / "marker")})
    stage.worker()
    doomed = stage.beat(scheduler=f"tests.apps.beat_faults:{step}")
    stage.leader([doomed])
    heir = _standing(stage.beat())
    assert doomed.wait(20) == -signal.SIGKILL
    ((unconfirmed,),) = stage.rows(
        "SELECT count(*) FROM pglock.beat_entries WHERE published_at IS NULL AND due_at IS NOT NULL"
        " OR due_at > clock_timestamp() - interval '1.5 s'"
    )
    assert unconfirmed == 1
    stage.leader([heir])
    stage.wait_for_runs(5)
    heir.terminate()
    heir.wait()
    stage.expect_each_once()


def test_only_one_of_three_beats_sends_and_the_others_say_so_once(make_stage: MakeStage) -> None:
    """C01 (a)."""
    stage = make_stage({"one": 1.0})
    stage.worker()
    beats = [_standing(stage.beat()) for _ in range(3)]
    stage.wait_for_runs(5)
    assert all(beat.running() for beat in beats)
    ((leaders,),) = stage.rows(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pglock:leader:stage@%'"
    )
    assert leaders == 1
    standbys = [beat for beat in beats if beat is not stage.leader(beats)]
    assert [beat.output().count("standby: ") for beat in standbys] == [1, 1]
    for beat in [*standbys, stage.leader(beats)]:
        beat.terminate()
        assert beat.wait() == 0
    stage.expect_each_once()


def test_workers_with_embedded_beats_send_once_and_standbys_go_on_working(
    make_stage: MakeStage,
) -> None:
    """C01 (b): `worker -B` twice; and a beat whose worker was killed ends too."""
    # Several messages at once: Redis gives a lone one to whichever worker asked first, and two
    # workers that ask once a second may go on asking in the same order.
    stage = make_stage(dict.fromkeys(("one", "two", "three", "four"), 1.0))
    first = stage.worker("-B", "--scheduler", "pglock", "-s", os.devnull)
    first.wait_for_line("leadership gained: ")
    second = stage.worker("-B", "--scheduler", "pglock", "-s", os.devnull)
    second.wait_for_line("standby: ")
    stage.wait_for_runs(8)
    eventually(
        lambda: "succeeded" in first.output() and "succeeded" in second.output(),
        20,
        "both workers work",
    )
    first.kill()
    eventually(lambda: not first.children(), 20, "the embedded beat ends with its worker")
    second.wait_for_line("leadership gained: ")
    count = len(stage.rows("SELECT 1 FROM ran"))
    stage.wait_for_runs(count + 3)
    second.terminate()
    assert second.wait() == 0
    runs = stage.rows("SELECT entry, due, count(*) FROM ran GROUP BY 1, 2 HAVING count(*) > 1")
    assert runs == []


def test_a_leader_whose_session_is_terminated_stands_by_and_leads_again(
    make_stage: MakeStage,
) -> None:
    """C04: the same process goes on; nothing is sent twice."""
    stage = make_stage({"one": 1.0})
    stage.worker()
    beats = [_standing(stage.beat()), _standing(stage.beat())]
    for _ in range(3):
        term = stage.term()
        leader = stage.leader(beats)
        stage.rows(
            "SELECT pg_terminate_backend(backend_pid) FROM pglock.beat_terms WHERE namespace = %s",
            stage.namespace,
        )
        leader.wait_for_line(rf"leadership lost: .*term {term}\)")
        stage.leader(beats, not_before_term=term + 1)
        ran = len(stage.rows("SELECT 1 FROM ran"))
        stage.wait_for_runs(ran + 2)
    assert all(beat.running() for beat in beats)
    for beat in beats:
        beat.terminate()
        assert beat.wait() == 0
        assert "Traceback" not in beat.output()
    stage.expect_each_once()


def test_a_frozen_leader_is_replaced_and_sends_nothing_when_it_wakes(
    make_stage: MakeStage,
) -> None:
    """SIGSTOP: the lease is what ends it, and it finds that out before it sends."""
    stage = make_stage({"one": 1.0}, settings={"pglock_leader_lease": 2.0})
    stage.worker()
    beats = [_standing(stage.beat()), _standing(stage.beat())]
    frozen = stage.leader(beats)
    term = stage.term()
    beats.remove(frozen)
    frozen.stop()
    heir = stage.leader(beats, not_before_term=term + 1)
    ran = len(stage.rows("SELECT 1 FROM ran"))
    stage.wait_for_runs(ran + 2)
    sends = frozen.output().count("Sending due task")
    frozen.cont()
    frozen.wait_for_line("leadership lost: ")
    stage.wait_for_runs(ran + 4)
    assert frozen.output().count("Sending due task") == sends
    for beat in (frozen, heir):
        beat.terminate()
        assert beat.wait() == 0
    stage.expect_each_once()


def _slack() -> float:
    # A busy machine delays the processes themselves; the documented figures are measured
    # with PGLOCK_TEST_KILLS set, on a machine that does nothing else.
    return 0.0 if "PGLOCK_TEST_KILLS" in os.environ else 1.0


def test_the_table_of_this_module_has_no_constraint(make_stage: MakeStage) -> None:
    """The control: the table in which runs are counted takes doubles."""
    stage = make_stage({"one": 1.0})
    with psycopg.connect(stage.url, autocommit=True) as connection:
        for _ in range(2):
            connection.execute("INSERT INTO ran VALUES ('one', '2026-01-01Z', 1)")
    assert len(stage.rows("SELECT 1 FROM ran")) == 2

"""Several beats, one leads: killed, stopped, cut off; every occurrence runs exactly once."""

from __future__ import annotations

import datetime as dt
import os
import random
import statistics
import time
from pathlib import Path

import psycopg
import pytest

from tests.support.broker_log import watched
from tests.support.processes import Process, eventually
from tests.support.stage import MakeStage, Stage

# The figures in the documentation are of 300 kills, 100 stops and 30 freezes.
KILLS = int(os.environ.get("PGLOCK_TEST_KILLS", "30"))
STOPS = int(os.environ.get("PGLOCK_TEST_STOPS", "5"))
FREEZES = int(os.environ.get("PGLOCK_TEST_FREEZES", "2"))
LEASE = 2.0
# A busy machine may take so long to replace a frozen leader that this counts as a downtime.
FREEZING = {"pglock_leader_lease": LEASE, "pglock_catchup": 100}


def _standing(beat: Process) -> Process:
    beat.wait_for_line("standby: |leadership gained: ")
    return beat


def _slack(variable: str) -> float:
    # A busy machine delays the processes themselves; the documented figures are measured
    # with the variable set, on a machine that does nothing else.
    return 0.0 if variable in os.environ else 3.0


def _pace() -> random.Random:
    seed = random.SystemRandom().randrange(1_000_000)
    print(f"\nseed {seed}")
    return random.Random(seed)  # noqa: S311 - not for secrets


def _figures(lateness: list[float]) -> str:
    p95 = sorted(lateness)[round(0.95 * (len(lateness) - 1))]
    return (
        f"lateness median {statistics.median(lateness):.3f} s, 95 % {p95:.3f} s,"
        f" max {max(lateness):.3f} s, n {len(lateness)}"
    )


def _end(stage: Stage, beats: list[Process]) -> int:
    for beat in beats:
        _standing(beat)  # before that it does not know what a signal is
        beat.terminate()
        assert beat.wait() == 0
    return stage.expect_each_once()


@pytest.mark.slow
@pytest.mark.timeout(120 + 10 * KILLS)
def test_a_killed_leader_is_replaced_and_each_occurrence_runs_once(
    make_stage: MakeStage,
) -> None:
    """C03 (a): SIGKILL among three; the lateness of what falls due first afterwards."""
    stage = make_stage({"one": 1.0, "two": 1.0})
    stage.worker()
    beats = [stage.beat() for _ in range(3)]
    pace = _pace()
    lateness = []
    began = time.monotonic()
    with stage.witness() as witness:
        for _ in range(KILLS):
            leader = stage.leader(beats)
            term = stage.term()
            # Of the two others the one that was started last may not be ready yet.
            _standing(next(beat for beat in beats if beat is not leader))
            time.sleep(pace.uniform(0.0, 1.0))
            moment = witness.now()
            leader.kill()
            beats.remove(leader)
            beats.append(stage.beat())
            lateness.append(witness.lateness_after(moment))
            heir = stage.leader(beats, not_before_term=term + 1)
            gained = heir.wait_for_line(rf"leadership gained: .* in term {term + 1}; (.*)")
            assert f":{leader.pid} vanished in term {term}" in gained[1]
    took = time.monotonic() - began
    count = _end(stage, beats)
    print(f"{KILLS} kills in {took:.0f} s, {count} occurrences: {_figures(lateness)}")
    assert statistics.median(lateness) <= 0.5 + _slack("PGLOCK_TEST_KILLS")
    assert max(lateness) <= 1.0 + _slack("PGLOCK_TEST_KILLS")


@pytest.mark.slow
@pytest.mark.timeout(120 + 10 * STOPS)
def test_a_stopped_leader_hands_over_at_once(make_stage: MakeStage) -> None:
    """C02: SIGTERM; the standby is told, so nothing waits for a poll."""
    stage = make_stage({"one": 1.0})
    stage.worker()
    beats = [stage.beat(), stage.beat()]
    pace = _pace()
    lateness = []
    with stage.witness() as witness:
        for _ in range(STOPS):
            for beat in beats:
                _standing(beat)
            leader = stage.leader(beats)
            time.sleep(pace.uniform(0.0, 1.0))
            moment = witness.now()
            leader.terminate()
            assert leader.wait() == 0
            assert "Traceback" not in leader.output()
            beats.remove(leader)
            lateness.append(witness.lateness_after(moment))
            (survivor,) = beats
            survivor.wait_for_line(rf":{leader.pid} resigned from term")
            beats.append(stage.beat())
    count = _end(stage, beats)
    print(f"{STOPS} stops, {count} occurrences: {_figures(lateness)}")
    assert max(lateness) <= 0.2 + _slack("PGLOCK_TEST_STOPS")


def test_only_one_of_three_beats_sends_and_the_others_say_so_once(make_stage: MakeStage) -> None:
    """C01 (a)."""
    stage = make_stage({"one": 1.0})
    stage.worker()
    beats = [_standing(stage.beat()) for _ in range(3)]
    stage.wait_for_runs(5)
    assert all(beat.running() for beat in beats)
    ((leaders,),) = stage.rows(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'pglock:leader:stage@%'"
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


@pytest.mark.slow
@pytest.mark.timeout(120 + 20 * FREEZES)
def test_a_frozen_leader_is_replaced_and_sends_nothing_when_it_wakes(
    make_stage: MakeStage,
) -> None:
    """SIGSTOP: the lease is what ends it, and it finds that out before it sends.

    What it may send is a message that it was handing over at that moment: with the same id, so
    that it runs once all the same.
    """
    stage = make_stage({"one": 1.0}, settings=FREEZING)
    stage.worker()
    beats = [_standing(stage.beat()), _standing(stage.beat())]
    pace = _pace()
    lateness = []
    in_hand: set[str] = set()
    with stage.witness() as witness, watched(stage.broker, stage.queue) as log:
        ends = []
        for _ in range(FREEZES):
            frozen = stage.leader(beats)
            term = stage.term()
            stood = frozen.output().count("standby: ")
            time.sleep(pace.uniform(0.0, 1.0))
            moment = witness.now()
            _freeze(frozen)
            stopped_at, holding = witness.now(), witness.unconfirmed()
            lateness.append(witness.lateness_after(moment))
            stage.leader(beats, not_before_term=term + 1)
            sends = frozen.output().count("Sending due task")
            ends.append((term, stopped_at, dt.datetime.now(dt.UTC), holding))
            frozen.cont()
            frozen.wait_for_line(rf"leadership lost: .*\(term {term}\)")
            frozen.wait_for_line("standby: ", count=stood + 1)
            assert frozen.output().count("Sending due task") - sends <= len(holding)
        count = _end(stage, beats)
        # All that was ever sent is known by now, and can be judged.
        for term, stopped_at, woken_at, holding in ends:
            in_hand |= {it.task_id for it in log.expect_silence(term, woken_at, holding)}
            claims = "SELECT period FROM pglock.job_runs WHERE term = %s AND due_at > %s"
            assert stage.rows(claims, term, stopped_at) == []
        log.expect_one_leader_after_the_other(in_hand)
    print(f"{FREEZES} freezes, {count} occurrences, {len(in_hand)} in hand: {_figures(lateness)}")
    assert max(lateness) <= LEASE + 1.0 + _slack("PGLOCK_TEST_FREEZES")


def test_control_a_leader_that_trusts_itself_sends_when_it_wakes(make_stage: MakeStage) -> None:
    stage = make_stage({"one": 1.0}, settings=FREEZING)
    trusting = _standing(stage.beat(scheduler="tests.apps.beat_trusting:Trusting"))
    stage.leader([trusting])
    heir = _standing(stage.beat())
    with stage.witness() as witness, watched(stage.broker, stage.queue) as log:
        _freeze(trusting)
        witness.lateness_after(witness.now())
        stage.leader([heir], not_before_term=2)
        woken_at = dt.datetime.now(dt.UTC)
        trusting.cont()
        eventually(lambda: log.of_term(1, woken_at), 20, "it sends although another leads")
        with pytest.raises(AssertionError, match="term 1 was over"):
            log.expect_silence(1, woken_at)
        eventually(lambda: log.messages()[-1].term == 2, 20, "the other sends too")
        with pytest.raises(AssertionError):
            log.expect_one_leader_after_the_other()


@pytest.mark.parametrize(
    "scheduler", ["FreezesInHand", pytest.param("TrustsAfterFreezing", marks=pytest.mark.chaos)]
)
def test_a_leader_that_is_frozen_in_a_burst_sends_no_more_than_the_message_in_its_hand(
    make_stage: MakeStage, tmp_path: Path, scheduler: str
) -> None:
    """It asks itself before each message, and not once for all of them: the second is the control.

    What it sends then carries the id that its heir has used too: the ledger refuses it.
    """
    stage = make_stage(
        dict.fromkeys(("one", "two", "three"), 1.0),
        settings=FREEZING,
        extra={"APP_MARKER": str(tmp_path / "marker")},
    )
    stage.worker()
    with stage.witness() as witness, watched(stage.broker, stage.queue) as log:
        frozen = _standing(stage.beat(scheduler=f"tests.apps.beat_freezing:{scheduler}"))
        stage.leader([frozen])
        heir = _standing(stage.beat())
        (tmp_path / "marker").touch()
        eventually(lambda: _state(frozen) == "T", 20, "it freezes itself")
        moment, holding = witness.now(), witness.unconfirmed()
        assert len(holding) == 3
        witness.lateness_after(moment)
        stage.leader([heir], not_before_term=2)
        woken_at = dt.datetime.now(dt.UTC)
        frozen.cont()
        if scheduler == "TrustsAfterFreezing":
            eventually(lambda: len(log.of_term(1, woken_at)) > 1, 20, "it sends the rest")
            with pytest.raises(AssertionError, match="term 1 was over"):
                log.expect_silence(1, woken_at, holding)
            return
        frozen.wait_for_line(r"leadership lost: .*\(term 1\)")
        frozen.wait_for_line("standby: ")
        _end(stage, [frozen, heir])
        # Nothing at all where the transport sends a burst as a whole: that is given up.
        for sent in log.expect_silence(1, woken_at, holding):
            assert [it.term for it in log.messages() if it.task_id == sent.task_id] == [2, 1]


def _freeze(beat: Process) -> None:
    beat.stop()
    eventually(lambda: _state(beat) == "T", what="it is frozen", interval=0.001)


def _state(process: Process) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_control_two_stock_beats_send_everything_twice(make_stage: MakeStage) -> None:
    stage = make_stage({"one": 1.0})
    with watched(stage.broker, stage.queue) as log:
        beats = [stage.beat("-s", os.devnull, scheduler="celery.beat:Scheduler") for _ in "ab"]
        for beat in beats:
            beat.wait_for_line("Sending due task one", count=3)
        eventually(lambda: len(log.messages()) >= 6, what="both have sent")
        assert {it.sender for it in log.messages()} == {beat.pid for beat in beats}
        # With other ids each time: so nobody can tell that two of them are the same.
        assert len({it.task_id for it in log.messages()}) >= 6


def test_control_a_run_that_is_lost_or_doubled_is_seen(make_stage: MakeStage) -> None:
    """The table in which runs are counted takes doubles, and the schedule tells what is due."""
    stage = make_stage({"one": 1.0})
    stage.worker()
    beat = stage.beat()
    stage.wait_for_runs(3)
    assert _end(stage, [beat]) >= 3
    with psycopg.connect(stage.url, autocommit=True) as connection:
        for change in (
            "INSERT INTO ran SELECT * FROM ran ORDER BY due LIMIT 1",
            "DELETE FROM ran WHERE due = (SELECT min(due) FROM ran)",
        ):
            connection.execute(change)
            with pytest.raises(AssertionError, match="entry one: "):
                stage.expect_each_once()

"""redbeat under LeaderMixin: its own store and its own tick, while the beat leads."""

from __future__ import annotations

import itertools
import time

from tests.support.processes import Process, eventually
from tests.support.stage import MakeStage, Stage

APP = "tests.apps.redbeat_app"


def _runs(stage: Stage) -> list[float]:
    rows = stage.rows("SELECT extract(epoch FROM at)::float8 FROM ran ORDER BY at")
    return [at for (at,) in rows]


def _gaps(stage: Stage) -> list[float]:
    return [later - at for at, later in itertools.pairwise(_runs(stage))]


def _beat(stage: Stage, scheduler: str) -> Process:
    # As of its own scheduler: how long it sleeps at the most.
    return stage.beat("--max-interval", "1", scheduler=f"{APP}:{scheduler}")


def test_only_the_leader_s_redbeat_ticks_and_a_killed_one_is_replaced(
    make_stage: MakeStage,
) -> None:
    stage = make_stage({"one": 1.0}, app=APP)
    stage.worker()
    beats = [_beat(stage, "Gated"), _beat(stage, "Gated")]
    for beat in beats:
        # A standby too, whom redbeat's own lock would have kept waiting.
        beat.wait_for_line("standby: |leadership gained: ", 60)
    stage.wait_for_runs(3)
    leader = stage.leader(beats)
    leader.kill()
    killed = time.time()
    beats.remove(leader)
    beats.append(_beat(stage, "Gated"))
    # It may be the new one, if that was there before the other's next poll.
    leader = stage.leader(beats, not_before_term=2)
    eventually(lambda: _runs(stage)[-1] > killed, 10, "it goes on")
    (other,) = (beat for beat in beats if beat is not leader)
    other.wait_for_line("standby: ")
    count = len(_runs(stage))
    stage.wait_for_runs(count + 1)
    ((standby,),) = stage.rows(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pglock:standby:%%'"
    )
    assert standby == 1
    gaps = _gaps(stage)
    print(f"\n{len(gaps) + 1} runs, {min(gaps):.2f} to {max(gaps):.2f} s apart")
    # What a worker does with each takes its time on a busy machine; a double would be at once.
    assert min(gaps) > 0.4
    assert max(gaps) < 5.0
    for beat in beats:
        beat.terminate()
        assert beat.wait() == 0
        assert "Traceback" not in beat.output()
    silent = [beat for beat in beats if "leadership gained" not in beat.output()]
    assert all("Sending due task" not in beat.output() for beat in silent)


def test_without_gate_and_lock_several_of_them_send_twice(make_stage: MakeStage) -> None:
    """The control. Two of them may look at their schedule in turn for a long time."""
    stage = make_stage({"one": 1.0}, app=APP, settings={"redbeat_lock_key": None})
    stage.worker()
    beats = [_beat(stage, "RedBeatScheduler") for _ in range(4)]
    for beat in beats:
        beat.wait_for_line("beat: Starting")
    eventually(lambda: any(gap < 0.2 for gap in _gaps(stage)), 60, "two runs at once")

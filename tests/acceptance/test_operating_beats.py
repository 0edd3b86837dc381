"""What operators do to beats that run: pause, resume, trigger, have the leader resign, ask them.

And what a beat whose main loop hangs does to the others.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery.beat
import pytest

from celery_pglock import migrating
from celery_pglock.demo.servers import PostgresServer
from tests.acceptance.bench import close_app
from tests.support.processes import Process, eventually
from tests.support.proxy import Proxy
from tests.support.queued import Message, count, queued
from tests.support.requirements import since
from tests.support.stage import APP, MakeStage, Stage

# An idle machine answers within this; make test, where a machine does much else, allows more.
ANSWER = 2.0 if "PGLOCK_TEST_ANSWER" in os.environ else 10.0


def standing(beat: Process) -> Process:
    beat.wait_for_line("standby: |leadership gained: ")
    return beat


def pglock(stage: Stage, *arguments: str, code: int = 0) -> str:
    command = stage.processes.celery(APP, "pglock", *arguments, env=stage.env(), name="pglock")
    assert command.wait(60) == code, command.output()
    return command.output()


def now(stage: Stage) -> dt.datetime:
    ((moment,),) = stage.rows("SELECT pg_catalog.clock_timestamp()")
    assert isinstance(moment, dt.datetime)
    return moment


def dues(stage: Stage, entry: str) -> list[dt.datetime]:
    rows = stage.rows("SELECT due FROM ran WHERE entry = %s ORDER BY due", entry)
    return [due for (due,) in rows]


def wait_for_one_due_after(stage: Stage, entry: str, moment: dt.datetime) -> None:
    eventually(
        lambda: any(due > moment for due in dues(stage, entry)),
        20,
        f"{entry} runs for an occurrence after {moment}",
    )


@pytest.mark.slow
def test_a_paused_entry_is_not_sent_and_a_resumed_one_goes_on(make_stage: MakeStage) -> None:
    stage = make_stage({"one": 1.0, "two": 1.0})
    stage.worker()
    beats = [standing(stage.beat()), standing(stage.beat())]
    stage.wait_for_runs(4)
    leader = stage.leader(beats)
    pglock(stage, "pause", "one", "--reason", "a deploy")
    paused_at = now(stage)
    leader.wait_for_line("entry one is due when it is resumed")
    ((reason,),) = stage.rows("SELECT paused_reason FROM pglock.beat_entries WHERE entry = 'one'")
    assert reason.endswith(": a deploy")
    # A standby that takes over knows of it too; the other entry goes on all the time.
    leader.kill()
    stage.leader(beats, not_before_term=2)
    wait_for_one_due_after(stage, "two", now(stage))
    still_paused_at = now(stage)
    assert "one is resumed" in pglock(stage, "resume", "one")
    resumed_at = now(stage)
    wait_for_one_due_after(stage, "one", resumed_at)
    assert not [due for due in dues(stage, "one") if paused_at < due < still_paused_at]
    rows = stage.rows(
        "SELECT status, due_at FROM pglock.job_runs WHERE entry = 'one' AND due_at BETWEEN %s AND %s",
        paused_at + dt.timedelta(seconds=1),
        still_paused_at - dt.timedelta(seconds=1),
    )
    assert rows == [], "what was due meanwhile is not made up for, and leaves no row"
    assert "was not paused" in pglock(stage, "resume", "one")
    stage.account("two")


@pytest.mark.slow
def test_a_pause_ends_by_itself(make_stage: MakeStage) -> None:
    stage = make_stage({"one": 1.0})
    stage.worker()
    standing(stage.beat())
    stage.wait_for_runs(2)
    pglock(stage, "pause", "one", "--for", "3s")
    paused_at = now(stage)
    ((until,),) = stage.rows("SELECT paused_until FROM pglock.beat_entries WHERE entry = 'one'")
    wait_for_one_due_after(stage, "one", until)
    assert not [due for due in dues(stage, "one") if paused_at < due < until]
    assert min(due for due in dues(stage, "one") if due >= until) - until < dt.timedelta(seconds=1)


@pytest.mark.slow
def test_a_pause_that_is_made_shorter_ends_when_it_says(make_stage: MakeStage) -> None:
    """Under the longer one the entry has been passed over already."""
    stage = make_stage({"one": 1.0})
    stage.worker()
    beat = standing(stage.beat())
    stage.wait_for_runs(2)
    pglock(stage, "pause", "one")
    beat.wait_for_line("entry one is due when it is resumed")
    pglock(stage, "pause", "one", "--for", "2s")
    ((until,),) = stage.rows("SELECT paused_until FROM pglock.beat_entries WHERE entry = 'one'")
    wait_for_one_due_after(stage, "one", until)


@pytest.mark.slow
def test_a_triggered_entry_runs_once_and_its_schedule_goes_on(make_stage: MakeStage) -> None:
    stage = make_stage({"hourly": 3600.0})
    stage.worker()
    standing(stage.beat())
    eventually(lambda: stage.rows("SELECT 1 FROM pglock.beat_entries"), what="it is registered")
    query = "SELECT next_due_at, due_at FROM pglock.beat_entries"
    before = stage.rows(query)
    pglock(stage, "pause", "hourly")
    pglock(stage, "trigger", "hourly")
    ((reason,),) = eventually(
        lambda: stage.rows("SELECT reason FROM pglock.job_runs WHERE status = 'done'"),
        what="it is done",
    )
    assert reason.startswith("triggered by ")
    assert stage.rows(query) == before
    assert len(dues(stage, "hourly")) == 1
    assert "did you mean 'hourly'?" in pglock(stage, "trigger", "hourli", code=2)


@pytest.mark.slow
def test_a_leader_that_is_asked_to_hands_over_and_nothing_is_lost(make_stage: MakeStage) -> None:
    stage = make_stage({"one": 1.0})
    stage.worker()
    first = standing(stage.beat())
    stage.leader([first])
    stage.wait_for_runs(2)
    assert "leads again, because no other stood by, term 2" in pglock(stage, "resign")
    second = standing(stage.beat())
    term = stage.term()
    told = pglock(stage, "resign")
    assert f"term {term + 1}" in told
    assert stage.leader([first, second], not_before_term=term + 1) is second
    first.wait_for_line("standby: ")
    wait_for_one_due_after(stage, "one", now(stage))
    for beat in (first, second):
        beat.terminate()
        assert beat.wait() == 0
    stage.expect_each_once()
    assert "no beat leads stage; start one" in pglock(stage, "resign", code=1)


@pytest.mark.slow
def test_a_leader_that_cannot_reach_the_broker_hands_over_to_one_that_can(
    make_stage: MakeStage,
) -> None:
    stage = make_stage({"one": 1.0})
    stage.worker()
    broker = stage.broker
    with contextlib.closing(Proxy(broker)) as proxy:
        stage.broker = proxy.url
        cut_off = standing(stage.beat())
        stage.leader([cut_off])
        stage.wait_for_runs(2)
        stage.broker = broker
        other = standing(stage.beat())
        proxy.close()
        cut_off.wait_for_line("leadership handed over: .*the broker did not take 3 messages", 30)
        assert stage.leader([cut_off, other], not_before_term=2) is other
        wait_for_one_due_after(stage, "one", now(stage))
        for beat in (cut_off, other):
            beat.terminate()
            assert beat.wait() == 0
        stage.expect_each_once()


@pytest.mark.slow
def test_a_standby_with_another_schedule_says_so(make_stage: MakeStage) -> None:
    stage = make_stage({"one": 1.0})
    leader = standing(stage.beat())
    stage.leader([leader])
    same = standing(stage.beat())
    stage.entries = {"one": 1.0, "new": 5.0}
    other = standing(stage.beat())
    other.wait_for_line("has another schedule than this beat")
    # The other one must not be the next leader: then it is this one's turn to say so.
    other.kill()
    leader.kill()
    stage.leader([same], not_before_term=2)
    assert "another schedule" not in same.output().partition("leadership gained")[0]


def test_a_beat_that_works_touches_its_heartbeat_file(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    file = tmp_path / "beat"
    stage = make_stage({"hourly": 3600.0}, settings={"pglock_heartbeat_file": str(file)})
    leader = standing(stage.beat())
    eventually(file.exists, what="the leader touches it")
    first = os.stat(file).st_mtime  # noqa: PTH116 - for its fraction of a second
    eventually(lambda: file.stat().st_mtime > first + 1.5, what="it is touched again and again")
    leader.stop()
    eventually(lambda: "T" in Path(f"/proc/{leader.pid}/stat").read_text().rpartition(")")[2])
    frozen = file.stat().st_mtime
    other_file = tmp_path / "other"
    stage.settings = {"pglock_heartbeat_file": str(other_file)}
    standing(stage.beat())
    eventually(other_file.exists, what="a standby touches its own")
    eventually(lambda: other_file.stat().st_mtime > frozen + 2, what="time goes on for the standby")
    assert file.stat().st_mtime == frozen, "a beat that hangs does not"
    leader.cont()


@pytest.mark.slow
def test_a_leader_that_resigns_in_a_burst_has_confirmed_what_it_sent(
    make_stage: MakeStage,
) -> None:
    """What it has not sent is left to the next one: no message comes twice, none is lacking."""
    stage = make_stage({f"entry{number:02}": 1.0 for number in range(60)})
    beats = [standing(stage.beat()), standing(stage.beat())]
    for term in (1, 2):
        stage.leader(beats, not_before_term=term)
        wait_for_messages(stage, 100)
        pglock(stage, "resign")
    stage.leader(beats, not_before_term=3)
    for beat in beats:
        beat.terminate()
        assert beat.wait() == 0
    ids = [message.task_id for message in messages(stage)]
    print(f"\n{len(ids)} messages over {stage.term()} terms, each once")
    assert len(set(ids)) == len(ids)
    recorded = stage.rows("SELECT task_id FROM pglock.job_runs WHERE sent_at IS NOT NULL")
    assert {task_id for (task_id,) in recorded} == set(ids)


def messages(stage: Stage) -> list[Message]:
    return queued(stage.broker, stage.queue)


def wait_for_messages(stage: Stage, more: int) -> None:
    """Wait until so many more have come."""
    before = count(stage.broker, stage.queue)
    eventually(
        lambda: count(stage.broker, stage.queue) >= before + more, 30, f"{more} more messages come"
    )


# --- a beat in every worker, and whether all of them answer -----------------------------------------


def embedded(stage: Stage) -> Process:
    worker = stage.worker("-B", "--scheduler", "pglock", "-s", os.devnull)
    worker.wait_for_line("standby: |leadership gained: ")
    return worker


def leading(stage: Stage, workers: list[Process], term: int) -> Process:
    """Wait until the beat of one of these workers leads, and return that worker."""
    mark = f" leads {stage.namespace} in term {term};"

    def found() -> Process | None:
        return next((worker for worker in workers if mark in worker.output()), None)

    worker = eventually(found, 20, f"the beat of a worker leads in term {term}")
    assert worker is not None
    return worker


@pytest.mark.chaos
@pytest.mark.slow
def test_a_worker_that_leads_hands_over_when_it_is_stopped(make_stage: MakeStage) -> None:
    stage = make_stage({"one": 1.0, "two": 1.0})
    stage.worker()  # it is left at the end, to work off what the others have sent
    workers = [embedded(stage) for _ in range(3)]
    for term in (1, 2, 3):
        leader = leading(stage, workers, term)
        if term > 1:
            leader.wait_for_line(rf"in term {term}; .* resigned from term {term - 1}$")
        ran = len(stage.rows("SELECT 1 FROM ran"))
        stage.wait_for_runs(ran + 4)
        leader.terminate()
        assert leader.wait() == 0
        workers.remove(leader)
    assert stage.expect_each_once() >= 12


class Asker:
    """Asks workers and beats how they are, over a broker of its own choice."""

    def __init__(self, broker: str) -> None:
        self._app = celery.Celery("asker", broker=broker, set_as_current=False)

    def ask(self, what: str, count: int) -> float:
        """Ask all for one thing; return how long it took until so many have answered."""
        started = time.monotonic()
        answers: Any = self._app.control.broadcast(what, reply=True, timeout=20.0, limit=count)
        took = time.monotonic() - started
        assert len({name for answer in answers for name in answer}) == count, answers
        return took

    def close(self) -> None:
        close_app(self._app)


@pytest.fixture
def asker(fresh_redis_url: str) -> Iterator[Asker]:
    asker = Asker(fresh_redis_url)
    yield asker
    asker.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("none", marks=pytest.mark.chaos),
        "database down",
        pytest.param("slow broker", marks=pytest.mark.chaos),
    ],
)
def test_workers_with_a_beat_answer_whatever_their_beat_does(
    make_stage: MakeStage, own_postgres: PostgresServer, asker: Asker, fault: str
) -> None:
    """One leads, two stand by."""
    migrating.migrate(own_postgres.url("postgres"), "pglock")
    stage = make_stage({"one": 1.0}, url=own_postgres.url("postgres"))
    with contextlib.closing(Proxy(stage.broker)) as proxy:
        stage.broker, direct = proxy.url, stage.broker
        workers = [embedded(stage) for _ in range(3)]
        leading(stage, workers, 1)
        stage.wait_for_runs(2)
        if fault == "database down":
            own_postgres.stop("immediate")
            for worker in workers:
                worker.wait_for_line("cannot use PostgreSQL|leadership lost")
        elif fault == "slow broker":
            proxy.delay = 0.2
        took = {what: asker.ask(what, 3) for what in ("ping", "active")}
        print(f"\n{fault}: {took}")
        assert max(took.values()) <= ANSWER
        stage.broker = direct
        told = stage.processes.celery(
            APP, "inspect", "ping", "--timeout", "10", env=stage.env(), name="ping"
        )
        assert told.wait(60) == 0, told.output()
        assert "3 nodes online" in told.output()
        if fault == "database down":
            own_postgres.start()
        assert all(worker.running() for worker in workers)


@pytest.mark.slow
def test_beats_answer_whether_they_lead_or_stand_by_or_have_no_database(
    make_stage: MakeStage, own_postgres: PostgresServer, asker: Asker
) -> None:
    since(hasattr(celery.beat, "BeatPidbox"), "Celery 5.7, whose beat can be asked")
    migrating.migrate(own_postgres.url("postgres"), "pglock")
    stage = make_stage({"one": 1.0}, url=own_postgres.url("postgres"))
    beats = [
        standing(stage.beat("--enable-remote-control", "-n", f"beat{number}@%h"))
        for number in range(2)
    ]
    stage.leader(beats)
    for beat in beats:
        beat.wait_for_line("beat pidbox: Connected")
    took = [eventually(lambda: asker.ask("ping", 2), what="both answer")]
    own_postgres.stop("immediate")
    for beat in beats:
        beat.wait_for_line("cannot use PostgreSQL")
    took.append(asker.ask("ping", 2))
    print(f"\nwith a database, and without: {took}")
    assert max(took) <= ANSWER
    own_postgres.start()


# --- a main loop that hangs -------------------------------------------------------------------------

HANGING = {"imports": ["tests.apps.beat_plan"], "pglock_leader_lease": 2.0}


def of_the_first_term(stage: Stage) -> list[Message]:
    return [message for message in messages(stage) if message.headers["pglock_term"] == 1]


def expect_no_gap(stage: Stage, entry: str) -> None:
    """Fail unless each occurrence of an entry has been sent, under one id, or is told as missed.

    It is missed if nobody was up to take over for long enough.
    """
    sent = {(m.due, m.task_id) for m in messages(stage) if m.entry == entry}
    missed = stage.rows(
        "SELECT due_at FROM pglock.job_runs WHERE entry = %s AND status = 'missed'", entry
    )
    dues = sorted([due for due, _ in sent] + [due for (due,) in missed])
    assert dues == [dues[0] + dt.timedelta(seconds=k) for k in range(len(dues))]


@pytest.mark.slow
def test_a_leader_that_hangs_between_two_looks_sends_nothing_of_its_term_when_it_wakes(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    """A log handler that blocks, for instance; its lease ends it, and another leads."""
    hang = tmp_path / "hang"
    stage = make_stage({"one": 1.0}, settings=HANGING, extra={"APP_HANG": str(hang)})
    hung = standing(stage.beat())
    stage.leader([hung])
    del stage.extra["APP_HANG"]
    heir = standing(stage.beat())
    eventually(lambda: len(messages(stage)) >= 2, 20, "it sends")
    hang.touch()
    eventually(hang.with_suffix(".arrived").exists, 20, "it hangs")
    stage.leader([heir], not_before_term=2)
    sent = len(of_the_first_term(stage))
    wait_for_messages(stage, 2)
    hang.with_suffix(".over").touch()
    hung.wait_for_line(r"leadership lost: .*\(term 1\)")
    wait_for_messages(stage, 3)
    assert len(of_the_first_term(stage)) == sent
    for beat in (hung, heir):
        beat.terminate()
        assert beat.wait() == 0
    expect_no_gap(stage, "one")


@pytest.mark.slow
def test_a_leader_that_hangs_in_a_message_sends_at_most_that_one_when_it_wakes(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    """An argument that is computed and never comes; the message has the same id from both."""
    gate = tmp_path / "gate"
    stage = make_stage(
        {"one": 1.0},
        settings=HANGING,
        extra={
            "APP_GATE": str(gate),
            "APP_PLAN": json.dumps({"hangs": {"schedule": 1.0, "gate": True}}),
        },
    )
    hung = stage.beat()
    hung.wait_for_line("leadership gained: ")
    eventually(gate.with_suffix(".arrived").exists, 20, "it hangs")
    del stage.extra["APP_GATE"]
    heir = standing(stage.beat())
    stage.leader([heir], not_before_term=2)
    eventually(lambda: len(messages(stage)) >= 4, 20, "the other sends")
    before = of_the_first_term(stage)
    gate.touch()
    hung.wait_for_line(r"leadership lost: .*\(term 1\)")
    wait_for_messages(stage, 4)
    # What it was handing over with it, in one batch, may come as well: of each entry only one.
    late = [message for message in of_the_first_term(stage) if message not in before]
    assert len({message.entry for message in late}) == len(late) <= 2
    for beat in (hung, heir):
        beat.terminate()
        assert beat.wait() == 0
    for entry in ("one", "hangs"):
        expect_no_gap(stage, entry)
    print(f"\n{len(late)} messages of the term that was over")

"""The rules of a beat, each next to a beat or a scheduler that goes without it.

Also what users of Celery's own schedulers rely on: their entries are sent as they wrote them.
"""

from __future__ import annotations

import base64
import copy
import datetime as dt
import itertools
import json
import uuid
from pathlib import Path
from typing import Any, ClassVar, Final

import celery
import celery.beat
import pytest
import redis
from typing_extensions import override

from celery_pglock import (
    beat,
    beat_rows,
    claims,
    leadership,
    ledger,
    schedule_statements,
    schedule_store,
)
from celery_pglock.demo.servers import ValkeyServer
from tests.apps import beat_variants
from tests.integration.workbench import Gate, Sessions, replaced, work
from tests.support.databases import Database
from tests.support.processes import Process, eventually
from tests.support.queued import Message, queued
from tests.support.stage import MakeStage, Stage
from tests.support.versions import FROM_5_7

QUEUE: Final = "rules"
VARIANTS: Final = "tests.apps.beat_variants"
PLAN: Final = {"imports": ["tests.apps.beat_plan"]}


def standing(beat: Process) -> Process:
    beat.wait_for_line("standby: |leadership gained: ", 60)
    return beat


def messages(stage: Stage) -> list[Message]:
    return queued(stage.broker, stage.queue)


# --- closing: inside the signal's handler, and again after it ---------------------------------


def stopped_in_a_statement(
    make_stage: MakeStage, database: Database, scheduler: str
) -> tuple[Process, Process]:
    """Stop a leader in the middle of a statement, which is answered when it begins to resign."""
    stage = make_stage({"one": 1.0})
    gate = Gate(database, beat_variants.GATE)
    leader = stage.beat(scheduler=f"{VARIANTS}:{scheduler}")
    leader.wait_for_line("leadership gained: ")
    gate.wait_for_arrival()
    standby = standing(stage.beat())
    leader.terminate()
    leader.wait_for_line("leadership resigned: ")
    gate.open()
    return leader, standby


def test_a_beat_that_is_stopped_in_a_statement_resigns_when_it_is_answered(
    make_stage: MakeStage, database: Database
) -> None:
    leader, standby = stopped_in_a_statement(make_stage, database, "InAStatement")
    assert leader.wait(10) == 0
    assert "Traceback" not in leader.output()
    standby.wait_for_line(rf":{leader.pid} resigned from term 1")


def test_where_its_session_ends_with_the_statement_nobody_is_told(
    make_stage: MakeStage, database: Database
) -> None:
    """The control."""
    leader, standby = stopped_in_a_statement(make_stage, database, "InAStatementWhoseSessionEnds")
    assert leader.wait(10) == 0
    standby.wait_for_line(rf":{leader.pid} vanished in term 1")


def stopped_in_a_publication(
    make_stage: MakeStage, tmp_path: Path, scheduler: str
) -> tuple[Stage, Process, Process, Path]:
    """Stop a leader whose publication goes on all the same: somebody's code swallows the exit."""
    gate = tmp_path / "gate"
    stage = make_stage(
        {},
        # One by one: a batch is given up as a whole by whoever does not lead any more.
        settings={
            **PLAN,
            "pglock_leader_lease": 60.0,
            "broker_transport_options": {"retry_on_timeout": True},
        },
        extra={"APP_PLAN": json.dumps({"slow": {"schedule": 2.0, "gate": True}})},
    )
    stage.extra["APP_GATE"] = str(gate)
    leader = stage.beat(scheduler=scheduler)
    leader.wait_for_line("leadership gained: ")
    eventually(gate.with_suffix(".arrived").exists, 20, "it is publishing")
    del stage.extra["APP_GATE"]
    standby = standing(stage.beat())
    leader.terminate()
    eventually(gate.with_suffix(".struck").exists, 20, "the signal has been handled")
    return stage, leader, standby, gate


def sent_of_the_first_term(stage: Stage) -> list[str]:
    """Return the ids of all messages of the first occurrence that was ever due."""
    first = min(message.due for message in messages(stage))
    return [message.task_id for message in messages(stage) if message.due == first]


def test_a_beat_that_is_stopped_in_a_publication_confirms_it_before_it_resigns(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    stage, leader, standby, gate = stopped_in_a_publication(make_stage, tmp_path, "pglock")
    # It is stopped and still leads: nobody else may send what it is just sending.
    assert len(advisory_locks_of(stage, "leader")) == 1
    assert "leadership" not in standby.output().replace("waits for the leadership", "")
    gate.touch()
    assert leader.wait(10) == 0
    assert "Traceback" not in leader.output()
    standby.wait_for_line(rf":{leader.pid} resigned from term 1")
    eventually(lambda: len({m.due for m in messages(stage)}) >= 2, 20, "the next one is sent")
    assert len(sent_of_the_first_term(stage)) == 1


def test_a_beat_that_would_resign_in_the_handler_sends_what_another_has_sent(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    """The control: its publication ends while another leads, who had to make up for it."""
    stage, leader, standby, gate = stopped_in_a_publication(
        make_stage, tmp_path, f"{VARIANTS}:ResignsInTheHandler"
    )
    standby.wait_for_line("leadership gained: ")
    eventually(lambda: messages(stage), 20, "the standby sends it")
    gate.touch()
    eventually(lambda: len(sent_of_the_first_term(stage)) == 2, 20, "it is sent again")
    assert len(set(sent_of_the_first_term(stage))) == 1
    leader.kill()


def advisory_locks_of(stage: Stage, role: str) -> list[Any]:
    return stage.rows(
        "SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.granted"
        " AND l.locktype = 'advisory' AND a.datname = current_database()"
        " AND a.application_name LIKE %s",
        f"pglock:{role}:%",
    )


# --- claim, publish, confirm --------------------------------------------------------------------


def test_whoever_claimed_past_an_unconfirmed_occurrence_would_lose_it(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    """The control of `test_a_leader_that_dies_between_two_steps_neither_loses_nor_doubles`."""
    stage = make_stage({"one": 1.0}, extra={"APP_MARKER": str(tmp_path / "marker")})
    doomed = stage.beat(scheduler="tests.apps.beat_faults:DiesBeforePublishing")
    assert doomed.wait(20) < 0
    ((lost,),) = stage.rows("SELECT due_at FROM pglock.beat_entries WHERE published_at IS NULL")
    stage.beat(scheduler=f"{VARIANTS}:ForgetsWhatIsUnconfirmed")
    eventually(lambda: [m for m in messages(stage) if m.due > lost], 20, "it goes on")
    assert lost not in {message.due for message in messages(stage)}
    rows = stage.rows("SELECT status, sent_at FROM pglock.job_runs WHERE due_at = %s", lost)
    assert rows == [("sent", None)]


@pytest.mark.parametrize(
    ("scheduler", "ids"),
    [
        ("pglock", 1),
        pytest.param(f"{VARIANTS}:NewIdEachTime", 2, marks=pytest.mark.chaos),
    ],
)
def test_an_occurrence_that_is_published_again_has_the_same_id(
    make_stage: MakeStage, tmp_path: Path, scheduler: str, ids: int
) -> None:
    """Its leader died before the confirmation. With new ids, the control, they are two tasks."""
    stage = make_stage({"one": 1.0}, extra={"APP_MARKER": str(tmp_path / "marker")})
    doomed = stage.beat(scheduler="tests.apps.beat_faults:DiesBeforeConfirming")
    assert doomed.wait(20) < 0
    ((due,),) = stage.rows("SELECT due_at FROM pglock.beat_entries WHERE published_at IS NULL")

    def of_it() -> list[str]:
        return [message.task_id for message in messages(stage) if message.due == due]

    assert len(of_it()) == 1
    stage.beat(scheduler=scheduler)
    eventually(lambda: len(of_it()) == 2, 20, "it is published again")
    assert len(set(of_it())) == ids


DUE: Final = dt.datetime(2026, 11, 29, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize("touches_only_sent_at", [True, False])
def test_a_confirmation_must_not_open_a_run_that_a_fast_worker_has_done(
    database: Database,
    lock_sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    *,
    touches_only_sent_at: bool,
) -> None:
    """Else, the control, the next copy of the message runs the period again."""
    if not touches_only_sent_at:
        wrong = replaced(
            schedule_statements.CONFIRM.encode(),
            b"set sent_at",
            b"set status = 'sent', sent_at",
        )
        monkeypatch.setattr(schedule_statements, "CONFIRM", wrong.decode())
    leader = leadership.Leadership(database.url, namespace="app", node="a:1")
    assert leader.stand() is not None
    store = schedule_store.ScheduleStore("app", "pglock", leader)
    store.register(
        [
            beat_rows.Registration(
                entry="report", task="report", schedule="daily", anchor=DUE, next_due_at=DUE
            )
        ]
    )
    occurrence = beat_rows.Occurrence(
        entry="report",
        task="report",
        due_at=DUE,
        next_due_at=None,
        task_id=beat_rows.task_id("app", "report", DUE),
        recorded=True,
    )
    assert store.claim([occurrence], 1) == {"report"}
    wanted = work(occurrence.period, task_id=occurrence.task_id)
    books, session = ledger.Ledger(), lock_sessions.open(database.url)
    first = books.claim(session, wanted, claim=uuid.uuid4())
    assert isinstance(first, claims.Claimed)
    assert books.settle(session, wanted, first.claim, "done")
    store.confirm([occurrence])
    assert database.rows("select published_at is not null from pglock.beat_entries") == [(True,)]
    second = books.claim(session, wanted, claim=uuid.uuid4())
    assert isinstance(second, claims.Refused) is touches_only_sent_at
    leader.resign()


# --- the order in which Celery's own beat does it -----------------------------------------------


def application(broker: str, url: str | None, **entries: dict[str, Any]) -> celery.Celery:
    app = celery.Celery("rules", broker=broker, set_as_current=False)
    app.conf.update(
        task_default_queue=QUEUE,
        result_expires=None,
        beat_schedule={
            name: {"task": "report", "schedule": 3600.0, **entry} for name, entry in entries.items()
        },
    )
    if url is not None:
        app.conf.pglock_database_url = url
    return app


def sent(broker: str) -> list[dict[str, Any]]:
    """Return the messages in the queue, decoded, the oldest first."""
    with redis.Redis.from_url(broker) as client:
        raw: Any = client.lrange(QUEUE, 0, -1)
    found = [json.loads(message) for message in reversed(raw)]
    return [{**message, "body": json.loads(base64.b64decode(message["body"]))} for message in found]


def make_due(database: Database) -> None:
    """Let what is planned be due, for the beat that leads next."""
    database.rows("update pglock.beat_entries set next_due_at = clock_timestamp() - interval '1 s'")


def lead(
    app: celery.Celery, kind: type[beat.LeaderScheduler] = beat.LeaderScheduler, **more: Any
) -> beat.LeaderScheduler:
    """Return a scheduler that has just been elected and has planned its entries."""
    scheduler = kind(app, **more)
    eventually(lambda: elected(scheduler), what="it leads")
    return scheduler


def elected(scheduler: beat.LeaderScheduler) -> bool:
    scheduler.tick()
    assert scheduler._leadership is not None  # noqa: SLF001
    return scheduler._leadership.leading  # noqa: SLF001


def lead_with_all_due(app: celery.Celery, database: Database, **more: Any) -> beat.LeaderScheduler:
    lead(app).close()
    make_due(database)
    return lead(app, **more)


def test_an_occurrence_outlives_a_hiccup_of_the_broker(
    database: Database, own_valkey: ValkeyServer
) -> None:
    app = application(own_valkey.url(), database.url, hourly={})
    scheduler = lead_with_all_due(app, database)
    own_valkey.stop()
    scheduler.tick()
    own_valkey.start()
    assert sent(own_valkey.url()) == []
    eventually(lambda: scheduler.tick() is None or sent(own_valkey.url()), 20, "it is sent")
    scheduler.close()
    assert len(sent(own_valkey.url())) == 1


def test_a_scheduler_that_moves_on_before_it_sends_loses_it(own_valkey: ValkeyServer) -> None:
    """The control: Celery's own order."""
    app = application(own_valkey.url(), None, hourly={})
    app.conf.task_publish_retry_policy = {"max_retries": 0}
    scheduler = celery.beat.Scheduler(app)
    last = dt.datetime.now(dt.UTC) - dt.timedelta(hours=2)
    scheduler.schedule["hourly"].last_run_at = last
    assert scheduler.producer is not None  # connected, before the hiccup
    own_valkey.stop()
    assert scheduler.tick() == 0
    own_valkey.start()
    # It is due again in an hour; what failed is nowhere written down.
    assert scheduler.tick() > 60
    assert scheduler.schedule["hourly"].last_run_at != last
    assert sent(own_valkey.url()) == []
    # And it could send it by now.
    scheduler.apply_entry(scheduler.schedule["hourly"], producer=scheduler.producer)
    assert len(sent(own_valkey.url())) == 1
    scheduler.close()
    app.close()


# --- what users of Celery's schedulers rely on ----------------------------------------------------


def test_arguments_are_computed_for_each_message(database: Database, fresh_redis_url: str) -> None:
    numbers = itertools.count(1)
    app = application(
        fresh_redis_url,
        database.url,
        lazy={
            "args": (celery.beat.BeatLazyFunc(lambda: next(numbers)), "as it is"),
            "kwargs": {"also": celery.beat.BeatLazyFunc(lambda: next(numbers))},
        },
    )
    for _ in range(2):
        scheduler = lead_with_all_due(app, database)
        scheduler.tick()
        scheduler.close()
    bodies = [message["body"][:2] for message in sent(fresh_redis_url)]
    assert bodies == [[[1, "as it is"], {"also": 2}], [[3, "as it is"], {"also": 4}]]


class Noting(beat.LeaderScheduler):
    """One that keeps somewhere when it has sent an entry."""

    noted: ClassVar[list[str]] = []

    @override
    def reserve(self, entry: Any) -> Any:
        self.noted.append(entry.name)
        return super().reserve(entry)


def test_nothing_is_noted_in_memory_unless_the_scheduler_asks_for_it(
    database: Database, fresh_redis_url: str
) -> None:
    app = application(fresh_redis_url, database.url, hourly={})
    scheduler = lead_with_all_due(app, database)
    entry = scheduler.schedule["hourly"]
    scheduler.tick()
    scheduler.close()
    assert scheduler.schedule["hourly"] is entry
    scheduler = lead_with_all_due(app, database, kind=Noting)
    entry = scheduler.schedule["hourly"]
    scheduler.tick()
    scheduler.close()
    assert Noting.noted == ["hourly"]
    assert scheduler.schedule["hourly"] is not entry
    assert len(sent(fresh_redis_url)) == 2


ENTRY: Final = {
    "args": (1, 2),
    "options": {"headers": {"mine": "kept"}, "shadow": "renamed", "expires": 900},
}


def test_the_options_and_headers_of_an_entry_are_sent_and_stay_as_they_are_written(
    database: Database, fresh_redis_url: str
) -> None:
    app = application(fresh_redis_url, database.url, first=ENTRY, second=ENTRY)
    before = copy.deepcopy(app.conf.beat_schedule)
    scheduler = lead_with_all_due(app, database)
    scheduler.tick()
    scheduler.close()
    found = sent(fresh_redis_url)
    assert len(found) == 2
    for message in found:
        assert message["headers"]["mine"] == "kept"
        assert message["headers"].get("celery_beat_task", False) is FROM_5_7
        assert message["headers"]["shadow"] == "renamed"
        assert message["headers"]["expires"] is not None
    # The dictionary that the two entries share was written into for neither of them.
    assert {message["headers"]["pglock_entry"] for message in found} == {"first", "second"}
    assert app.conf.beat_schedule == before
    assert {name: entry.options for name, entry in scheduler.schedule.items()} == {
        name: entry["options"] for name, entry in before.items()
    }


def test_celerys_own_scheduler_writes_into_the_headers_of_an_entry(fresh_redis_url: str) -> None:
    """The control: what the test before this one looks for can be seen there.

    Before 5.7 it writes nothing.
    """
    app = application(fresh_redis_url, None, first=copy.deepcopy(ENTRY))
    before = copy.deepcopy(app.conf.beat_schedule)
    scheduler = celery.beat.Scheduler(app)
    scheduler.apply_entry(scheduler.schedule["first"], producer=scheduler.producer)
    scheduler.close()
    app.close()
    assert (app.conf.beat_schedule != before) is FROM_5_7


def test_the_clean_up_of_results_is_an_entry_like_others(
    database: Database, fresh_redis_url: str, tmp_path: Path
) -> None:
    app = application(fresh_redis_url, database.url, mine={})
    # Redis forgets results by itself; a database has to be told.
    app.conf.update(result_expires=3600, result_backend=f"db+sqlite:///{tmp_path}/results")
    scheduler = lead_with_all_due(app, database)
    scheduler.tick()
    scheduler.close()
    tasks = [message["headers"]["task"] for message in sent(fresh_redis_url)]
    assert sorted(tasks) == ["celery.backend_cleanup", "report"]
    # It keeps no row: nobody would settle it.
    assert database.rows("select entry from pglock.job_runs") == []
    # The control: the class that this one extends drops it when there are other entries.
    assert set(celery.beat.Scheduler(app).schedule) == {"mine"}


@pytest.mark.parametrize(
    ("given", "settings", "longest"),
    [({"max_interval": 0.2}, {}, 0.2), ({}, {"beat_max_loop_interval": 0.3}, 0.3), ({}, {}, 0.5)],
)
def test_the_longest_pause_between_two_looks_is_respected(
    database: Database,
    fresh_redis_url: str,
    given: dict[str, Any],
    settings: dict[str, Any],
    longest: float,
) -> None:
    """With none given it is our own, a second, which the last case shows."""
    app = application(fresh_redis_url, database.url, mine={})
    app.conf.update(settings)
    scheduler = lead(app, **given)
    rests = [scheduler.tick() for _ in range(3)]
    scheduler.close()
    assert max(rests) == pytest.approx(longest)

"""What the broker or a worker lost is sent again, and runs once."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import uuid
from typing import Any

import celery
import psycopg
import pytest
import redis
from celery.schedules import schedule

from celery_pglock import beat_rows, periods, schedules
from tests.support.processes import Process, eventually
from tests.support.stage import MakeStage, Stage

QUICK = {"pglock_rescue_sent_after": 2, "pglock_rescue_lost_after": 2}
APP = "tests.apps.rescue_app"
# So that there is one occurrence while a test lasts.
SELDOM = 86400.0


def sent(stage: Stage) -> int:
    return int(stage.rows("SELECT count(*) FROM pglock.job_runs WHERE sent_at IS NOT NULL")[0][0])


def stop(beat: Process) -> None:
    beat.terminate()
    assert beat.wait() == 0


def flush(stage: Stage) -> None:
    """Have the broker forget all that it has."""
    with redis.Redis.from_url(stage.broker) as client:
        client.flushdb()


@dataclasses.dataclass
class Play:
    """One occurrence of each entry of `rescue_app`, due at `due`."""

    stage: Stage
    due: dt.datetime

    def beat(self, scheduler: str = "pglock") -> Process:
        return self._celery("beat", "-S", scheduler)

    def worker(self, concurrency: int = 1) -> Process:
        name = f"w{uuid.uuid4().hex[:6]}@test"
        worker = self._celery("worker", "-c", str(concurrency), "-n", name)
        worker.wait_for_line(r"ready\.")
        return worker

    def plan(self, what: str, entry: str = "one") -> None:
        self.stage.rows(
            "INSERT INTO plan VALUES (%s, %s) ON CONFLICT (entry) DO UPDATE"
            " SET what = excluded.what RETURNING 1",
            entry,
            what,
        )

    def task_id(self, entry: str = "one") -> str:
        return beat_rows.task_id(self.stage.namespace, entry, self.due)

    def row(self, *columns: str, job: str = "stage:one", period: str | None = None) -> Any:
        found = self.stage.rows(
            f"SELECT {', '.join(columns)} FROM pglock.job_runs"  # noqa: S608 - names of this file
            " WHERE job = %s AND period = %s",
            job,
            period or periods.occurrence(self.due),
        )
        return found[0] if found else None

    def wait_for(self, expected: tuple[Any, ...], *columns: str, **which: Any) -> None:
        try:
            eventually(lambda: self.row(*columns, **which) == expected, 30, f"{columns} {expected}")
        except pytest.fail.Exception as late:
            shown = ("status", "reason", "attempts", "lost_attempts", "rescues", "error")
            pytest.fail(f"{late}; the row: {self.row(*shown, **which)}")

    def attempts(self, entry: str = "one") -> list[int]:
        rows = self.stage.rows("SELECT attempt FROM ran WHERE entry = %s ORDER BY at", entry)
        return [attempt for (attempt,) in rows]

    def wait_for_attempts(self, *attempts: int, entry: str = "one") -> None:
        eventually(lambda: self.attempts(entry) == list(attempts), 30, f"attempts {attempts}")

    def _celery(self, *arguments: str) -> Process:
        return self.stage.processes.celery(
            APP, *arguments, "-l", "INFO", env=self.stage.env(), name=arguments[0]
        )


@pytest.fixture
def make_play(make_stage: MakeStage) -> Any:
    """Makes a play: `make_play({"one": {"task": "job", "options": {}}})`."""

    def make(entries: dict[str, dict[str, Any]] | None = None, **given: Any) -> Play:
        entries = entries or {"one": {}}
        stage = make_stage(dict.fromkeys(entries, SELDOM), **{"settings": QUICK, **given})
        stage.extra = {"APP_OPTIONS": json.dumps(entries)}
        with psycopg.connect(stage.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE plan (entry text PRIMARY KEY, what text NOT NULL)")
        # As a leader has left it: the next occurrence is due in a moment.
        ((due,),) = stage.rows("SELECT now() + interval '1 s'")
        for name, options in entries.items():
            stage.rows(
                "INSERT INTO pglock.beat_entries (namespace, entry, task, schedule, anchor,"
                " next_due_at) VALUES (%s, %s, %s, %s, %s, %s) RETURNING 1",
                stage.namespace,
                name,
                f"{APP}.{options.get('task', 'job')}",
                schedules.canonical(schedule(SELDOM), dt.UTC),
                due - dt.timedelta(seconds=SELDOM),
                due,
            )
        return Play(stage, due)

    return make


def test_messages_that_the_broker_has_forgotten_are_sent_again(make_stage: MakeStage) -> None:
    stage = make_stage({"one": 1.0}, settings=QUICK)
    beat = stage.beat()
    eventually(lambda: sent(stage) >= 3, 20, "three occurrences are sent")
    flush(stage)
    stage.worker()
    beat.wait_for_line("rescued: stage:one .* was sent", timeout=20)
    eventually(
        lambda: stage.rows("SELECT count(*) FROM pglock.job_runs WHERE status = 'done'")[0][0] >= 8,
        30,
        "all that was due is done",
    )
    stop(beat)
    stage.expect_each_once()


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_after_it_had_acknowledged_runs_again(
    make_play: Any,
) -> None:
    play = make_play()
    play.plan("wait")
    worker = play.worker()
    beat = play.beat()
    play.wait_for_attempts(1)
    worker.kill(group=True)
    play.plan("")
    beat.wait_for_line("rescued: stage:one .* was running")
    play.worker()
    play.wait_for(("done", 2, 1), "status", "attempts", "lost_attempts")
    assert play.attempts() == [1, 2]


@pytest.mark.slow
def test_at_most_once_is_at_most_once_with_redelivery_and_rescue(
    make_play: Any, rabbitmq_url: str
) -> None:
    play = make_play({"one": {"task": "fragile"}}, broker=rabbitmq_url)
    play.plan("wait")
    worker = play.worker()
    beat = play.beat()
    play.wait_for_attempts(1)
    worker.kill(group=True)
    beat.wait_for_line("rescued: stage:one .* was running")
    worker = play.worker()
    play.wait_for(("failed", "exhausted"), "status", "reason")
    # Both messages have come to an end.
    worker.wait_for_line(r"\.fragile\[.*(raised|ignored|rejected|succeeded)", count=2)
    assert play.attempts() == [1]


@pytest.mark.slow
def test_a_job_that_was_slow_to_start_and_failed_is_not_run_again_by_its_copies(
    make_play: Any,
) -> None:
    play = make_play()
    play.plan("fail")
    beat = play.beat()
    beat.wait_for_line("rescued: stage:one .* was sent", count=2)
    worker = play.worker()
    worker.wait_for_line("copy dropped", count=2)
    assert play.attempts() == [1]
    assert play.row("status", "attempts", "reason") == ("failed", 1, "error")


@pytest.mark.slow
def test_messages_that_were_only_slow_run_once(make_play: Any) -> None:
    play = make_play({"one": {}, "two": {"task": "daily"}, "three": {"task": "atomic"}})
    beat = play.beat()
    beat.wait_for_line("rescued: stage:", count=6)
    stop(beat)
    worker = play.worker(2)
    # Three messages, two copies of each.
    worker.wait_for_line(r"Task tests\.apps\.\S+\[\S+\] (succeeded|ignored|raised)", count=9)
    assert [play.attempts(entry) for entry in ("one", "two", "three")] == [[1], [1], [1]]
    rows = play.stage.rows("SELECT DISTINCT status FROM pglock.job_runs")
    assert rows == [("done",)]


@pytest.mark.slow
def test_under_a_calendar_rule_a_lost_occurrence_runs_although_an_earlier_one_failed(
    make_play: Any,
) -> None:
    """The copy's row had no attempts, and the day's row has had one, for another message."""
    play = make_play({"one": {"task": "daily"}, "two": {}})
    day = f"{play.due:%Y-%m-%d}"
    which = {"job": f"stage:{APP}.daily", "period": day}
    play.stage.rows(
        "INSERT INTO pglock.job_runs (job, period, status, reason, task_id, attempts, started_at)"
        " VALUES (%s, %s, 'failed', 'error', 'earlier', 1, now()) RETURNING 1",
        which["job"],
        day,
    )
    beat = play.beat()
    eventually(lambda: sent(play.stage) == 2, 20, "both are sent")
    flush(play.stage)
    beat.wait_for_line("rescued: stage:", count=2)
    play.worker()
    play.wait_for(("done", 2, play.task_id()), "status", "attempts", "task_id", **which)
    play.wait_for(("done",), "status")
    play.wait_for(("done",), "status", job="stage:two")
    assert play.attempts() == [2]


@pytest.mark.slow
def test_what_a_removed_entry_had_sent_is_missed(make_play: Any) -> None:
    play = make_play()
    beat = play.beat()
    eventually(lambda: sent(play.stage) == 1, 20, "it is sent")
    stop(beat)
    flush(play.stage)
    play.stage.entries.clear()
    beat = play.beat()
    beat.wait_for_line("given up: stage:one .* it is missed")
    assert play.row("status", "reason", "rescues") == (
        "missed", "its schedule entry was removed before it was started", 0,
    )  # fmt: skip


@pytest.mark.slow
def test_what_has_expired_is_neither_sent_again_nor_run(make_play: Any) -> None:
    play = make_play({"one": {"options": {"expires": 1}}})
    beat = play.beat()
    beat.wait_for_line("given up: stage:one .* it is missed: it expired")
    worker = play.worker()
    worker.wait_for_line("Discarding revoked task|expired")
    assert play.row("status", "rescues") == ("missed", 0)
    assert play.attempts() == []


@pytest.mark.chaos
def test_a_message_that_celery_discards_as_expired_settles_its_row(make_play: Any) -> None:
    play = make_play({"one": {"options": {"expires": 1}}})
    beat = play.beat()
    eventually(lambda: sent(play.stage) == 1, 20, "it is sent")
    beat.kill()
    eventually(
        lambda: play.stage.rows("SELECT 1 WHERE now() > %s + interval '3 s'", play.due),
        what="it has expired",
    )
    play.worker()
    play.wait_for(("skipped", "its message had expired"), "status", "reason")
    assert play.attempts() == []


@pytest.mark.slow
def test_what_was_revoked_is_settled_and_not_sent_again(make_play: Any) -> None:
    play = make_play({"one": {}, "two": {}, "other": {}})
    play.plan("wait", "two")
    worker = play.worker(2)
    app = celery.Celery(broker=play.stage.broker)
    app.control.revoke(play.task_id("one"))
    worker.wait_for_line(f"revoked.*{play.task_id('one')}")
    beat = play.beat()
    play.wait_for_attempts(1, entry="two")
    # SIGKILL: a body that is ended by SIGTERM may be quicker to record that it has failed.
    app.control.revoke(play.task_id("two"), terminate=True, signal="SIGKILL")
    revoked = "its message was revoked"
    play.wait_for(("skipped", revoked, 0), "status", "reason", "rescues")
    play.wait_for(("failed", revoked, 1), "status", "reason", "attempts", job="stage:two")
    app.close()
    # What is lost is found meanwhile, and these two are not.
    play.wait_for(("done",), "status", job="stage:other")
    play.stage.rows(
        "UPDATE pglock.job_runs SET status = 'sent', sent_at = now() WHERE job = 'stage:other'"
        " RETURNING 1"
    )
    beat.wait_for_line("rescued: stage:other")
    assert "rescued: stage:one" not in beat.output()
    assert "rescued: stage:two" not in beat.output()
    assert play.attempts("two") == [1]


@pytest.mark.slow
def test_a_retry_whose_message_is_lost_is_sent_again(make_play: Any) -> None:
    play = make_play()
    play.plan("retry")
    worker = play.worker()
    beat = play.beat()
    play.wait_for(("retrying",), "status")
    # The worker that keeps the retry until it is due, and the broker that keeps it for him.
    worker.kill(group=True)
    flush(play.stage)
    play.plan("")
    beat.wait_for_line("rescued: stage:one .* was retrying")
    play.worker()
    play.wait_for(("done", 2), "status", "attempts")
    assert play.attempts() == [1, 2]


@pytest.mark.chaos
def test_a_leader_that_dies_before_it_has_recorded_a_copy_does_no_harm(make_play: Any) -> None:
    play = make_play()
    beat = play.beat(f"{APP}:DiesBeforeRecording")
    assert beat.wait() == -9
    assert play.row("status", "rescues") == ("sent", 0)
    beat = play.beat()
    beat.wait_for_line("rescued: stage:one .* was sent")
    worker = play.worker()
    worker.wait_for_line(r"\.job\[\S+\] (succeeded|ignored)", count=3)
    assert play.attempts() == [1]
    assert play.row("status") == ("done",)


@pytest.mark.slow
def test_a_run_that_is_alive_is_never_rescued(make_play: Any) -> None:
    """At session level, at transaction level, and with the two rows of a calendar rule."""
    entries = {"one": {}, "two": {"task": "daily"}, "three": {"task": "atomic"}}
    limits = {"pglock_rescue_sent_after": 4, "pglock_rescue_lost_after": 1}
    play = make_play(entries, settings=limits)
    for entry in entries:
        play.plan("wait", entry)
    play.worker(3)
    beat = play.beat()
    for entry in entries:
        play.wait_for_attempts(1, entry=entry)
    # The leader looks every half second.
    eventually(
        lambda: play.stage.rows("SELECT 1 WHERE now() > %s + interval '10 s'", play.due),
        20,
        "it has lasted longer than both limits",
    )
    for entry in entries:
        play.plan("", entry)
    eventually(
        lambda: play.stage.rows("SELECT DISTINCT status FROM pglock.job_runs") == [("done",)],
        20,
        "all rows are settled",
    )
    assert play.stage.rows("SELECT max(rescues), max(lost_attempts) FROM pglock.job_runs") == [
        (0, 0)
    ]
    assert "rescued" not in beat.output()
    assert [play.attempts(entry) for entry in entries] == [[1], [1], [1]]

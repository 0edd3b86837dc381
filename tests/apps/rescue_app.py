"""An application whose messages get lost: what its entries run comes from the environment.

`APP_OPTIONS` is a JSON object of entry name to its task (`job` unless it says so) and its
options. What a body does is in the table `plan`, where the test may change it at any time.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import celery
import psycopg
from typing_extensions import override

from celery_pglock import LockedTask, beat, current_run

TASKS = "tests.apps.rescue_app."

app = celery.Celery(os.environ["APP_NAMESPACE"], broker=os.environ["APP_BROKER_URL"])
_options: dict[str, dict[str, Any]] = json.loads(os.environ.get("APP_OPTIONS", "{}"))
app.conf.update(
    task_default_queue=os.environ["APP_QUEUE"],
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    result_expires=None,
    pglock_database_url=os.environ["APP_DATABASE_URL"],
    beat_schedule={
        name: {
            "task": TASKS + _options.get(name, {}).get("task", "job"),
            "schedule": seconds,
            "options": _options.get(name, {}).get("options", {}),
        }
        for name, seconds in json.loads(os.environ["APP_ENTRIES"]).items()
    },
    **json.loads(os.environ.get("APP_SETTINGS", "{}")),
)


def _act(task: celery.Task[..., Any]) -> None:
    """Leave a row, then do what the plan says: `fail`, `retry`, or `wait` until it is another."""
    run = current_run()
    entry = task.request.headers["pglock_entry"]  # type: ignore[index]
    with psycopg.connect(os.environ["APP_DATABASE_URL"], autocommit=True) as connection:

        def plan() -> str:
            row = connection.execute("SELECT what FROM plan WHERE entry = %s", [entry]).fetchone()
            return "" if row is None else str(row[0])

        connection.execute(
            "INSERT INTO ran (entry, due, attempt) VALUES (%s, %s, %s)",
            (entry, run.due, run.attempt),
        )
        what = plan()
        if what == "fail":
            msg = "as it was told to"
            raise ValueError(msg)
        if what == "retry":
            raise task.retry(countdown=2)
        while plan() == "wait":
            time.sleep(0.05)


@app.task(base=LockedTask, bind=True)
def job(self: celery.Task[..., Any]) -> None:
    """Acknowledged early, as Celery does by default."""
    _act(self)


@app.task(base=LockedTask, bind=True, acks_late=True, max_crash_retries=0)
def fragile(self: celery.Task[..., Any]) -> None:
    """At most once."""
    _act(self)


@app.task(base=LockedTask, bind=True, once_per="day")
def daily(self: celery.Task[..., Any]) -> None:
    """Has two rows: the beat's own, and that of the day."""
    _act(self)


@app.task(base=LockedTask, bind=True, lock_level="transaction")
def atomic(self: celery.Task[..., Any]) -> None:
    """Has no backend in its row."""
    _act(self)


class DiesBeforeRecording(beat.LeaderScheduler):
    """Killed after a rescue copy was handed over and before that was recorded."""

    @override
    def _hand_over(self, entry: Any, task_id: str, ours: Mapping[str, Any]) -> BaseException | None:
        failure = super()._hand_over(entry, task_id, ours)
        if "pglock_seen" in ours:
            os.kill(os.getpid(), signal.SIGKILL)
        return failure

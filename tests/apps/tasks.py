"""The tasks that the acceptance tests send to their workers."""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
import time
from typing import Any

import celery
import celery.exceptions
import celery.signals
import psycopg
import sqlalchemy as sa

from celery_pglock import LockedTask, current_run
from tests.apps import configured, recording

app = configured.application()

register: Any = app.task
LATE: dict[str, Any] = {"acks_late": True, "reject_on_worker_lost": True}


@app.task(bind=True, name="plain")
def plain(self: Any, *args: object) -> str:
    """Run without a lock: a next step, a chord's body, a callback."""
    redelivered = bool((self.request.delivery_info or {}).get("redelivered"))
    recording.note_run("plain", self.request.id, args=args, redelivered=redelivered)
    return "plain"


def work(
    self: LockedTask, key: str, *, gate: str = "", seconds: float = 0.0, value: Any = None
) -> Any:
    """Hold the lock until the gate is open, or for some time."""
    recording.note_run("start", self.request.id, key=key)
    if gate:
        recording.wait_for_gate(gate)
    if seconds:
        time.sleep(seconds)
    recording.note_run("end", self.request.id, key=key)
    return value


# The same body under many options. lock_by keeps the tests of one worker apart.
WORKING: dict[str, dict[str, Any]] = {
    "job": {},
    "raising": {"lock_conflict": "raise"},
    "patient": {"lock_conflict": "postpone"},
    "waiting": {"lock_wait": 60},
    "polite": {"skip_state": "SUCCESS"},
    "quiet": {"ignore_result": True},
    "tracked": {"track_started": True},
    "late": LATE,
    "named": {"lock_name": "a name of its own"},
    "same_name": {"lock_name": "a name of its own"},
    "per_minute": {"once_per": "minute"},
    "per_hour": {"once_per": "hour"},
    "per_day": {"once_per": "day"},
    "per_week": {"once_per": "week"},
    "per_month": {"once_per": "month"},
    # The lock of the task "retrying", as another job.
    "retrying_lock": {"lock_name": "retrying"},
    "unledgered": {"once_per": None},
    "transactional": {"lock_level": "transaction"},
    "late_transactional": {"lock_level": "transaction", **LATE},
    "warned": {"lock_lost": "warn"},
}
for _name, _options in WORKING.items():
    register(base=LockedTask, bind=True, name=_name, **{"lock_by": ("key",), **_options})(work)


@app.task(base=LockedTask, bind=True, name="entry_task", lock_by=("key",))
def entry_task(self: LockedTask, key: str) -> None:
    """Note which run it is."""
    recording.note_run("start", self.request.id, key=key)


def label_at_the_gate(_: dt.datetime) -> str:
    """Return the label that the test has written: midnight is when the test says so."""
    return recording.gate_value("label")


@app.task(
    base=LockedTask,
    bind=True,
    name="by_label",
    once_per=label_at_the_gate,
    lock_by=("key",),
    max_retries=5,
    **LATE,
)
def by_label(self: LockedTask, key: str, ending: str) -> None:
    """End its first attempt in some way, and succeed with the second."""
    run = current_run()
    recording.note_run("start", self.request.id, key=key)
    if run.attempt == 1:
        recording.wait_for_gate(key)
        if ending == "retry":
            raise self.retry(countdown=0)
        if ending == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
    recording.note_run("end", self.request.id, key=key)


@app.task(base=LockedTask, bind=True, name="retrying", lock_by=("key",), max_retries=5)
def retrying(
    self: LockedTask, key: str, times: int, countdown: float = 0, *, linger: bool = False
) -> int:
    """Ask for a retry some times, then succeed; linger under the lock until the retry is there."""
    retries = self.request.retries
    recording.note_run("start", self.request.id, key=key, retries=retries)
    if retries < times:
        try:
            self.retry(countdown=countdown)
        except celery.exceptions.Retry:
            if linger:
                recording.wait_for_gate(delivered(self.request.id, retries + 1))
                recording.note("came early", key=key)
            raise
    return retries


def delivered(task_id: str | None, retries: int) -> str:
    """Name the gate at which a run waits for the arrival of its own retry."""
    return f"delivered {task_id} {retries}"


@celery.signals.task_prerun.connect
def tell_delivery(task: Any, task_id: str, kwargs: dict[str, Any], **_: object) -> None:
    """Note that a message has arrived, before it asks for its lock."""
    retries = task.request.retries
    recording.note("delivered", task_id=task_id, retries=retries)
    if kwargs.get("linger"):
        recording.open_gate(delivered(task_id, retries))


@app.task(
    base=LockedTask,
    bind=True,
    name="auto_retrying",
    lock_by=("key",),
    autoretry_for=(ValueError,),
    retry_backoff=False,
    default_retry_delay=0,
    max_retries=2,
)
def auto_retrying(self: LockedTask, key: str, times: int) -> int:
    """Fail some times, then succeed."""
    recording.note_run("start", self.request.id, key=key, retries=self.request.retries)
    if self.request.retries < times:
        raise ValueError(key)
    return self.request.retries


def crash(self: LockedTask, key: str, times: int = 1) -> str:
    """Kill its own process in its first attempts, then succeed."""
    recording.note_run("start", self.request.id, key=key)
    if current_run().lost_attempts < times:
        os.kill(os.getpid(), signal.SIGKILL)
    recording.note_run("end", self.request.id, key=key)
    return "survived"


CRASHING: dict[str, dict[str, Any]] = {
    "crashing": {},
    "crashing_transaction": {"lock_level": "transaction"},
    "at_most_once": {"max_crash_retries": 0},
    "once_again": {"max_crash_retries": 1},
}
for _name, _options in CRASHING.items():
    register(base=LockedTask, bind=True, name=_name, lock_by=("key",), **LATE, **_options)(crash)


@app.task(base=LockedTask, bind=True, name="in_a_query", lock_by=("key",))
def in_a_query(self: LockedTask, key: str) -> None:
    """Be busy in the server, on a connection of the application's own."""
    with psycopg.connect(recording.url(), autocommit=True) as connection:
        recording.note_run("start", self.request.id, key=key, backend=connection.info.backend_pid)
        connection.execute("SELECT pg_sleep(30)")


@app.task(
    base=LockedTask, bind=True, name="in_a_statement", lock_level="transaction", lock_by=("key",)
)
def in_a_statement(
    self: LockedTask, key: str, seconds: float, check_interval: str | None = None
) -> None:
    """Be busy in the server, on the connection of the transaction that is the lock."""
    connection = current_run().connection
    if check_interval is not None:
        connection.execute(
            sa.text("SELECT set_config('client_connection_check_interval', :value, true)"),
            {"value": check_interval},
        )
    recording.note_run("start", self.request.id, key=key)
    connection.execute(sa.text("SELECT pg_sleep(:seconds)"), {"seconds": seconds})
    recording.note_run("end", self.request.id, key=key)


@app.task(
    base=LockedTask,
    bind=True,
    name="write_rows",
    lock_level="transaction",
    lock_by=("key",),
    **LATE,
)
def write_rows(self: LockedTask, key: str, count: int, seed: int) -> int:  # noqa: ARG001 - lock_by
    """Write rows at an uneven pace, in the transaction that is the lock."""
    run = current_run()
    pace = random.Random(f"{seed} {run.job} {run.attempt}")  # noqa: S311 - only a pace
    insert = sa.text("INSERT INTO written (job, number) VALUES (:job, :number)")
    for number in range(count):
        run.connection.execute(insert, {"job": run.job, "number": number})
        time.sleep(pace.uniform(0, 0.006))
    return count

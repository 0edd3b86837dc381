"""The tasks of the contract: each body under both lock levels, and what it sees of its run.

The names are `<level>.<task>`. All tasks of a level have one lock name, so that they exclude
each other, with a key of its own for each test. Where the transaction level is the
application's default it has no other: such an application may stand behind a pooler in
transaction mode.
"""

from __future__ import annotations

from typing import Any

import celery.exceptions
import celery.signals
import sqlalchemy as sa

from celery_pglock import JobSkipped, LockedTask, LockLost, current_run
from tests.apps import configured, recording

app = configured.application()

register: Any = app.task
LEVELS = [
    level
    for level in ("session", "transaction")
    if app.conf.get("pglock_lock_level") in (None, level)
]
OPTIONS: dict[str, dict[str, Any]] = {
    "job": {},
    "raising": {"lock_conflict": "raise"},
    "patient": {"lock_conflict": "postpone"},
    "waiting": {"lock_wait": 60},
}
INSERT = sa.text("INSERT INTO written (job, number) VALUES (:job, :number)")


@app.task(bind=True, name="plain")
def plain(self: Any, *args: object) -> None:
    """Run without a lock, in whatever process or thread it comes to be."""
    recording.note_run("plain", self.request.id, args=args)


@celery.signals.task_prerun.connect
def tell_delivery(task: Any, task_id: str, kwargs: dict[str, Any], **_: object) -> None:
    """Tell of a message that waits, and open the gate for the run that asked for this retry."""
    if task.name.endswith(".waiting"):
        recording.note("delivered", task_id=task_id)
    if kwargs.get("linger") and task.request.retries:
        recording.open_gate(f"retry {task_id}")


@celery.signals.task_postrun.connect
def tell_end(task_id: str, **_: object) -> None:
    """Note which run is in progress where one has just ended: none."""
    recording.note_run("after", task_id)


def job(self: LockedTask, key: str, *, gate: str = "", write: int = 0, fail: bool = False) -> None:
    """Write, wait at a gate, fail: as told."""
    run = current_run()
    run.check()
    seen = {"key": key, "held": run.held, "level": run.level}
    recording.note_run("start", self.request.id, **seen)
    for number in range(write):
        run.connection.execute(INSERT, {"job": key, "number": number})
    if write:
        recording.note("written", key=key)
    if gate:
        recording.wait_for_gate(gate)
    if fail:
        raise ValueError(key)
    recording.note_run("end", self.request.id, key=key)


def asking(self: LockedTask, key: str, *, gate: str) -> None:
    """Wait at a gate, then ask whether the lock is still held."""
    run = current_run()
    recording.note_run("start", self.request.id, key=key)
    recording.wait_for_gate(gate)
    try:
        run.check()
    except LockLost:
        recording.note("told", key=key, held=run.held)
        raise
    recording.note_run("end", self.request.id, key=key)


def retrying(self: LockedTask, key: str, *, linger: bool = True) -> int:
    """Ask for a retry once, and keep the lock until that retry has arrived."""
    retries = int(self.request.retries)
    recording.note_run("start", self.request.id, key=key, retries=retries)
    if not retries:
        try:
            self.retry(countdown=0)
        except celery.exceptions.Retry:
            if linger:
                recording.wait_for_gate(f"retry {self.request.id}")
            raise
    return retries


def nesting(self: LockedTask, key: str, *, gate: str) -> None:
    """Call another task as a function: under another key, and under the lock held here."""
    run = current_run()
    other = app.tasks[f"{run.level}.job"]
    other(f"{key}-inner", gate=gate)
    recording.note_run("between", self.request.id, key=key, same=current_run() is run)
    try:
        other(key)
    except JobSkipped as skipped:
        recording.note_run("refused", self.request.id, key=key, reason=str(skipped))
    recording.note_run("end", self.request.id, key=key, same=current_run() is run)


for _level in LEVELS:
    for _name, _options in OPTIONS.items():
        register(
            base=LockedTask,
            bind=True,
            name=f"{_level}.{_name}",
            lock_level=_level,
            lock_name="contract",
            lock_by=("key",),
            **_options,
        )(job)
    for _body in (asking, retrying, nesting):
        register(
            base=LockedTask,
            bind=True,
            name=f"{_level}.{_body.__name__}",
            lock_level=_level,
            lock_name="contract",
            lock_by=("key",),
        )(_body)

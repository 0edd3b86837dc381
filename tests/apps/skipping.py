"""The tasks of `tests.apps.tasks`, and some that hand over, fail, or count periods of their own."""

from __future__ import annotations

import datetime as dt
import os
import signal
from typing import Any, NoReturn

from celery_pglock import LockedTask, LockLost, current_run
from tests.apps import recording, tasks
from tests.apps.tasks import app

job: Any = app.tasks["job"]
__all__ = ["app", "tasks"]


@app.task(bind=True, name="replacing")
def replacing(self: Any, key: str) -> Any:
    """Hand over to a task with a lock."""
    return self.replace(job.si(key))


@app.task(base=LockedTask, bind=True, name="locked_replacing", lock_by=("key",))
def locked_replacing(self: LockedTask, key: str, *, gate: str = "") -> Any:
    """Hold its lock, and after that hand over to another task with a lock."""
    recording.note_run("start", self.request.id, key=key)
    if not gate:
        return self.replace(job.si(key))
    recording.wait_for_gate(gate)
    recording.note_run("end", self.request.id, key=key)
    return None


@app.task(name="failing")
def failing(text: str) -> NoReturn:
    """Fail."""
    raise ValueError(text)


@app.task(
    base=LockedTask,
    bind=True,
    name="nightly",
    once_per="day",
    lock_by=("key",),
    autoretry_for=(LookupError,),
    default_retry_delay=0,
    **tasks.LATE,
)
def nightly(self: LockedTask, key: str, ending: str) -> str | None:
    """End its first attempt in some way; return its period with the second."""
    run = current_run()
    recording.note_run("start", self.request.id, key=key)
    if run.attempt == 1:
        match ending:
            case "retry":
                raise self.retry(countdown=0)
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fail and retry":
                raise LookupError(key)
    return run.period


def chosen_label(_: dt.datetime) -> Any:
    """Return what the message wants, be it a label or not."""
    label = (by_rule.request.args or ())[1]
    if label == "raise":
        raise LookupError("no such period")
    return label


@app.task(base=LockedTask, bind=True, name="by_rule", once_per=chosen_label, lock_by=("key",))
def by_rule(self: LockedTask, key: str, label: str) -> str | None:  # noqa: ARG001 - for the rule
    """Return its period."""
    recording.note_run("start", self.request.id, key=key)
    return current_run().period


def lose(self: LockedTask, key: str) -> int:
    """Wait, in the first attempt, until the test has ended the lock's session."""
    recording.note_run("start", self.request.id, key=key)
    if current_run().attempt == 1:
        recording.wait_for_gate(key)
    return current_run().attempt


LOSING: dict[str, dict[str, Any]] = {
    "retried_after_a_loss": {},
    "failed_after_a_loss": {"dont_autoretry_for": (LockLost,)},
}
for _name, _options in LOSING.items():
    tasks.register(
        base=LockedTask,
        bind=True,
        name=_name,
        lock_by=("key",),
        autoretry_for=(Exception,),
        default_retry_delay=0,
        retry_backoff=False,
        **_options,
    )(lose)

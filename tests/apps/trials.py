"""More tasks, for trials with redelivery: at most once, Celery's newer retry, endings to choose.

With the setting `trials_forgetful` the worker does not know a repeated message for one, as a
control: what it takes for another's it acknowledges. With `trials_impatient` it lets a copy wait
for longer than the broker's visibility time-out, and lets each of several copies go on, as another.
"""

from __future__ import annotations

from typing import Any

import celery.exceptions
import celery.signals
from typing_extensions import override

from celery_pglock import LockedTask, current_run, messages, run_skipped
from tests.apps import recording, tasks

app = tasks.app

if app.conf.get("trials_forgetful"):
    messages.Delivery.repeats = lambda *_: False  # type: ignore[method-assign]
    # Once it has arrived, a retry would race with the run that lets go of the lock.
    celery.signals.task_prerun.disconnect(tasks.tell_delivery)

    @run_skipped.connect(weak=False)
    def tell_skip(task_id: str, **_: object) -> None:
        """Let the run end whose retry was refused."""
        recording.open_gate(tasks.delivered(task_id, 1))


if app.conf.get("trials_impatient"):
    # A third of the usual hour.
    messages._patience = lambda task: 1200.0  # noqa: ARG005, SLF001
    # That the last of several copies alone goes on would hide how many there are.
    messages.Delivery.superseded = lambda *_: False  # type: ignore[method-assign]

OPTIONS: dict[str, dict[str, Any]] = {
    "once_or_never": {"max_crash_retries": 0},
    "once_or_never_transactional": {"max_crash_retries": 0, "lock_level": "transaction"},
    # Celery 5.7; before it, the attribute says nothing and the message is rejected.
    "retried_when_lost": {"retry_on_worker_lost": True, "default_retry_delay": 1},
}
for _name, _options in OPTIONS.items():
    tasks.register(
        base=LockedTask, bind=True, name=_name, lock_by=("key",), **tasks.LATE, **_options
    )(tasks.work)


class Lingering(LockedTask):
    """Keeps its lock after it has asked for a retry, until that retry has arrived."""

    @override
    def retry(self, *args: Any, **kwargs: Any) -> Any:
        gate = f"retry {self.request.id} {self.request.retries + 1}"
        try:
            return super().retry(*args, **kwargs)
        except celery.exceptions.Retry:
            recording.wait_for_gate(gate)
            (key,) = self.request.args or ()
            recording.note("came early", key=key)
            raise


@celery.signals.task_prerun.connect
def tell_retry(task: Any, task_id: str, **_: object) -> None:
    """Let the run end that has asked for the retry which is here now."""
    if isinstance(task, Lingering) and task.request.retries:
        recording.open_gate(f"retry {task_id} {task.request.retries}")


def unready(self: LockedTask, key: str) -> int:
    """Ask for a retry once: by an exception, or with a countdown."""
    recording.note_run("start", self.request.id, key=key, retries=self.request.retries)
    if not self.request.retries:
        if self.name == "lingering_countdown":
            raise self.retry(countdown=0.2)
        raise ValueError(key)
    return int(self.request.retries)


for _name in ("lingering_autoretry", "lingering_countdown"):
    tasks.register(
        base=Lingering,
        bind=True,
        name=_name,
        lock_by=("key",),
        autoretry_for=(ValueError,),
        retry_backoff=False,
        default_retry_delay=0,
        max_retries=2,
    )(unready)


def twice(self: LockedTask, key: str, ending: str) -> int:
    """Return the number of the attempt; the first waits at a gate, and may fail then."""
    attempt = current_run().attempt
    recording.note_run("start", self.request.id, key=key)
    if attempt == 1:
        recording.wait_for_gate(key)
        recording.note_run("end", self.request.id, key=key)
        if ending == "fails":
            raise ValueError(key)
    return attempt


for _name, _options in {
    "twice": {},
    "twice_warned": {"lock_lost": "warn"},
    "twice_transactional": {"lock_level": "transaction"},
}.items():
    tasks.register(
        base=LockedTask, bind=True, name=_name, lock_by=("key",), **tasks.LATE, **_options
    )(twice)

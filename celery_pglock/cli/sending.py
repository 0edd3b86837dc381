"""The message of a schedule entry, sent by a command instead of by the leader."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from typing import Any, Final

import celery.beat

from celery_pglock import definitions, entry_rows, publishing

#: Seconds for each thing that is said to the broker.
PATIENCE: Final = 10.0
# Whoever sends it by hand wants it now, and once.
_NOT_TAKEN_OVER: Final = ("task_id", "retry", "expires", "countdown", "eta", "headers")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is sent.

    Attributes:
        task: the registered name of the task.
        args: positional arguments.
        kwargs: keyword arguments.
        options: further options of ``apply_async``.
    """

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    options: dict[str, Any]

    def send(self, app: Any, task_id: uuid.UUID, headers: Mapping[str, Any]) -> None:
        """Hand it to the broker, as a leader does: in a bounded time, and sure that it arrived.

        Raises:
            Exception: whatever the transport or the serializer raises.
        """
        publisher = publishing.Publisher(app, PATIENCE)
        batch = publisher.batch()
        try:
            with batch:
                batch.begin()
                self._send(app, task_id, headers, publisher.producer())
                batch.hand_over()
        finally:
            publisher.forget()

    def _send(
        self, app: Any, task_id: uuid.UUID, headers: Mapping[str, Any], producer: Any
    ) -> None:
        given = {
            **self.options,
            "task_id": str(task_id),
            "retry": False,
            "producer": producer,
            "headers": {**(self.options.get("headers") or {}), **headers},
        }
        # As a beat does: what a registered task says of its queue, its serializer and its
        # priority is known to the task alone.
        task = app.tasks.get(self.task)
        if task is None:
            app.send_task(self.task, self.args, self.kwargs, **given)
        else:
            task.apply_async(self.args, self.kwargs, **given)


def told(error: Exception) -> str:
    """Return what kept a message from being sent, and what to do."""
    return (
        f"{publishing.told(error)}; nothing was changed: check broker_url and the entry's "
        f"arguments, and try again"
    )


def of_entry(app: Any, rows: entry_rows.EntryRows, name: str | None) -> Message | None:
    """Return the message of a schedule entry, of the configuration or of the database, or None.

    Raises:
        ConfigurationError: what the database has cannot be read.
    """
    if name is None:
        return None
    entry = schedule(app).get(name)
    if not entry:
        found = rows.read([name])
        if not found:
            return None
        entry = dataclasses.asdict(definitions.read(name, found[0].definition))
    options = dict(entry.get("options") or {})
    kept = {key: value for key, value in options.items() if key not in _NOT_TAKEN_OVER}
    return Message(
        task=str(entry["task"]),
        args=[_evaluated(value) for value in entry.get("args") or ()],
        kwargs={key: _evaluated(value) for key, value in (entry.get("kwargs") or {}).items()},
        options={**kept, "headers": dict(options.get("headers") or {})},
    )


def schedule(app: Any) -> Mapping[str, Any]:
    """Return all configured entries, with those that are added when the app is complete."""
    app.loader.import_default_modules()
    app.finalize()
    return app.conf.beat_schedule or {}


def _evaluated(value: Any) -> Any:
    return value() if isinstance(value, celery.beat.BeatLazyFunc) else value

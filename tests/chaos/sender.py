"""Messages that are sent by hand: for explicit periods, until they are done; and second copies."""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from typing import Any, Final

import celery
import psycopg

from tests.chaos.evidence import Period
from tests.chaos.history import Event
from tests.chaos.stage import Stage
from tests.chaos.watch import Watch

JOBS: Final[dict[str, str]] = {
    "chaos:hand1": "own",
    "chaos:hand2": "atomic",
    "chaos:hand3": "early",
}
_EVERY: Final = 0.4
# What is not done after so many seconds is sent again, under another id: the broker has perhaps
# lost it, and nobody else knows of it.
_AGAIN: Final = 6.0
_SAMPLE: Final = 60
_DONE: Final = b"SELECT job, period FROM pglock.job_runs WHERE status = 'done' AND job = ANY(%s)"


class Sender:
    """Sends as an application would that has a period of its own, and sends once too often.

    Args:
        stage: with its broker.
        watch: what is known of the messages of the beats.

    Attributes:
        sent: the periods that it has sent.
        open: those that are not done as far as is known, with when they were sent last.
    """

    def __init__(self, stage: Stage, watch: Watch) -> None:
        self._stage = stage
        self._watch = watch
        self._app = self._made()
        self.sent: set[Period] = set()
        self.open: dict[Period, float] = {}
        self._numbers = itertools.count(1)
        self._next_at = 0.0
        self._look_at = 0.0

    def _made(self) -> celery.Celery:
        url = self._stage.broker.url()
        app = celery.Celery("sender", broker=url, set_as_current=False)
        app.conf.task_default_queue = "chaos"
        return app

    def close(self) -> None:
        """Close the connection to the broker."""
        self._app.close()

    def step(self) -> None:
        """Send what it is time for."""
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + _EVERY
            number = next(self._numbers)
            period = Period(list(JOBS)[number % len(JOBS)], str(number))
            self.sent.add(period)
            for _ in range(1 + number % 2):
                self._send_period(period)
        self.repeat()

    def repeat(self) -> None:
        """Send again what is not done."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + 1.0
        with (
            contextlib.suppress(psycopg.Error),
            psycopg.connect(
                self._stage.server.url(), autocommit=True, connect_timeout=2
            ) as connection,
        ):
            for row in connection.execute(_DONE, [list(JOBS)]):
                self.open.pop(Period(*row), None)
        for period, sent_at in list(self.open.items()):
            if now - sent_at > _AGAIN:
                self._send_period(period)

    def _send_period(self, period: Period) -> None:
        self.open[period] = time.monotonic()
        headers = {"pglock_job": period.job, "pglock_period": period.label, "pglock_fixed": True}
        self.send(JOBS[period.job], headers)

    @property
    def sample(self) -> list[Event]:
        """The latest messages of the beats."""
        return [event for event in self._watch.events[-20 * _SAMPLE :] if event.kind == "publish"][
            -_SAMPLE:
        ]

    def again(self, message: Event, *, same_id: bool) -> bool:
        """Send an occurrence once more: the same message, or another one for it."""
        entry = (message.job or "").partition(":")[2]
        if entry not in self._stage.entries:
            return False
        headers = {
            "pglock_job": message.job,
            "pglock_period": message.period,
            "pglock_due": message.period,
            "pglock_entry": entry,
            "pglock_term": message.term,
        }
        given = self._stage.entries[entry]
        return self.send(
            given["task"],
            headers,
            task_id=message.task_id if same_id else None,
            kwargs=given.get("kwargs"),
        )

    def send(
        self,
        task: str,
        headers: dict[str, Any],
        *,
        task_id: str | None = None,
        kwargs: dict[str, Any] | None = None,
        queue: str | None = None,
    ) -> bool:
        """Hand a message to the broker; return whether it took it."""
        if not self._stage.broker.running:
            # It would wait for the broker, and everything else with it.
            return False
        try:
            self._app.send_task(
                task,
                kwargs=kwargs or {},
                task_id=task_id or str(uuid.uuid4()),
                headers=headers,
                queue=queue,
                retry=False,
            )
        except Exception:  # noqa: BLE001 - each transport raises its own; it is sent again
            # What its pools have kept is broken.
            self._app.close()
            self._app = self._made()
            return False
        return True

"""What the main process of a worker says of a message that did not run.

Celery tells monitors (Flower, ``celery events``) of each end of a task from there: if events are
enabled, which a monitor may do while the worker runs, and over a connection that is there
already. A pool's process would have to open one, and could not know whether anybody listens.
"""

from __future__ import annotations

from typing import Any

import celery.worker.request
from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined] # not in the stubs
from typing_extensions import override

from celery_pglock import outcomes


class Request(celery.worker.request.Request):
    """A message of a ``LockedTask`` in a worker (Celery documentation, "Custom task classes")."""

    @override
    def on_failure(
        self,
        exc_info: Any,
        send_failed_event: bool = True,
        return_ok: bool = False,
    ) -> Any:
        """Go on as Celery does, and tell of a skip."""
        answer = super().on_failure(exc_info, send_failed_event, return_ok)
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, outcomes.Skipped) and not error.earlier_stands:
            self.send_event("task-revoked", terminated=False, signum=None, expired=False)
        return answer

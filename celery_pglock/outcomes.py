"""How a call ends that did not run, and what a body's exception means for its period.

A skip must end every wait and must not look like work that was done. ``Ignore`` alone leaves
the result pending for ever, and with it chains, groups and chords; a returned value lets the
next step of a chain go on as if the work were done. So a skip is ``REVOKED``, with a
``TaskRevokedError`` that says why: Celery's own word for a task that was not executed.
"""

from __future__ import annotations

import datetime as dt
import logging
from typing import Any, Final, TypedDict

import celery
import celery.states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError
from typing_extensions import override

from celery_pglock import claims, errors, messages

_log: Final = logging.getLogger("celery_pglock.outcomes")

_ERROR_LENGTH: Final = 500
_BOTH_COUNT: Final = celery.VERSION < (5, 6)


class SkippedResult(TypedDict):
    """What a skipped task returns with ``skip_state="SUCCESS"``."""

    skipped: bool
    job: str
    period: str | None
    reason: str


class Skipped(Ignore):
    """Ends a delivery that was skipped; its result, where one is kept, has been written.

    Attributes:
        reason: why.
        earlier_stands: an earlier delivery of the same message has told its result.
    """

    # A pool's process sends it to its parent: unpickling gives ``args``, and then the attributes.
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.earlier_stands = False

    @override
    def __str__(self) -> str:
        return f"skipped: {self.reason}"


def skip(
    task: celery.Task[..., Any],
    delivery: messages.Delivery,
    work: claims.Work,
    reason: str,
    skip_state: str,
) -> SkippedResult:
    """End a call that does not run.

    Returns:
        With ``skip_state="SUCCESS"``, the value that the task is to return.

    Raises:
        JobSkipped: to the caller of a direct call.
        Skipped: otherwise, after the result has been written as ``REVOKED``.
    """
    if delivery.direct:
        raise errors.JobSkipped(work.job, work.period, reason)
    if skip_state == "SUCCESS":
        return {"skipped": True, "job": work.job, "period": work.period, "reason": reason}
    skipped = Skipped(reason)
    if not delivery.eager:
        # A broken result backend must not turn the skip into a failure of the task.
        try:
            skipped.earlier_stands = not _revoke(task, str(skipped))
        except Exception:  # noqa: BLE001 - whatever a third-party backend raises
            _log.exception(
                "the skip of task %s[%s] could not be written to the result backend",
                task.name,
                delivery.task_id,
                extra={"event": "skip_not_stored", "task_id": delivery.task_id},
            )
    raise skipped


def verdict(error: BaseException) -> claims.Verdict:
    """Return what a body's exception means for its period."""
    match error:
        case Retry():
            return claims.Verdict(
                status="retrying",
                retry_in=_countdown(error),
                reason="retry",
                error=_text(error.exc),
            )
        case Replaced():
            return claims.Verdict(status=error.status, reason="replaced", keep=True)
        case Ignore() | Reject():
            return claims.Verdict(status="failed", reason=type(error).__name__.lower())
        case errors.LockLost():
            return claims.Verdict(status="failed", reason="lock lost", error=_text(error))
        case _:
            return claims.Verdict(status="failed", reason="error", error=_text(error))


class Replaced(Ignore):
    """Ends a body that called ``self.replace()``: another task goes on under the same id.

    Attributes:
        status: ``retrying`` when that task continues this very period, else ``done``.
    """

    # With a default, because a pool's process sends it to its parent: unpickling gives ``args``
    # alone, and then the attributes.
    def __init__(self, *args: object, status: claims.Status = "done") -> None:
        super().__init__(*args)
        self.status = status


def _revoke(task: celery.Task[..., Any], reason: str) -> bool:
    """Write that a call was skipped; return False where there is a result that stands."""
    request = task.request
    backend = task.backend
    if isinstance(backend, DisabledBackend):
        return True
    task_id = request.id or ""
    stored = not _ignored(task)
    if stored and backend.get_state(task_id) in celery.states.READY_STATES:
        return False
    # mark_as_revoked() would leave the later steps of a chain pending; this one ends them
    # too, and the chord that the task is a part of.
    error = TaskRevokedError(reason)
    backend.mark_as_failure(
        task_id,
        error,
        request=request,
        store_result=stored,
        call_errbacks=False,
        state=celery.states.REVOKED,
    )
    if not stored:
        # With the result of this step Celery leaves out those of the later ones too, and who
        # waits for them would wait for ever.
        _revoke_later_steps(backend, request.chain, error)
    return True


def _ignored(task: celery.Task[..., Any]) -> bool:
    """Whether nobody is to have a result, by the rule of the Celery that is there."""
    # Only what the message itself says: Celery's class-level default would look like it.
    said: bool | None = vars(task.request).get("ignore_result")
    # Before 5.6 a message that is sent by name says False in any case, and the task's own word
    # counts beside it.
    if said is None or (_BOTH_COUNT and not said):
        return bool(task.ignore_result)
    return said


def _revoke_later_steps(backend: Any, chain: Any, error: TaskRevokedError) -> None:
    steps = list(chain or ())
    while steps:
        step = steps.pop()
        options = step.get("options") or {}
        task_id = options.get("task_id")
        if task_id is not None:
            context = Context(step, **options, id=task_id)
            backend.store_result(task_id, error, celery.states.REVOKED, request=context)
        if step.get("subtask_type") == "chord":
            # What waits for a chord waits for its body.
            steps.extend(filter(None, [(step.get("kwargs") or {}).get("body")]))


def _countdown(retry: Retry) -> float | None:
    when = retry.when
    if isinstance(when, dt.datetime):
        when = when if when.tzinfo else when.replace(tzinfo=dt.UTC)
        return max(0.0, (when - dt.datetime.now(dt.UTC)).total_seconds())
    return float(when) if isinstance(when, int | float) else None


def _text(error: BaseException | str | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, str):
        return error[:_ERROR_LENGTH]
    # The first line only: what follows may be the parameters of a statement.
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"[:_ERROR_LENGTH]

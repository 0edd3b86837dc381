"""What people are told of runs: one function for each event, a signal and a log record each.

The signals are Celery's; a receiver that raises is logged by Celery and harms nobody. The
records are made by loggers ``celery_pglock.*``; ``record.event`` is a stable name and the
fields stand beside it, so both can be matched without parsing sentences.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from celery.utils.dispatch import Signal

from celery_pglock import runs

if TYPE_CHECKING:
    import celery

    from celery_pglock import claims, errors, holds

_log: Final = logging.getLogger("celery_pglock.task")

# A job that is skipped so many times as often as is worth a warning does not run any more.
_ERROR_TIMES: Final = 5

#: Sent with the locks held, before the body. Arguments: ``run``.
run_started = Signal(name="run_started", providing_args=["run"])
#: Sent after the locks are given back. Arguments: ``run``, ``status``, ``exception``.
run_finished = Signal(name="run_finished", providing_args=["run", "status", "exception"])
#: Sent when a call does not run. Arguments: ``job``, ``period``, ``reason``, ``kind``,
#: ``task_id``, ``skips``.
run_skipped = Signal(
    name="run_skipped", providing_args=["job", "period", "reason", "kind", "task_id", "skips"]
)
#: Sent when the same message was sent again for later. Arguments: ``job``, ``period``,
#: ``reason``, ``number``, ``countdown``, ``task_id``.
run_postponed = Signal(
    name="run_postponed",
    providing_args=["job", "period", "reason", "number", "countdown", "task_id"],
)
#: Sent when a run has lost its locks, by whatever thread notices, while the body may still
#: be working. Arguments: ``job``, ``period``, ``reason``.
lock_lost = Signal(name="lock_lost", providing_args=["job", "period", "reason"])


def started(task: celery.Task[..., Any], run: runs.Run) -> None:
    """Tell that a body is about to begin under its locks."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug(
            "run started: %s, attempt %s",
            _named(run.job, run.period),
            run.attempt,
            extra=_fields(
                "run_started", run.job, run.period, attempt=run.attempt, lock_key=run.key
            ),
        )
    if run.lost_attempts:
        _log.warning(
            "run takes over: %s; %s earlier attempt(s) died without an outcome",
            _named(run.job, run.period),
            run.lost_attempts,
            extra=_fields(
                "run_taken_over",
                run.job,
                run.period,
                attempt=run.attempt,
                lost_attempts=run.lost_attempts,
            ),
        )
    run_started.send(sender=task, run=run)


def finished(
    task: celery.Task[..., Any], run: runs.Run, status: str, exception: BaseException | None = None
) -> None:
    """Tell that a body has ended and what was recorded."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug(
            "run finished: %s, %s",
            _named(run.job, run.period),
            status,
            extra=_fields("run_finished", run.job, run.period, attempt=run.attempt, status=status),
        )
    run_finished.send(sender=task, run=run, status=status, exception=exception)


def skipped(
    task: celery.Task[..., Any],
    work: claims.Work,
    refused: claims.Refused,
    reason: str,
    *,
    redelivered: bool,
    skips: int | None,
    alarm: int | None,
) -> None:
    """Tell that a call does not run, why, and who holds the lock.

    Args:
        task: the task.
        work: what was to be run.
        refused: why it was not.
        reason: the same as a sentence.
        redelivered: by the broker.
        skips: how many periods in a row were skipped since one was run, where that is known.
        alarm: from how many on it is a warning, and from five times as many an error; None: never.
    """
    holder = refused.holder
    before = refused.before
    level = _skip_level(skips, alarm)
    _log.log(
        level,
        "run skipped%s: task %s[%s] of %s: %s",
        "" if level == logging.INFO else f", {skips} times in a row without a run",
        work.task,
        work.task_id,
        _named(work.job, work.period),
        reason,
        extra=_fields(
            "run_skipped",
            work.job,
            work.period,
            reason=reason,
            kind=refused.kind,
            task_id=work.task_id,
            lock_name=work.name,
            lock_key=work.name_key,
            redelivered=redelivered,
            holder_pid=holder.pid if holder else before and before.backend_pid,
            holder_task_id=holder.task_id if holder else before and before.task_id,
            holder_started_at=holder.started_at if holder else before and before.started_at,
            holder_application=holder and holder.application,
            holder_session_since=holder and holder.session_since,
            skips=skips,
        ),
    )
    run_skipped.send(
        sender=task,
        job=work.job,
        period=work.period,
        reason=reason,
        kind=refused.kind,
        task_id=work.task_id,
        skips=skips,
    )


def postponed(
    task: celery.Task[..., Any],
    work: claims.Work,
    reason: str,
    number: int,
    countdown: float,
    *,
    unavailable: bool = False,
) -> None:
    """Tell that the same message was sent again for later; a warning without a database."""
    _log.log(
        logging.WARNING if unavailable else logging.INFO,
        "run postponed: task %s[%s] of %s for %g s (copy %s): %s",
        work.task,
        work.task_id,
        _named(work.job, work.period),
        countdown,
        number,
        reason,
        extra=_fields(
            "run_postponed",
            work.job,
            work.period,
            reason=reason,
            number=number,
            countdown=countdown,
            task_id=work.task_id,
        ),
    )
    run_postponed.send(
        sender=task,
        job=work.job,
        period=work.period,
        reason=reason,
        number=number,
        countdown=countdown,
        task_id=work.task_id,
    )


def dropped(work: claims.Work, reason: str) -> None:
    """Tell that a copy of a message is dropped, because another copy of it lives on."""
    _log.info(
        "copy dropped: task %s[%s] of %s, another copy of it counts: %s",
        work.task,
        work.task_id,
        _named(work.job, work.period),
        reason,
        extra=_fields("copy_dropped", work.job, work.period, reason=reason, task_id=work.task_id),
    )


def lost(
    task: celery.Task[..., Any] | None,
    run: runs.Run | None,
    error: errors.LockLost,
    loss: holds.Loss | None = None,
) -> None:
    """Tell that a run lost its locks, once, whoever notices it first: the monitor or its end.

    Args:
        task: whose.
        run: the run, if it had begun.
        error: what the loss is to the task.
        loss: how it was noticed; without it, only at the end.
    """
    if run is not None and not runs.first_to_tell(run):
        return
    _log.error(
        "%s%s",
        error,
        ""
        if loss is None
        else f" (server process {loss.backend_pid}, last proven {loss.silent_for:.1f} s ago)",
        extra=_fields(
            "lock_lost",
            error.job,
            error.period,
            reason=error.reason,
            lock_key=None if run is None else run.key,
            backend_pid=None if loss is None else loss.backend_pid,
            silent_for=None if loss is None else round(loss.silent_for, 3),
        ),
    )
    lock_lost.send(sender=task, job=error.job, period=error.period, reason=error.reason)


def long(run: runs.Run, seconds: float) -> None:
    """Tell, while it lasts, that a run at transaction level is a long transaction."""
    _log.warning(
        "run of %s has been a transaction for %.0f s: until it ends, vacuum may be held back and "
        'CREATE INDEX CONCURRENTLY may wait; make it shorter, or use lock_level="session"',
        _named(run.job, run.period),
        seconds,
        extra=_fields("transaction_long", run.job, run.period, seconds=round(seconds, 3)),
    )


def warn(event: str, text: str, *args: str) -> None:
    """Log a warning with an event name."""
    _log.warning(text, *args, extra={"event": event})


def _skip_level(skips: int | None, alarm: int | None) -> int:
    if skips is None or alarm is None or skips < alarm:
        return logging.INFO
    return logging.WARNING if skips < alarm * _ERROR_TIMES else logging.ERROR


def _fields(event: str, job: str, period: str | None, **fields: object) -> dict[str, object]:
    return {"event": event, "job": job, "period": period, **fields}


def _named(job: str, period: str | None) -> str:
    return job if period is None else f"{job} {period}"

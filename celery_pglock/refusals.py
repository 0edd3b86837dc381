"""What becomes of a call that may not run, and the sentence that says why; pure.

Three questions, in this order. May this be the same message again, whose loss would be the
loss of its period? Then it waits, and is sent again for later. Is the period settled, or in
good hands? Then it is skipped. Is the lock name taken? Then ``lock_conflict`` decides, except
that an occurrence is never dropped because of *another* job's run.
"""

from __future__ import annotations

import datetime as dt
from typing import Literal

from celery_pglock import claims, messages

Conflict = Literal["skip", "postpone", "raise"]
Answer = Literal["skip", "postpone", "raise", "drop", "give up"]


def decide(
    delivery: messages.Delivery, work: claims.Work, refused: claims.Refused, conflict: Conflict
) -> Answer:
    """Return what becomes of a refused call.

    ``skip``: it ends without having run; ``postpone``: its message is sent again for later;
    ``raise``: it fails; ``drop``: this copy of the message is not needed; ``give up``: its
    period has just been given up.
    """
    row = refused.before
    if refused.kind == "exhausted":
        return "give up"
    if refused.kind == "stale":
        return "skip"
    if refused.kind == "closed":
        own = row is not None and row.status == "done" and row.task_id == delivery.task_id
        # What was thought lost has been started after all: a rescue copy is not needed then.
        moved_on = work.seen is not None and row is not None and row.attempts > work.seen
        return "drop" if (own or moved_on) and not delivery.direct else "skip"
    if not delivery.direct and delivery.superseded(row):
        return "drop"
    if insists(delivery, work, refused, conflict):
        return "postpone"
    if refused.kind == "running":
        return "raise" if conflict == "raise" else "skip"
    return conflict


def insists(
    delivery: messages.Delivery, work: claims.Work, refused: claims.Refused, conflict: Conflict
) -> bool:
    """Whether the message must not be lost although its run is refused now.

    Acknowledging what may be the same message again would leave nothing in the broker, should
    the run that is going on now die. An occurrence is not dropped for another job's run; nor,
    when it is one of several that are made up for at once, for the one before it.
    """
    if delivery.direct or refused.kind not in ("running", "held"):
        return False
    if delivery.superseded(refused.before):
        return False
    if delivery.repeats(refused.before):
        return True
    if claim_in_progress(refused):
        row = refused.before
        return row is None or row.task_id == delivery.task_id
    if conflict == "raise" or refused.kind != "held":
        return False
    return delivery.late or _of_another_job(work, refused)


def claim_in_progress(refused: claims.Refused) -> bool:
    """Whether the period is being claimed at this moment, so that nobody can say by whom.

    The run lock was refused, but the row, read as it was before the other's claim was
    committed, does not say ``running`` yet. Under ``id:<task_id>`` or an occurrence the other
    may be this same message, which two workers got in the same instant: skipped as somebody
    else's it would mark the result of the run that is just beginning as ``REVOKED``.
    """
    row = refused.before
    return refused.kind == "running" and (row is None or row.status != "running")


def holder_unknown(work: claims.Work, refused: claims.Refused) -> bool:
    """Whether it cannot be said yet whose run has the lock name: of this job, or of another.

    It had just ended when it was asked for; or its claim has the lock, and its row is just
    being committed. (A holder without a row, a script or a lock-only task, stays unknown.)
    """
    holder = refused.holder
    return holder is None or (work.period is not None and holder.ours and holder.job is None)


def _of_another_job(work: claims.Work, refused: claims.Refused) -> bool:
    holder = refused.holder
    return (
        work.period is not None
        and holder is not None
        and holder.job is not None
        and holder.job != work.job
    )


def settled(refused: claims.Refused) -> bool:
    """Whether nothing is amiss with a period that is not run here: it was run, or is being run."""
    row = refused.before
    if refused.kind == "closed":
        return row is not None and row.status == "done"
    return refused.kind in ("running", "held")


def reason(work: claims.Work, refused: claims.Refused) -> str:
    """Return why a call does not run: who holds what, and since when."""
    if refused.kind == "held":
        return _held(work, refused.holder)
    if refused.kind == "stale":
        return (
            f"it was due {_moment(work.due_at)}, longer ago than pglock_retention keeps its "
            f"history, so whether it has run is not known"
        )
    row = refused.before
    if row is None:
        return "this period is being run"
    # At transaction level there is none to name: a pooler may change it.
    backend = "" if row.backend_pid is None else f", backend {row.backend_pid}"
    match refused.kind:
        case "closed" if row.status == "done":
            return (
                f"already ran in this period (task {row.task_id}, done {_moment(row.finished_at)})"
            )
        case "closed":
            return f"this period is settled as {row.status}: {row.reason or 'no reason given'}"
        case _ if row.status == "running":
            return (
                f"this period is being run (task {row.task_id} on {row.node}, attempt "
                f"{row.attempts}, since {_moment(row.started_at)}{backend})"
            )
        case _:
            return "this period is being run"


def _held(work: claims.Work, holder: claims.Holder | None) -> str:
    lock = f'lock "{work.name}"'
    if holder is None:
        return f"{lock} is held by another run"
    if holder.job is not None:
        return (
            f'{lock} is held by job "{holder.job}", period "{holder.period}" (task '
            f"{holder.task_id} on {holder.node}, since {_moment(holder.started_at)}, backend "
            f"{holder.pid})"
        )
    since = ""
    if holder.session_since is not None:
        since = f", connected since {_moment(holder.session_since)}"
    if holder.ours:
        return f"{lock} is held by {holder.application} (backend {holder.pid}{since})"
    return (
        f"{lock} (key {work.name_key}) is held by a session that is not of celery-pglock: "
        f"application {holder.application!r}, backend {holder.pid}{since}"
    )


def _moment(moment: dt.datetime | None) -> str:
    return "?" if moment is None else moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")

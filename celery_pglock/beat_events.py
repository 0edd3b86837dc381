"""What people are told of beats: one function for each event, a signal and a log record each.

As in ``events``, which tells of runs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from celery.utils.dispatch import Signal

if TYPE_CHECKING:
    import datetime as dt

    from celery_pglock import beat_rows, elections, errors, leadership, rescue

_log: Final = logging.getLogger("celery_pglock.beat")

#: Sent by a beat that begins to lead. Arguments: ``namespace``, ``term``, ``node``, ``before``.
leadership_gained = Signal(
    name="leadership_gained", providing_args=["namespace", "term", "node", "before"]
)
#: Sent by a beat that ceases to lead. Arguments: ``namespace``, ``term``, ``node``, ``reason``.
leadership_lost = Signal(
    name="leadership_lost", providing_args=["namespace", "term", "node", "reason"]
)
#: Sent by the leader after a message was handed to the broker. Arguments: ``entry``, ``task``,
#: ``due``, ``task_id``.
occurrence_sent = Signal(name="occurrence_sent", providing_args=["entry", "task", "due", "task_id"])
#: Sent by the leader for occurrences that nobody sends any more. Arguments: ``entry``,
#: ``task``, ``dues``.
occurrence_missed = Signal(name="occurrence_missed", providing_args=["entry", "task", "dues"])


def gained(leadership: leadership.Leadership, elected: elections.Elected) -> None:
    """Tell that this beat leads now, and who did before."""
    before = elected.before
    if before is None:
        past = "there was no leader before"
    elif before.resigned_at is not None:
        past = f"{before.node} resigned from term {before.term}"
    else:
        past = f"{before.node} vanished in term {before.term}, last seen {before.last_tick_at}"
    _log.info(
        "leadership gained: %s leads %s in term %s; %s",
        leadership.node,
        leadership.namespace,
        elected.term,
        past,
        extra={
            "event": "leadership_gained",
            "namespace": leadership.namespace,
            "term": elected.term,
            "node": leadership.node,
            "previous_node": before and before.node,
        },
    )
    leadership_gained.send(
        sender=None,
        namespace=leadership.namespace,
        term=elected.term,
        node=leadership.node,
        before=before,
    )


def paused(entry: beat_rows.Passed) -> None:
    """Tell when an entry that was paused is due again."""
    _log.info(
        "paused or resumed: entry %s is due %s",
        entry.entry,
        entry.next_due_at or "when it is resumed",
        extra={"event": "entry_paused", "entry": entry.entry, "next_due_at": entry.next_due_at},
    )


def handed_on(leadership: leadership.Leadership, term: int, why: str) -> None:
    """Tell that this beat gives its leadership to another, and goes on as a standby."""
    _log.info(
        "leadership handed over: %s resigns from term %s of %s: %s",
        leadership.node,
        term,
        leadership.namespace,
        why,
        extra={
            "event": "leadership_handed_over",
            "namespace": leadership.namespace,
            "term": term,
            "node": leadership.node,
            "reason": why,
        },
    )
    leadership_lost.send(
        sender=None,
        namespace=leadership.namespace,
        term=term,
        node=leadership.node,
        reason=why,
    )


def differs(leadership: leadership.Leadership) -> None:
    """Tell that the leader has another schedule than this standby."""
    _log.warning(
        "the leader of %s has another schedule than this beat; deploy the same release to both, "
        "or what only one of them knows is sent only while it leads",
        leadership.namespace,
        extra={"event": "schedule_differs", "namespace": leadership.namespace},
    )


def configured_too(entry: str) -> None:
    """Tell that an entry of the database does not count, because its name is configured."""
    _log.warning(
        "entry %s is configured and in the database too; the configuration's counts: give one of "
        "them another name, or run pglock entries remove",
        entry,
        extra={"event": "entry_configured_too", "entry": entry},
    )


def entry_broken(entry: str, reason: str) -> None:
    """Tell that an entry of the database cannot be read, and is left out."""
    _log.error(
        "entry in the database left out: %s; nothing of it is sent until it is saved anew",
        reason,
        extra={"event": "entry_broken", "entry": entry, "reason": reason},
    )


def rescued(lost: rescue.Copy, failure: str | None) -> None:
    """Tell that a message was sent again for a row that nothing else would have changed."""
    row = lost.row
    fields = {"job": row.job, "period": row.period, "status": row.status, "task_id": row.task_id}
    if failure is None:
        _log.warning(
            "rescued: %s %s was %s and nobody worked on it; its message was sent again (copy %s)",
            row.job,
            row.period,
            row.status,
            row.rescues + 1,
            extra={"event": "run_rescued", "copy": row.rescues + 1, **fields},
        )
    else:
        _log.error(
            "not rescued: %s %s is %s and nobody works on it, but the broker did not take its "
            "message: %s",
            row.job,
            row.period,
            row.status,
            failure,
            extra={"event": "run_not_rescued", "reason": failure, **fields},
        )


def given_up(row: rescue.Lost, outcome: str, reason: str) -> None:
    """Tell that a row which nobody works on is closed."""
    _log.warning(
        "given up: %s %s was %s and nobody worked on it; it is %s: %s",
        row.job,
        row.period,
        row.status,
        outcome,
        reason,
        extra={
            "event": "run_given_up",
            "job": row.job,
            "period": row.period,
            "status": outcome,
            "reason": reason,
        },
    )


def pruned(leadership: leadership.Leadership, removed: int) -> None:
    """Tell that old history was deleted."""
    _log.info(
        "pruned: %s runs of %s, older than its history is kept",
        removed,
        leadership.namespace,
        extra={"event": "pruned", "namespace": leadership.namespace, "removed": removed},
    )


def deposed(leadership: leadership.Leadership, term: int, reason: str) -> None:
    """Tell that this beat does not lead any more."""
    _log.warning(
        "leadership lost: %s no longer leads %s (term %s): %s",
        leadership.node,
        leadership.namespace,
        term,
        reason,
        extra={
            "event": "leadership_lost",
            "namespace": leadership.namespace,
            "term": term,
            "node": leadership.node,
            "reason": reason,
        },
    )
    leadership_lost.send(
        sender=None,
        namespace=leadership.namespace,
        term=term,
        node=leadership.node,
        reason=reason,
    )


def resigned(leadership: leadership.Leadership, term: int) -> None:
    """Tell that this beat gave the leadership back."""
    _log.info(
        "leadership resigned: %s gives up %s (term %s)",
        leadership.node,
        leadership.namespace,
        term,
        extra={
            "event": "leadership_resigned",
            "namespace": leadership.namespace,
            "term": term,
            "node": leadership.node,
        },
    )
    leadership_lost.send(
        sender=None,
        namespace=leadership.namespace,
        term=term,
        node=leadership.node,
        reason="resigned",
    )


def standing_by(leadership: leadership.Leadership) -> None:
    """Tell, once, that this beat waits for the leadership."""
    _log.info(
        "standby: %s waits for the leadership of %s",
        leadership.node,
        leadership.namespace,
        extra={"event": "standby", "namespace": leadership.namespace, "node": leadership.node},
    )


def clock_set(leadership: leadership.Leadership, step: dt.timedelta) -> None:
    """Tell that PostgreSQL's clock was set; a negative step is one back."""
    seconds = step.total_seconds()
    if seconds < 0:
        consequence = (
            "intervals go on as if nothing had happened; other schedules come to some instants a "
            "second time, which are run again by tasks that keep no record"
        )
    else:
        consequence = "what was due in that time is late, or after a long time missed"
    _log.warning(
        "the clock of PostgreSQL was set %s by %.1f s, as %s of %s sees it: %s",
        "back" if seconds < 0 else "forward",
        abs(seconds),
        leadership.node,
        leadership.namespace,
        consequence,
        extra={
            "event": "server_clock_set",
            "namespace": leadership.namespace,
            "node": leadership.node,
            "seconds": seconds,
        },
    )


def host_differs(leadership: leadership.Leadership, ahead: dt.timedelta) -> None:
    """Tell that this host's clock and PostgreSQL's are apart."""
    seconds = ahead.total_seconds()
    _log.warning(
        "the clock of this host is %.1f s %s the one of PostgreSQL; what is due when is reckoned "
        "by PostgreSQL's, but Celery uses this host's for expires and countdowns: have both "
        "hosts synchronize their clocks",
        abs(seconds),
        "behind" if seconds < 0 else "ahead of",
        extra={
            "event": "host_clock_differs",
            "namespace": leadership.namespace,
            "node": leadership.node,
            "seconds": seconds,
        },
    )


def sent(occurrence: beat_rows.Occurrence) -> None:
    """Tell that the message of an occurrence was handed to the broker."""
    occurrence_sent.send(
        sender=None,
        entry=occurrence.entry,
        task=occurrence.task,
        due=occurrence.due_at,
        task_id=occurrence.task_id,
    )


def not_sent(occurrence: beat_rows.Occurrence, reason: str, again_in: float) -> None:
    """Tell that the broker did not take a message; it is kept."""
    _log.error(
        "occurrence not sent: entry %s, due %s: %s; trying again in %g s",
        occurrence.entry,
        occurrence.period,
        reason,
        again_in,
        extra={
            "event": "occurrence_not_sent",
            "entry": occurrence.entry,
            "period": occurrence.period,
            "reason": reason,
        },
    )


def schedule_failed(entry: str, error: Exception) -> None:
    """Tell that a schedule of the user's own has raised; its entry is asked again in a minute."""
    _log.error(
        "the schedule of entry %s cannot say when it is due; asking again in a minute",
        entry,
        exc_info=error,
        extra={"event": "schedule_failed", "entry": entry},
    )


def missed(occurrence: beat_rows.Occurrence | beat_rows.Passed) -> None:
    """Tell that earlier occurrences of an entry are not sent any more."""
    _log.warning(
        "occurrences missed: %s of entry %s, from %s to %s; no beat was leading, or "
        "the clock was set forward over them",
        len(occurrence.missed),
        occurrence.entry,
        occurrence.missed[0],
        occurrence.missed[-1],
        extra={
            "event": "occurrence_missed",
            "entry": occurrence.entry,
            "count": len(occurrence.missed),
        },
    )
    occurrence_missed.send(
        sender=None, entry=occurrence.entry, task=occurrence.task, dues=occurrence.missed
    )


def unusable(error: errors.PGLockError) -> None:
    """Tell that a beat cannot use the database and tries again."""
    _log.error("%s", error, extra={"event": "database_unavailable"})


def scheduler_failed(error: Exception) -> None:
    """Tell that the scheduler behind ``LeaderMixin`` could not read or write its store."""
    _log.error(
        "the scheduler's own store cannot be used: %s: %s; what is known of the schedule goes on, "
        "and it is tried again",
        type(error).__name__,
        " ".join(str(error).split()),
        extra={"event": "scheduler_failed"},
    )

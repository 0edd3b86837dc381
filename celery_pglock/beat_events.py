"""What people are told of beats: one function for each event, a signal and a log record each.

As in ``events``, which tells of runs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from celery.utils.dispatch import Signal

if TYPE_CHECKING:
    from celery_pglock import errors, leadership, schedule_store

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


def gained(leadership: leadership.Leadership, elected: leadership.Elected) -> None:
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


def sent(occurrence: schedule_store.Occurrence) -> None:
    """Tell that the message of an occurrence was handed to the broker."""
    occurrence_sent.send(
        sender=None,
        entry=occurrence.entry,
        task=occurrence.task,
        due=occurrence.due_at,
        task_id=occurrence.task_id,
    )


def not_sent(occurrence: schedule_store.Occurrence, reason: str, again_in: float) -> None:
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


def missed(occurrence: schedule_store.Occurrence | schedule_store.Passed) -> None:
    """Tell that earlier occurrences of an entry are not sent any more."""
    _log.warning(
        "occurrences missed: %s of entry %s, from %s to %s; no beat was leading",
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

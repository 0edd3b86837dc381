"""From when, until when and how often an entry of another scheduler is due.

Celery's own entries have a schedule and nothing else. Those that are kept in a database
(django-celery-beat, sqlalchemy-celery-beat) have a row behind them too, their ``model``, with
``start_time``, ``expires`` and ``one_off``. Their own schedulers look at these when they ask
an entry whether it is due; here due instants are computed, so they have to be bounded.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
from collections.abc import Mapping
from typing import Any, Final

from celery_pglock import occurrences, schedules

_LEAST: Final = dt.timedelta.resolution
# Who lets an entry begin at once means a moment before it is seen here.
_SEEN_LATE: Final = dt.timedelta(minutes=1)


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What an entry's row says, beside its schedule.

    Attributes:
        start: not due before it.
        until: not due from then on.
        once: it is due a single time, counted from when its row was last changed: this; None
            if it is due again and again.
        at: the moment that a clocked schedule names.
        spent: it was due that one time.
    """

    start: dt.datetime | None = None
    until: dt.datetime | None = None
    once: dt.datetime | None = None
    at: dt.datetime | None = None
    spent: bool = False

    @property
    def text(self) -> str:
        """What has to be the same for an entry to go on as it was planned."""
        named = {"from": self.start, "until": self.until, "once since": self.once}
        return "".join(
            f" {name} {moment.astimezone(dt.UTC).isoformat()}"
            for name, moment in named.items()
            if moment is not None
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Bounded:
    """A schedule within the bounds of its entry.

    Attributes:
        due: the schedule alone.
        bounds: the bounds.
        anchor: when the entry was first seen so.
    """

    due: occurrences.Schedule
    bounds: Bounds
    anchor: dt.datetime

    def after(self, moment: dt.datetime) -> dt.datetime | None:
        """Return the first due instant after ``moment``, or None if there never is one."""
        if self.bounds.spent:
            return None
        if self.bounds.once is None:
            due = self._from(moment)
        else:
            due = self._only()
            if due is not None and due <= moment:
                return None
        until = self.bounds.until
        return None if due is None or (until is not None and due >= until) else due

    def _from(self, moment: dt.datetime) -> dt.datetime | None:
        start = self.bounds.start
        if start is None:
            return self.due.after(moment)
        at_once = self.anchor + _LEAST
        if (
            isinstance(self.due, occurrences.Interval)
            and self.anchor - _SEEN_LATE <= start <= self.anchor
            and moment < at_once
        ):
            return at_once
        return self.due.after(max(moment, start - _LEAST))

    def _only(self) -> dt.datetime | None:
        if self.bounds.at is None:
            return self._from(self.anchor)
        # A moment that had passed when it was first seen is made up for at once: whoever asked
        # for it does not know that no beat was there.
        return max(self.bounds.at, self.anchor + _LEAST)


def of(entry: Any, zone: dt.tzinfo) -> Bounds | None:
    """Return the bounds of an entry, or None if it has none.

    Args:
        entry: a schedule entry of any scheduler.
        zone: of times without one.
    """
    row = getattr(entry, "model", None)
    if row is None:
        return None

    def moment(name: str) -> dt.datetime | None:
        value = getattr(row, name, None)
        if not isinstance(value, dt.datetime):
            return None
        return value if value.tzinfo else value.replace(tzinfo=zone)

    at = getattr(entry.schedule, "clocked_time", None)
    once = getattr(row, "one_off", False) or at is not None
    bounds = Bounds(
        start=moment("start_time"),
        until=moment("expires"),
        # Not when it last ran: that is what is to be told to it yet.
        once=(moment("date_changed") or dt.datetime.min.replace(tzinfo=dt.UTC)) if once else None,
        at=at,
        spent=bool(
            once and (getattr(row, "total_run_count", 0) or not getattr(row, "enabled", True))
        ),
    )
    return None if bounds == Bounds() else bounds


def read(entry: Any, zone: dt.tzinfo, anchor: dt.datetime) -> occurrences.Schedule:
    """Return the due instants of an entry.

    Args:
        entry: a schedule entry of any scheduler.
        zone: the application's time zone.
        anchor: from where intervals are counted.
    """
    due = schedules.read(entry.schedule, zone, anchor)
    bounds = of(entry, zone)
    if bounds is None:
        return due
    if bounds.start is not None and isinstance(due, occurrences.Interval):
        # It is due then for the first time.
        due = occurrences.Interval(due.every, bounds.start - due.every)
    return Bounded(due, bounds, anchor)


def canonical(entry: Any, zone: dt.tzinfo) -> str:
    """Return a text that is the same for the same schedule and bounds."""
    bounds = of(entry, zone)
    text = schedules.canonical(entry.schedule, zone)
    return text if bounds is None else text + bounds.text


def fingerprint(entries: Mapping[str, Any], zone: dt.tzinfo) -> str:
    """Return a text that two applications have in common if they have the same schedule.

    Args:
        entries: schedule entries by their names.
        zone: the application's time zone.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(entries.items()):
        text = canonical(entry, zone)
        digest.update(f"{name}\0{entry.task}\0{text}\0".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:16]

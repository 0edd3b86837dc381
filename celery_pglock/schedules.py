"""Celery's schedule objects, read into due instants of our own.

crontab and plain intervals are computed from their own fields (``occurrences``). Any other
class, ``solar`` for instance, is asked for its own estimate, from the instant it was last due.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import re
from typing import Any, Final

from celery import schedules as celery_schedules

from celery_pglock import errors, occurrences

_LEAST: Final = dt.timedelta(seconds=1)
# Where an object lies in this process's memory, as a plain ``repr`` tells it.
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Estimated:
    """A schedule of a class that is not known here."""

    schedule: Any

    def after(self, moment: dt.datetime) -> dt.datetime:
        """Return its own estimate; at least a second later, so that time goes on."""
        due = self._estimate(moment)
        if due < moment + _LEAST:
            # The same instant again: solar's own calculation is not exact to the millisecond.
            due = self._estimate(moment + _LEAST)
        return max(due, moment + _LEAST)

    def _estimate(self, moment: dt.datetime) -> dt.datetime:
        # An estimate counts from the schedule's clock, which would go on between two looks at
        # it: then no two beats, and no two calls, would find the same instant.
        asked = copy.copy(self.schedule)
        asked.nowfun = lambda: moment
        estimate: dt.datetime = asked.now() + asked.remaining_estimate(moment)
        return estimate.astimezone(dt.UTC)


def check(entry: str, schedule: Any) -> None:
    """Refuse an interval that would be due at every moment.

    Raises:
        ConfigurationError: it is zero or negative.
    """
    if _is_plain_interval(schedule) and not schedule.run_every > dt.timedelta(0):
        msg = (
            f"the schedule of entry {entry!r} in beat_schedule is every "
            f"{schedule.run_every.total_seconds():g} s; an interval must be longer than zero"
        )
        raise errors.ConfigurationError(msg)


def read(schedule: Any, zone: dt.tzinfo, anchor: dt.datetime) -> occurrences.Schedule:
    """Return the due instants of a Celery schedule.

    Args:
        schedule: a ``crontab``, ``schedule``, or any other schedule object.
        zone: the application's time zone.
        anchor: from where intervals are counted.
    """
    if isinstance(schedule, celery_schedules.crontab):
        fields: Any = schedule  # the stubs leave its sets out
        return occurrences.Crontab(
            minutes=frozenset(fields.minute),
            hours=frozenset(fields.hour),
            days_of_week=frozenset(fields.day_of_week),
            days_of_month=frozenset(fields.day_of_month),
            months=frozenset(fields.month_of_year),
            zone=_zone(schedule, zone),
            elapsed=_starts_with_star(fields, "minute") or _starts_with_star(fields, "hour"),
        )
    if _is_plain_interval(schedule):
        return occurrences.Interval(schedule.run_every, anchor)
    return Estimated(schedule)


def canonical(schedule: Any, zone: dt.tzinfo) -> str:
    """Return a text that is the same for the same schedule, on every host and in every process.

    ``repr`` of a schedule rounds, so two that differ may look alike in it.
    """
    if isinstance(schedule, celery_schedules.crontab):
        names = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
        fields = " ".join(_field(schedule, name) for name in names)
        return f"crontab {fields} {_zone(schedule, zone)}"
    if _is_plain_interval(schedule):
        return f"every {schedule.run_every.total_seconds():.6f} s"
    parts = getattr(schedule, "__reduce__", lambda: (None, ()))()
    arguments = _ADDRESS.sub("", repr(parts[1]))
    return f"{type(schedule).__module__}.{type(schedule).__qualname__} {arguments} {zone}"


def _is_plain_interval(schedule: Any) -> bool:
    return type(schedule) is celery_schedules.schedule and not schedule.relative


def _zone(schedule: Any, zone: dt.tzinfo) -> dt.tzinfo:
    own = getattr(schedule, "tz", None)
    return own if isinstance(own, dt.tzinfo) else zone


def _original(schedule: Any, name: str) -> Any:
    return getattr(schedule, f"_orig_{name}", None)


def _starts_with_star(schedule: Any, name: str) -> bool:
    original = _original(schedule, name)
    return isinstance(original, str) and original.startswith("*")


def _field(schedule: Any, name: str) -> str:
    original = _original(schedule, name)
    if isinstance(original, str) and original.startswith("*"):
        return original
    # "1,2", [2, 1] and {1, 2} are one schedule.
    return ",".join(str(value) for value in sorted(getattr(schedule, name)))

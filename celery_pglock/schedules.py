"""Celery's schedule objects, read into due instants of our own.

crontab and plain intervals are computed from their own fields (``occurrences``), and ``solar``
once for each solar day of its place. Any other class is asked for its own estimate, from the
instant it was last due; so is a subclass of crontab that estimates in its own way.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import celery.beat
from celery import schedules as celery_schedules

from celery_pglock import errors, occurrences

if TYPE_CHECKING:
    from celery import Celery

_log = logging.getLogger("celery_pglock.schedules")

_LEAST: Final = dt.timedelta(seconds=1)
_DAY: Final = dt.timedelta(days=1)
# How much later a class of its own is asked when its estimate is not in the future.
_AHEAD: Final = (
    dt.timedelta(0),
    _LEAST,
    dt.timedelta(minutes=1),
    dt.timedelta(hours=1),
    _DAY,
)
_SOME_MIDNIGHT: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
# What comes once a year comes within two.
_SOLAR_DAYS: Final = 2 * 366
# Where an object lies in this process's memory, as a plain ``repr`` tells it.
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Solar:
    """An event of the sun: at most once in each solar day of the place.

    ephem finds the same event some milliseconds off when it starts elsewhere, and a due instant
    is a period. So each solar day is searched from one instant only, six hours or more from
    where the event can be: not from wherever somebody looks.
    """

    schedule: Any

    def after(self, moment: dt.datetime) -> dt.datetime | None:
        """Return the first due instant after ``moment``, to the second.

        None if the event does not come for two years: at the poles the sun neither rises nor
        sets in the course of a day. (Celery would be due there where its search ends.)
        """
        # The sun rises between midnight and noon of the place's own mean time, and sets between
        # noon and midnight. Its clock is ahead of Greenwich by an hour for each 15 degrees east.
        away = {"next_rising": 18, "next_transit": 0, "next_setting": 6}[self.schedule.method]
        first = _SOME_MIDNIGHT + dt.timedelta(hours=away - self.schedule.lon / 15)
        today = first + (moment - first) // _DAY * _DAY
        for days in range(_SOLAR_DAYS):
            start = today + days * _DAY
            due = self._event(start)
            if due is not None and moment < due < start + _DAY:
                return due
        return None

    def _event(self, start: dt.datetime) -> dt.datetime | None:
        asked = self.schedule
        center = {"use_center": True} if asked.use_center else {}
        search = getattr(asked.cal.copy(), asked.method)
        try:
            found = search(asked.ephem.Sun(), start=asked.ephem.Date(start), **center)
        except asked.ephem.CircumpolarError:
            return None
        event: dt.datetime = found.datetime()
        return event.replace(microsecond=0, tzinfo=dt.UTC)


@dataclasses.dataclass(frozen=True, slots=True)
class Estimated:
    """A schedule of a class that is not known here."""

    schedule: Any

    def after(self, moment: dt.datetime) -> dt.datetime | None:
        """Return its own estimate; at least a second later, so that time goes on.

        None if it names an instant in the past wherever one looks from: it was due once, and
        is not any more.

        Raises:
            Exception: whatever the schedule itself raises.
        """
        # From a second later on where it finds the same instant again, since its own calculation
        # is not exact; from an hour or a day later where it stands still, as Celery's does in a
        # repeated hour.
        soon = None
        for ahead in _AHEAD:
            due = self._estimate(moment + ahead)
            if due is None or due >= moment + _LEAST:
                return due
            if soon is None and due > moment:
                soon = due
        return soon

    def _estimate(self, moment: dt.datetime) -> dt.datetime | None:
        # An estimate counts from the schedule's clock, which would go on between two looks at
        # it: then no two beats, and no two calls, would find the same instant.
        # A copy by `copy.copy` would be made from its arguments, without its zone, its application
        # and what else a subclass keeps.
        asked: Any = object.__new__(type(self.schedule))
        vars(asked).update(vars(self.schedule))
        asked.nowfun = lambda: moment
        left = asked.remaining_estimate(moment)
        try:
            estimate: dt.datetime = asked.now() + left
        except OverflowError:
            return None  # timedelta.max is how some say never
        return estimate.astimezone(dt.UTC)


def check(entry: str, schedule: Any) -> None:
    """Refuse a schedule that is due at every moment, or cannot say when; warn if it never comes.

    Raises:
        ConfigurationError: with the sentence that says what is wrong with it.
    """
    if not comes(entry, schedule):
        _log.warning(
            "the schedule of entry %r in beat_schedule never comes: %r",
            entry,
            schedule,
            extra={"event": "schedule_never_comes", "entry": entry},
        )


def comes(entry: str, schedule: Any) -> bool:
    """Whether a schedule is ever due: some people switch an entry off with a date that is none.

    Raises:
        ConfigurationError: it is due at every moment, or cannot say when.
    """
    if _is_plain_interval(schedule):
        if schedule.run_every > dt.timedelta(0):
            return True
        msg = (
            f"the schedule of entry {entry!r} in beat_schedule is every "
            f"{schedule.run_every.total_seconds():g} s; an interval must be longer than zero"
        )
        raise errors.ConfigurationError(msg)
    now = dt.datetime.now(dt.UTC)
    try:
        due = read(schedule, dt.UTC, now)
        # For crontabs without a search: there may be a hundred thousand of them.
        never = not due.comes if isinstance(due, occurrences.Crontab) else due.after(now) is None
    except Exception as error:
        kind = type(schedule)
        msg = (
            f"the schedule of entry {entry!r} in beat_schedule cannot say when it is due: "
            f"{kind.__module__}.{kind.__qualname__} raised {type(error).__name__}: "
            f"{' '.join(str(error).split())}; its remaining_estimate(last_run_at) has to return a "
            "timedelta"
        )
        raise errors.ConfigurationError(msg) from error
    return isinstance(due, Estimated) or not never  # the former may have been due once


def read(schedule: Any, zone: dt.tzinfo, anchor: dt.datetime) -> occurrences.Schedule:
    """Return the due instants of a Celery schedule.

    Args:
        schedule: a ``crontab``, ``schedule``, or any other schedule object.
        zone: the application's time zone.
        anchor: from where intervals are counted.
    """
    if _counts_by_fields(schedule):
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
    if type(schedule) is celery_schedules.solar:
        return Solar(schedule)
    return Estimated(schedule)


def canonical(schedule: Any, zone: dt.tzinfo) -> str:
    """Return a text that is the same for the same schedule, on every host and in every process.

    ``repr`` of a schedule rounds, so two that differ may look alike in it.
    """
    if _counts_by_fields(schedule):
        names = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
        fields = " ".join(_field(schedule, name) for name in names)
        return f"crontab {fields} {_zone(schedule, zone)}"
    if _is_plain_interval(schedule):
        return f"every {schedule.run_every.total_seconds():.6f} s"
    parts = getattr(schedule, "__reduce__", lambda: (None, ()))()
    arguments = _ADDRESS.sub("", repr(parts[1]))
    return f"{type(schedule).__module__}.{type(schedule).__qualname__} {arguments} {_zone(schedule, zone)}"


def told(schedule: Any, zone: dt.tzinfo) -> str:
    """Return a schedule in words, for people."""
    if type(schedule) is celery_schedules.solar:
        event = schedule.event.replace("_", " ")
        return f"{event} at {schedule.lat:g}, {schedule.lon:g}"
    if _is_plain_interval(schedule):
        seconds = schedule.run_every.total_seconds()
        for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
            if seconds >= length and not seconds % length:
                return f"every {seconds / length:g} {unit}"
        return f"every {seconds:g} s"
    return canonical(schedule, zone)


def configured(app: Celery) -> Mapping[str, Any]:
    """Return the schedule entries of an application as a beat has them; nothing is started.

    Raises:
        Exception: whatever an entry that is none raises.
    """
    app.loader.import_default_modules()
    app.finalize()
    scheduler = celery.beat.Scheduler(app, lazy=True)
    scheduler.merge_inplace(app.conf.beat_schedule or {})
    scheduler.install_default_entries(scheduler.schedule)
    return scheduler.schedule


def _counts_by_fields(schedule: Any) -> bool:
    """Whether it is a crontab, or a subclass that leaves alone how it counts."""
    plain = celery_schedules.crontab
    return isinstance(schedule, plain) and all(
        getattr(type(schedule), name) is getattr(plain, name)
        for name in ("remaining_delta", "remaining_estimate")
    )


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

"""The instants at which a schedule is due, computed from its own fields; pure.

A due instant depends on the schedule alone, never on when a process was started or when it
last looked. So every beat computes the same ones, and a leader that takes over knows what its
predecessor would have sent.

Daylight saving, as cron does it: a crontab whose minute or hour field starts with ``*``
follows elapsed time, and fires at each real minute whose local fields match: in both passes
of a repeated hour, and never in a gap. Any other crontab names a time on the wall clock: in a
repeated hour it fires in the first pass only, and a time that does not exist moves forward by
the gap.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import datetime as dt
import functools
import itertools
from collections.abc import Iterator
from typing import Final, Protocol

_MINUTE: Final = dt.timedelta(minutes=1)
_DAY: Final = dt.timedelta(days=1)
# 29 February comes after eight years at the latest (1896, 1904), and as a Monday after forty
# (1892, 1932); what has not come by then never will.
_HORIZON: Final = dt.timedelta(days=366 * 41)
_LOOK_BACK: Final = (*(dt.timedelta(days=days) for days in (1, 40, 400)), _HORIZON)
# How long each month is at the most.
_LONGEST: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
# So many steps, at some 30 microseconds each, keep a leader within its lease.
_MOST_STEPS: Final = 20_000


@dataclasses.dataclass(frozen=True, slots=True)
class Crontab:
    """Five fields, all of which have to match (Celery ANDs day of month and day of week).

    Attributes:
        minutes: 0 to 59.
        hours: 0 to 23.
        days_of_week: 0 (Sunday) to 6.
        days_of_month: 1 to 31.
        months: 1 to 12.
        zone: the time zone of the fields.
        elapsed: the minute or hour field starts with ``*``.
    """

    minutes: frozenset[int]
    hours: frozenset[int]
    days_of_week: frozenset[int]
    days_of_month: frozenset[int]
    months: frozenset[int]
    zone: dt.tzinfo
    elapsed: bool

    @property
    def comes(self) -> bool:
        """Whether it is due at all: not on 30 February, nor where a field is empty.

        A date that exists falls on every day of the week in some year.
        """
        return bool(self.minutes and self.hours and self.days_of_week) and any(
            day <= _LONGEST[month - 1] for month in self.months for day in self.days_of_month
        )

    def after(self, moment: dt.datetime) -> dt.datetime | None:
        """Return the first due instant after ``moment``, or None if there never is one."""
        if not self.comes:
            return None
        if self.elapsed:
            return _elapsed_after(self, moment)
        return _wall_clock_after(self, moment)

    def on_day(self, day: dt.date) -> bool:
        """Whether the date matches the three day fields."""
        return (
            day.month in self.months
            and day.day in self.days_of_month
            and day.isoweekday() % 7 in self.days_of_week
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """Every so often, counted from an anchor that is stored, so no restart moves it.

    Attributes:
        every: the distance.
        anchor: an instant from which the multiples are counted.
    """

    every: dt.timedelta
    anchor: dt.datetime

    def after(self, moment: dt.datetime) -> dt.datetime:
        """Return the first due instant after ``moment``; the anchor itself is not due."""
        past = max(0, (moment - self.anchor) // self.every)
        return self.anchor + self.every * (past + 1)


class Schedule(Protocol):
    """What tells its next due instant."""

    def after(self, moment: dt.datetime) -> dt.datetime | None:
        """Return the first due instant after ``moment``, or None if there never is one."""


def newest(
    schedule: Schedule, since: dt.datetime, until: dt.datetime, count: int
) -> list[dt.datetime]:
    """Return the newest due instants in ``(since, until]``, at most ``count``, in their order."""
    if not count:
        return []
    if isinstance(schedule, Interval):
        oldest = max(since, until - schedule.every * (count + 1))
        return list(between(schedule, oldest, until))[-count:]
    if not isinstance(schedule, Crontab):
        return _newest_of_chain(schedule, since, until, count)
    found: list[dt.datetime] = []
    for back in _LOOK_BACK:
        found = list(between(schedule, max(since, until - back), until))
        if len(found) >= count or until - back <= since:
            break
    return found[-count:]


def _newest_of_chain(
    schedule: Schedule, since: dt.datetime, until: dt.datetime, count: int
) -> list[dt.datetime]:
    # Each may count from the one before: who starts elsewhere finds other instants.
    walk = enumerate(itertools.islice(between(schedule, since, until), _MOST_STEPS), 1)
    steps = collections.deque(walk, maxlen=count)
    if not steps or steps[-1][0] < _MOST_STEPS:
        return [due for _, due in steps]
    # Too far: no further back from the end than those steps went from the beginning.
    reach = steps[-1][1] - since
    return list(collections.deque(between(schedule, until - reach, until), maxlen=count))


def between(schedule: Schedule, since: dt.datetime, until: dt.datetime) -> Iterator[dt.datetime]:
    """Yield the due instants in ``(since, until]``."""
    due = schedule.after(since)
    while due is not None and due <= until:
        yield due
        due = schedule.after(due)


# Many entries share one crontab, and a leader that takes over asks for all of them at once.
@functools.lru_cache(maxsize=4096)
def _wall_clock_after(crontab: Crontab, moment: dt.datetime) -> dt.datetime | None:
    # From the day before: a time that does not exist may move across midnight.
    day = moment.astimezone(crontab.zone).date() - _DAY
    last = day + _HORIZON
    while day <= last:
        if crontab.on_day(day) and _on_wall_clock(crontab, day)[-1:] > (moment,):
            # A gap at midnight can put the next day's first time before this day's last.
            both = [_on_wall_clock(crontab, date) for date in (day, day + _DAY)]
            return min(due for times in both for due in times[bisect.bisect(times, moment) :][:1])
        day += _DAY
    return None


# A crontab that lists each minute has 1,440 times a day, and is asked for one after the other.
@functools.lru_cache(maxsize=64)
def _on_wall_clock(crontab: Crontab, day: dt.date) -> tuple[dt.datetime, ...]:
    if not crontab.on_day(day):
        return ()
    # fold=0 in a gap reads the time with the offset from before it, which moves it forward
    # by the length of the gap.
    return tuple(
        sorted(
            dt.datetime(
                day.year, day.month, day.day, hour, minute, tzinfo=crontab.zone, fold=0
            ).astimezone(dt.UTC)
            for hour in crontab.hours
            for minute in crontab.minutes
        )
    )


@functools.lru_cache(maxsize=4096)
def _elapsed_after(crontab: Crontab, moment: dt.datetime) -> dt.datetime | None:
    probe = moment.astimezone(dt.UTC).replace(second=0, microsecond=0) + _MINUTE
    last = probe + _HORIZON
    while probe <= last:
        local = probe.astimezone(crontab.zone)
        if not crontab.on_day(local.date()):
            probe = _leap(probe, crontab.zone, 60 * (23 - local.hour) + 60 - local.minute)
        elif local.hour not in crontab.hours:
            probe = _leap(probe, crontab.zone, 60 - local.minute)
        elif local.minute not in crontab.minutes:
            following = min((m for m in crontab.minutes if m > local.minute), default=60)
            probe = _leap(probe, crontab.zone, following - local.minute)
        else:
            return probe
    return None


def _leap(probe: dt.datetime, zone: dt.tzinfo, minutes: int) -> dt.datetime:
    # Only where the offset stays the same do local fields advance with real time.
    target = probe + _MINUTE * minutes
    same = probe.astimezone(zone).utcoffset() == target.astimezone(zone).utcoffset()
    return target if same else probe + _MINUTE

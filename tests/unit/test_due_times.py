"""A year of due instants beside Celery's own, and a reason for each one that differs.

Celery is driven as its beat drives it: ``is_due`` with a clock, from one occurrence to the
next, by a beat that is never late. It may differ on the days on which clocks are changed, and
only in the ways that are listed here.

`PGLOCK_TEST_DUE_TIMES=all` compares whole years of all pairs, which takes some minutes.
By default a pair that is seldom due is compared over the whole year, and one that is often due
around each change and on some day, which `PGLOCK_TEST_SEED` chooses.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, Final
from zoneinfo import ZoneInfo

import celery
import celery.beat
import pytest
from celery import schedules as celery_schedules

from celery_pglock import occurrences, schedules
from tests.support.versions import FROM_5_7

UTC: Final = dt.UTC
ZERO: Final = dt.timedelta(0)
MINUTE: Final = dt.timedelta(minutes=1)
DAY: Final = dt.timedelta(days=1)
EVERYTHING: Final = os.environ.get("PGLOCK_TEST_DUE_TIMES") == "all"
SEED: Final = int(os.environ.get("PGLOCK_TEST_SEED", "0")) or random.SystemRandom().randrange(10**6)

# 2028 has a 29 February. Apia's clocks have stood still since 2021; in 2011 they were changed
# twice, and then skipped a whole day.
YEARS: Final = {
    "UTC": 2028,
    "Asia/Kolkata": 2026,
    "Europe/Berlin": 2026,
    "Europe/Dublin": 2028,
    "America/New_York": 2026,
    "Africa/Cairo": 2026,
    "Australia/Lord_Howe": 2026,
    "Pacific/Apia": 2011,
}
CHANGES: Final = {"UTC": 0, "Asia/Kolkata": 0, "Pacific/Apia": 3}

# As in a crontab file: minute, hour, day of month, month, day of week.
SPECS: Final = (
    "*/5 * * * *",
    "*/20 * * * *",
    "*/7 1-3 * * *",
    "0 * * * *",
    "* 2 * * *",
    "0 */6 * * *",
    "*/30 0,23 * * *",
    "15 */2 * * sat,sun",
    "30 2 * * *",
    "30 1 * * *",
    "0,20,40 1,2,3 * * *",
    "0-59/10 0-4 * * *",
    "0 0 * * *",
    "59 23 28-31 * *",
    "15,45 9-17 * * mon-fri",
    "5 4 1,15 * *",
    "0 2 * 3,4,9,10,11 sun",
    "0 12 13 * fri",
    "0 6 29 2 *",
    "10,35 2 * * *",
)
INTERVALS: Final = (1, 7.5, 60, 900, 3600, 86400, 100_000)


@pytest.fixture(scope="module")
def app() -> celery.Celery:
    return celery.Celery("due-times", set_as_current=False)


class Clock:
    """What a schedule takes for now."""

    def __init__(self) -> None:
        self.now = dt.datetime(1970, 1, 1, tzinfo=UTC)

    def __call__(self) -> dt.datetime:
        return self.now


def crontab(app: celery.Celery, spec: str, zone: str, clock: Clock) -> Any:
    minute, hour, day_of_month, month_of_year, day_of_week = spec.split()
    made: Any = celery_schedules.crontab(
        minute=minute,
        hour=hour,
        day_of_month=day_of_month,
        month_of_year=month_of_year,
        day_of_week=day_of_week,
        nowfun=clock,
        app=app,
    )
    made.tz = ZoneInfo(zone)
    return made


def by_celery(
    schedule: Any, zone: dt.tzinfo, since: dt.datetime, until: dt.datetime
) -> Iterator[dt.datetime]:
    """Yield what a beat that is never late sends in ``(since, until]``."""
    clock = schedule.nowfun
    clock.now = last = since.astimezone(zone)
    due, seconds = schedule.is_due(last)
    assert not due
    while True:
        clock.now = (last.astimezone(UTC) + dt.timedelta(seconds=seconds)).astimezone(zone)
        if clock.now > until:
            return
        due, seconds = schedule.is_due(last)
        assert due
        yield clock.now.astimezone(UTC)
        last = clock.now


# --- the changes of clocks ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Change:
    """The clocks of a zone are changed at an instant, by so much; a gap is more than zero."""

    at: dt.datetime
    by: dt.timedelta

    def in_gap(self, instant: dt.datetime) -> bool:
        """Whether a time that does not exist would be moved to this instant."""
        return self.at <= instant < self.at + self.by

    def in_second_pass(self, instant: dt.datetime) -> bool:
        return self.at <= instant < self.at - self.by


def offset(instant: dt.datetime, zone: str) -> dt.timedelta:
    found = instant.astimezone(ZoneInfo(zone)).utcoffset()
    assert found is not None
    return found


@functools.cache
def changes(zone: str) -> tuple[Change, ...]:
    first = dt.datetime(YEARS[zone], 1, 1, tzinfo=UTC)
    found = []
    for hour in range(366 * 24):
        before = first + dt.timedelta(hours=hour)
        if offset(before, zone) != offset(before + dt.timedelta(hours=1), zone):
            minutes = (before + MINUTE * minute for minute in range(61))
            at = next(m for m in minutes if offset(m, zone) != offset(before, zone))
            found.append(Change(at, offset(at, zone) - offset(before, zone)))
    return tuple(found)


def test_there_are_changes_to_look_at() -> None:
    assert {zone: len(changes(zone)) for zone in YEARS} == {
        zone: CHANGES.get(zone, 2) for zone in YEARS
    }


# --- why an instant may differ --------------------------------------------------------------

SECOND_PASS: Final = "a second pass: elapsed time goes on, Celery sends nothing"
NOT_ELAPSED: Final = "no such time: Celery moves it, elapsed time has none"
MOVED_TOO: Final = "no such time: each one moves, Celery moves the first one only"
PASSED_OVER: Final = "after a gap: Celery counts on from a moved time, and passes this one over"


def matches(schedule: Any, label: dt.datetime) -> bool:
    return (
        label.minute in schedule.minute
        and label.hour in schedule.hour
        and label.isoweekday() % 7 in schedule.day_of_week
        and label.day in schedule.day_of_month
        and label.month in schedule.month_of_year
    )


def why(
    schedule: Any, spec: str, zone: str, instant: dt.datetime, theirs: set[dt.datetime]
) -> str | None:
    """Return which reason an instant has that only one of both knows, or None."""
    elapsed = any(field.startswith("*") for field in spec.split()[:2])
    shown = instant.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    for change in changes(zone):
        if change.in_second_pass(instant):
            ours = instant not in theirs
            return SECOND_PASS if ours and elapsed and matches(schedule, shown) else None
        if change.in_gap(instant):
            moved = shown - change.by
            if instant in theirs:
                only_moved = matches(schedule, moved) and not matches(schedule, shown)
                return NOT_ELAPSED if elapsed and only_moved else None
            if not any(change.in_gap(sent) for sent in theirs):
                return None
            if not elapsed and matches(schedule, moved):
                return MOVED_TOO
            return PASSED_OVER if matches(schedule, shown) else None
    return None


# --- a year ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
    """What was compared, and what was found to differ."""

    compared: int = 0
    differing: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unexplained: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.compared += other.compared
        self.differing += other.differing
        self.unexplained += other.unexplained


def windows(zone: str, spec: str) -> list[tuple[dt.datetime, dt.datetime]]:
    """Return which spans of the year are compared."""
    year = YEARS[zone]
    # No instant is due at half a minute.
    first = dt.datetime(year, 1, 1, 0, 0, 30, tzinfo=UTC) - DAY
    minute, hour, *days = spec.split()
    schedule: Any = celery_schedules.crontab(minute=minute, hour=hour)
    a_day = len(schedule.minute) * len(schedule.hour)
    if EVERYTHING or a_day == 1 or (days != ["*"] * 3 and a_day <= 12):
        return [(first, dt.datetime(year + 1, 1, 2, tzinfo=UTC))]
    chosen = random.Random(f"{SEED} {zone} {spec}")  # noqa: S311 - which days, no secret
    start = first + DAY * chosen.randrange(365)
    around = [(change.at - DAY, change.at + DAY) for change in changes(zone)]
    return [(start, start + 3 * DAY), *((since + MINUTE / 2, until) for since, until in around)]


def read(schedule: Any) -> occurrences.Schedule:
    return schedules.read(schedule, UTC, dt.datetime(1970, 1, 1, tzinfo=UTC))


def compare(
    app: celery.Celery, zone: str, spec: str, ours_for: Callable[[Any], occurrences.Schedule] = read
) -> Tally:
    tz = ZoneInfo(zone)
    schedule = crontab(app, spec, zone, Clock())
    schedule_of_ours = ours_for(schedule)
    tally = Tally()
    for since, until in windows(zone, spec):
        ours = list(occurrences.between(schedule_of_ours, since, until))
        assert all(one < other for one, other in itertools.pairwise(ours))
        theirs = set(by_celery(schedule, tz, since, until))
        tally.compared += len(theirs.union(ours))
        for instant in sorted(theirs.symmetric_difference(ours)):
            reason = why(schedule, spec, zone, instant, theirs)
            whose = "theirs" if instant in theirs else "ours"
            if reason is None:
                tally.unexplained.append(f"{zone} {spec} {whose} {instant}")
            else:
                tally.differing[reason] += 1
    return tally


@pytest.mark.xfail(not FROM_5_7, reason="before 5.7 Celery's own rule is another", strict=False)
@pytest.mark.timeout(1800 if EVERYTHING else 120)
@pytest.mark.parametrize("zone", YEARS)
def test_a_year_agrees_with_celery_but_where_the_rule_says_otherwise(
    app: celery.Celery, zone: str
) -> None:
    """C09: 20 crontabs in 8 zones; each instant that only one of both knows has its reason."""
    found = Tally()
    for spec in SPECS:
        one = compare(app, zone, spec)
        assert one.compared or (spec == "0 6 29 2 *" and YEARS[zone] % 4)
        found.add(one)
    print(f"\n{zone} {YEARS[zone]} (seed {SEED}): {found.compared} instants compared")
    for reason, count in sorted(found.differing.items()):
        print(f"  {count:5} {reason}")
    assert found.unexplained == []
    # Where clocks are changed there is something to explain, and nowhere else.
    assert bool(found.differing) is bool(changes(zone))


def as_the_other_kind(schedule: Any) -> occurrences.Schedule:
    right = read(schedule)
    assert isinstance(right, occurrences.Crontab)
    return dataclasses.replace(right, elapsed=not right.elapsed)


@dataclasses.dataclass(frozen=True)
class Late:
    """Due a minute after it is due."""

    right: occurrences.Schedule

    def after(self, moment: dt.datetime) -> dt.datetime | None:
        due = self.right.after(moment - MINUTE)
        return None if due is None else due + MINUTE


@pytest.mark.xfail(not FROM_5_7, reason="before 5.7 Celery's own rule is another", strict=False)
@pytest.mark.parametrize(
    ("zone", "spec", "wrong"),
    [
        # A time on the wall clock in both passes, and not at all in a gap.
        ("Europe/Berlin", "30 2 * * *", as_the_other_kind),
        # Elapsed time that moves 02:20 by the gap, to 02:50.
        ("Australia/Lord_Howe", "*/20 * * * *", as_the_other_kind),
        ("UTC", "0 6 29 2 *", lambda schedule: Late(read(schedule))),
    ],
)
def test_instants_of_another_rule_have_no_reason(
    app: celery.Celery, zone: str, spec: str, wrong: Callable[[Any], occurrences.Schedule]
) -> None:
    assert compare(app, zone, spec).unexplained == []
    assert compare(app, zone, spec, wrong).unexplained


# --- the repeated hour ----------------------------------------------------------------------


def sent_by_celery(zone: str, queue: str) -> int:
    """Return what stock beat sends that starts at 06:05Z and looks every 10 s for an hour."""
    clock = Clock()
    with celery.Celery("stock", broker="memory://", set_as_current=False) as app:
        app.conf.update(task_default_queue=queue, broker_connection_retry_on_startup=False)
        schedule = crontab(app, "*/20 * * * *", zone, clock)
        clock.now = dt.datetime(2026, 11, 1, 6, 5, tzinfo=UTC)
        app.conf.beat_schedule = {"entry": {"task": "stock", "schedule": schedule}}
        scheduler = celery.beat.Scheduler(app)
        for _ in range(55 * 6):
            clock.now += dt.timedelta(seconds=10)
            scheduler.tick()
        channel: Any = scheduler.connection.default_channel
        sent: int = channel.queue_declare(queue, passive=True).message_count
        scheduler.connection.close()
    return sent


def test_in_a_repeated_hour_each_instant_comes_once_where_celery_does_not_stop_sending() -> None:
    """C09: a real beat sent one entry 17,954 times in four seconds there."""
    assert sent_by_celery("UTC", "not repeated") == 3
    # At each look until 06:40, from which on the next one is due in the hour after it.
    sent = sent_by_celery("America/New_York", "repeated")
    assert sent >= 200 if FROM_5_7 else sent == 3

    since = dt.datetime(2026, 11, 1, 6, 5, tzinfo=UTC)
    ours = read(crontab(celery.Celery(set_as_current=False), SPECS[1], "America/New_York", Clock()))
    # Whoever looks, and whenever: a beat that starts there, and one that has always been there.
    every = [since + dt.timedelta(seconds=10 * look) for look in range(55 * 6 + 1)]
    assert SPECS[1] == "*/20 * * * *"
    assert {f"{ours.after(look):%H:%M}" for look in every} == {"06:20", "06:40", "07:00", "07:20"}
    assert [f"{due:%H:%M}" for due in occurrences.between(ours, since, every[-1])] == [
        "06:20",
        "06:40",
        "07:00",
    ]


# --- intervals ------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", INTERVALS)
def test_an_interval_is_due_when_celerys_is_that_is_never_late(
    app: celery.Celery, seconds: float
) -> None:
    """Over a year, or its first 2,000 instants; across changes of clocks as well."""
    zone: dt.tzinfo = ZoneInfo("Europe/Berlin") if FROM_5_7 else UTC
    anchor = dt.datetime(2026, 3, 28, 12, 0, 0, 123456, tzinfo=UTC)
    schedule = celery_schedules.schedule(seconds, nowfun=Clock(), app=app)
    until = anchor + min(365 * DAY, 2000 * dt.timedelta(seconds=seconds))
    ours = list(occurrences.between(schedules.read(schedule, zone, anchor), anchor, until))
    assert ours == list(by_celery(schedule, zone, anchor, until))
    assert len(ours) == (until - anchor) // dt.timedelta(seconds=seconds)


def test_an_interval_does_not_drift_where_celerys_does(app: celery.Celery) -> None:
    """Each look is 3 ms late, as each is in a real beat, and Celery counts on from there."""
    late, count = dt.timedelta(milliseconds=3), 1000
    clock = Clock()
    schedule = celery_schedules.schedule(1, nowfun=clock, app=app)
    ours = schedules.read(schedule, UTC, clock.now)
    start = theirs = due = clock.now
    for _ in range(count):
        clock.now = theirs
        clock.now += dt.timedelta(seconds=schedule.is_due(theirs).next) + late
        theirs = clock.now
        following = ours.after(due + late)
        assert following is not None
        due = following
    assert theirs - start == count * (dt.timedelta(seconds=1) + late)
    assert due - start == count * dt.timedelta(seconds=1)

"""Due instants: golden values, every change of clocks, and the same answer as a brute search."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, Final
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from celery_pglock import occurrences

UTC: Final = dt.UTC
MINUTE: Final = dt.timedelta(minutes=1)
DAY: Final = dt.timedelta(days=1)
# Apia's clocks have stood still since 2021; in December 2011 they skipped a whole day.
YEARS: Final = {
    "Europe/Berlin": 2026,
    "America/New_York": 2026,
    "Australia/Lord_Howe": 2026,
    "Europe/Dublin": 2026,
    "Africa/Cairo": 2026,
    "Pacific/Apia": 2011,
}


def utc(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=UTC)


def cron(
    *,
    minutes: Iterable[int] = range(60),
    hours: Iterable[int] = range(24),
    days_of_week: Iterable[int] = range(7),
    days_of_month: Iterable[int] = range(1, 32),
    months: Iterable[int] = range(1, 13),
    zone: str = "UTC",
    elapsed: bool = False,
) -> occurrences.Crontab:
    return occurrences.Crontab(
        minutes=frozenset(minutes),
        hours=frozenset(hours),
        days_of_week=frozenset(days_of_week),
        days_of_month=frozenset(days_of_month),
        months=frozenset(months),
        zone=ZoneInfo(zone),
        elapsed=elapsed,
    )


def due(schedule: occurrences.Schedule, since: str, until: str) -> list[str]:
    """Return the due instants in ``(since, until]`` as short texts, in UTC."""
    found = occurrences.between(schedule, utc(since), utc(until))
    return [f"{moment.astimezone(UTC):%m-%d %H:%M}" for moment in found]


# --- golden values around the changes of clocks ---------------------------------------------


@pytest.mark.parametrize(
    ("zone", "at", "since", "until", "expected"),
    [
        # Spring: 02:30 does not exist on 29 March, and is 03:30; autumn: it exists twice.
        (
            "Europe/Berlin",
            (2, 30),
            "2026-03-27T12:00",
            "2026-03-30T12:00",
            ["03-28 01:30", "03-29 01:30", "03-30 00:30"],
        ),
        (
            "Europe/Berlin",
            (2, 30),
            "2026-10-23T12:00",
            "2026-10-26T12:00",
            ["10-24 00:30", "10-25 00:30", "10-26 01:30"],
        ),
        ("America/New_York", (2, 30), "2026-03-08T00:00", "2026-03-09T00:00", ["03-08 07:30"]),
        ("America/New_York", (1, 30), "2026-11-01T00:00", "2026-11-02T00:00", ["11-01 05:30"]),
        ("America/New_York", (2, 30), "2026-11-01T00:00", "2026-11-02T00:00", ["11-01 07:30"]),
        # Half an hour of summer time.
        ("Australia/Lord_Howe", (2, 15), "2026-10-03T00:00", "2026-10-04T00:00", ["10-03 15:45"]),
        ("Australia/Lord_Howe", (1, 45), "2026-04-04T00:00", "2026-04-05T00:00", ["04-04 14:45"]),
        # Winter time is the exception there.
        ("Europe/Dublin", (1, 30), "2026-03-28T12:00", "2026-03-29T12:00", ["03-29 01:30"]),
        ("Europe/Dublin", (1, 30), "2026-10-24T12:00", "2026-10-25T12:00", ["10-25 00:30"]),
        # At midnight: 00:30 of 24 April is 01:30; 23:30 of 29 October comes twice.
        ("Africa/Cairo", (0, 30), "2026-04-23T12:00", "2026-04-24T12:00", ["04-23 22:30"]),
        ("Africa/Cairo", (23, 30), "2026-10-29T12:00", "2026-10-30T12:00", ["10-29 20:30"]),
        # 30 December never was; its occurrence falls together with that of the 31st.
        (
            "Pacific/Apia",
            (2, 30),
            "2011-12-29T00:00",
            "2012-01-01T00:00",
            ["12-29 12:30", "12-30 12:30", "12-31 12:30"],
        ),
    ],
)
def test_a_time_on_the_wall_clock_comes_once_a_day(
    zone: str, at: tuple[int, int], since: str, until: str, expected: list[str]
) -> None:
    """C09: in the first pass of a repeated hour; moved by the gap where it does not exist."""
    hour, minute = at
    assert due(cron(hours=[hour], minutes=[minute], zone=zone), since, until) == expected


def test_a_leader_that_takes_over_in_the_second_pass_does_not_find_the_first_again() -> None:
    """C09: at 01:15Z it is 02:15 for the second time; 02:30 has been."""
    schedule = cron(hours=[2], minutes=[30], zone="Europe/Berlin")
    assert schedule.after(utc("2026-10-25T01:15")) == utc("2026-10-26T01:30")


@pytest.mark.parametrize(
    ("zone", "since", "until"),
    [
        ("Europe/Berlin", "2026-03-28T23:59", "2026-03-29T04:00"),
        ("Europe/Berlin", "2026-10-24T23:59", "2026-10-25T04:00"),
        ("America/New_York", "2026-03-08T04:59", "2026-03-08T10:00"),
        ("America/New_York", "2026-11-01T03:59", "2026-11-01T09:00"),
        ("Europe/Dublin", "2026-10-24T22:59", "2026-10-25T04:00"),
        ("Africa/Cairo", "2026-10-29T18:59", "2026-10-30T00:00"),
        ("Africa/Cairo", "2026-04-23T19:59", "2026-04-24T01:00"),
        ("Pacific/Apia", "2011-12-30T07:59", "2011-12-30T13:00"),
    ],
)
def test_every_hour_is_every_real_hour(zone: str, since: str, until: str) -> None:
    schedule = cron(minutes=[0], zone=zone, elapsed=True)
    found = list(occurrences.between(schedule, utc(since), utc(until)))
    assert found == [utc(since) + MINUTE + dt.timedelta(hours=hour) for hour in range(len(found))]
    assert len(found) >= 5


def test_elapsed_time_fires_in_both_passes_and_never_in_a_gap() -> None:
    half_past_two = cron(hours=[2], minutes=[0, 30], zone="Europe/Berlin", elapsed=True)
    assert due(half_past_two, "2026-03-28T12:00", "2026-03-29T12:00") == []
    assert due(half_past_two, "2026-10-24T12:00", "2026-10-25T12:00") == [
        "10-25 00:00",
        "10-25 00:30",
        "10-25 01:00",
        "10-25 01:30",
    ]
    # 02:00 and 02:20 are skipped there, and 02:40 comes ten minutes after 01:40 + 30.
    twenty = cron(minutes=[0, 20, 40], zone="Australia/Lord_Howe", elapsed=True)
    assert due(twenty, "2026-10-03T15:00", "2026-10-03T16:30") == [
        "10-03 15:10",
        "10-03 15:40",
        "10-03 16:00",
        "10-03 16:20",
    ]


# --- against a brute search -----------------------------------------------------------------


@functools.cache
def changes(zone: str) -> list[dt.datetime]:
    """Return the instants, to the minute, at which the clocks of a zone are changed."""
    tz = ZoneInfo(zone)
    first = dt.datetime(YEARS[zone], 1, 1, tzinfo=UTC)
    hours = [first + dt.timedelta(hours=hour) for hour in range(366 * 24)]
    found = []
    for before, after in itertools.pairwise(hours):
        if before.astimezone(tz).utcoffset() != after.astimezone(tz).utcoffset():
            minutes = (before + MINUTE * minute for minute in range(61))
            offset = before.astimezone(tz).utcoffset()
            found.append(next(m for m in minutes if m.astimezone(tz).utcoffset() != offset))
    return found


def test_there_are_changes_to_look_at() -> None:
    assert {zone: len(changes(zone)) for zone in YEARS} == {
        **dict.fromkeys(YEARS, 2),
        "Pacific/Apia": 3,
    }


ALL_CHANGES: Final = [(zone, change) for zone in YEARS for change in changes(zone)]


@functools.cache
def minutes_around(zone: str, change: dt.datetime) -> list[tuple[dt.datetime, dt.datetime]]:
    """Return (instant, what the clock on the wall shows) for each minute of nine days."""
    first = change - DAY * 4
    instants = [first + MINUTE * minute for minute in range(9 * 24 * 60)]
    tz = ZoneInfo(zone)
    return [(instant, instant.astimezone(tz).replace(tzinfo=None)) for instant in instants]


@functools.cache
def first_passes(zone: str, change: dt.datetime) -> dict[dt.datetime, dt.datetime]:
    """Return the instant of each label; one that does not exist moves by the gap."""
    found: dict[dt.datetime, dt.datetime] = {}
    clock = None
    for instant, label in minutes_around(zone, change):
        while clock is not None and clock + MINUTE < label:
            clock += MINUTE
            found.setdefault(clock, found[clock - MINUTE] + MINUTE)
        found.setdefault(label, instant)
        clock = label
    return found


def matches(schedule: occurrences.Crontab, label: dt.datetime) -> bool:
    return (
        label.minute in schedule.minutes
        and label.hour in schedule.hours
        and label.isoweekday() % 7 in schedule.days_of_week
        and label.day in schedule.days_of_month
        and label.month in schedule.months
    )


def by_force(
    schedule: occurrences.Crontab,
    change: dt.datetime,
    since: dt.datetime,
    until: dt.datetime,
) -> list[dt.datetime]:
    zone = str(schedule.zone)
    if schedule.elapsed:
        every = minutes_around(zone, change)
        instants = {instant for instant, label in every if matches(schedule, label)}
    else:
        labels = first_passes(zone, change)
        instants = {labels[label] for label in labels if matches(schedule, label)}
    return sorted(instant for instant in instants if since < instant <= until)


def some(most: int, least: int = 0) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(least, most), min_size=1, max_size=4) | st.just(
        set(range(least, most + 1))
    )


@st.composite
def crontabs(draw: st.DrawFn, zones: st.SearchStrategy[str]) -> occurrences.Crontab:
    return cron(
        minutes=draw(some(59)),
        hours=draw(some(23) | st.sets(st.integers(0, 3), min_size=1)),
        days_of_week=draw(some(6)),
        days_of_month=draw(st.just(set(range(1, 32))) | some(31, 1)),
        zone=draw(zones),
        elapsed=draw(st.booleans()),
    )


@st.composite
def around_changes(
    draw: st.DrawFn,
) -> tuple[occurrences.Crontab, dt.datetime, dt.datetime, dt.datetime]:
    zone, change = draw(st.sampled_from(ALL_CHANGES))
    schedule = draw(crontabs(st.just(zone)))
    since = change + draw(st.timedeltas(-2 * DAY, DAY))
    return schedule, change, since, since + draw(st.timedeltas(dt.timedelta(0), DAY))


@given(around_changes())
def test_between_finds_what_a_search_over_all_minutes_finds(
    case: tuple[occurrences.Crontab, dt.datetime, dt.datetime, dt.datetime],
) -> None:
    schedule, _, since, until = case
    assert list(occurrences.between(schedule, since, until)) == by_force(*case)


@pytest.mark.parametrize("elapsed", [False, True])
@pytest.mark.parametrize("times", [(range(60), range(24)), ([0, 59], [0, 1, 23]), ([15, 45], [2])])
@pytest.mark.parametrize(("zone", "change"), ALL_CHANGES)
def test_each_change_of_clocks_by_force(
    zone: str, change: dt.datetime, times: tuple[Iterable[int], Iterable[int]], *, elapsed: bool
) -> None:
    minutes, hours = times
    schedule = cron(minutes=minutes, hours=hours, zone=zone, elapsed=elapsed)
    since, until = change - DAY, change + DAY
    found = list(occurrences.between(schedule, since, until))
    assert found == by_force(schedule, change, since, until)
    assert found


@given(around_changes(), st.integers(0, 5))
def test_the_newest_are_the_tail_of_all(
    case: tuple[occurrences.Crontab, dt.datetime, dt.datetime, dt.datetime], count: int
) -> None:
    schedule, _, since, until = case
    since -= DAY * 2
    everything = list(occurrences.between(schedule, since, until))
    expected = everything[-count:] if count else []
    assert occurrences.newest(schedule, since, until, count) == expected


@given(crontabs(st.sampled_from(sorted(YEARS))), st.datetimes(timezones=st.just(UTC)))
def test_time_always_goes_on(schedule: occurrences.Crontab, moment: dt.datetime) -> None:
    moment = moment.replace(year=1990 + moment.year % 60, day=min(moment.day, 28))
    first = schedule.after(moment)
    assert first is not None
    assert first > moment
    assert first.second == first.microsecond == 0
    second = schedule.after(first)
    assert second is not None
    assert second > first
    # Nothing lies between an instant and the one after it, from wherever one looks.
    assert schedule.after(first + (second - first) / 2) == second


# --- rare, and never ------------------------------------------------------------------------


def by_days(*, day: int, month: int, weekday: int, since: dt.date) -> dt.date:
    date = since
    while not (date.day == day and date.month == month and date.isoweekday() % 7 == weekday):
        date += DAY
    return date


@pytest.mark.parametrize("elapsed", [False, True])
@pytest.mark.parametrize(
    ("day", "month", "weekday"),
    [
        (29, 2, 1),  # a Monday in 2044 and in 2072, and then not before 2112
        (13, 2, 5),  # eleven years may lie between two
        (31, 12, 0),
    ],
)
@pytest.mark.parametrize("year", [2026, 2073])
def test_what_comes_once_in_a_generation_is_found(
    day: int, month: int, weekday: int, year: int, *, elapsed: bool
) -> None:
    """Day of month and day of week have both to match, so a date may be long in coming."""
    schedule = cron(
        minutes=[0],
        hours=[6],
        days_of_week=[weekday],
        days_of_month=[day],
        months=[month],
        elapsed=elapsed,
    )
    expected = by_days(day=day, month=month, weekday=weekday, since=dt.date(year, 1, 1))
    found = schedule.after(dt.datetime(year, 1, 1, tzinfo=UTC))
    assert found == dt.datetime.combine(expected, dt.time(6), UTC)
    assert occurrences.newest(schedule, utc("2025-01-01T00:00"), found, 1) == [found]


class Counted(frozenset[int]):
    """Numbers of a field, which count how often somebody looks for one."""

    looks: ClassVar[int] = 0

    @override
    def __contains__(self, number: object) -> bool:
        Counted.looks += 1
        return super().__contains__(number)


def counted(schedule: occurrences.Crontab) -> occurrences.Crontab:
    Counted.looks = 0
    return dataclasses.replace(
        schedule,
        months=Counted(schedule.months),
        hours=Counted(schedule.hours),
        minutes=Counted(schedule.minutes),
    )


NO_INTS: Final[list[int]] = []


@pytest.mark.parametrize("elapsed", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"days_of_month": [31], "months": [4]},
        {"days_of_month": [30], "months": [2]},
        {"days_of_month": [30, 31], "months": [2], "days_of_week": [1]},
        {"days_of_month": NO_INTS},
        {"months": NO_INTS},
        {"minutes": NO_INTS},
        {"hours": NO_INTS},
        {"days_of_week": NO_INTS},
    ],
    ids=str,
)
def test_what_never_comes_is_told_without_a_search(
    fields: dict[str, Any], *, elapsed: bool
) -> None:
    schedule = counted(cron(**fields, zone="Europe/Berlin", elapsed=elapsed))
    assert not schedule.comes
    assert schedule.after(utc("2026-01-01T00:00")) is None
    assert occurrences.newest(schedule, utc("2026-01-01T00:00"), utc("2027-01-01T00:00"), 3) == []
    assert Counted.looks == 0


@pytest.mark.parametrize("elapsed", [False, True])
@pytest.mark.parametrize("weekday", range(7))
def test_the_search_for_what_is_rare_has_a_bound(weekday: int, *, elapsed: bool) -> None:
    """29 February on one day of the week: a look at each day of 40 years, at the most."""
    schedule = counted(
        cron(
            minutes=[59],
            hours=[23],
            days_of_month=[29],
            months=[2],
            days_of_week=[weekday],
            zone="Europe/Berlin",
            elapsed=elapsed,
        )
    )
    assert schedule.comes
    # Up to the last one before 2100 and after it, when eight years have no 29 February.
    for year in (2026, 2073, 2088):
        Counted.looks = 0
        assert schedule.after(dt.datetime(year, 3, 1, tzinfo=UTC)) is not None
        # In elapsed time also at each minute of a day until its clocks are changed.
        assert Counted.looks <= 41 * 366 + 82 * 180 + 24 + 60
    assert Counted.looks > 366


# --- what counts from the one before --------------------------------------------------------


class Chain:
    """Due so long after it was last due."""

    def __init__(self, step: dt.timedelta) -> None:
        self.step = step
        self.steps = 0

    def after(self, moment: dt.datetime) -> dt.datetime:
        self.steps += 1
        return moment + self.step


@given(st.timedeltas(dt.timedelta(minutes=5), 9 * DAY), st.integers(0, 5))
def test_the_newest_of_a_chain_are_the_tail_of_all(step: dt.timedelta, count: int) -> None:
    """Whoever looks, and whenever: they are those that would have been sent, one by one."""
    schedule = Chain(step)
    since, until = utc("2026-11-01T00:00"), utc("2026-11-30T00:00")
    everything = list(occurrences.between(schedule, since, until))
    expected = everything[-count:] if count else []
    assert occurrences.newest(schedule, since, until, count) == expected


def test_the_search_for_the_newest_of_a_chain_has_a_bound() -> None:
    schedule = Chain(dt.timedelta(seconds=1))
    until = utc("2026-11-30T00:00")
    found = occurrences.newest(schedule, utc("2025-11-30T00:00"), until, 3)
    assert found == [until - dt.timedelta(seconds=late) for late in (2, 1, 0)]
    # Not the 31,536,000 of a year.
    assert schedule.steps <= 50_000


# --- intervals ------------------------------------------------------------------------------

ANCHOR: Final = utc("2026-11-29T12:00:00.123456")
distances = st.timedeltas(dt.timedelta(milliseconds=1), DAY * 400)


@given(distances, st.timedeltas(-DAY * 1000, DAY * 1000))
def test_an_interval_stays_on_its_anchor(every: dt.timedelta, away: dt.timedelta) -> None:
    schedule = occurrences.Interval(every, ANCHOR)
    moment = ANCHOR + away
    found = schedule.after(moment)
    assert (found - ANCHOR) % every == dt.timedelta(0)
    assert found > max(moment, ANCHOR)
    assert found - every <= max(moment, ANCHOR)


@given(distances, st.integers(1, 300), st.timedeltas(dt.timedelta(0), DAY))
def test_an_interval_does_not_drift(every: dt.timedelta, count: int, late: dt.timedelta) -> None:
    schedule = occurrences.Interval(every, ANCHOR)
    until = ANCHOR + every * count
    # Whoever asks, and however late, the instants are the same.
    found = list(occurrences.between(schedule, ANCHOR, until))
    assert found == [ANCHOR + every * k for k in range(1, count + 1)]
    looked_at = until + late
    assert schedule.after(looked_at) == ANCHOR + every * (late // every + count + 1)
    assert occurrences.newest(schedule, ANCHOR, until, 3) == found[-3:]
    assert occurrences.newest(schedule, ANCHOR, until, 0) == []

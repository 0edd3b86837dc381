"""Periods: golden labels, and every instant in exactly one bucket, around every change of clocks."""

from __future__ import annotations

import datetime as dt
import itertools
from typing import Final
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_pglock import periods

UTC: Final = dt.UTC
BERLIN: Final = ZoneInfo("Europe/Berlin")
# Zones whose clocks have done what others' never do: half an hour of summer time, winter time
# as the exception, a change at midnight, a day that never was, a month without summer time.
ZONES: Final = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Europe/Dublin",
    "Africa/Cairo",
    "Pacific/Apia",
    "Africa/Casablanca",
    "Asia/Kathmandu",
]
MICROSECOND: Final = dt.timedelta(microseconds=1)


def utc(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=UTC)


def _changes() -> list[tuple[str, dt.datetime]]:
    """Return the instants, to the hour, before the clocks of a zone are changed."""
    found = []
    hour = dt.timedelta(hours=1)
    for name in ZONES:
        zone = ZoneInfo(name)
        for year in (2011, 2026):
            moment = dt.datetime(year, 1, 1, tzinfo=UTC)
            while moment.year == year:
                later = moment + dt.timedelta(days=1)
                if moment.astimezone(zone).utcoffset() != later.astimezone(zone).utcoffset():
                    at = moment
                    while at.astimezone(zone).utcoffset() == moment.astimezone(zone).utcoffset():
                        at += hour
                    found.append((name, at - hour))
                moment = later
    return found


CHANGES: Final = _changes()

zones = st.sampled_from(ZONES)
anywhere = st.tuples(
    zones,
    st.datetimes(dt.datetime(2000, 1, 1), dt.datetime(2037, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
)
around_changes = st.builds(
    lambda change, seconds: (change[0], change[1] + dt.timedelta(seconds=seconds)),
    st.sampled_from(CHANGES),
    st.floats(-90_000, 90_000).map(lambda value: round(value, 6)),
)
moments = anywhere | around_changes
rules = st.sampled_from(["minute", "hour", "day", "week", "month"])


def test_all_the_zones_with_summer_time_have_changes_to_look_at() -> None:
    assert {name for name, _ in CHANGES} == set(ZONES) - {"UTC", "Asia/Kathmandu"}


@pytest.mark.parametrize(
    ("moment", "label"),
    [
        (utc("2026-11-03T03:00"), "2026-11-03T03:00:00.000000+00:00"),
        (utc("2026-11-03T03:00:00.123456"), "2026-11-03T03:00:00.123456+00:00"),
        (dt.datetime(2026, 11, 3, 4, tzinfo=BERLIN), "2026-11-03T03:00:00.000000+00:00"),
        # The two passes of the repeated hour are two instants.
        (dt.datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN), "2026-10-25T00:30:00.000000+00:00"),
        (
            dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN),
            "2026-10-25T01:30:00.000000+00:00",
        ),
    ],
)
def test_an_occurrence_is_its_instant_in_utc_with_microseconds(
    moment: dt.datetime, label: str
) -> None:
    assert periods.occurrence(moment) == label


def test_a_message_has_its_id_for_a_period() -> None:
    assert periods.message("4f2c6a3e") == "id:4f2c6a3e"


@pytest.mark.parametrize(
    ("rule", "moment", "zone", "label"),
    [
        ("minute", "2026-11-03T13:05:59", "Europe/Berlin", "2026-11-03T14:05+01:00"),
        ("hour", "2026-11-03T13:05", "Europe/Berlin", "2026-11-03T14+01:00"),
        ("day", "2026-11-03T13:05", "Europe/Berlin", "2026-11-03"),
        ("week", "2026-11-03T13:05", "Europe/Berlin", "2026-W45"),
        ("month", "2026-11-03T13:05", "Europe/Berlin", "2026-11"),
        # In another zone it is another day already.
        ("day", "2026-11-03T23:30", "Europe/Berlin", "2026-11-04"),
        ("day", "2026-11-03T23:30", "America/New_York", "2026-11-03"),
        # ISO weeks at the turn of the year.
        ("week", "2027-01-03T12:00", "UTC", "2026-W53"),
        ("week", "2027-01-04T00:00", "UTC", "2027-W01"),
        ("week", "2024-12-30T00:00", "UTC", "2025-W01"),
        # Both passes of the repeated hour; the gap of spring has no label at all.
        ("hour", "2026-10-25T00:30", "Europe/Berlin", "2026-10-25T02+02:00"),
        ("hour", "2026-10-25T01:30", "Europe/Berlin", "2026-10-25T02+01:00"),
        ("hour", "2026-03-29T00:59", "Europe/Berlin", "2026-03-29T01+01:00"),
        ("hour", "2026-03-29T01:00", "Europe/Berlin", "2026-03-29T03+02:00"),
        ("hour", "2026-11-01T05:30", "America/New_York", "2026-11-01T01-04:00"),
        ("hour", "2026-11-01T06:30", "America/New_York", "2026-11-01T01-05:00"),
        # Half an hour of summer time.
        ("hour", "2026-04-04T14:45", "Australia/Lord_Howe", "2026-04-05T01+11:00"),
        ("hour", "2026-04-04T15:00", "Australia/Lord_Howe", "2026-04-05T01+10:30"),
        ("minute", "2026-04-04T15:00", "Australia/Lord_Howe", "2026-04-05T01:30+10:30"),
        # Ireland: winter time is the exception.
        ("hour", "2026-10-25T00:30", "Europe/Dublin", "2026-10-25T01+01:00"),
        ("hour", "2026-10-25T01:30", "Europe/Dublin", "2026-10-25T01+00:00"),
        # Egypt changes at midnight: this day begins at one o'clock.
        ("day", "2026-04-23T21:59", "Africa/Cairo", "2026-04-23"),
        ("day", "2026-04-23T22:00", "Africa/Cairo", "2026-04-24"),
        ("hour", "2026-04-23T22:00", "Africa/Cairo", "2026-04-24T01+03:00"),
        # Samoa had no 30 December 2011.
        ("day", "2011-12-30T09:59", "Pacific/Apia", "2011-12-29"),
        ("day", "2011-12-30T10:00", "Pacific/Apia", "2011-12-31"),
        # Morocco goes back for Ramadan and forth again.
        ("hour", "2026-02-15T01:30", "Africa/Casablanca", "2026-02-15T02+01:00"),
        ("hour", "2026-02-15T02:30", "Africa/Casablanca", "2026-02-15T02+00:00"),
        ("minute", "2026-01-01T00:00", "Asia/Kathmandu", "2026-01-01T05:45+05:45"),
    ],
)
def test_calendar_labels_are_frozen(
    rule: periods.Calendar, moment: str, zone: str, label: str
) -> None:
    assert periods.calendar(rule, utc(moment), ZoneInfo(zone)) == label


@given(moments, rules)
@example(("Africa/Casablanca", utc("2011-07-30T22:00")), "day")
def test_a_window_holds_its_moment_and_nothing_of_another_label(
    where: tuple[str, dt.datetime], rule: periods.Calendar
) -> None:
    name, moment = where
    zone = ZoneInfo(name)
    window = periods.window(rule, moment, zone)
    if window is None:
        return
    since, until = window
    label = periods.calendar(rule, moment, zone)
    assert since <= moment < until
    inside = [since + (until - since) * part / 7 for part in range(7)]
    assert {periods.calendar(rule, at, zone) for at in [*inside, until - MICROSECOND]} == {label}
    # And it is the whole bucket, unless the clocks are changed at one of its ends (a Moroccan
    # day of 2011 began its last hour once more at midnight).
    for end, beyond in [(until - MICROSECOND, until), (since, since - MICROSECOND)]:
        if beyond.astimezone(zone).utcoffset() == end.astimezone(zone).utcoffset():
            assert periods.calendar(rule, beyond, zone) != label


@given(anywhere, rules)
def test_only_a_change_of_the_offset_leaves_no_window(
    where: tuple[str, dt.datetime], rule: periods.Calendar
) -> None:
    name, moment = where
    zone = ZoneInfo(name)
    if periods.window(rule, moment, zone) is not None:
        return
    around = [moment + dt.timedelta(days=day) for day in range(-32, 33)]
    assert len({at.astimezone(zone).utcoffset() for at in around}) > 1


@given(moments, rules, st.floats(-1, 1))
@example(("Europe/Berlin", utc("2026-10-25T00:30")), "hour", 1)
@example(("Africa/Casablanca", utc("2026-02-15T02:30")), "month", 1)
def test_an_instant_is_in_exactly_one_bucket(
    where: tuple[str, dt.datetime], rule: periods.Calendar, away: float
) -> None:
    """Two instants share a label just when no boundary of the local calendar is between them."""
    name, moment = where
    zone = ZoneInfo(name)
    days = {"minute": 2 / 1440, "hour": 0.1, "day": 2, "week": 9, "month": 40}[rule]
    other = moment + dt.timedelta(days=days * away)
    one, two = moment.astimezone(zone), other.astimezone(zone)
    if rule in ("minute", "hour"):
        # By the length of the offset, so that a repeated hour is two.
        size = 60 if rule == "minute" else 3600
        same = _bucket(one, size) == _bucket(two, size)
    else:
        same = _fields(rule, one) == _fields(rule, two)
    labels = {periods.calendar(rule, at, zone) for at in (moment, other)}
    assert len(labels) == (1 if same else 2)


def _fields(rule: periods.Calendar, local: dt.datetime) -> tuple[int, ...]:
    year, week, _ = local.isocalendar()
    fields = {
        "day": (local.year, local.month, local.day),
        "week": (year, week),
        "month": (local.year, local.month),
    }
    return fields[rule]


def _bucket(local: dt.datetime, size: int) -> tuple[dt.timedelta | None, int]:
    offset = local.utcoffset()
    assert offset is not None
    return offset, int((local.timestamp() + offset.total_seconds()) // size)


@given(moments)
def test_an_occurrence_tells_instants_apart_and_nothing_else(
    where: tuple[str, dt.datetime],
) -> None:
    name, moment = where
    label = periods.occurrence(moment)
    assert periods.occurrence(moment.astimezone(ZoneInfo(name))) == label
    assert periods.occurrence(moment + MICROSECOND) != label
    assert dt.datetime.fromisoformat(label) == moment


@pytest.mark.parametrize(("name", "moment"), CHANGES)
def test_no_two_hours_around_a_change_of_clocks_share_a_label(
    name: str, moment: dt.datetime
) -> None:
    zone = ZoneInfo(name)
    quarters = [moment + dt.timedelta(minutes=15 * step) for step in range(-16, 17)]
    labels = [periods.calendar("minute", at, zone) for at in quarters]
    assert len(set(labels)) == len(quarters)


def test_a_month_with_a_change_in_its_middle_has_no_window() -> None:
    zone = ZoneInfo("Africa/Casablanca")  # back on 15 February, forth on 22 March
    assert periods.window("month", utc("2026-02-10T12:00"), zone) is None
    assert periods.window("month", utc("2026-03-10T12:00"), zone) is None
    assert periods.window("month", utc("2026-05-10T12:00"), zone) is not None
    # There and back within one month: both of its ends have the same offset.
    cairo = ZoneInfo("Africa/Cairo")
    assert periods.window("month", utc("2010-09-05T12:00"), cairo) is None
    assert periods.window("day", utc("2010-09-05T12:00"), cairo) is not None


def test_the_window_of_a_day_is_that_day_in_the_zone() -> None:
    assert periods.window("day", utc("2026-11-03T13:05"), BERLIN) == (
        utc("2026-11-02T23:00"),
        utc("2026-11-03T23:00"),
    )


def test_december_ends_with_its_year() -> None:
    window = periods.window("month", utc("2026-12-31T12:00"), ZoneInfo("UTC"))
    assert window == (utc("2026-12-01T00:00"), utc("2027-01-01T00:00"))


@pytest.mark.parametrize("rule", periods.CALENDARS)
def test_a_moment_without_a_zone_is_refused(rule: periods.Calendar) -> None:
    naive = dt.datetime(2026, 11, 3, 14)  # noqa: DTZ001
    with pytest.raises(ValueError, match="has no time zone"):
        periods.occurrence(naive)
    with pytest.raises(ValueError, match="has no time zone"):
        periods.calendar(rule, naive, BERLIN)
    with pytest.raises(ValueError, match="has no time zone"):
        periods.window(rule, naive, BERLIN)


# --- Labels and their bounds ----------------------------------------------------------------

# How closely the clock is looked at, and from how long before to how long after the instant
# that a label seems to name. All zones above change their clocks at a quarter of an hour.
_SCANS: Final[dict[str, tuple[dt.timedelta, dt.timedelta]]] = {
    "minute": (dt.timedelta(minutes=1), dt.timedelta(minutes=2)),
    "hour": (dt.timedelta(minutes=15), dt.timedelta(hours=2)),
    "day": (dt.timedelta(minutes=15), dt.timedelta(days=3)),
    "week": (dt.timedelta(hours=1), dt.timedelta(days=10)),
    "month": (dt.timedelta(hours=1), dt.timedelta(days=34)),
}
_FORMATS: Final = {"week": "%G-W%V-%u", "month": "%Y-%m-%d"}


def bounds(rule: periods.Calendar, label: str, zone: ZoneInfo) -> tuple[dt.datetime, dt.datetime]:
    """Return ``[since, until)`` of a label, found by looking at the clock around it."""
    match rule:
        case "minute" | "hour":
            day, _, clock = label.partition("T")
            hour, offset = clock[:-6], clock[-6:]
            start = dt.datetime.fromisoformat(f"{day}T{hour}{':00' * (rule == 'hour')}{offset}")
        case "day":
            start = dt.datetime.fromisoformat(label).replace(tzinfo=UTC)
        case _:
            start = dt.datetime.strptime(f"{label}-1", _FORMATS[rule]).replace(tzinfo=UTC)
    step, far = _SCANS[rule]
    at = start.astimezone(UTC) - far
    inside = []
    for _ in range(2 * far // step + 1):
        if periods.calendar(rule, at, zone) == label:
            inside.append(at)
        at += step
    # In one piece, so that its two ends say everything.
    assert inside == [inside[0] + number * step for number in range(len(inside))]
    return inside[0], inside[-1] + step


# Half an hour of summer time ends an hour of Lord Howe in its middle, Nepal is at 45 minutes.
_ODD: Final = {"Asia/Kathmandu", "Australia/Lord_Howe"}


@given(moments, rules)
@example(("Africa/Casablanca", utc("2011-07-30T22:00")), "day")
@example(("Pacific/Apia", utc("2011-12-30T10:00")), "week")
@example(("Africa/Cairo", utc("2026-04-23T22:00")), "day")
@example(("Australia/Lord_Howe", utc("2026-04-04T15:00")), "hour")
def test_a_label_leads_back_to_the_bucket_that_it_was_made_of(
    where: tuple[str, dt.datetime], rule: periods.Calendar
) -> None:
    name, moment = where
    if name in _ODD and rule in ("week", "month"):
        return  # looked at by the hour, their ends would be missed
    zone = ZoneInfo(name)
    label = periods.calendar(rule, moment, zone)
    since, until = bounds(rule, label, zone)
    assert since <= moment < until
    assert periods.calendar(rule, since, zone) == label
    assert periods.calendar(rule, until - MICROSECOND, zone) == label
    # The next bucket begins where this one ends, and the one before ends where this begins.
    after = periods.calendar(rule, until, zone)
    before = periods.calendar(rule, since - MICROSECOND, zone)
    assert len({before, label, after}) == 3
    assert bounds(rule, after, zone)[0] == until
    assert bounds(rule, before, zone)[1] == since
    window = periods.window(rule, moment, zone)
    if window is not None:
        # A clock that is put back at midnight makes the bucket longer than its window.
        assert since <= window[0] <= moment < window[1] <= until


@pytest.mark.parametrize(("name", "moment"), CHANGES)
@pytest.mark.parametrize("rule", periods.CALENDARS)
def test_a_label_that_was_left_never_comes_back(
    name: str, moment: dt.datetime, rule: periods.Calendar
) -> None:
    """Over each change of clocks; and dates grow with time."""
    zone = ZoneInfo(name)
    step, length = {
        "minute": (dt.timedelta(minutes=1), dt.timedelta(hours=4)),
        "hour": (dt.timedelta(minutes=5), dt.timedelta(hours=30)),
    }.get(rule, (dt.timedelta(minutes=15), dt.timedelta(days=34)))
    number = length // step
    labels = [
        periods.calendar(rule, moment + part * step, zone) for part in range(-number, number + 1)
    ]
    order = [label for label, _ in itertools.groupby(labels)]
    assert len(set(order)) == len(order)
    assert len(order) > 2
    if rule in ("day", "week", "month"):
        assert order == sorted(order)
    else:
        # As instants, by the offset that they carry.
        starts = [bounds(rule, label, zone)[0] for label in order[:: max(1, len(order) // 40)]]
        assert starts == sorted(starts)


@pytest.mark.parametrize(
    ("name", "change", "before", "after"),
    [
        ("Europe/Berlin", "2026-03-29T01:00", "2026-03-29T01:59+01:00", "2026-03-29T03:00+02:00"),
        ("Europe/Berlin", "2026-10-25T01:00", "2026-10-25T02:59+02:00", "2026-10-25T02:00+01:00"),
        (
            "America/New_York",
            "2026-03-08T07:00",
            "2026-03-08T01:59-05:00",
            "2026-03-08T03:00-04:00",
        ),
        (
            "America/New_York",
            "2026-11-01T06:00",
            "2026-11-01T01:59-04:00",
            "2026-11-01T01:00-05:00",
        ),
        (
            "Australia/Lord_Howe",
            "2026-04-04T15:00",
            "2026-04-05T01:59+11:00",
            "2026-04-05T01:30+10:30",
        ),
        (
            "Australia/Lord_Howe",
            "2026-10-03T15:30",
            "2026-10-04T01:59+10:30",
            "2026-10-04T02:30+11:00",
        ),
        ("Europe/Dublin", "2026-03-29T01:00", "2026-03-29T00:59+00:00", "2026-03-29T02:00+01:00"),
        ("Europe/Dublin", "2026-10-25T01:00", "2026-10-25T01:59+01:00", "2026-10-25T01:00+00:00"),
        ("Africa/Cairo", "2026-04-23T22:00", "2026-04-23T23:59+02:00", "2026-04-24T01:00+03:00"),
        ("Africa/Cairo", "2026-10-29T21:00", "2026-10-29T23:59+03:00", "2026-10-29T23:00+02:00"),
        ("Pacific/Apia", "2011-04-02T14:00", "2011-04-02T03:59-10:00", "2011-04-02T03:00-11:00"),
        ("Pacific/Apia", "2011-09-24T14:00", "2011-09-24T02:59-11:00", "2011-09-24T04:00-10:00"),
        ("Pacific/Apia", "2011-12-30T10:00", "2011-12-29T23:59-10:00", "2011-12-31T00:00+14:00"),
    ],
)
def test_the_last_label_before_and_the_first_after_each_change_are_frozen(
    name: str, change: str, before: str, after: str
) -> None:
    zone = ZoneInfo(name)
    for moment, minute in ((utc(change) - MICROSECOND, before), (utc(change), after)):
        assert periods.calendar("minute", moment, zone) == minute
        assert periods.calendar("hour", moment, zone) == minute[:13] + minute[16:]
        assert periods.calendar("day", moment, zone) == minute[:10]
        assert periods.calendar("month", moment, zone) == minute[:7]


def test_the_day_that_samoa_skipped_is_no_label() -> None:
    zone = ZoneInfo("Pacific/Apia")
    quarters = [utc("2011-12-28T10:00") + dt.timedelta(minutes=15 * part) for part in range(400)]
    days = dict.fromkeys(periods.calendar("day", at, zone) for at in quarters)
    assert list(days) == [
        "2011-12-28",
        "2011-12-29",
        "2011-12-31",
        "2012-01-01",
        "2012-01-02",
    ]


def test_where_the_clocks_were_put_back_over_midnight_a_day_is_the_date_that_the_clock_shows() -> (
    None
):
    """Newfoundland, until 2011, at 0:01: the new day lasts a minute, and begins once more."""
    zone = ZoneInfo("America/St_Johns")
    days = [
        periods.calendar("day", utc(f"2010-11-07T{clock}"), zone)
        for clock in ("02:29", "02:30", "02:31", "03:29", "03:30")
    ]
    assert days == ["2010-11-06", "2010-11-07", "2010-11-06", "2010-11-06", "2010-11-07"]

"""Schedules and lengths of time in words."""

from __future__ import annotations

import datetime as dt
import zoneinfo

import pytest
from celery import schedules as celery_schedules

from celery_pglock import schedules
from celery_pglock.page import words

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
NOW = dt.datetime(2026, 11, 3, 12, 0, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            celery_schedules.crontab(minute="0", hour="7", day_of_week="mon-fri"),
            "At 07:00, Monday through Friday (UTC)",
        ),
        (celery_schedules.crontab(minute="*/5"), "Every 5 minutes (UTC)"),
        (celery_schedules.crontab(), "Every minute (UTC)"),
        (
            celery_schedules.crontab(minute="30", hour="2", day_of_week="sun"),
            "At 02:30, only on Sunday (UTC)",
        ),
        (celery_schedules.schedule(60), "Every 1 min"),
        (celery_schedules.schedule(90), "Every 90 s"),
        (celery_schedules.schedule(0.5), "Every 0.5 s"),
        (celery_schedules.schedule(7200), "Every 2 h"),
        (celery_schedules.schedule(86400 * 7), "Every 7 d"),
        (celery_schedules.solar("sunset", 52.5, 13.4), "Sunset at 52.5, 13.4"),
    ],
)
def test_a_stored_schedule_in_words(schedule: celery_schedules.BaseSchedule, expected: str) -> None:
    assert words.of_schedule(schedules.canonical(schedule, BERLIN)) == expected


@pytest.mark.parametrize("text", ["proj.Moon ('full',) UTC", "crontab x y z 1 2 UTC", ""])
def test_what_is_not_known_stays_as_it_is(text: str) -> None:
    assert words.of_schedule(text) == text


def test_bounds_stay_behind_the_words() -> None:
    text = "every 60.000000 s from 2026-11-03T00:00:00+00:00"
    assert words.of_schedule(text) == "Every 1 min from 2026-11-03T00:00:00+00:00"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0004, "0 s"), (0.25, "0.25 s"), (1.26, "1.3 s"), (59, "59 s"), (60, "1 min"),
        (119, "119 s"), (150, "2.5 min"), (7300, "2 h"), (86400, "1 d"), (400000, "4.6 d"),
    ],
)  # fmt: skip
def test_lengths_of_time(seconds: float, expected: str) -> None:
    assert words.span(seconds) == expected


def test_moments() -> None:
    assert words.instant(NOW, BERLIN) == "2026-11-03 13:00:00+01:00"
    assert words.briefly(NOW, NOW, BERLIN) == "13:00:00"
    assert words.briefly(NOW, NOW - dt.timedelta(days=1), BERLIN) == "2026-11-02 13:00"
    assert words.ago(NOW, NOW - dt.timedelta(seconds=3)) == "3 s ago"
    assert words.ago(NOW, NOW + dt.timedelta(seconds=3)) == "0 s ago"  # clocks differ

"""When an entry with a row behind it is due: within its bounds."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import pytest
from celery.schedules import crontab, schedule

from celery_pglock import bounds

NOON = dt.datetime(2026, 11, 30, 12, tzinfo=dt.UTC)
SECOND = dt.timedelta(seconds=1)
MINUTE = dt.timedelta(minutes=1)
HOUR = dt.timedelta(hours=1)


def entry(every: Any, **row: Any) -> Any:
    model = SimpleNamespace(**{"enabled": True, "total_run_count": 0, "date_changed": NOON, **row})
    return SimpleNamespace(schedule=every, model=model)


def dues(
    given: Any, anchor: dt.datetime = NOON, *, since: dt.datetime | None = None, most: int = 4
) -> list[dt.datetime]:
    due_times = bounds.read(given, dt.UTC, anchor)
    found: list[dt.datetime] = []
    moment = anchor if since is None else since
    while len(found) < most:
        due = due_times.after(moment)
        if due is None:
            break
        assert due > moment
        found.append(due)
        moment = due
    return found


def test_an_entry_without_a_row_has_none() -> None:
    assert bounds.of(SimpleNamespace(schedule=schedule(60)), dt.UTC) is None
    assert bounds.of(entry(schedule(60)), dt.UTC) is None
    assert bounds.canonical(entry(schedule(60)), dt.UTC) == "every 60.000000 s"


def test_an_interval_begins_at_its_start_time() -> None:
    given = entry(schedule(60), start_time=NOON + HOUR + SECOND)
    assert dues(given, most=2) == [NOON + HOUR + SECOND, NOON + HOUR + SECOND + MINUTE]


def test_a_crontab_begins_with_the_first_at_or_after_its_start_time() -> None:
    assert dues(entry(crontab(minute="0"), start_time=NOON + HOUR), most=1) == [NOON + HOUR]
    given = entry(crontab(minute="0"), start_time=NOON + HOUR + SECOND)
    assert dues(given, most=1) == [NOON + 2 * HOUR]


def test_an_interval_that_is_to_begin_at_once_does() -> None:
    """It is seen a moment after the start time that somebody has given as now."""
    given = entry(schedule(86400), start_time=NOON - 2 * SECOND)
    first, second = dues(given, most=2)
    assert NOON < first < NOON + SECOND
    assert second == NOON - 2 * SECOND + dt.timedelta(days=1)
    # One that began long ago is due when it would have been.
    given = entry(schedule(86400), start_time=NOON - HOUR)
    assert dues(given, most=1) == [NOON - HOUR + dt.timedelta(days=1)]


def test_what_expires_is_not_due_from_then_on() -> None:
    assert dues(entry(schedule(60), expires=NOON + 2 * MINUTE)) == [NOON + MINUTE]


@pytest.mark.parametrize("every", [schedule(60), crontab()])
def test_what_runs_once_is_due_once_whenever_one_asks(every: Any) -> None:
    given = entry(every, one_off=True)
    assert dues(given) == [NOON + MINUTE]
    assert dues(given, since=NOON - HOUR) == [NOON + MINUTE]
    assert dues(given, since=NOON + MINUTE) == []


@pytest.mark.parametrize("row", [{"total_run_count": 1}, {"enabled": False}])
def test_what_has_run_once_is_not_due(row: dict[str, Any]) -> None:
    assert dues(entry(schedule(60), one_off=True, **row)) == []
    # Any other goes on, however often it ran.
    assert len(dues(entry(schedule(60), start_time=NOON, **row))) == 4


def test_a_clocked_moment_that_has_passed_is_made_up_for_at_once() -> None:
    clocked = SimpleNamespace(
        clocked_time=NOON + HOUR,
        remaining_estimate=lambda _: None,
        __reduce__=lambda: (None, ()),
    )
    given = entry(clocked, one_off=True)
    assert dues(given) == [NOON + HOUR]
    late = dues(given, NOON + 2 * HOUR)
    assert len(late) == 1
    assert NOON + 2 * HOUR < late[0] < NOON + 2 * HOUR + SECOND


def test_switched_on_again_it_is_another_entry() -> None:
    """By its text, in which an only run counts from the row's last change."""
    before = entry(schedule(60), one_off=True)
    after = entry(schedule(60), one_off=True, date_changed=NOON + SECOND)
    assert bounds.canonical(before, dt.UTC) != bounds.canonical(after, dt.UTC)
    # For any other a change of its row is none of its schedule.
    texts = {
        bounds.canonical(entry(schedule(60), start_time=NOON, date_changed=changed), dt.UTC)
        for changed in (NOON, NOON + SECOND)
    }
    assert len(texts) == 1


def test_times_without_a_zone_are_of_the_application_s() -> None:
    zone = dt.timezone(HOUR)
    found = bounds.of(entry(schedule(60), start_time=NOON.replace(tzinfo=None)), zone)
    assert found is not None
    assert found.start == NOON - HOUR

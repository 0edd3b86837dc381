"""Which starts look as if a stock beat had sent the messages, and which may be chance."""

from __future__ import annotations

import datetime as dt

import pytest
from celery.schedules import crontab, schedule
from hypothesis import given
from hypothesis import strategies as st

from celery_pglock import occurrences, schedules, stock_beats

NOON = dt.datetime(2026, 11, 3, 12, tzinfo=dt.UTC)


def after(*seconds: float) -> list[dt.datetime]:
    return [NOON + dt.timedelta(seconds=each) for each in sorted(seconds)]


def due(each: object) -> occurrences.Schedule:
    return schedules.read(each, dt.UTC, NOON)


TENS = due(crontab(minute="*/10"))
MINUTE = due(schedule(dt.timedelta(minutes=1)))


@pytest.mark.parametrize(
    ("seconds", "matches"),
    [
        ((0.2, 601.9, 1200.0), 3),
        ((0.2, 600.2, 1200.2, 50.0, 100.0), 3),
        ((0.2, 600.2), 0),
        ((0.2, 600.2, 1202.1), 0),
        ((-0.1, 599.9, 1199.9), 0),
        ((0.2, 600.2, 1200.2, 50.0, 100.0, 150.0, 300.0), 0),
    ],
)
def test_a_crontab_is_told_by_its_instants(seconds: tuple[float, ...], matches: int) -> None:
    assert stock_beats.matches(TENS, after(*seconds)) == matches


@pytest.mark.parametrize(
    ("seconds", "matches"),
    [
        ((7.0, 67.3, 127.0, 187.9), 3),
        ((7.0, 67.3, 127.0), 0),
        ((7.0, 68.1, 127.0, 189.0, 248.0), 0),
        ((7.0, 38.0, 69.0, 100.0, 131.0), 0),
        ((7.0, 67.0, 127.0, 187.0, 200.0, 230.0, 260.0, 300.0), 0),
    ],
)
def test_an_interval_by_its_distances(seconds: tuple[float, ...], matches: int) -> None:
    assert stock_beats.matches(MINUTE, after(*seconds)) == matches


def test_a_short_interval_has_to_be_met_the_better() -> None:
    second = due(schedule(dt.timedelta(seconds=1)))
    assert stock_beats.matches(second, after(0.0, 1.01, 2.0, 3.04)) == 3
    assert stock_beats.matches(second, after(0.0, 1.2, 2.1, 3.5)) == 0


def test_no_starts_are_no_pattern() -> None:
    assert stock_beats.matches(TENS, []) == stock_beats.matches(MINUTE, []) == 0


@given(st.lists(st.floats(3, 597), max_size=50))
def test_what_never_begins_at_the_instants_is_never_taken_for_it(offsets: list[float]) -> None:
    starts = after(*(600 * number + offset for number, offset in enumerate(offsets)))
    assert stock_beats.matches(TENS, starts) == 0

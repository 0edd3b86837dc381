"""Moments as they are shown and typed on the command line."""

from __future__ import annotations

import datetime as dt
import zoneinfo

import click
import pytest

from celery_pglock.cli import moments, pause, runs

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
NOW = dt.datetime(2026, 11, 30, 3, 0, 0, 999999, tzinfo=dt.UTC)
FOR = next(param for param in pause.pause.params if param.name == "duration")
SINCE = next(param for param in runs.command.params if param.name == "since")
CONTEXT = click.Context(runs.command)


def test_a_moment_is_shown_in_the_zone_and_with_its_offset() -> None:
    assert moments.told(NOW, BERLIN) == "2026-11-30 04:00:00+01:00"
    assert moments.told(NOW, dt.UTC) == "2026-11-30 03:00:00+00:00"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.04, "0.0 s ago"), (-3, "0.0 s ago"), (7199, "7199.0 s ago"), (7200, "2.0 h ago"),
        (172_800, "2.0 d ago"),
    ],
)  # fmt: skip
def test_how_long_ago(seconds: float, told: str) -> None:
    assert moments.ago(NOW, NOW - dt.timedelta(seconds=seconds)) == told
    assert moments.ago(NOW, None) == "never"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("90s", dt.timedelta(seconds=90)), ("1.5h", dt.timedelta(minutes=90)),
        ("7d", dt.timedelta(days=7)),
        ("2026-11-30", dt.datetime(2026, 11, 30)),  # noqa: DTZ001 - a zone is added later
        ("2026-11-30T04:00+01:00", dt.datetime(2026, 11, 30, 3, tzinfo=dt.UTC)),
        ("2026-11-30T03:00Z", dt.datetime(2026, 11, 30, 3, tzinfo=dt.UTC)),
    ],
)  # fmt: skip
def test_since_when(typed: str, expected: object) -> None:
    assert moments.since(CONTEXT, SINCE, typed) == expected


@pytest.mark.parametrize("typed", ["", "2", "2 h", "-1h", "0h", "36501d", "1e3s", "30.11.2026"])
def test_what_is_no_length_of_time_is_refused(typed: str) -> None:
    with pytest.raises(click.BadParameter, match=r"must be .*; got|at most 36500d"):
        moments.duration(CONTEXT, FOR, typed)
    with pytest.raises(click.BadParameter):
        moments.since(CONTEXT, SINCE, typed)

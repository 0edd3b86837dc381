"""docs/explanation/due-times.md: the table of the two nights is what is computed."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab

from celery_pglock import occurrences, periods, schedules
from tests.support.processes import REPOSITORY

PAGE: Final = (REPOSITORY / "docs/explanation/due-times.md").read_text()
ROWS: Final = re.findall(r"^\| `crontab\((.*?)\)` \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
BERLIN: Final = ZoneInfo("Europe/Berlin")
NIGHTS: Final = (dt.date(2026, 3, 29), dt.date(2026, 10, 25))
NEVER: Final = "\N{EN DASH}"
TICK: Final = dt.timedelta(microseconds=1)


def test_the_table_has_rows() -> None:
    assert len(ROWS) == PAGE.count("| `crontab(") > 5


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_is_due_in_the_two_nights(row: tuple[str, str, str]) -> None:
    fields = dict(re.findall(r'(\w+)="(.*?)"', row[0]))
    app = Celery("due", set_as_current=False)
    app.conf.update(timezone=BERLIN.key)
    schedule = schedules.read(
        crontab(**fields, app=app), BERLIN, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    )
    for night, shown in zip(NIGHTS, row[1:], strict=True):
        first, last = (
            dt.datetime.combine(day, dt.time(), BERLIN).astimezone(dt.UTC) - TICK
            for day in (night, night + dt.timedelta(days=1))
        )
        due = [f"{each:%H:%M}" for each in occurrences.between(schedule, first, last)]
        expected = [] if shown == NEVER else shown.split(", ")
        if expected[-1:] == ["…"]:
            expected.pop()
            assert len(due) > len(expected)
            due = due[: len(expected)]
        assert due == expected


def test_the_labels_of_a_repeated_hour() -> None:
    moments = [dt.datetime(2026, 10, 25, hour, 30, tzinfo=dt.UTC) for hour in (0, 1)]
    hours = [periods.calendar("hour", moment, BERLIN) for moment in moments]
    assert hours == ["2026-10-25T02+02:00", "2026-10-25T02+01:00"]
    assert {periods.calendar("day", moment, BERLIN) for moment in moments} == {"2026-10-25"}
    for label in (*hours, "2026-10-25"):
        assert f"`{label}`" in PAGE

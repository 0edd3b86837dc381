"""The application of `beat_app` for beats with wrong clocks, and schedulers without a rule.

`APP_CRONTABS` is a JSON object of entry name to the fields of a crontab.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
from typing import Any

from celery.schedules import crontab
from typing_extensions import override

from celery_pglock import agenda, beat, occurrences, schedules
from tests.apps.beat_app import app

for name, fields in json.loads(os.environ.get("APP_CRONTABS", "{}")).items():
    app.conf.beat_schedule[name] = {
        "task": "tests.apps.beat_app.job",
        "schedule": crontab(**fields),
    }


class ByItsOwnClock(beat.LeaderScheduler):
    """Goes by the wall clock of its host."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        assert self._leadership is not None
        self._leadership.now = lambda: dt.datetime.now(dt.UTC)  # type: ignore[method-assign]


class WaitsForTheClock(beat.LeaderScheduler):
    """Does nothing about a server whose clock was set back."""

    @override
    def setup_schedule(self) -> None:
        def leave(*_: Any) -> None:
            pass

        agenda.Agenda._set_back = leave  # type: ignore[method-assign, assignment] # noqa: SLF001
        super().setup_schedule()


class ByEachMinute(beat.LeaderScheduler):
    """Takes a time on the wall clock for each real minute that looks like it."""

    @override
    def setup_schedule(self) -> None:
        read = schedules.read

        def as_elapsed(*arguments: Any) -> occurrences.Schedule:
            schedule = read(*arguments)
            if isinstance(schedule, occurrences.Crontab):
                return dataclasses.replace(schedule, elapsed=True)
            return schedule

        schedules.read = as_elapsed  # type: ignore[assignment]
        super().setup_schedule()

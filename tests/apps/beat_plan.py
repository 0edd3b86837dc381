"""What the application of `beat_app` imports to have entries and tasks of other kinds.

`APP_PLAN` is a JSON object of entry name to `schedule` (seconds, or the fields of a crontab), and
perhaps `task`, `options`, and `gate`: its argument is computed at the gate of `APP_GATE`, where a
beat that has one waits until the test opens it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import celery.beat
import celery.schedules
import psycopg
from typing_extensions import override

from celery_pglock import LockedTask
from tests.apps.beat_app import app


def work(self: Any) -> None:
    """Work for a while, and note from when to when."""
    due = self.request.headers["pglock_due"]
    with psycopg.connect(os.environ["APP_DATABASE_URL"], autocommit=True) as connection:
        connection.execute(
            "INSERT INTO spans (task, due, id) VALUES (%s, %s, %s)",
            (self.name, due, self.request.id),
        )
        time.sleep(1.0)
        connection.execute(
            "UPDATE spans SET ended = pg_catalog.clock_timestamp() WHERE id = %s",
            (self.request.id,),
        )


app.task(base=LockedTask, bind=True, name="guarded")(work)
app.task(bind=True, name="unguarded")(work)


def at_the_gate() -> str:
    """Wait at the gate, however often the process is asked to end."""
    if gate := os.environ.get("APP_GATE"):
        _wait(Path(gate))
    return "let through"


def _wait(gate: Path) -> None:
    gate.with_suffix(".arrived").touch()
    while True:
        try:
            while not gate.exists():
                time.sleep(0.02)
        except SystemExit:
            # As a `finally: return` or a bare `except:` in somebody's code does.
            gate.with_suffix(".struck").touch()
        else:
            return


class _HangsWhenAsked(logging.Filter):
    """A log handler that blocks, once there is a file that says so, in the main loop."""

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        asked = Path(os.environ["APP_HANG"])
        if asked.exists() and str(record.msg).startswith("beat: Waking up"):
            _wait(asked.with_suffix(".over"))
        return True


def _schedule(given: Any) -> Any:
    return celery.schedules.crontab(**given) if isinstance(given, dict) else given


for _name, _entry in json.loads(os.environ.get("APP_PLAN", "{}")).items():
    app.conf.beat_schedule[_name] = {
        "task": _entry.get("task", "tests.apps.beat_app.job"),
        "schedule": _schedule(_entry["schedule"]),
        "options": _entry.get("options", {}),
        "kwargs": {"word": celery.beat.BeatLazyFunc(at_the_gate)} if _entry.get("gate") else {},
    }

if "APP_HANG" in os.environ:
    _log = logging.getLogger("celery.beat")
    _log.setLevel(logging.DEBUG)
    _log.addFilter(_HangsWhenAsked())

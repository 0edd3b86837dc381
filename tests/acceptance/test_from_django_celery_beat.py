"""docs/howto/from-django-celery-beat.md, step by step: two beats send twice before, and once after."""

from __future__ import annotations

import itertools
from typing import Any

import psycopg.conninfo
import pytest

from tests.support.databases import Database
from tests.support.guides import PATIENCE, Project, blocks, sides
from tests.support.processes import Process, eventually

pytestmark = pytest.mark.timeout(400)
PAGE = "from-django-celery-beat.md"
DIFFS = {name: sides(parts[0]) for name, parts in blocks(PAGE, "diff").items()}
CUSTOMERS = blocks(PAGE, "python")["customers.py"][0]
IMPORTS = ("import django, proj", "django.setup()", "import customers")


def files(side: int, database: Database) -> dict[str, str]:
    """Return one side of the diffs; reports come more often than on the page."""
    here = psycopg.conninfo.conninfo_to_dict(database.url)
    found = {name: both[side] for name, both in DIFFS.items()}
    found["customers.py"] = CUSTOMERS
    for name, shown, there in (
        ("settings.py", '"HOST": "localhost"', f'"HOST": "{here["host"]}"'),
        ("settings.py", '"PORT": 5432', f'"PORT": {here["port"]}'),
        ("settings.py", '"NAME": "proj"', f'"NAME": "{here["dbname"]}"'),
        ("customers.py", 'period="days"', 'period="seconds"'),
    ):
        assert shown in found[name]
        found[name] = found[name].replace(shown, there)
    return found


def started(project: Project) -> list[Process]:
    """Start two beats."""
    return [project.beat() for _ in range(2)]


def stop(beats: list[Process]) -> None:
    for beat in beats:
        beat.terminate()
    for beat in beats:
        assert beat.wait() == 0
        assert "Traceback" not in beat.output()


def gaps(project: Project, what: str) -> list[float]:
    rows = project.database.rows(
        "SELECT extract(epoch FROM began_at)::float8 FROM work WHERE what = %s ORDER BY began_at",
        what,
    )
    return [later - earlier for (earlier,), (later,) in itertools.pairwise(rows)]


def test_two_beats_send_twice_before_and_once_after(make_project: Any, database: Database) -> None:
    before: Project = make_project("before", files(0, database), DJANGO_SETTINGS_MODULE="settings")
    after: Project = make_project(
        "after", files(1, database), broker=before.broker, DJANGO_SETTINGS_MODULE="settings"
    )
    shell = before.shell(*IMPORTS)
    shell.do("from django.core.management import call_command")
    shell.do("call_command('migrate', verbosity=0)")
    shell.do("customers.welcome(7)")
    worker, beats = before.start_worker("-P", "threads"), started(before)
    for beat in beats:
        beat.wait_for_line("Sending due task report of 7", PATIENCE, count=2)
    # Every second, by each: more than one a second.
    eventually(
        lambda: len(found := gaps(before, "report 7")) > 6 and sum(found) < 0.8 * len(found),
        40,
        "twice as many runs as there should be",
        told=before.told,
    )
    stop(beats)
    worker.terminate()
    assert worker.wait() == 0
    ran_before = after.times("report 7")

    shell = after.shell(*IMPORTS)
    after.start_worker("-P", "threads")
    beats = started(after)
    for beat in beats:
        beat.wait_for_line("standby: |leadership gained: ", PATIENCE)
    shell.do("customers.welcome(8)")
    after.ended("report 7", ran_before + 5)
    after.ended("report 8", 3)
    shell.do("customers.goodbye(8)")
    stop(beats)
    eventually(lambda: not after.open_rows(), 20, "all is settled", told=after.told)
    ran = {7: after.times("report 7") - ran_before, 8: after.times("report 8")}
    assert {tenant: after.done(f"report of {tenant}") for tenant in ran} == ran
    # What the admin shows.
    ((counted, last_run_at),) = after.database.rows(
        "SELECT total_run_count > 0, last_run_at FROM django_celery_beat_periodictask"
        " WHERE name = 'report of 7'"
    )
    assert counted
    assert last_run_at is not None

"""`pglock entries`, and the other commands on entries that are kept in the database."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import celery
import pytest
from click.testing import CliRunner, Result

from celery_pglock import Entry, LockedTask, beat, cli
from tests.integration.test_changed_schedule import QUEUE, arguments, leading_after_tick
from tests.support.databases import Database
from tests.support.processes import eventually
from tests.support.queued import queued

Run = Callable[..., Result]
CRONTAB: Final = ("--crontab", "0 7 * * mon-fri", "--zone", "Europe/Berlin")


@pytest.fixture
def app(database: Database, fresh_redis_url: str) -> Iterator[celery.Celery]:
    app = celery.Celery("kept", broker=fresh_redis_url, set_as_current=False)
    app.conf.update(
        pglock_database_url=database.url,
        task_default_queue=QUEUE,
        result_expires=None,
        beat_schedule={"configured": {"task": "report", "schedule": 3600.0}},
    )
    yield app
    app.close()


@pytest.fixture
def pglock(app: celery.Celery) -> Run:
    def run(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(
            cli.pglock, arguments, obj=types.SimpleNamespace(app=app), prog_name="pglock"
        )
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


def lead(app: celery.Celery) -> None:
    """Have a leader take over, and resign."""
    scheduler = beat.LeaderScheduler(app)
    eventually(lambda: leading_after_tick(scheduler), what="it leads")
    scheduler.close()


def listed(pglock: Run) -> dict[str, dict[str, Any]]:
    return {row["entry"]: row for row in json.loads(pglock("entries", "--json").stdout)}


def test_entries_are_added_shown_and_removed(app: celery.Celery, pglock: Run) -> None:
    told = pglock("entries", "add", "nightly", "proj.report", *CRONTAB, "--args", '["a", 1]').stdout
    assert told == "nightly is kept, edit 1: crontab 0 7 * * 1,2,3,4,5 Europe/Berlin\n"
    pglock("entries", "add", "often", "proj.report", "--every", "90", "--options", '{"queue": "q"}')
    pglock("entries", "add", "dusk", "proj.report", "--solar", "sunset", "52.5", "-13.4")
    found = {entry.name: entry for entry in Entry.all(app=app)}
    assert (found["nightly"].args, found["nightly"].zone) == (["a", 1], "Europe/Berlin")
    assert found["often"].options == {"queue": "q"}
    # Before a beat has seen them.
    assert {name: row["source"] for name, row in listed(pglock).items()} == {
        "configured": "configuration", "dusk": "database", "nightly": "database",
        "often": "database",
    }  # fmt: skip
    lead(app)
    rows = listed(pglock)
    assert all(row["next_due_at"] for row in rows.values())
    assert {name: row["schedule"] for name, row in rows.items()} == {
        "configured": "every 1 h",
        "dusk": "sunset at 52.5, -13.4",
        "nightly": "crontab 0 7 * * 1,2,3,4,5 Europe/Berlin",
        "often": "every 90 s",
    }
    assert pglock("entries", "remove", "often").stdout == "often is removed\n"
    assert "often" not in listed(pglock)
    assert [entry.name for entry in Entry.all(app=app)] == ["dusk", "nightly"]


def test_json_may_be_asked_for_before_the_name_of_the_subcommand(pglock: Run) -> None:
    told = pglock("entries", "--json", "add", "a", "proj.report", "--every", "60").stdout
    assert json.loads(told)["revision"] == 1
    assert json.loads(pglock("entries", "--json", "remove", "a").stdout)["entry"] == "a"


def test_a_name_that_is_there_is_not_written_over_by_accident(
    app: celery.Celery, pglock: Run
) -> None:
    pglock("entries", "add", "a", "proj.report", "--every", "60")
    refused = pglock("entries", "add", "a", "proj.other", "--every", "60", code=1)
    assert "there is an entry 'a' in the database; give --replace" in refused.output
    assert [entry.task for entry in Entry.all(app=app)] == ["proj.report"]
    told = pglock("entries", "add", "a", "proj.other", "--every", "60", "--replace").stdout
    assert told.startswith("a is kept, edit 2: ")
    pglock("entries", "remove", "a")
    pglock("entries", "add", "a", "proj.again", "--every", "60")
    assert [entry.task for entry in Entry.all(app=app)] == ["proj.again"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--every", "0"), "entry 'a': schedule.seconds must be a number above 0"),
        (("--every", "nan"), "entry 'a': schedule.seconds must be a number above 0"),
        (("--every", "1", "--zone", "UTC"), "entry 'a': schedule.zone is not known"),
        (("--every", "1", "--crontab", "* * * * *"), "give one of --every, --crontab and --solar"),
        ((), "give one of --every, --crontab and --solar"),
        (("--crontab", "0 7 * *"), "--crontab must have five fields"),
        (("--crontab", "61 * * * *"), "entry 'a': schedule.minute must be a field of a crontab"),
        ((*CRONTAB[:3], "Berlin"), "entry 'a': schedule.zone must be the name of a time zone"),
        (("--every", "1", "--args", "{"), "args must be JSON; got '{'"),
        (("--every", "1", "--args", "{}"), "entry 'a': args must be a list; got {}"),
        (("--every", "1", "--args", "[NaN]"), "entry 'a': args must be what JSON can hold"),
        (("--every", "1", "--options", '{"expire": 1}'), "did you mean 'expires'?"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    app: celery.Celery, pglock: Run, arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in pglock("entries", "add", "a", "proj.report", *arguments, code=2).output
    assert Entry.all(app=app) == []


def test_what_is_not_in_the_database_cannot_be_removed(pglock: Run) -> None:
    pglock("entries", "add", "nightly", "proj.report", "--every", "60")
    near = pglock("entries", "remove", "nightli", code=1)
    assert "there is no entry 'nightli' in the database; did you mean 'nightly'?" in near.output
    configured = pglock("entries", "remove", "configured", code=1)
    assert "no entry 'configured' in the database; it is in the configuration" in configured.output


def test_what_is_odd_is_told(app: celery.Celery, pglock: Run, database: Database) -> None:
    """Equal names, pauses, broken rows, and what only another scheduler knows."""
    told = pglock("entries", "add", "configured", "proj.other", "--every", "60")
    assert "it does not count, because the configuration has that name too" in told.output
    pglock("entries", "add", "broken", "proj.report", "--every", "60")
    pglock("entries", "add", "paused", "proj.report", "--every", "60")
    pglock("pause", "paused", "--reason", "a deploy")
    lead(app)
    database.rows(
        "update pglock.beat_entries set definition = '{\"version\": 2}' where entry = 'broken'"
    )
    database.rows(
        "insert into pglock.beat_entries (namespace, entry, task, schedule, anchor, next_due_at)"
        " values ('kept', 'elsewhere', 't', 'every 5.000000 s', now(), now())"
    )
    rows = listed(pglock)
    assert {name: row["source"] for name, row in rows.items()} == {
        "broken": "database", "configured": "configuration", "elsewhere": "elsewhere",
        "paused": "database",
    }  # fmt: skip
    assert rows["configured"]["task"] == "report"
    assert rows["paused"]["paused_reason"].endswith(": a deploy")
    output = pglock("entries").output
    assert "entry 'configured' is in the database too; the configuration's counts" in output
    assert "entry 'broken': version must be 1; got 2" in output
    assert "until resumed" in output
    pglock("resume", "paused")
    assert listed(pglock)["paused"]["paused_until"] is None


def test_an_application_without_entries(app: celery.Celery, pglock: Run) -> None:
    app.conf.beat_schedule = {}
    assert pglock("entries").stdout == "no schedule entries\n"


def test_an_entry_in_the_database_is_triggered(
    app: celery.Celery, pglock: Run, database: Database, fresh_redis_url: str
) -> None:
    @app.task(name="locked", base=LockedTask, shared=False)
    def locked(*_: object) -> None:
        """Do nothing."""

    Entry("a", 3600, "locked", ["x"], options={"expires": 60, "headers": {"h": 1}}).save(app=app)
    assert pglock("trigger", "a").stdout.startswith("sent locked[")
    (message,) = queued(fresh_redis_url, QUEUE)
    assert (message.entry, message.headers["h"]) == ("a", 1)
    assert arguments(fresh_redis_url) == {"a": [["x"]]}
    query = "select job, task_id, status, reason from pglock.job_runs"
    ((job, task_id, status, reason),) = database.rows(query)
    assert (job, task_id, status) == ("kept:a", message.task_id, "sent")
    assert reason.startswith("triggered by ")
    near = pglock("trigger", "configure", code=2)
    assert "did you mean 'configured'?" in near.output
    # And once more, when its period has failed.
    database.rows("update pglock.job_runs set status = 'failed'")
    pglock("rerun", "a", message.headers["pglock_period"])
    assert arguments(fresh_redis_url)["a"] == [["x"], ["x"]]

"""The commands on a terminal: lines that fit, colours, questions, progress; and in a pipe, none of it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import celery
import psycopg
import pytest

from celery_pglock import migrating, schema
from celery_pglock.cli import columns, index_builds
from tests.integration import online
from tests.integration.test_command_states import NAMESPACE, QUEUE, application, fill, refill
from tests.support.commands import Ended, on_terminal, pglock, without_colours
from tests.support.databases import Database
from tests.support.processes import eventually
from tests.support.queued import count

pytestmark = pytest.mark.usefixtures("alone")

LONG: Final = "warehouse.reporting." + "monthly." * 10 + "export_of_customers"
SHOWING: Final = (("runs",), ("entries",), ("status",), ("locks", "--all"), ("doctor",))


@pytest.fixture(scope="module")
def long_named(read_database: Database) -> Database:
    """A database with long names in it, which no test here changes."""
    read_database.rows(
        "insert into pglock.job_runs (job, period, status, task, node, attempts, started_at,"
        " finished_at, reason) values (%s, '2026-11-30T03:00:00.000000+00:00', 'skipped', %s,"
        " %s, 0, now(), now(), %s)",
        f"{NAMESPACE}:{LONG}", f"proj.{LONG}", f"worker@{'host.' * 12}example.org:4711",
        f'lock "{LONG}" is held by another run',
    )  # fmt: skip
    read_database.rows(
        "insert into pglock.beat_entries (namespace, entry, task, schedule, anchor, next_due_at)"
        " values ('proj', %s, %s, 'crontab 0 4 * * *', now(), '2026-12-01 03:00Z')",
        LONG,
        f"proj.{LONG}",
    )
    return read_database


def long_named_application(database: Database) -> celery.Celery:
    from celery_pglock import LockedTask

    app = application(database.url)

    def report() -> None:
        """Do nothing: no command runs it."""

    register: Any = app.task(name=f"proj.{LONG}", base=LockedTask, shared=False)
    register(report)
    return app


# --- width -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 132])
@pytest.mark.parametrize("command", SHOWING, ids=" ".join)
def test_every_line_fits_whatever_the_names(
    long_named: Database, command: tuple[str, ...], width: int
) -> None:
    app = long_named_application(long_named)
    ended = on_terminal(app, *command, columns=width).fits(width)
    assert "Traceback" not in ended.output
    if command != ("doctor",):
        assert re.search(rf"{columns.ELLIPSIS}\S*omers", ended.output), "the name's end is there"


@pytest.mark.parametrize("command", SHOWING[:4], ids=" ".join)
def test_wide_terminals_and_pipes_show_names_whole(
    long_named: Database, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = long_named_application(long_named)
    assert LONG in on_terminal(app, *command, columns=1000).output
    monkeypatch.setenv("COLUMNS", "40")  # exported by chance, it is not for a pipe
    output = pglock(app, *command).stdout
    assert LONG in output
    assert columns.ELLIPSIS not in output


def test_columns_tells_how_wide_a_terminal_is(
    long_named: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = long_named_application(long_named)
    monkeypatch.setenv("COLUMNS", "60")
    on_terminal(app, "runs", columns=132, keep=["COLUMNS"]).fits(60)


def test_what_has_no_room_in_its_row_is_beneath_it(long_named: Database) -> None:
    app = long_named_application(long_named)
    head, row, *beneath = on_terminal(app, "runs").output.splitlines()
    assert head.split() == ["job", "period", "status"]
    assert "2026-11-30T03:00:00.000000+00:00" in row, "a period can be copied"
    told = " ".join(line.strip() for line in beneath)
    assert told.startswith("attempts 0, started_at 2026-")
    assert told.endswith("is held by another run")


# --- colours ---------------------------------------------------------------------------------------


def test_colours_are_where_they_are_wanted(database: Database) -> None:
    fill(database)
    app = application(database.url)
    coloured = on_terminal(app, "runs", columns=200, colours=True).output
    assert "\x1b[31mfailed\x1b[0m" in coloured
    plain = on_terminal(app, "runs", columns=200).output
    assert "\x1b" not in plain, "NO_COLOR"
    assert without_colours(coloured) == plain
    assert "\x1b" not in pglock(app, "runs").output


def test_without_rich_it_is_the_same_without_colours(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(database)
    app = application(database.url)
    plain = on_terminal(app, "runs").output
    for module in ("rich", "rich.console", "rich.text", "rich.theme"):
        monkeypatch.setitem(sys.modules, module, None)
    assert on_terminal(app, "runs", colours=True).output == plain


# --- questions -------------------------------------------------------------------------------------


def state(database: Database) -> Any:
    return database.rows(
        "select job, period, status from pglock.job_runs union all"
        " select entry, definition::text, null from pglock.beat_entries order by 1, 2"
    )


ASKED: Final = {
    ("prune",): "1 run older than 2:00:00 will be deleted; go on? [y/N]",
    ("rerun", "nightly", "2026-11-02", "--force"): "is done, and may be run twice; go on?",
    ("entries", "remove", "kept"): "entry kept will be removed, with its arguments",
}


def test_on_a_terminal_it_asks_before_it_destroys(database: Database, fresh_redis_url: str) -> None:
    app = application(database.url, fresh_redis_url, pglock_retention=7200)
    for command, question in ASKED.items():
        refill(database)
        before, sent = state(database), count(fresh_redis_url, QUEUE)
        no = on_terminal(app, *command, typed="\n")
        assert (no.code, state(database)) == (1, before), command
        assert question in no.output
        assert "Error: nothing was changed" in no.output
        assert count(fresh_redis_url, QUEUE) == sent
        assert on_terminal(app, *command, "--dry-run", typed="").code == 0
        assert state(database) == before, command
        yes = on_terminal(app, *command, "--json", typed="y\n")
        assert (yes.code, question in yes.output) == (0, True), command
        assert state(database) != before, command
    app.close()


def test_a_script_and_who_says_yes_are_not_asked(database: Database, fresh_redis_url: str) -> None:
    app = application(database.url, fresh_redis_url, pglock_retention=7200)
    silently: list[tuple[Callable[..., Ended], dict[str, str], tuple[str, ...]]] = [
        (pglock, {}, ()),
        (on_terminal, {}, ()),
        (on_terminal, {"typed": ""}, ("--yes",)),
    ]
    for command in ASKED:
        for run, given, more in silently:
            refill(database)
            before = state(database)
            ended = run(app, *command, *more, **given)
            assert (ended.code, "go on?" in ended.output) == (0, False), command
            assert state(database) != before, command
    app.close()


# --- progress --------------------------------------------------------------------------------------


def test_progress_is_for_who_looks_or_asks(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(database)
    app = application(database.url, pglock_retention=7200)
    dry = ("prune", "--dry-run")
    assert "looked at" not in pglock(app, *dry).output
    asked = pglock(app, *dry, "--verbose", "--json")
    assert json.loads(asked.stdout)["runs"] == 1
    assert "looked at 2, 1 to be deleted" in asked.output
    assert "looked at 2, 1 to be deleted" in on_terminal(app, *dry, colours=True).output, "by rich"
    for module in ("rich", "rich.console", "rich.theme"):
        monkeypatch.setitem(sys.modules, module, None)
    shown = on_terminal(app, *dry).output
    assert "\r\x1b[Klooked at 2, 1 to be deleted\r\x1b[K1 run older" in shown


def test_a_migration_tells_the_step_that_it_applies(blank_database: Database) -> None:
    app = application(blank_database.url)
    ended = pglock(app, "migrate", "--verbose")
    assert "applying 0001_job_runs" in ended.output
    assert "applying" not in ended.stdout


def test_a_migration_tells_what_the_building_of_an_index_waits_for(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = (*schema.migrations(), online.INDEX)
    monkeypatch.setattr(schema, "migrations", lambda: steps)
    told: list[str] = []
    builds = index_builds.Builds(database.url, "pglock", told.append)

    def begun(step: schema.Migration) -> None:
        builds.step = step.name

    with psycopg.connect(database.url) as writing, builds.watched(), ThreadPoolExecutor(1) as pool:
        writing.execute("delete from pglock.job_runs")
        migration = pool.submit(migrating.migrate, database.url, begun=begun)
        waits = (
            f"applying {online.INDEX.name}: waiting for writers before build, "
            f"for backend {writing.info.backend_pid}"
        )
        eventually(lambda: waits in told, what="it tells for whom it waits", told=lambda: told)
        writing.commit()
        assert migration.result(30) == [online.INDEX.name]

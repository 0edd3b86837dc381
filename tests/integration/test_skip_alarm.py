"""A job that is skipped again and again and does not run: somebody is told, and who has the lock."""

from __future__ import annotations

import datetime as dt
import logging
import re
import uuid
from collections.abc import Iterator
from typing import Any

import celery
import psycopg
import pytest

from celery_pglock import (
    LockedTask,
    claims,
    errors,
    keys,
    ledger,
    overview,
    run_skipped,
    settings,
    statements,
    testing,
)
from tests.integration.workbench import Sessions
from tests.support.databases import Database
from tests.support.history import History

NAMESPACE = "alarmed"
TASK = "proj.report"
START = dt.datetime.now(dt.UTC).replace(microsecond=0) - dt.timedelta(hours=2)
LEDGER = ledger.Ledger()


@pytest.fixture
def pglock_app(request: pytest.FixtureRequest) -> celery.Celery:
    app = celery.Celery(NAMESPACE, broker="memory://", set_as_current=False)
    app.conf.update(getattr(request, "param", {}))

    def report() -> str:
        return "done"

    register: Any = app.task(name=TASK, base=LockedTask, shared=False)
    register(report)
    return app


@pytest.fixture
def task(pglock_app: celery.Celery, pglock_database: testing.Database) -> celery.Task[..., Any]:
    """A task whose application is pointed at a database of this test's own."""
    del pglock_database
    found: celery.Task[..., Any] = pglock_app.tasks[TASK]
    return found


@pytest.fixture
def stranger(pglock_database: testing.Database) -> Iterator[psycopg.Connection[Any]]:
    """A session that holds the task's lock name and is not one of celery-pglock's."""
    url = pglock_database.url
    with psycopg.connect(url, autocommit=True, application_name="psql of ann") as held:
        held.execute(
            "select pg_advisory_lock(%s::bigint)", [keys.from_name(NAMESPACE, "task", TASK)]
        )
        yield held


def occur(task: celery.Task[..., Any], number: int) -> str:
    """Deliver the message of an occurrence; return what became of it."""
    due = START + dt.timedelta(minutes=number)
    return str(testing.run_occurrence(task, due, entry="nightly").state)


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if getattr(each, "event", "") == "run_skipped"]


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in told(caplog)]


def test_the_third_skip_in_a_row_is_a_warning_and_names_the_session(
    task: celery.Task[..., Any],
    stranger: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "celery_pglock")
    assert {occur(task, number) for number in range(3)} == {"skipped"}
    assert levels(caplog) == ["INFO", "INFO", "WARNING"]
    record = told(caplog)[-1]
    sentence = record.getMessage()
    assert "run skipped, 3 times in a row without a run" in sentence
    for part in ("'psql of ann'", f"backend {stranger.info.backend_pid}", "connected since "):
        assert part in sentence
    said = vars(record)
    assert (said["skips"], said["holder_application"]) == (3, "psql of ann")
    assert said["holder_pid"] == stranger.info.backend_pid
    assert isinstance(said["holder_session_since"], dt.datetime)


def test_control_a_job_that_runs_in_between_is_none(
    task: celery.Task[..., Any],
    stranger: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "celery_pglock")
    key = keys.from_name(NAMESPACE, "task", TASK)
    for number in range(3):
        assert occur(task, 10 * number) == "skipped"
        assert occur(task, 10 * number + 1) == "skipped"
        stranger.execute("select pg_advisory_unlock(%s::bigint)", [key])
        assert occur(task, 10 * number + 2) == "done"
        stranger.execute("select pg_advisory_lock(%s::bigint)", [key])
    assert levels(caplog) == ["INFO"] * 6
    assert [vars(record)["skips"] for record in told(caplog)] == [1, 2] * 3


@pytest.mark.parametrize("pglock_app", [{"pglock_warn_after_skips": 1}], indirect=True)
@pytest.mark.usefixtures("stranger")
def test_five_times_as_many_are_an_error(
    task: celery.Task[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_pglock")
    for number in range(5):
        occur(task, number)
    assert levels(caplog) == ["WARNING"] * 4 + ["ERROR"]


@pytest.mark.parametrize("pglock_app", [{"pglock_warn_after_skips": None}], indirect=True)
@pytest.mark.usefixtures("stranger")
def test_it_can_be_switched_off(
    task: celery.Task[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_pglock")
    for number in range(4):
        occur(task, number)
    assert levels(caplog) == ["INFO"] * 4


@pytest.mark.usefixtures("stranger")
def test_the_signal_says_how_many(task: celery.Task[..., Any]) -> None:
    heard = []

    def hear(*, skips: int, **_: object) -> None:
        heard.append(skips)

    run_skipped.connect(hear)
    try:
        occur(task, 1)
        occur(task, 2)
    finally:
        run_skipped.disconnect(hear)
    assert heard == [1, 2]


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_a_number_that_is_none_is_refused(value: object) -> None:
    app = celery.Celery(NAMESPACE, set_as_current=False)
    app.conf.pglock_warn_after_skips = value
    with pytest.raises(errors.ConfigurationError, match="pglock_warn_after_skips must be"):
        settings.of(app)


# --- How they are counted -------------------------------------------------------------------


def skip(lock_sessions: Sessions, database: Database, period: str, level: Any = "session") -> int:
    work = claims.Work(
        job=f"{NAMESPACE}:nightly", period=period, name=TASK, name_key=1, run_key=2, task=TASK
    )
    return LEDGER.skip(lock_sessions.open(database.url, level), work, "held")


@pytest.mark.parametrize("level", ["session", "transaction"])
@pytest.mark.parametrize(
    ("before", "count"),
    [
        ([], 1),
        (["skipped"], 2),
        (["skipped", "skipped", "skipped"], 4),
        (["skipped", "sent", "missed", "skipped", "done", "skipped"], 3),
        (["running", "skipped"], 1),
        (["retrying", "skipped"], 1),
        (["failed", "skipped"], 1),
    ],
)
def test_what_counts_as_a_run(
    database: Database, lock_sessions: Sessions, level: str, before: list[str], count: int
) -> None:
    history = History(database.url, NAMESPACE)
    for number, status in enumerate(before, start=1):
        history.row("nightly", status, 60 * number)
    period = history.row("nightly", "sent", 0)["period"]
    history.row("nightly", "done", -60)  # a later one that was quicker
    assert skip(lock_sessions, database, period, level) == count


def test_other_jobs_do_not_count(database: Database, lock_sessions: Sessions) -> None:
    history = History(database.url, NAMESPACE)
    history.row("nightly", "skipped", 120)
    history.row("hourly", "done", 60)
    assert skip(lock_sessions, database, "2999") == 2


@pytest.mark.parametrize(("last", "count"), [("skipped", 4), ("done", 1), ("running", 1)])
def test_messages_without_an_occurrence_are_counted_by_when_they_were_settled(
    database: Database, lock_sessions: Sessions, last: str, count: int
) -> None:
    history = History(database.url, NAMESPACE)
    for number, status in enumerate(["skipped", "skipped", last]):
        ago = 300 - 60 * number
        history.row("nightly", status, ago, period=f"id:{uuid.uuid4()}", due_at=None)
    assert skip(lock_sessions, database, f"id:{uuid.uuid4()}") == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("period", "analysed"),
    [
        pytest.param("2999", True, id="label"),
        # As in the first minutes of a table, and after a restore from a dump.
        pytest.param("2999", False, id="label, without statistics"),
        pytest.param(f"id:{uuid.uuid4()}", True, id="id"),
    ],
)
def test_a_long_history_is_not_read(
    database: Database, lock_sessions: Sessions, period: str, *, analysed: bool
) -> None:
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute("alter table pglock.job_runs set (autovacuum_enabled = off)")
        connection.execute(
            "insert into pglock.job_runs (job, period, status, started_at, finished_at)"
            " select 'alarmed:nightly', case when n % 2 = 0 then '2' else 'id:' end"
            " || to_char(n, 'FM000000'), 'skipped', null, now() - n * interval '1 s'"
            " from generate_series(1, 200000) n"
        )
        if analysed:
            connection.execute("vacuum (analyze) pglock.job_runs")
        query = f"explain (analyze, buffers) {statements.SKIP}".format(runs="pglock.job_runs")
        plan = "\n".join(
            line
            for (line,) in connection.execute(
                query.encode(),
                {
                    **dict.fromkeys(["due_at", "task", "task_id", "entry", "node", "term"]),
                    "job": "alarmed:nightly", "period": period, "name_key": 1, "reason": "held",
                },
            )
        )  # fmt: skip
        connection.execute("delete from pglock.job_runs where period = %s", [period])
    print(f"\n{plan.splitlines()[-1]} after 200,000 skips")
    assert "Seq Scan on job_runs" not in plan
    # Of each node, in all its loops: as many as are looked at, and not all that there are.
    read = [int(n) * int(m) for n, m in re.findall(r"actual .* rows=(\d+)\S* loops=(\d+)", plan)]
    assert read
    assert max(read) <= 1000
    assert skip(lock_sessions, database, period) == statements.SKIPS_COUNTED + 1


def test_the_page_and_the_metrics_count_the_same() -> None:
    assert overview.skips_in_a_row(["skipped", "sent", "missed", "skipped", "done"]) == 2
    assert overview.skips_in_a_row(["done", "skipped"]) == 0
    assert overview.skips_in_a_row([]) == 0

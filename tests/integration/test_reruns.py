"""Opening a period again: what may be, what comes of its old message, and undoing it."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from celery_pglock import claims, errors, ledger, reruns, sessions, working_transactions
from tests.integration.workbench import PERIOD, Gate, Sessions, in_thread, row, terminate, work
from tests.support.databases import Database
from tests.support.processes import eventually

LEDGER = ledger.Ledger()
JOB = "app:report"
NEW = uuid.UUID(int=7)
WHO = "ann@host"
FREE = ["failed", "skipped", "missed"]
FORCED = ["done", "sent", "retrying"]


@pytest.fixture
def periods(database: Database) -> Iterator[reruns.Reruns]:
    connection: psycopg.Connection[Any] = database.connect()
    yield reruns.Reruns(connection, "pglock", "app")
    # Whatever happened, nothing is left open.
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def insert(database: Database, status: str, **columns: object) -> None:
    columns = {
        "job": JOB,
        "period": PERIOD,
        "status": status,
        "attempts": 5,
        "lost_attempts": 3,
        "postponements": 2,
        "claim": uuid.UUID(int=1),
        "name_key": 11,
        "task": "report",
        "task_id": "m-1",
        "entry": "nightly",
        "node": "w1:1",
        "backend_pid": 12,
        "term": 4,
        "due_at": "2026-11-29 03:00Z",
        "sent_at": "2026-11-29 03:00:01Z",
        "started_at": "2026-11-29 03:00:02Z",
        "finished_at": "2026-11-29 03:00:03Z",
        "retry_at": "2026-11-29 03:00:04Z",
        "reason": "why",
        "error": "what",
        **columns,
    }
    database.rows(
        f"insert into pglock.job_runs ({', '.join(columns)})"  # noqa: S608 - names of this file
        f" values ({', '.join(['%s'] * len(columns))})",
        *columns.values(),
    )


def whole(database: Database) -> Any:
    return database.rows("select r::text from pglock.job_runs r")


def reopen(periods: reruns.Reruns, **more: Any) -> reruns.Recorded:
    return periods.reopen(JOB, PERIOD, **{"task_id": NEW, "who": WHO, **more})


def claim(session: sessions.Session, **more: Any) -> claims.Claimed | claims.Refused:
    return LEDGER.claim(session, work(**more), claim=uuid.uuid4())


# --- what may be opened ------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("status", FREE)
def test_what_is_settled_and_did_not_run_is_opened(
    database: Database, periods: reruns.Reruns, status: str, *, force: bool
) -> None:
    insert(database, status)
    found = reopen(periods, force=force)
    assert (found.status, found.task, found.entry) == (status, "report", "nightly")
    assert found.due == dt.datetime(2026, 11, 29, 3, tzinfo=dt.UTC)
    assert row(
        database,
        *("status", "attempts", "lost_attempts", "postponements", "claim", "task_id", "error"),
        *("finished_at", "retry_at", "reason"),
    ) == (
        *("sent", 5, 0, 0, None, str(NEW), None, None, None),
        f"opened again by {WHO}; it was {status}: why",
    )
    assert row(database, "sent_at > now() - interval '1 min'")


@pytest.mark.parametrize("status", FORCED)
def test_what_has_run_or_may_still_run_needs_force(
    database: Database, periods: reruns.Reruns, status: str
) -> None:
    insert(database, status)
    before = whole(database)
    with pytest.raises(errors.RerunRefused, match="add --force"):
        reopen(periods)
    assert whole(database) == before
    reopen(periods, force=True)
    assert row(database, "status", "attempts", "task_id") == ("sent", 5, str(NEW))
    expected = f"opened again with --force by {WHO}; it was {status}: why"
    assert row(database, "reason") == expected


@pytest.mark.parametrize("force", [False, True])
def test_a_dead_run_is_opened(database: Database, periods: reruns.Reruns, *, force: bool) -> None:
    insert(database, "running")
    assert reopen(periods, force=force).status == "running"
    assert row(database, "status", "attempts", "lost_attempts") == ("sent", 5, 0)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("level", ["session", "transaction"])
def test_what_is_being_run_is_refused_whatever_its_age(
    database: Database,
    lock_sessions: Sessions,
    periods: reruns.Reruns,
    level: sessions.Level,
    *,
    force: bool,
) -> None:
    session = lock_sessions.open(database.url, level)
    answer = claim(session)
    assert isinstance(answer, claims.Claimed)
    transaction = working_transactions.WorkingTransaction(session, LEDGER, work(), answer.claim)
    if level == "transaction":
        assert transaction.begin() is None
    database.rows("update pglock.job_runs set started_at = now() - interval '1 day'")
    before = whole(database)
    with pytest.raises(errors.RerunRefused, match="it is being run since"):
        reopen(periods, force=force)
    assert whole(database) == before
    if level == "transaction":
        assert transaction.complete()
    else:
        assert LEDGER.settle(session, work(), answer.claim, "done")
    reopen(periods, force=True)


def test_a_claim_whose_locks_are_not_taken_yet_counts_as_being_run(
    database: Database, lock_sessions: Sessions, periods: reruns.Reruns
) -> None:
    """At transaction level the claim is committed a moment before its locks are taken."""
    session = lock_sessions.open(database.url, "transaction")
    assert isinstance(claim(session), claims.Claimed)
    with pytest.raises(errors.RerunRefused, match="it is being run since"):
        reopen(periods, force=True)
    database.rows("update pglock.job_runs set started_at = started_at - interval '3 s'")
    reopen(periods)


def test_of_a_claim_in_progress_the_newest_state_counts(
    database: Database, periods: reruns.Reruns
) -> None:
    """The row is locked by a claim that is not committed: what it was before says nothing."""
    insert(database, "failed", reason="error")
    gate = Gate(database)
    with psycopg.connect(database.url) as claiming:
        claiming.execute("select pg_advisory_xact_lock(%s)", [work().run_key])
        claiming.execute("update pglock.job_runs set status = 'running', started_at = now()")
        with in_thread(lambda: reopen(periods), gate) as opened:
            blocked = (
                "select 1 from pg_stat_activity where wait_event_type = 'Lock'"
                " and datname = current_database()"
            )
            eventually(lambda: database.rows(blocked), what="it waits for the row")
            claiming.commit()
            with pytest.raises(errors.RerunRefused, match="it is being run since"):
                opened.result(30)
    assert row(database, "status", "task_id") == ("running", "m-1")


def test_what_is_not_there_is_refused(periods: reruns.Reruns) -> None:
    with pytest.raises(errors.RerunRefused, match="no such run is recorded"):
        reopen(periods)
    with pytest.raises(errors.RerunRefused, match="no such run is recorded"):
        periods.find(JOB, PERIOD)


# --- and then ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["session", "transaction"])
def test_attempts_go_on_and_giving_up_begins_anew(
    database: Database, lock_sessions: Sessions, periods: reruns.Reruns, level: sessions.Level
) -> None:
    insert(database, "failed", reason="exhausted", attempts=4, lost_attempts=4)
    session = lock_sessions.open(database.url, level)
    refused = claim(session, task_id=str(NEW))
    assert isinstance(refused, claims.Refused)
    assert refused.kind == "closed"
    reopen(periods)
    answer = claim(session, task_id=str(NEW))
    assert isinstance(answer, claims.Claimed)
    assert (answer.attempt, answer.lost_attempts) == (5, 0)
    assert LEDGER.settle(session, work(), answer.claim, "done")
    # Who asked for it stays in the row.
    expected = f"opened again by {WHO}; it was failed: exhausted"
    assert row(database, "status", "attempts", "reason") == ("done", 5, expected)


def test_the_old_message_finds_the_period_done(
    database: Database, lock_sessions: Sessions, periods: reruns.Reruns
) -> None:
    insert(database, "failed", reason="error")
    reopen(periods)
    session = lock_sessions.open(database.url)
    answer = claim(session, task_id=str(NEW))
    assert isinstance(answer, claims.Claimed)
    late = claim(lock_sessions.open(database.url), task_id="m-1")
    assert isinstance(late, claims.Refused)
    assert late.kind == "running"
    assert LEDGER.settle(session, work(), answer.claim, "done")
    late = claim(session, task_id="m-1")
    assert isinstance(late, claims.Refused)
    assert late.kind == "closed"
    assert late.before is not None
    assert (late.before.status, late.before.task_id) == ("done", str(NEW))


def test_a_dead_attempt_that_was_not_dead_settles_nothing(
    database: Database, lock_sessions: Sessions, periods: reruns.Reruns
) -> None:
    """Its session was ended and its body goes on: the fence holds after a rerun too."""
    session = lock_sessions.open(database.url)
    answer = claim(session)
    assert isinstance(answer, claims.Claimed)
    terminate(database, session.pid)
    database.rows("update pglock.job_runs set started_at = started_at - interval '3 s'")
    reopen(periods)
    other = lock_sessions.open(database.url)
    assert not LEDGER.settle(other, work(), answer.claim, "done")
    again = claim(other, task_id=str(NEW))
    assert isinstance(again, claims.Claimed)
    assert again.attempt == answer.attempt + 1
    third = lock_sessions.open(database.url)
    assert not LEDGER.settle(third, work(), answer.claim, "done")
    assert row(database, "status", "claim") == ("running", again.claim)


# --- undone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [*FREE, *FORCED, "running"])
@pytest.mark.parametrize("empty", [False, True])
def test_undone_every_column_is_as_it_was(
    database: Database, periods: reruns.Reruns, status: str, *, empty: bool
) -> None:
    nothing = ("claim", "task_id", "reason", "error", "sent_at", "finished_at", "retry_at")
    insert(database, status, **(dict.fromkeys(nothing) if empty else {}))
    # Columns that come later count too.
    integers = [
        name
        for (name,) in database.rows(
            "select column_name from information_schema.columns where table_schema = 'pglock'"
            " and table_name = 'job_runs' and data_type = 'integer'"
        )
    ]
    for number, name in enumerate(integers, start=3):
        database.rows(f"update pglock.job_runs set {name} = {number}")  # noqa: S608
    before = whole(database)
    found = reopen(periods, force=True)
    assert whole(database) != before
    periods.restore(found, NEW)
    assert whole(database) == before


def test_undone_for_another_message_or_when_it_runs_it_is_left_alone(
    database: Database, lock_sessions: Sessions, periods: reruns.Reruns
) -> None:
    """A broker may have taken the message although it said no."""
    insert(database, "failed", reason="error")
    found = reopen(periods)
    before = whole(database)
    periods.restore(found, uuid.UUID(int=8))
    assert whole(database) == before
    answer = claim(lock_sessions.open(database.url), task_id=str(NEW))
    assert isinstance(answer, claims.Claimed)
    before = whole(database)
    periods.restore(found, NEW)
    assert whole(database) == before

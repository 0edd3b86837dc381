"""One message that two workers got in the same instant."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import celery
import pytest
from celery.result import EagerResult

from celery_pglock import (
    LockedTask,
    claims,
    current_run,
    idle_sessions,
    refusals,
    statements,
)
from tests.integration.workbench import Gate, in_thread
from tests.support.databases import Database

NAME_LOCK = b"pg_catalog.pg_try_advisory_lock(%(name_key)s::bigint)"


@pytest.fixture
def task(database: Database) -> Iterator[Any]:
    app: Any = celery.Celery("same_instant", set_as_current=False)
    app.conf.pglock_database_url = database.url

    def body() -> int:
        return current_run().attempt

    yield app.task(body, base=LockedTask, shared=False, lazy=False, name="same_instant.body")
    idle_sessions.close_idle()
    app.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once somebody was refused and it was asked whether the claim is still being made."""
    event = threading.Event()
    ask = refusals.claim_in_progress

    def told(refused: claims.Refused) -> bool:
        event.set()
        return ask(refused)

    monkeypatch.setattr(refusals, "claim_in_progress", told)
    return event


def deliver_twice(
    task: Any, database: Database, asked: threading.Event
) -> tuple[EagerResult[int], EagerResult[int]]:
    """Execute a message again while the first claim of it has its lock and no row yet."""
    gate = Gate(database)
    text = gate.before(statements.claim("pglock", "session"), NAME_LOCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statements, "claim", lambda *_: text)
        with in_thread(lambda: task.apply(task_id="one"), gate) as first:
            gate.wait_for_arrival()
            patch.undo()
            with in_thread(lambda: task.apply(task_id="one"), gate) as second:
                assert asked.wait(10)
                gate.open()
                return first.result(30), second.result(30)


def test_the_run_that_is_just_beginning_is_not_called_skipped(
    task: Any, database: Database, asked: threading.Event
) -> None:
    first, second = deliver_twice(task, database, asked)
    assert (str(first.state), first.result) == ("SUCCESS", 1)
    assert str(second.state) == "IGNORED"
    assert database.rows("select status, attempts from pglock.job_runs") == [("done", 1)]


def test_control_taken_for_somebody_elses_claim_it_is_called_skipped(
    task: Any, database: Database, asked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(_: claims.Refused) -> bool:
        asked.set()
        return False

    monkeypatch.setattr(refusals, "claim_in_progress", no)
    first, second = deliver_twice(task, database, asked)
    assert str(first.state) == "SUCCESS"
    assert str(second.state) == "REVOKED"

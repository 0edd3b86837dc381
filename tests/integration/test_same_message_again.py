"""What becomes of a message whose run is refused, on a ledger, and without each rule.

The messages are delivered by the kit that users test with: as a worker does it, with what is
published kept in the process. Each rule stands beside its control, the same moment without it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import threading
from collections.abc import Callable
from typing import Any

import celery
import pytest

from celery_pglock import (
    LockedTask,
    attempts,
    claims,
    errors,
    ledger,
    lock_lost,
    messages,
    run_finished,
    sessions,
    transaction_locks,
)
from celery_pglock.testing import Database, Message, deliver, outbox, run_occurrence, running
from tests.integration.workbench import in_thread, terminate

DUE = dt.datetime(2026, 11, 29, 2, tzinfo=dt.UTC)
BEFORE = DUE - dt.timedelta(days=1)

as_it_is_and_without = pytest.mark.parametrize("known", [True, False], ids=["as it is", "control"])


@pytest.fixture
def pglock_app() -> Any:
    app: Any = celery.Celery("app", set_as_current=False, broker="redis://127.0.0.1:1")
    # So that a repeated message does not wait for long in the "worker".
    app.conf.broker_transport_options = {"visibility_timeout": 3}
    return app


def job(app: Any, body: Callable[..., Any], **options: Any) -> Any:
    return app.task(body, base=LockedTask, shared=False, lazy=False, **{"name": "job", **options})


def nothing() -> None:
    pytest.fail("it ran")


# --- A retry that meets its own run -----------------------------------------------------------


@as_it_is_and_without
def test_a_retry_that_comes_before_the_end_of_its_run_is_not_lost(
    pglock_app: Any, pglock_database: Database, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """`retry()` publishes first; its run ends, and gives the lock back, only afterwards."""
    holds, end = threading.Event(), threading.Event()

    def body(self: Any) -> None:
        if not self.request.retries:
            holds.set()
            assert end.wait(20)
            raise celery.exceptions.Retry(when=dt.datetime.now(dt.UTC))

    def retry() -> Message:
        (row,) = pglock_database.runs()
        with outbox.opened(task) as sent:
            task.apply_async(
                task_id=row.task_id,
                retries=1,
                headers={"pglock_job": row.job, "pglock_due": DUE.isoformat()},
            )
        return sent[0]

    task = job(pglock_app, body, bind=True)
    if not known:
        monkeypatch.setattr(messages.Delivery, "repeats", lambda *_: False)
    with in_thread(lambda: run_occurrence(task, DUE)) as first:
        try:
            assert holds.wait(20)
            run = deliver(retry())
        finally:
            end.set()
        assert first.result(20).state == "retrying"
    (row,) = pglock_database.runs()
    assert (row.status, row.attempts) == ("retrying", 1)
    if known:
        assert (run.state, run.copy.headers["retries"]) == ("postponed", 1)
        # And that copy runs.
        again = deliver(run.copy)
        assert (again.state, again.row.attempts) == ("done", 2)
    else:
        # Acknowledged as a skip: a row that waits for a retry, and nothing that could run it.
        assert (run.state, run.sent) == ("skipped", ())


# --- A lower number ---------------------------------------------------------------------------


@as_it_is_and_without
def test_of_the_copies_of_a_message_only_the_last_goes_on(
    pglock_app: Any, pglock_database: Database, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """The original turns up again although its third copy is on its way."""
    task = job(pglock_app, nothing)
    if not known:
        monkeypatch.setattr(messages.Delivery, "superseded", lambda *_: False)
    with running(task, DUE) as first:
        pglock_database.rows("update pglock.job_runs set postponements = 3")
        run = deliver(first.message, redelivered=True)
    # The control has two of one message now, where there was one.
    assert (run.state, len(run.sent)) == (("dropped", 0) if known else ("postponed", 1))
    assert run.row.postponements == 3


# --- The beat's own row -----------------------------------------------------------------------


@as_it_is_and_without
def test_the_row_of_the_beat_does_not_make_a_fresh_occurrence_a_repeated_message(
    pglock_app: Any, pglock_database: Database, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """It overlaps with the occurrence before it, and is skipped for that."""
    task = job(pglock_app, nothing)
    repeats = messages.Delivery.repeats
    found: list[tuple[str, bool]] = []

    def with_sent(delivery: messages.Delivery, before: claims.Row | None) -> bool:
        assert before is not None
        found.append((before.status, before.task_id == delivery.task_id))
        if not known:
            before = dataclasses.replace(before, status="running")
        return repeats(delivery, before)

    monkeypatch.setattr(messages.Delivery, "repeats", with_sent)
    with running(task, BEFORE):
        run = run_occurrence(task, DUE)
    assert set(found) == {("sent", True)}
    if known:
        assert (run.state, run.row.status, run.sent) == ("skipped", "skipped", ())
    else:
        assert (run.state, run.row.status, len(run.sent)) == ("postponed", "sent", 1)
    assert len(pglock_database.runs()) == 2


# --- A database that goes away before the body ------------------------------------------------


def test_a_transaction_that_dies_before_the_body_begins_is_postponed(
    pglock_app: Any, pglock_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[bool] = []

    def body() -> None:
        began.append(True)

    task = job(pglock_app, body, lock_level="transaction")
    lock = transaction_locks._try  # noqa: SLF001 - the moment in question

    def lock_and_die(session: sessions.Session, *rest: Any) -> Any:
        answer = lock(session, *rest)
        terminate(pglock_database, session.connection.info.backend_pid)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(transaction_locks, "_try", lock_and_die)
        run = run_occurrence(task, DUE)
    (row,) = pglock_database.runs()
    assert (run.state, row.status, row.attempts, row.lost_attempts) == ("postponed", "failed", 1, 0)
    assert not began
    run = deliver(run.copy)
    assert (run.state, run.row.attempts, run.row.lost_attempts) == ("done", 2, 0)
    assert began


# --- A task that is called inside another -----------------------------------------------------


class Told:
    """The signals of a task, in their order."""

    def __init__(self, task: Any) -> None:
        self.names: list[str] = []
        self._receivers = [self._receiver("lost"), self._receiver("finished")]
        for signal, receiver in zip((lock_lost, run_finished), self._receivers, strict=True):
            signal.connect(receiver, sender=task)

    def _receiver(self, name: str) -> Callable[..., None]:
        def receive(**_: Any) -> None:
            self.names.append(name)

        return receive


@as_it_is_and_without
def test_what_an_outer_task_loses_is_not_told_as_the_inner_ones(
    pglock_app: Any, pglock_database: Database, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """It strikes in the middle of the inner one's claim."""
    period = "2026-11-29T02:00:00.000000+00:00"
    outer_lost = errors.LockLost("app:outer", period, "its session was ended by the server")

    def call_inner() -> None:
        inner()

    inner = job(pglock_app, nothing, name="inner")
    outer = job(pglock_app, call_inner, name="outer")
    inner_told, outer_told = Told(inner), Told(outer)
    claim = ledger.Ledger.claim

    def claim_and_strike(self: Any, session: Any, work: claims.Work, **more: Any) -> Any:
        answer = claim(self, session, work, **more)
        if work.task == "inner":
            raise outer_lost
        return answer

    monkeypatch.setattr(ledger.Ledger, "claim", claim_and_strike)
    if not known:
        monkeypatch.setattr(attempts, "struck_by", lambda *_: False)
    run = run_occurrence(outer, DUE)
    assert run.error is outer_lost
    assert inner_told.names == ([] if known else ["lost"])
    assert outer_told.names == ["lost", "finished"]
    assert (run.row.status, run.row.reason) == ("failed", "lock lost")
    assert {row.job for row in pglock_database.runs("app:outer")} == {"app:outer"}

"""What is made once for a task, and when it is made anew."""

from __future__ import annotations

import os
from typing import Any

import celery
import pytest

from celery_pglock import (
    LockedTask,
    claims,
    errors,
    events,
    ledger,
    locks,
    messages,
    options,
    policies,
    runs,
    settings,
)

NODE = "celery@here:1"


@pytest.fixture
def app() -> celery.Celery:
    app = celery.Celery("proj", broker="memory://", set_as_current=False)
    app.conf.pglock_database_url = "postgresql://nobody@127.0.0.1:1/nothing"
    return app


def body() -> None:
    """Do nothing."""


def policy(app: celery.Celery, **given: Any) -> policies.Policy:
    make: Any = app.task(base=LockedTask, name="proj.t", shared=False, **given)
    task = make(body)
    chosen = options.locked(task)
    assert chosen is not None
    return policies.Policy(task, settings.of(app), chosen)


def test_all_calls_of_a_task_share_what_runs_them(app: celery.Celery) -> None:
    made = policy(app)
    assert made.machinery(NODE) is made.machinery("another@here:2")
    assert isinstance(made.machinery(NODE)[0].records, ledger.Ledger)


def test_without_periods_no_table_is_needed(app: celery.Celery) -> None:
    executor, identifier = policy(app, once_per=None).machinery(NODE)
    assert isinstance(executor.records, locks.NameLockOnly)
    found = identifier.identify(messages.Delivery(task_id="abc", direct=False), "proj.t")
    assert (found.job, found.period) == ("proj:proj.t", None)


def test_an_option_of_the_task_comes_before_the_applications(app: celery.Celery) -> None:
    app.conf.pglock_lock_wait = 3
    app.conf.pglock_lock_conflict = "raise"
    made = policy(app, lock_conflict="postpone")
    assert (made.lock_wait, made.lock_conflict) == (3, "postpone")


def test_other_settings_are_another_policy(app: celery.Celery) -> None:
    made = policy(app)
    assert made.made_for(settings.of(app), made.chosen)
    with settings.replaced(app, schema="elsewhere") as changed:
        assert not made.made_for(changed, made.chosen)
    assert made.made_for(settings.of(app), made.chosen)


def test_what_cannot_be_made_is_tried_again(app: celery.Celery) -> None:
    app.conf.pglock_database_url = None
    made = policy(app)
    for _ in range(2):
        with pytest.raises(errors.ConfigurationError, match="pglock_database_url is not set"):
            made.machinery(NODE)


def test_a_loss_that_two_notice_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    run = runs.Run(
        name="proj.t",
        key=1,
        level="session",
        job="proj:proj.t",
        period=None,
        due=None,
        attempt=1,
        term=None,
        _held=lambda: False,
        _prove=lambda: None,
    )
    lost = errors.LockLost("proj:proj.t", None, "its session was ended by the server")
    for _ in range(2):
        events.lost(None, run, lost)
    assert [getattr(record, "event", None) for record in caplog.records] == ["lock_lost"]
    # Without a run nobody else can notice it.
    events.lost(None, None, lost)
    assert len(caplog.records) == 2


def test_values_that_are_made_in_each_run_are_compared_and_hashed_by_their_fields() -> None:
    def work() -> claims.Work:
        return claims.Work(
            job="proj:t",
            period="p",
            name="t",
            name_key=1,
            run_key=2,
            task="t",
            node=str(os.getpid()),
        )

    assert work() == work()
    assert len({work(), work()}) == 1

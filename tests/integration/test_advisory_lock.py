"""The lock of a name, for commands and scripts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import celery
import pytest

from celery_pglock import (
    ConfigurationError,
    DatabaseUnavailable,
    JobSkipped,
    LockedTask,
    LockLost,
    LockNotAcquired,
    advisory_lock,
    current_run,
    errors,
    holds,
    idle_sessions,
    keys,
)
from tests.integration.workbench import advisory_locks, terminate
from tests.support.databases import Database
from tests.support.processes import Processes, eventually


@pytest.fixture
def app(database: Database) -> Iterator[celery.Celery]:
    app = celery.Celery("app", set_as_current=False)
    app.conf.pglock_database_url = database.url
    yield app
    idle_sessions.close_idle()


def held_keys(database: Database) -> list[int]:
    return [key for key, _ in advisory_locks(database)]


def test_it_holds_the_key_of_the_name_and_gives_it_back(
    app: celery.Celery, database: Database
) -> None:
    with advisory_lock("nightly", app=app) as lock:
        assert held_keys(database) == [keys.from_name("app", "task", "nightly")] == [lock.key]
        assert (lock.name, lock.job, lock.period, lock.held) == (
            "nightly",
            "app:nightly",
            None,
            True,
        )
        lock.check()
        with pytest.raises(errors.NoCurrentRun):
            current_run()
    assert not held_keys(database)
    assert not lock.held
    with advisory_lock(42, app=app):
        assert held_keys(database) == [42]


def test_a_taken_lock_raises_and_says_who_has_it(app: celery.Celery, database: Database) -> None:
    with advisory_lock("nightly", app=app) as lock:
        ((_, pid),) = advisory_locks(database)
        with (
            pytest.raises(LockNotAcquired, match=f"held by pglock:nightly@.*backend {pid}"),
            advisory_lock("nightly", app=app),
        ):
            pytest.fail("it ran")
        lock.check()
    assert not held_keys(database)


def test_it_excludes_a_task_of_that_name_and_is_excluded_by_it(app: celery.Celery) -> None:
    @app.task(base=LockedTask, lock_name="nightly", once_per=None)
    def report() -> str:
        with pytest.raises(LockNotAcquired), advisory_lock("nightly", app=app):
            pytest.fail("it ran")
        return "ran"

    with advisory_lock("nightly", app=app), pytest.raises(JobSkipped):
        report()
    assert report() == "ran"


def test_it_waits(app: celery.Celery) -> None:
    holds, release = threading.Event(), threading.Event()

    def other() -> None:
        with advisory_lock("nightly", app=app):
            holds.set()
            assert release.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert holds.wait(20)
    started = time.monotonic()
    with pytest.raises(LockNotAcquired), advisory_lock("nightly", app=app, wait=0.3):
        pytest.fail("it ran")
    assert time.monotonic() - started >= 0.3
    releaser = threading.Timer(0.1, release.set)
    releaser.start()
    with advisory_lock("nightly", app=app, wait=20) as lock:
        assert lock.held
    thread.join()
    releaser.join()


@pytest.mark.parametrize("lock_lost", ["raise", "warn"])
def test_a_lost_lock_interrupts_or_warns(
    app: celery.Celery, database: Database, caplog: pytest.LogCaptureFixture, lock_lost: str
) -> None:
    app.conf.pglock_lock_lost = lock_lost
    ended = []

    def work() -> None:
        with advisory_lock("nightly", app=app) as lock:
            ((_, pid),) = advisory_locks(database)
            terminate(database, pid)
            eventually(lambda: not lock.held, what="it knows")
            with pytest.raises(LockLost):
                lock.check()
            eventually(lambda: caplog.records, what="it is told")
            ended.append(True)

    if lock_lost == "raise":
        with pytest.raises(LockLost):
            work()
    else:
        work()
        assert ended
    eventually(lambda: caplog.records, what="it is told")
    # psycopg complains too when the test's own query was interrupted.
    (record,) = [record for record in caplog.records if record.name.startswith("celery_pglock")]
    assert (record.levelname, vars(record)["event"]) == ("ERROR", "lock_lost")
    assert not held_keys(database)


def test_a_thread_that_outlives_the_block_is_told_so(app: celery.Celery) -> None:
    working, ended = threading.Event(), threading.Event()
    found: list[tuple[bool, str]] = []

    def go_on() -> None:
        lock.check()
        working.set()
        assert ended.wait(20)
        try:
            lock.check()
        except LockLost as lost:
            found.append((lock.held, lost.reason))

    with advisory_lock("nightly", app=app) as lock:
        thread = threading.Thread(target=go_on)
        thread.start()
        assert working.wait(20)
    ended.set()
    thread.join(20)
    assert found == [(False, "its run has ended")]


def test_a_loss_before_the_block_begins_interrupts_it(
    app: celery.Celery, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = holds.Hold.begin

    def begin_and_lose(hold: holds.Hold) -> None:
        begin(hold)
        terminate(database, hold.session.pid)
        eventually(lambda: hold.state == "lost", what="it knows")

    monkeypatch.setattr(holds.Hold, "begin", begin_and_lose)
    ended = []

    def work() -> None:
        with advisory_lock("nightly", app=app):
            time.sleep(10)  # the strike itself may come a moment after the loss
            ended.append(True)

    with pytest.raises(LockLost):
        work()
    assert not ended
    assert not held_keys(database)


def test_what_the_block_raises_is_raised_and_the_lock_is_free(
    app: celery.Celery, database: Database
) -> None:
    with pytest.raises(ZeroDivisionError), advisory_lock("nightly", app=app):
        _ = 1 / 0
    assert not held_keys(database)


def test_an_idle_session_that_died_is_replaced(app: celery.Celery, database: Database) -> None:
    with advisory_lock("nightly", app=app):
        ((_, pid),) = advisory_locks(database)
    terminate(database, pid)
    with advisory_lock("nightly", app=app) as lock:
        lock.check()


def test_without_a_database_nothing_runs() -> None:
    app = celery.Celery("app", set_as_current=False)
    with (
        pytest.raises(ConfigurationError, match="pglock_database_url"),
        advisory_lock("x", app=app),
    ):
        pytest.fail("it ran")
    app = celery.Celery("app", set_as_current=False)
    app.conf.pglock_database_url = "postgresql://nobody@127.0.0.1:1/none"
    with pytest.raises(DatabaseUnavailable), advisory_lock("x", app=app):
        pytest.fail("it ran")


def test_without_locks_the_block_runs() -> None:
    app = celery.Celery("app", set_as_current=False)
    app.conf.pglock_enabled = False
    with advisory_lock("x", app=app) as lock:
        lock.check()
        assert lock.held


SCRIPT = """
import sys, time, celery
from celery_pglock import advisory_lock
app = celery.Celery("app")
app.conf.pglock_database_url = sys.argv[1]
with advisory_lock("nightly"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_script_leaves_no_lock(database: Database, processes: Processes) -> None:
    script = processes.python("-c", SCRIPT, database.url, name="script")
    script.wait_for_line("^held$")
    assert held_keys(database)
    script.kill()
    eventually(lambda: not held_keys(database), 1.0, "the lock is free")

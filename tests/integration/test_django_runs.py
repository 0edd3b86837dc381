"""A run at transaction level on Django's own connection: the models' writes are part of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest
from celery.exceptions import Ignore, Retry

from celery_pglock import LockedTask, LockLost, current_run, errors, run_finished, settings
from tests.integration.workbench import advisory_locks, terminate
from tests.support.databases import Database
from tests.support.django_site import pointed
from tests.support.pgbouncer import StartPgBouncer
from tests.support.processes import eventually
from tests.support.requirements import since

_NUMBERS = itertools.count(1)


class Site:
    """Runs bodies as tasks of the project, in this process, and tells what was left behind."""

    def __init__(self, app: celery.Celery, database: Database) -> None:
        self.app = app
        self.database = database

    def task(self, body: Callable[..., Any], **options: Any) -> Any:
        """Make a task at transaction level of a body without arguments."""

        def run() -> Any:
            return body()

        given = {"lock_level": "transaction", **options}
        make: Any = self.app.task
        return make(base=LockedTask, name=f"site.task{next(_NUMBERS)}", **given)(run)

    def run(self, body: Callable[..., Any], **options: Any) -> Any:
        """Run a body as a worker would, and return its result."""
        result = self.task(body, **options).apply()
        assert not advisory_locks(self.database), "no lock is left"
        return result

    def status(self) -> tuple[str, str | None]:
        """Return status and reason of the one row."""
        ((status, reason),) = self.database.rows("SELECT status, reason FROM pglock.job_runs")
        return status, reason

    def rows(self) -> list[int]:
        """Return the numbers of the rows that are committed."""
        found = self.database.rows("SELECT number FROM books_row ORDER BY number")
        return [number for (number,) in found]


@pytest.fixture
def on(site: celery.Celery, shared_site_database: Database) -> Site:
    shared_site_database.rows("TRUNCATE pglock.job_runs, books_row, books_shelf")
    return Site(site, shared_site_database)


def save(*numbers: int) -> None:
    from tests.apps.django_site.books.models import Row

    for number in numbers:
        Row(job="job", number=number).save()


def connection() -> Any:
    from django.db import connections

    return connections["default"]


# --- done, failed, retry, skip ----------------------------------------------------------------


def test_what_models_write_is_committed_with_the_outcome(on: Site) -> None:
    seen: list[Any] = []

    def body() -> str:
        save(1, 2)
        run = current_run()
        run.check()
        seen.append((run.held, run.connection is connection(), on.rows(), on.status()))
        return "value"

    assert on.run(body).get() == "value"
    assert seen == [(True, True, [], ("running", None))]
    assert (on.rows(), on.status()) == ([1, 2], ("done", None))
    assert not connection().in_atomic_block
    assert connection().get_autocommit()


def test_a_body_that_fails_has_written_nothing(on: Site) -> None:
    def body() -> None:
        save(1)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - ours, without words
        on.run(body).get()
    assert (on.rows(), on.status()) == ([], ("failed", "error"))
    assert not connection().in_atomic_block


@pytest.mark.parametrize(
    ("raised", "status"),
    [(Retry(), ("retrying", "retry")), (Ignore(), ("failed", "ignore"))],
)
def test_a_retry_or_a_message_given_up_has_written_nothing(
    on: Site, raised: Exception, status: tuple[str, str]
) -> None:
    def body() -> None:
        save(1)
        raise raised

    on.run(body)
    assert (on.rows(), on.status()) == ([], status)


def test_while_another_holds_the_lock_it_is_skipped(on: Site) -> None:
    from celery_pglock import advisory_lock

    task = on.task(lambda: save(1), lock_name="shared")
    with advisory_lock("shared", app=on.app):
        assert task.apply().state == "REVOKED"
    assert (on.rows(), on.status()[0]) == ([], "skipped")
    task.apply()
    assert on.rows() == [1]


def test_without_a_ledger_the_lock_alone_is_in_the_transaction(on: Site) -> None:
    held: list[int] = []

    def body() -> None:
        save(1)
        held.append(len(advisory_locks(on.database)))

    on.run(body, once_per=None)
    assert (on.rows(), held) == ([1], [1])
    assert on.database.rows("SELECT count(*) FROM pglock.job_runs") == [(0,)]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_whatever_isolation_is_set_for_the_connection(on: Site, isolation: str) -> None:
    """Its first snapshot would be older than the locks, and could not tell what they are for."""
    from psycopg import IsolationLevel

    level = IsolationLevel[isolation.replace(" ", "_")]
    found: list[str] = []

    def body() -> None:
        with connection().cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            found.append(cursor.fetchone()[0])

    options = connection().settings_dict["OPTIONS"]
    options["isolation_level"] = level
    connection().close()
    try:
        on.run(body)
        # The control: elsewhere it is what was set.
        from django.db import transaction

        with transaction.atomic():
            body()
    finally:
        del options["isolation_level"]
        connection().close()
    assert found == ["read committed", isolation.lower()]


def test_what_is_set_on_the_connection_lasts_as_long_as_the_transaction(on: Site) -> None:
    names = ("client_connection_check_interval", "idle_in_transaction_session_timeout")

    def shown() -> list[str]:
        with connection().cursor() as cursor:
            found = []
            for name in (*names, "application_name"):
                cursor.execute(f"SHOW {name}")
                found.append(cursor.fetchone()[0])
            return found

    connection().ensure_connection()
    with connection().cursor() as cursor:
        cursor.execute("SET idle_in_transaction_session_timeout = '9s'")
    before = shown()
    seen: list[list[str]] = []
    on.run(lambda: seen.append(shown()))
    ((interval, timeout, application),) = seen
    assert (interval, timeout) == ("500ms", "0")
    assert application.startswith("pglock:site.task")
    assert shown() == before
    connection().close()


# --- atomic() and on_commit() -----------------------------------------------------------------


def test_blocks_of_the_body_nest(on: Site) -> None:
    from django.db import IntegrityError, transaction

    def body() -> None:
        save(1)
        with pytest.raises(IntegrityError), transaction.atomic():
            save(2, 1)
        with transaction.atomic():
            save(3)

    on.run(body)
    assert (on.rows(), on.status()) == ([1, 3], ("done", None))


def test_what_is_left_for_the_commit_is_called_after_it(on: Site) -> None:
    from django.db import transaction

    called: list[Any] = []

    def body() -> None:
        save(1)
        transaction.on_commit(
            lambda: called.append((on.rows(), on.status(), advisory_locks(on.database)))
        )
        assert not called

    on.run(body)
    assert called == [([1], ("done", None), [])]


def test_what_is_left_for_the_commit_is_forgotten_with_a_failure(on: Site) -> None:
    from django.db import transaction

    called: list[None] = []

    def body() -> None:
        transaction.on_commit(lambda: called.append(None))
        raise ValueError

    assert on.run(body).state == "FAILURE"
    assert on.status() == ("failed", "error")
    assert not called


def test_an_error_after_the_commit_is_the_tasks_and_its_period_is_done(on: Site) -> None:
    from django.db import transaction

    told: list[str] = []

    def tell(status: str, **_: Any) -> None:
        told.append(status)

    def body() -> None:
        save(1)
        transaction.on_commit(lambda: {"a": 1}["b"])

    task = on.task(body)
    run_finished.connect(tell, sender=task)
    result = task.apply()
    assert isinstance(result.result, KeyError)
    assert (on.rows(), on.status(), told) == ([1], ("done", None), ["done"])
    assert not connection().in_atomic_block
    assert connection().get_autocommit()


# --- a body that ends the transaction ---------------------------------------------------------


def _swallow_at_the_driver() -> None:
    with connection().cursor() as cursor, pytest.raises(Exception, match="row_once"):
        cursor.execute("INSERT INTO books_row (job, number) VALUES ('job', 1)")


def _swallow_in_a_block() -> None:
    from django.db import IntegrityError, transaction

    with pytest.raises(IntegrityError), transaction.atomic(savepoint=False):
        save(1)


def _mark_for_rollback() -> None:
    from django.db import transaction

    transaction.set_rollback(True)


def _leave_a_block_open() -> None:
    from django.db import transaction

    transaction.atomic().__enter__()
    save(3)


def _close_all() -> None:
    from django.db import connections

    connections.close_all()


def _as_text(statement: str) -> Callable[[], None]:
    def end() -> None:
        with connection().cursor() as cursor:
            cursor.execute(statement)

    return end


def _of_the_driver(name: str) -> Callable[[], None]:
    def end() -> None:
        getattr(connection().connection, name)()

    return end


UNDONE: dict[str, Callable[[], Any]] = {
    "connection.close()": lambda: connection().close(),
    "close_all()": _close_all,
    "the driver's close()": _of_the_driver("close"),
    "the driver's rollback()": _of_the_driver("rollback"),
    "ROLLBACK as text": _as_text("ROLLBACK"),
    "ROLLBACK and BEGIN": _as_text("ROLLBACK; BEGIN"),
    "a swallowed error": _swallow_at_the_driver,
    "a swallowed error in a block": _swallow_in_a_block,
    "set_rollback(True)": _mark_for_rollback,
    "a block left open": _leave_a_block_open,
}
COMMITTED: dict[str, Callable[[], Any]] = {
    "the driver's commit()": _of_the_driver("commit"),
    "COMMIT as text": _as_text("COMMIT"),
    "COMMIT AND CHAIN": _as_text("COMMIT AND CHAIN"),
}


def expect_not_done(on: Site, end: Callable[[], Any]) -> None:
    def body() -> None:
        save(1)
        end()

    result = on.run(body)
    assert isinstance(result.result, LockLost), result.result
    assert "is not done: " in str(result.result)
    assert on.status() == ("failed", "transaction ended")
    # The next one is as any other.
    assert not connection().in_atomic_block
    on.database.rows("TRUNCATE pglock.job_runs, books_row, books_shelf")
    on.run(lambda: save(7))
    assert (on.rows(), on.status()) == ([7], ("done", None))


@pytest.mark.parametrize("end", UNDONE)
def test_a_body_that_ends_the_transaction_is_not_done(on: Site, end: str) -> None:
    expect_not_done(on, UNDONE[end])


@pytest.mark.parametrize("end", COMMITTED)
def test_a_body_that_commits_behind_our_back_is_not_done(on: Site, end: str) -> None:
    expect_not_done(on, COMMITTED[end])


def test_what_follows_a_commit_of_the_body_is_undone(on: Site) -> None:
    def body() -> None:
        save(1)
        COMMITTED["COMMIT as text"]()
        assert not current_run().held
        save(2)

    assert isinstance(on.run(body).result, LockLost)
    assert on.rows() == [1]  # that cannot be undone any more


@pytest.mark.parametrize("name", ["commit", "rollback", "set_autocommit"])
def test_django_itself_refuses_the_rest(on: Site, name: str) -> None:
    from django.db import transaction

    def body() -> None:
        save(1)
        arguments = [True] if name == "set_autocommit" else []
        with pytest.raises(transaction.TransactionManagementError):
            getattr(transaction, name)(*arguments)
        save(2)

    on.run(body)
    assert (on.rows(), on.status()) == ([1, 2], ("done", None))


@pytest.mark.parametrize("level", ["transaction", "session"])
def test_close_old_connections_loses_no_lock(on: Site, level: str) -> None:
    """At session level it closes Django's connection, which is another than the lock's."""
    from django.db import close_old_connections

    def body() -> None:
        save(1)
        connection().close_at = 0.0  # CONN_MAX_AGE has passed
        close_old_connections()
        assert (connection().connection is None) == (level == "session")
        assert current_run().held
        current_run().check()
        assert len(advisory_locks(on.database)) == 2
        save(2)

    on.run(body, lock_level=level)
    assert (on.rows(), on.status()) == ([1, 2], ("done", None))
    connection().close_at = 0.0
    close_old_connections()
    assert connection().connection is None, "afterwards it does what it is for"


@pytest.mark.usefixtures("on")
def test_control_left_to_itself_django_closes_a_connection_in_a_transaction() -> None:
    from django.db import close_old_connections, transaction

    with pytest.raises(Exception, match="closed"), transaction.atomic():  # noqa: PT012
        save(1)
        close_old_connections()
        save(2)


# --- the server, and other databases ----------------------------------------------------------


def test_a_session_that_the_server_ends_is_a_lost_lock(on: Site) -> None:
    def body() -> None:
        save(1)
        terminate(on.database, connection().connection.info.backend_pid)
        eventually(lambda: not current_run().held, what="the run notices")

    result = on.run(body)
    assert isinstance(result.result, LockLost)
    assert (on.rows(), on.status()[0]) == ([], "failed")
    on.run(lambda: save(2))
    assert on.rows() == [2]


def test_a_commit_that_is_refused_is_the_tasks_own_error(on: Site) -> None:
    from django.db import IntegrityError

    from tests.apps.django_site.books.models import Row

    def body() -> None:
        Row(job="job", number=1, shelf_id=99).save()

    result = on.run(body)
    assert isinstance(result.result, IntegrityError)
    assert (on.rows(), on.status()) == ([], ("failed", "error"))
    assert not connection().in_atomic_block


def test_a_connection_that_has_died_while_idle_is_replaced(on: Site) -> None:
    connection().ensure_connection()
    terminate(on.database, connection().connection.info.backend_pid)
    on.run(lambda: save(1))
    assert on.rows() == [1]


def test_another_attempt_that_has_taken_the_period_over_is_left_alone(on: Site) -> None:
    def body() -> None:
        save(1)
        on.database.rows("UPDATE pglock.job_runs SET claim = gen_random_uuid()")

    result = on.run(body)
    assert isinstance(result.result, LockLost)
    assert "taken the period over" in str(result.result)
    assert (on.rows(), on.status()[0]) == ([], "running")
    assert not connection().in_atomic_block


def test_inside_a_block_of_the_caller_it_is_refused(on: Site) -> None:
    from django.db import transaction

    task = on.task(lambda: save(1))
    with transaction.atomic():
        save(5)
        with pytest.raises(errors.ConfigurationError, match=r"inside transaction\.atomic\(\)"):
            task()
    assert on.rows() == [5]


def test_a_task_called_by_another_has_no_transaction_of_its_own(on: Site) -> None:
    inner = on.task(lambda: save(2))

    def body() -> None:
        save(1)
        with pytest.raises(errors.ConfigurationError, match=r"send it with delay\(\)"):
            inner()
        assert current_run().held

    on.run(body)
    assert (on.rows(), on.status()) == ([1], ("done", None))


def test_a_task_called_after_the_commit_has_one(on: Site) -> None:
    from django.db import transaction

    inner = on.task(lambda: save(2), once_per=None)

    def body() -> None:
        save(1)
        transaction.on_commit(inner)

    on.run(body)
    assert (on.rows(), on.status()) == ([1, 2], ("done", None))


def test_what_is_written_to_another_database_is_not_part_of_it(
    on: Site, blank_database: Database
) -> None:
    """One transaction is on one database: said in the documentation, and found by a check."""
    from django.db import connections

    blank_database.rows("CREATE TABLE elsewhere (number integer)")

    def body() -> None:
        save(1)
        with connections["other"].cursor() as cursor:
            cursor.execute("INSERT INTO elsewhere VALUES (1)")
        raise ValueError

    with pointed(other=blank_database.url):
        on.run(body)
    assert on.rows() == []
    assert blank_database.rows("SELECT number FROM elsewhere") == [(1,)]


def test_the_tables_may_be_on_another_alias_than_default(on: Site) -> None:
    from tests.apps.django_site.books.models import Row

    def body() -> None:
        assert str(vars(current_run().connection)["alias"]) == "other"
        Row(job="job", number=1).save(using="other")
        raise ValueError

    with (
        settings.replaced(on.app, django_alias="other"),
        pointed(other=on.database.url),
    ):
        on.run(body)
    assert (on.rows(), on.status()) == ([], ("failed", "error"))


def test_through_a_pooler_in_transaction_mode(on: Site, pgbouncer: StartPgBouncer) -> None:
    url = pgbouncer(on.database, "transaction", default_pool_size=2).url
    with pointed(default=url):
        on.run(lambda: save(1))
        assert (on.rows(), on.status()) == ([1], ("done", None))
        assert on.run(UNDONE["ROLLBACK as text"]).state == "FAILURE"
    assert on.rows() == [1]


@pytest.fixture
def pooled(on: Site) -> Iterator[Any]:
    """Django's connection, out of a pool of Django's."""
    import django

    since(django.VERSION >= (5, 1), "Django 5.1, which has pools")
    connection().close()
    connection().settings_dict["OPTIONS"]["pool"] = {"min_size": 1, "max_size": 2}
    assert on.rows() == []
    yield connection()
    connection().close()
    connection().close_pool()
    del connection().settings_dict["OPTIONS"]["pool"]


@pytest.mark.parametrize("end", [*UNDONE, *COMMITTED])
def test_on_a_connection_out_of_djangos_pool(on: Site, pooled: Any, end: str) -> None:
    on.run(lambda: save(1))
    assert (on.rows(), on.status()) == ([1], ("done", None))
    on.database.rows("TRUNCATE pglock.job_runs, books_row, books_shelf")
    expect_not_done(on, {**UNDONE, **COMMITTED}[end])
    assert pooled.pool.get_stats()["pool_size"] <= 2


# --- controls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seam", [True, False], ids=["as it is", "control"])
def test_only_on_djangos_connection_are_models_writes_part_of_the_run(
    on: Site, *, seam: bool
) -> None:
    def body() -> None:
        save(1)
        raise ValueError

    if seam:
        on.run(body)
    else:
        # As with pglock_database_url: the transaction is on a connection of our own.
        with settings.replaced(on.app, django_alias=None, database_url=on.database.url):
            on.run(body)
    assert on.status() == ("failed", "error")
    assert on.rows() == ([] if seam else [1])


@pytest.mark.parametrize("seam", [True, False], ids=["as it is", "control"])
def test_only_what_is_looked_for_at_the_end_is_found(
    on: Site, monkeypatch: pytest.MonkeyPatch, *, seam: bool
) -> None:
    from celery_pglock.contrib.django import atomic_runs

    if not seam:
        monkeypatch.setattr(atomic_runs.AtomicTransaction, "_how_ended", lambda _: None)

    def body() -> None:
        save(1)
        _mark_for_rollback()

    on.run(body)
    # Without it the work is undone, and is done all the same.
    assert (on.rows(), on.status()[0]) == ([], "failed" if seam else "done")

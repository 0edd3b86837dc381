"""The kit with which users test their own tasks, and the page that shows it.

Its broker and its result backend are at a port where nobody listens: what needed one would fail.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import celery
import celery.result
import kombu.exceptions
import psycopg
import pytest
from celery.exceptions import Ignore, Reject

from celery_pglock import (
    CrashRetriesExhausted,
    DatabaseUnavailable,
    JobSkipped,
    LockedTask,
    LockLost,
    LockNotAcquired,
    current_run,
    settings,
)
from celery_pglock.testing import (
    Database,
    Outcome,
    at,
    dead_attempt,
    deliver,
    expect_skipped,
    holding,
    lose_lock,
    run_occurrence,
    running,
)
from celery_pglock.testing import databases as kit_databases
from tests.support.processes import REPOSITORY
from tests.support.servers import TestedPostgres

DUE = dt.datetime(2020, 11, 29, 2, tzinfo=dt.UTC)
NEXT = DUE + dt.timedelta(days=1)
NOWHERE = "redis://127.0.0.1:1/0"
CONFIGURED = "postgresql://nobody@127.0.0.1:1/nowhere"

app: Any = celery.Celery("kit", set_as_current=False, broker=NOWHERE, backend=NOWHERE)
app.conf.update(
    pglock_database_url=CONFIGURED,
    # As test suites have it.
    pglock_enabled=False,
    task_always_eager=True,
    # So that a message which must not be lost waits for 0.2 s, and not 3 s, for what is in its way.
    broker_transport_options={"visibility_timeout": 1.2},
)


class Body:
    """What the tasks do; the tests set it."""

    act: ClassVar[Callable[[], Any]] = lambda: None


def body() -> Any:
    answer = Body.act()
    return current_run().attempt if answer is None else answer


def task(name: str, **options: Any) -> Any:
    return app.task(body, name=name, base=LockedTask, shared=False, lazy=False, **options)


nightly = task("nightly", lock_name="reports", autoretry_for=(LookupError,), default_retry_delay=9)
booked = task("booked", lock_level="transaction")
weekly = task("weekly", lock_name="reports")
daily = task("daily", once_per="day")
labelled = task("labelled", once_per=lambda due: f"{due:%Y-%m}")
patient = task("patient", lock_lost="warn")
polite = task("polite", skip_state="SUCCESS")
strict = task("strict", lock_name="reports", lock_conflict="raise", lock_unavailable="raise")
alone = task("alone", once_per=None)
either_level = pytest.mark.parametrize("job", [nightly, booked], ids=lambda job: job.name)


def never(text: str) -> None:
    pytest.fail(f"{text} was executed")


mail = app.task(never, name="mail", shared=False, lazy=False)


@pytest.fixture
def pglock_app() -> Any:
    return app


@pytest.fixture(autouse=True)
def _plain_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Body, "act", lambda: None)


def doing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    monkeypatch.setattr(Body, "act", staticmethod(act))


def raising(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def seen(run: Outcome) -> tuple[str, str, int, int]:
    return run.state, run.row.status, run.row.attempts, run.row.lost_attempts


# --- An occurrence ----------------------------------------------------------------------------


@pytest.mark.usefixtures("pglock_database")
@either_level
def test_an_occurrence_runs_once(job: Any) -> None:
    run = run_occurrence(job, DUE, entry="every night")
    assert (run.value, run.error, run.sent) == (1, None, ())
    assert seen(run) == ("done", "done", 1, 0)
    assert (run.row.job, run.row.entry, run.row.due_at) == ("kit:every night", "every night", DUE)
    assert (run.row.task_id, run.row.term) == (run.message.task_id, 1)
    again = run_occurrence(job, DUE, entry="every night")
    assert (again.state, again.kind, again.value) == ("skipped", "closed", None)
    assert again.reason is not None
    assert f"already ran in this period (task {run.message.task_id}" in again.reason
    # Another entry is another job, and the next night another period.
    assert run_occurrence(job, DUE, entry="another").state == "done"
    assert run_occurrence(job, NEXT, entry="every night").state == "done"


@pytest.mark.usefixtures("pglock_database")
def test_a_message_that_comes_again_is_dropped() -> None:
    run = run_occurrence(daily, DUE)
    again = deliver(run.message, redelivered=True)
    assert (again.state, again.error, again.row) == ("dropped", None, run.row)


def test_what_beat_has_written_is_closed_too(pglock_database: Database) -> None:
    """Under a calendar rule a run has another row than the occurrence that was sent."""
    run = run_occurrence(daily, DUE, entry="each day")
    assert (run.row.job, run.row.period) == ("kit:daily", "2020-11-29")
    (sent,) = pglock_database.runs("kit:each day")
    assert (sent.status, sent.reason) == ("done", "run as kit:daily 2020-11-29")


@pytest.mark.usefixtures("pglock_database")
@either_level
@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (ValueError("no"), "failed", "error"),
        (Ignore(), "failed", "ignore"),
        (Reject("no"), "failed", "reject"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_body_raises_is_told_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, job: Any, error: Exception, state: str, reason: str
) -> None:
    doing(monkeypatch, raising(error))
    run = run_occurrence(job, DUE)
    assert (run.state, run.error, run.row.reason) == (state, error, reason)
    with pytest.raises(LookupError, match="nothing was sent to go on with"):
        _ = run.copy


@pytest.mark.usefixtures("pglock_database")
def test_an_exit_of_the_body_is_one_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    doing(monkeypatch, raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run_occurrence(nightly, DUE)


@pytest.mark.usefixtures("pglock_database")
def test_a_retry_goes_on_with_the_period(monkeypatch: pytest.MonkeyPatch) -> None:
    doing(monkeypatch, raising(LookupError("not yet")))
    run = run_occurrence(nightly, DUE)
    assert seen(run) == ("retrying", "retrying", 1, 0)
    assert (run.copy.task_id, run.copy.headers["retries"]) == (run.message.task_id, 1)
    doing(monkeypatch, lambda: None)
    assert seen(deliver(run.copy)) == ("done", "done", 2, 0)


@pytest.mark.usefixtures("pglock_database")
def test_a_body_that_hands_over_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    doing(monkeypatch, lambda: nightly.replace(mail.si("instead")))
    run = run_occurrence(nightly, DUE)
    assert (seen(run), run.error) == (("done", "done", 1, 0), None)
    assert (run.copy.task, run.copy.args) == ("mail", ["instead"])


def test_without_a_row_it_says_so(pglock_database: Database) -> None:
    run = run_occurrence(alone, DUE)
    assert (run.state, run.value, pglock_database.runs()) == ("done", 1, [])
    with pytest.raises(LookupError, match="no row tells of"):
        _ = run.row


@pytest.mark.usefixtures("pglock_database")
def test_a_skip_that_counts_as_success_is_a_skip() -> None:
    run_occurrence(polite, DUE)
    run = run_occurrence(polite, DUE)
    assert (run.state, run.value["skipped"]) == ("skipped", True)


def test_what_cannot_be_an_occurrence_is_refused(
    pglock_database: Database,
) -> None:
    with pytest.raises(TypeError, match="task 'mail' takes no lock"):
        run_occurrence(mail, DUE)
    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        run_occurrence(nightly, DUE, args=["one too many"])
    naive = DUE.replace(tzinfo=None)
    with pytest.raises(ValueError, match="has no time zone"):
        run_occurrence(nightly, naive)
    with pytest.raises(ValueError, match="has no time zone"), at(naive):
        pytest.fail("it is another instant elsewhere")
    assert not pglock_database.runs()


@pytest.mark.usefixtures("pglock_database")
def test_no_occurrence_is_too_old() -> None:
    assert run_occurrence(daily, DUE).state == "done"
    # The control, with the retention that is the default.
    with settings.replaced(app, retention=30 * 86400.0), expect_skipped(kind="stale"):
        run_occurrence(daily, NEXT)


# --- No broker, no result backend -------------------------------------------------------------


@pytest.mark.usefixtures("pglock_database")
def test_what_a_run_sends_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> None:
        mail.delay("from the body")
        sender = threading.Thread(target=mail.delay, args=["from a thread of the body"])
        sender.start()
        sender.join()

    pool = app.amqp._producer_pool  # noqa: SLF001 - that of before
    doing(monkeypatch, act)
    run = run_occurrence(nightly, DUE)
    assert run.state == "done"
    assert [message.args for message in run.sent] == [
        ["from the body"],
        ["from a thread of the body"],
    ]
    assert (app.conf.task_always_eager, app.amqp._producer_pool) == (True, pool)  # noqa: SLF001
    assert nightly.backend is app.backend
    # The control: there is no broker.
    elsewhere: Any = celery.Celery("control", set_as_current=False, broker=NOWHERE)
    with pytest.raises(kombu.exceptions.OperationalError):
        elsewhere.send_task("mail", retry=False, ignore_result=True)


@pytest.mark.usefixtures("pglock_database")
def test_runs_that_overlap_keep_their_messages_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last of them to end puts the application's broker and backend back."""
    both = threading.Barrier(2, timeout=30)
    first_ended = threading.Event()

    def act() -> None:
        me = current_run().job
        both.wait()
        if me == "kit:last":
            assert first_ended.wait(30)
        mail.delay(me)

    def run(job: Any, entry: str) -> Outcome:
        answer = run_occurrence(job, DUE, entry=entry)
        if entry == "first":
            first_ended.set()
        return answer

    doing(monkeypatch, act)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(run, booked, "first")
        last = threads.submit(run, patient, "last")
        assert [message.args for message in first.result(60).sent] == [["kit:first"]]
        assert [message.args for message in last.result(60).sent] == [["kit:last"]]
    assert (app.conf.task_always_eager, patient.backend) == (True, app.backend)
    results: Any = celery.result  # its stubs do not know the next line's function
    assert not results.task_join_will_block()


# --- Others that run, hold and die ------------------------------------------------------------


@pytest.mark.usefixtures("pglock_database")
@either_level
def test_a_run_in_another_process_is_in_the_way_until_it_ends(job: Any) -> None:
    with running(job, DUE):
        same = run_occurrence(job, DUE)
        assert (same.state, same.kind) == ("skipped", "running")
        later = run_occurrence(job, NEXT)
        assert (later.state, later.kind, later.row.status) == ("skipped", "held", "skipped")
        with pytest.raises(RuntimeError, match="cannot run elsewhere: this period is being run"):
            dead_attempt(job, DUE)
        with pytest.raises(RuntimeError, match=r"cannot run elsewhere: lock .* is held by job"):
            dead_attempt(job, NEXT + (NEXT - DUE))
    after = run_occurrence(job, DUE)
    assert (after.state, after.kind, after.row.status) == ("skipped", "closed", "done")


@pytest.mark.usefixtures("pglock_database")
def test_for_a_run_of_another_job_it_is_postponed() -> None:
    with running(nightly, DUE):
        run = run_occurrence(weekly, DUE)
        assert (run.state, run.row.status, run.row.postponements) == ("postponed", "sent", 1)
        assert run.copy.headers["pglock_postponed"] == 1
        refused = run_occurrence(strict, DUE)
        assert (refused.state, type(refused.error)) == ("failed", LockNotAcquired)
    assert seen(deliver(run.copy)) == ("done", "done", 1, 0)


@pytest.mark.usefixtures("pglock_database")
def test_a_lock_name_can_be_held() -> None:
    with holding("reports"):
        assert run_occurrence(nightly, DUE).kind == "held"
        with pytest.raises(LockNotAcquired), holding("reports"):
            pytest.fail("it is held")
    assert run_occurrence(nightly, NEXT).state == "done"


@pytest.mark.usefixtures("pglock_database")
@either_level
def test_a_redelivered_message_waits_for_its_run_and_goes_on_after_its_death(job: Any) -> None:
    with running(job, DUE) as other:
        early = deliver(other.message, redelivered=True)
        assert early.state == "postponed"
        other.die()
        late = deliver(early.copy)
    assert seen(late) == ("done", "done", 2, 1)


@pytest.mark.usefixtures("pglock_database")
@either_level
def test_a_dead_attempt_is_taken_over_and_too_many_end_it(job: Any) -> None:
    message = dead_attempt(job, DUE)
    assert seen(deliver(message, redelivered=True)) == ("done", "done", 2, 1)
    dead_attempt(job, NEXT, times=3)
    assert seen(run_occurrence(job, NEXT)) == ("done", "done", 4, 3)
    later = NEXT + (NEXT - DUE)
    dead_attempt(job, later, times=4)
    given_up = run_occurrence(job, later)
    assert isinstance(given_up.error, CrashRetriesExhausted)
    assert seen(given_up) == ("failed", "failed", 4, 4)
    with pytest.raises(TypeError, match="once_per=None"):
        dead_attempt(alone, DUE)


# --- A lock that is lost, a database that is away ---------------------------------------------


@pytest.mark.usefixtures("pglock_database")
@either_level
def test_a_lock_is_lost_where_the_test_says(monkeypatch: pytest.MonkeyPatch, job: Any) -> None:
    after: list[bool] = []

    def act() -> None:
        assert current_run().held
        lose_lock()
        after.append(True)

    doing(monkeypatch, act)
    run = run_occurrence(job, DUE)
    assert isinstance(run.error, LockLost)
    assert (seen(run), run.row.reason) == (("failed", "failed", 1, 0), "lock lost")
    assert not after  # it was interrupted
    doing(monkeypatch, lambda: None)
    assert seen(deliver(run.message, redelivered=True)) == ("done", "done", 2, 0)


@pytest.mark.usefixtures("pglock_database")
def test_a_lost_lock_can_be_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []

    def act() -> None:
        lose_lock()
        held.append(current_run().held)
        with pytest.raises(RuntimeError, match='nobody holds lock "patient"'):
            lose_lock()

    doing(monkeypatch, act)
    assert seen(run_occurrence(patient, DUE)) == ("done", "done", 1, 0)
    assert held == [False]


@pytest.mark.usefixtures("pglock_database")
def test_a_run_whose_period_is_taken_over_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> None:
        doing(monkeypatch, lambda: None)
        lose_lock()
        assert run_occurrence(patient, DUE).state == "done"

    doing(monkeypatch, act)
    run = run_occurrence(patient, DUE)
    assert seen(run) == ("lost", "done", 2, 1)


@either_level
def test_a_database_that_is_away_is_back_after_the_block(
    pglock_database: Database, job: Any
) -> None:
    assert run_occurrence(job, DUE).state == "done"  # over a session that is idle now
    with pglock_database.unavailable():
        run = run_occurrence(job, NEXT)
        with pytest.raises(DatabaseUnavailable, match="not currently accepting connections"):
            pglock_database.rows("select 1")
        refused = run_occurrence(strict, DUE)
    assert run.state == "postponed"
    assert (refused.state, type(refused.error)) == ("failed", DatabaseUnavailable)
    assert seen(deliver(run.copy)) == ("done", "done", 1, 0)


# --- Another clock ----------------------------------------------------------------------------


@pytest.mark.usefixtures("pglock_database")
@pytest.mark.parametrize(
    ("job", "label", "next_label"),
    [(daily, "2020-11-29", "2020-12-29"), (labelled, "2020-11", "2020-12")],
    ids=["calendar", "function"],
)
def test_a_period_can_be_counted_at_another_instant(
    monkeypatch: pytest.MonkeyPatch, job: Any, label: str, next_label: str
) -> None:
    doing(monkeypatch, lambda: current_run().period)
    with at(DUE):
        assert job() == label
        with pytest.raises(JobSkipped):
            job()
        with at(DUE.replace(month=12)):
            # In a thread, as a worker of the test has it.
            with ThreadPoolExecutor(1) as threads:
                assert threads.submit(job.apply).result(60).get() == next_label
            # An occurrence is counted by its due instant.
            last_year = run_occurrence(job, DUE.replace(year=2019))
            assert last_year.value == label.replace("2020", "2019")
        with pytest.raises(JobSkipped):
            job()
    # The control: today is no day of 2020.
    assert not job().startswith("2020")


# --- The expectation of a skip ----------------------------------------------------------------


@pytest.mark.usefixtures("pglock_database")
def test_a_skip_is_expected_with_its_kind() -> None:
    after: list[str] = []
    run = run_occurrence(daily, DUE)
    with expect_skipped(daily, kind="closed") as skipped:
        assert run_occurrence(daily, DUE).state == "skipped"
        run_occurrence(nightly, DUE)
    assert (skipped.job, skipped.period, skipped.kind) == ("kit:daily", "2020-11-29", "closed")
    assert skipped.task_id not in (None, run.message.task_id)
    assert "already ran" in skipped.reason
    with at(DUE), expect_skipped(daily) as skipped:
        daily()
        after.append("a direct call that is skipped raises")
    assert (skipped.task_id, after) == (None, [])


@pytest.mark.usefixtures("pglock_database")
def test_a_skip_that_is_missing_says_what_happened_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failure(act: Callable[[], Any], *args: Any, **options: Any) -> str:
        with pytest.raises(AssertionError) as caught, expect_skipped(*args, **options):
            act()
        return str(caught.value)

    assert failure(lambda: None) == "expected exactly one skipped run; instead: no run at all"
    assert failure(lambda: run_occurrence(daily, DUE)) == (
        "expected exactly one skipped run; instead: daily ran: done (kit:daily 2020-11-29)"
    )
    doing(monkeypatch, raising(ValueError("broken")))
    assert "booked ran: failed (kit:booked 2020-11-29T02" in failure(
        lambda: run_occurrence(booked, DUE)
    )
    assert "kind 'closed': already ran" in failure(lambda: run_occurrence(daily, DUE), kind="held")
    twice = failure(lambda: [run_occurrence(daily, DUE) for _ in range(2)])
    assert twice.count("daily was skipped") == 2
    other = failure(lambda: run_occurrence(daily, DUE), nightly, kind="closed")
    assert other == (
        "expected exactly one skipped run of kind 'closed' of task nightly; instead: no run at all"
    )
    with running(nightly, DUE):
        assert "weekly was postponed (lock" in failure(lambda: run_occurrence(weekly, DUE))


@pytest.mark.usefixtures("pglock_database")
def test_what_else_is_raised_goes_through() -> None:
    with pytest.raises(ZeroDivisionError), expect_skipped():
        raise ZeroDivisionError
    other = JobSkipped("kit:other", None, "of another day")
    with pytest.raises(JobSkipped) as caught, expect_skipped():
        raise other
    assert caught.value is other


# --- The application and its database ---------------------------------------------------------


@pytest.mark.parametrize("read_before", [True, False])
def test_afterwards_all_is_as_it_was(postgres_server: TestedPostgres, *, read_before: bool) -> None:
    settings._read.pop(app, None)  # noqa: SLF001 - as in a process that has just begun
    before = settings.of(app) if read_before else None
    server = kit_databases.Server(postgres_server.url())
    templates = kit_databases.Templates(server)
    with templates.copy("pglock") as database, kit_databases.pointed(app, database):
        assert (settings.of(app).database_url, settings.of(app).enabled) == (database.url, True)
        assert run_occurrence(nightly, DUE).state == "done"
        assert database.rows("select status from pglock.job_runs") == [("done",)]
    templates.close()
    assert settings._read.get(app) is before  # noqa: SLF001 - whether it would be read again
    assert (settings.of(app).database_url, settings.of(app).enabled) == (CONFIGURED, False)
    with psycopg.connect(postgres_server.url()) as connection:
        query = "select from pg_database where datname = %s"
        assert connection.execute(query, [database.name]).fetchone() is None
    # And no test can take locks in the database that is configured.
    for act in (
        lambda: run_occurrence(nightly, DUE),
        lambda: dead_attempt(nightly, DUE),
        lambda: holding("reports", app=app).__enter__(),
    ):
        with pytest.raises(RuntimeError, match="'kit' is not pointed at a database of this test"):
            act()


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (
            "host=h port=5433 user=u dbname=d password='p@/ ?'",
            "postgresql://u:p%40%2F%20%3F@h:5433/x",
        ),
        ("postgresql+psycopg://u@h/d?sslmode=require", "postgresql://u@h/x?sslmode=require"),
        ("postgresql://u@/d?host=/tmp&port=7", "postgresql://u@/x?host=%2Ftmp&port=7"),
        ("host=h options='-c a=b'", "postgresql://h/x?options=-c%20a%3Db"),
        ("postgresql://u@[::1]:7/d", "postgresql://u@/x?host=%3A%3A1&port=7"),
    ],
)
def test_the_url_of_a_database_is_that_of_the_server_with_its_name(given: str, url: str) -> None:
    assert kit_databases.Server(given).url("x") == url
    told = {"host": "", **psycopg.conninfo.conninfo_to_dict(url)}
    wanted = {**psycopg.conninfo.conninfo_to_dict(given.replace("+psycopg", "")), "dbname": "x"}
    assert told == {"host": "", **wanted}


# --- As a user has it -------------------------------------------------------------------------


def shown() -> dict[str, str]:
    """Return the files that the page shows, each from all its parts."""
    page = (REPOSITORY / "docs/howto/test-your-tasks.md").read_text()
    files: dict[str, str] = {}
    for block in re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL):
        files[block[0]] = files.get(block[0], "") + block[1]
    return files


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of its own, with the files of the page."""
    for name, text in shown().items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run_pytest(project: Path, *args: str, url: str | None, **env: str) -> tuple[int, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PGLOCK_")}
    if url is not None:
        env["PGLOCK_TEST_URL"] = url
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *args],
        cwd=project, env=kept | env, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_the_page_is_true(project: Path, postgres_server: TestedPostgres) -> None:
    expected = shown()["test_reports.py"].count("def test_")
    code, output = run_pytest(project, url=postgres_server.url())
    assert code == 0, output
    assert f"{expected} passed" in output
    assert expected >= 10


def test_without_a_url_a_server_is_started_for_the_run(project: Path) -> None:
    # A conftest.py may import from the plugin that it names; pytest would warn of that.
    with (project / "conftest.py").open("a") as conftest:
        conftest.write("from celery_pglock.testing import run_occurrence\n")
    code, output = run_pytest(project, "-k", "once_per_occurrence", url=None)
    assert code == 0, output
    assert "1 passed" in output


def test_without_any_server_one_sentence_says_what_to_do(project: Path) -> None:
    (project / "conftest.py").write_text(
        "import importlib.util, pathlib\n"
        "from celery_pglock.demo.servers import binaries\n"
        "binaries._package = lambda name: None\n"
        "binaries._DEBIAN = pathlib.Path('/nowhere')\n" + shown()["conftest.py"]
    )
    code, output = run_pytest(project, "-k", "once_per_occurrence", url=None)
    assert code == 1
    assert (
        "celery_pglock.testing needs a PostgreSQL: set PGLOCK_TEST_URL to the URL of one where "
        "tests may create databases, or run pip install 'celery-pglock[demo]'"
    ) in output
    assert "Traceback" not in output
    assert "During handling" not in output


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("postgresql://127.0.0.1:1/postgres", "cannot use PostgreSQL at 127.0.0.1:1/postgres"),
        pytest.param(
            "postgres@localhost",
            "what it says is not a PostgreSQL connection string",
            marks=pytest.mark.chaos,
        ),
    ],
)
def test_a_url_that_leads_nowhere_is_named(project: Path, url: str, sentence: str) -> None:
    code, output = run_pytest(project, "-k", "once_per_occurrence", url=url)
    assert code == 1
    assert "the URL that PGLOCK_TEST_URL or the fixture pglock_server_url names" in output
    assert sentence in output
    assert "Traceback" not in output
    assert "During handling" not in output


def test_an_application_that_is_not_known_is_asked_for(project: Path) -> None:
    (project / "test_reports.py").write_text("def test_it(pglock_database): pass\n")
    code, output = run_pytest(project, url="postgresql://127.0.0.1:1/postgres")
    assert code == 1
    assert "write a fixture pglock_app that returns it" in output


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import celery_pglock, sys; print('pytest' in sys.modules)", "False"),
        ("import sys; sys.modules['pytest'] = None; import celery_pglock; print('fine')", "fine"),
        (
            "import sys; sys.modules['pytest'] = None; import celery_pglock.testing",
            "ImportError: celery_pglock.testing needs pytest: run pip install pytest",
        ),
    ],
)
def test_only_the_kit_needs_pytest(code: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout + done.stderr).strip().endswith(says)

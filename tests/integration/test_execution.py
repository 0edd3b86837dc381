"""One body under its locks: one contract for every level, and what each level adds to it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import linecache
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, ClassVar

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from typing_extensions import override

from celery_pglock import (
    claims,
    errors,
    execution,
    ledger,
    locks,
    monitor,
    runs,
    schema,
    sessions,
    settling,
    transactions,
)
from celery_pglock.demo.servers import PostgresServer
from tests.integration.workbench import (
    PERIOD,
    Sessions,
    advisory_locks,
    age,
    in_thread,
    row,
    terminate,
    work,
)
from tests.support.databases import Database
from tests.support.processes import eventually


class Ended(Exception):
    """What a body raises; it knows what it means for the period."""

    def __init__(self, **verdict: Any) -> None:
        super().__init__(verdict)
        self.verdict = claims.Verdict(**verdict)


def classify(error: BaseException) -> claims.Verdict:
    if isinstance(error, Ended):
        return error.verdict
    return claims.Verdict(status="failed", reason="error", error=repr(error))


def never(_: runs.Run) -> None:
    pytest.fail("it ran")


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to run bodies."""

    name: str
    level: sessions.Level
    records: transactions.Records
    period: str | None = PERIOD

    @property
    def has_rows(self) -> bool:
        return self.period is not None


MODES = [
    Mode("session", "session", ledger.Ledger()),
    Mode("transaction", "transaction", ledger.Ledger()),
    Mode("session, name lock only", "session", locks.NameLockOnly(), None),
    Mode("transaction, name lock only", "transaction", locks.NameLockOnly(), None),
]
SESSION, TRANSACTION, *_ = MODES
every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
with_rows = pytest.mark.parametrize("mode", [SESSION, TRANSACTION], ids=lambda mode: mode.name)


@dataclasses.dataclass
class Subject:
    """Executors of one mode over one database."""

    mode: Mode
    database: Database
    opened: Sessions

    def __post_init__(self) -> None:
        self.executor = self.another()

    def another(self, **changes: Any) -> execution.Executor:
        """Return an executor with sessions of its own, as in another process."""
        stack = self.opened.stack(self.database.url, self.mode.level)
        given = {"stack": stack, "records": self.mode.records, "classify": classify, **changes}
        return execution.Executor(**given)

    def work(self, **more: Any) -> claims.Work:
        return work(self.mode.period, **more)

    def run(self, body: Callable[[runs.Run], Any] = lambda _: None, **more: Any) -> Any:
        return self.executor.execute(self.work(**more), body)

    def status(self) -> tuple[str, str | None] | None:
        """Return status and reason; None where no row is kept."""
        return row(self.database, "status", "reason") if self.mode.has_rows else None

    def expect(self, status: str, reason: str | None = None) -> None:
        if self.mode.has_rows:
            assert self.status() == (status, reason)

    def expect_free(self) -> None:
        """No lock is left, and the next run works."""
        eventually(lambda: not advisory_locks(self.database), 2.0, "no lock is left")
        if self.mode.has_rows:
            age(self.database)
        later = dataclasses.replace(self.work(), period=self.mode.period and "2030-01-01")
        if later.period is not None:
            later = dataclasses.replace(later, run_key=work(later.period).run_key)
        answer = self.executor.execute(later, lambda _: "later")
        assert isinstance(answer, execution.Ran), answer
        if self.mode.has_rows:
            self.database.rows("delete from pglock.job_runs where period = '2030-01-01'")


@pytest.fixture
def subject(mode: Mode, database: Database, lock_sessions: Sessions) -> Subject:
    return Subject(mode, database, lock_sessions)


def backend(run: runs.Run, database: Database) -> int:
    """Return the server process whose session or transaction holds the lock of a run."""
    (pid,) = {pid for key, pid in advisory_locks(database) if key == run.key}
    return pid


def cut_off(run: runs.Run, database: Database) -> None:
    terminate(database, backend(run, database))
    eventually(lambda: not run.held, 1.0, "the run knows it")


# --- the contract ---------------------------------------------------------------------------


@every_mode
def test_a_body_runs_under_its_locks_and_its_value_comes_back(subject: Subject) -> None:
    seen: list[Any] = []

    def body(run: runs.Run) -> str:
        seen.append([key for key, _ in advisory_locks(subject.database)])
        assert runs.current_run() is run
        assert (run.name, run.level, run.period) == (
            *("report", subject.mode.level, subject.mode.period),
        )
        assert (run.attempt, run.lost_attempts, run.held) == (1, 0, True)
        run.check()
        subject.expect("running")
        return "value"

    answer = subject.run(body)
    assert isinstance(answer, execution.Ran)
    assert (answer.value, answer.lost) == ("value", None)
    assert seen == [sorted(subject.work().lock_keys)]
    assert runs.in_progress() is None
    subject.expect("done")
    subject.expect_free()


@every_mode
def test_a_bodys_exception_is_recorded_and_raised_again(subject: Subject) -> None:
    raised = ValueError("what went wrong")

    def body(_: runs.Run) -> None:
        raise raised

    with pytest.raises(ValueError, match="what went wrong") as caught:
        subject.run(body)
    assert caught.value is raised
    subject.expect("failed", "error")
    if subject.mode.has_rows:
        assert row(subject.database, "error") == "ValueError('what went wrong')"
    assert isinstance(subject.run(), execution.Ran)
    subject.expect("done")


@every_mode
@pytest.mark.parametrize(
    ("verdict", "status"),
    [
        ({"status": "failed", "reason": "ignore"}, "failed"),
        ({"status": "retrying", "reason": "retry", "retry_in": 5.0}, "retrying"),
        ({"status": "retrying", "reason": "retry", "retry_in": None}, "retrying"),
        ({"status": "done", "reason": "replaced"}, "done"),
    ],
)
def test_a_body_may_end_in_other_ways(
    subject: Subject, verdict: dict[str, Any], status: str
) -> None:
    def body(_: runs.Run) -> None:
        raise Ended(**verdict)

    with pytest.raises(Ended):
        subject.run(body)
    subject.expect(status, verdict["reason"])
    if subject.mode.has_rows:
        assert (row(subject.database, "retry_at") is None) == (verdict.get("retry_in") is None)
    subject.expect_free()


@every_mode
def test_a_run_inside_a_run_under_the_same_name_is_refused(subject: Subject) -> None:
    def body(run: runs.Run) -> Any:
        inner = dataclasses.replace(subject.work(), job="app:inner")
        if inner.period is not None:
            inner = dataclasses.replace(inner, run_key=1)
        answers = [subject.executor.execute(inner, never), subject.run(never)]
        assert run.held
        assert runs.current_run() is run
        assert isinstance(subject.run(name="another", job="app:another"), execution.Ran)
        return answers

    inner, same = subject.run(body).value
    assert inner.kind == "held"
    assert inner.holder is not None
    assert inner.holder.ours
    assert same.kind == ("running" if subject.mode.has_rows else "held")
    subject.expect("done")
    subject.expect_free()


@every_mode
def test_a_lost_session_is_seen_and_told_by_check(subject: Subject) -> None:
    def body(run: runs.Run) -> None:
        run.check()
        cut_off(run, subject.database)
        with pytest.raises(errors.LockLost) as caught:
            run.check()
        assert not run.held
        raise caught.value

    with pytest.raises(errors.LockLost):
        subject.run(body)
    subject.expect("failed", "error")
    subject.expect_free()


@every_mode
def test_a_run_whose_lock_is_known_to_be_lost_is_not_done(subject: Subject) -> None:
    def body(run: runs.Run) -> str:
        cut_off(run, subject.database)
        return "value"

    with pytest.raises(errors.LockLost):
        subject.run(body)
    subject.expect("failed", "lock lost")
    subject.expect_free()


@with_rows
def test_a_replaced_body_whose_lock_is_known_to_be_lost_is_not_done(subject: Subject) -> None:
    def body(run: runs.Run) -> None:
        cut_off(run, subject.database)
        raise Ended(status="done", reason="replaced", keep=True)

    with pytest.raises((Ended, errors.LockLost)):
        subject.run(body)
    subject.expect("failed", "lock lost")
    subject.expect_free()


@every_mode
def test_a_lost_session_that_nobody_noticed(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At session level the fence still lets the outcome in; a transaction is gone."""
    monkeypatch.setattr(monitor.Monitor, "watch", lambda *_: None)

    def body(run: runs.Run) -> str:
        terminate(subject.database, backend(run, subject.database))
        return "value"

    if subject.mode is SESSION:
        assert subject.run(body).value == "value"
        subject.expect("done")
    else:
        with pytest.raises(errors.LockLost):
            subject.run(body)
        subject.expect("failed", "lock lost")
    subject.expect_free()


@every_mode
@pytest.mark.parametrize("other_ends", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_a_period_that_another_attempt_has_taken_over_is_left_alone(
    subject: Subject, *, other_ends: bool, raises: bool
) -> None:
    other = subject.another()
    ours_ended, other_holds = threading.Event(), threading.Event()

    def other_body(_: runs.Run) -> None:
        other_holds.set()
        if not other_ends:
            assert ours_ended.wait(20)

    def body(run: runs.Run) -> None:
        cut_off(run, subject.database)
        if subject.mode.has_rows:
            age(subject.database)
        starter.start()
        assert other_holds.wait(20)
        if other_ends:
            starter.join(20)
        if raises:
            raise Ended(status="failed", reason="ours")

    answers: list[Any] = []
    starter = threading.Thread(
        target=lambda: answers.append(other.execute(subject.work(task_id="m-2"), other_body))
    )
    with pytest.raises(Ended if raises else errors.LockLost):
        subject.run(body)
    if subject.mode.has_rows:
        assert row(
            subject.database, "status", "reason", "task_id", "attempts", "lost_attempts"
        ) == (*("done" if other_ends else "running", None, "m-2", 2, 1),)
    ours_ended.set()
    starter.join(20)
    assert isinstance(answers[0], execution.Ran)
    subject.expect("done")
    subject.expect_free()


@every_mode
def test_a_loss_may_be_tolerated_where_nothing_is_recorded(subject: Subject) -> None:
    tolerant = dataclasses.replace(subject.executor, tolerate_loss=True)

    def body(run: runs.Run) -> str:
        cut_off(run, subject.database)
        return "value"

    if subject.mode.level == "transaction":
        with pytest.raises(errors.LockLost):  # what it wrote is gone: that is no loss to tolerate
            tolerant.execute(subject.work(), body)
        return
    answer = tolerant.execute(subject.work(), body)
    assert isinstance(answer, execution.Ran)
    assert answer.value == "value"
    assert (answer.lost is None) == subject.mode.has_rows


@every_mode
def test_whoever_is_patient_gets_the_lock_when_it_is_free(subject: Subject) -> None:
    other, other_holds, release = subject.another(), threading.Event(), threading.Event()

    def other_body(_: runs.Run) -> None:
        other_holds.set()
        assert release.wait(20)

    other_work = dataclasses.replace(subject.work(), job="app:other")
    if other_work.period is not None:
        other_work = dataclasses.replace(other_work, run_key=1)
    refusals: list[claims.Refused] = []

    def patience(refused: claims.Refused) -> float:
        refusals.append(refused)
        if len(refusals) == 3:
            release.set()
        return 10.0

    with in_thread(lambda: other.execute(other_work, other_body)) as others:
        assert other_holds.wait(20)
        answer = subject.executor.execute(
            subject.work(), lambda run: run.attempt, patience=patience
        )
        assert isinstance(answer, execution.Ran)
        assert isinstance(others.result(10), execution.Ran)
    assert {refused.kind for refused in refusals} == {"held"}
    assert len(refusals) >= 3


@with_rows
def test_a_claim_that_was_made_but_not_answered_is_the_same_attempt(
    subject: Subject,
) -> None:
    class LosesItsAnswer(ledger.Ledger):
        lost: ClassVar[list[str]] = []

        @override
        def claim(self, session: sessions.Session, *args: Any, **kwargs: Any) -> Any:
            answer = super().claim(session, *args, **kwargs)
            if not self.lost:
                self.lost.append("the first")
                session.close()
                eventually(lambda: not advisory_locks(subject.database), what="it has ended")
                msg = "server closed the connection unexpectedly"
                raise psycopg.OperationalError(msg)
            return answer

    LosesItsAnswer.lost.clear()
    executor = dataclasses.replace(subject.executor, records=LosesItsAnswer())
    answer = executor.execute(subject.work(max_lost=0), lambda run: run.attempt)
    assert isinstance(answer, execution.Ran)
    assert LosesItsAnswer.lost
    assert row(subject.database, "status", "attempts", "lost_attempts") == ("done", 1, 0)


@every_mode
def test_an_idle_session_that_died_unseen_is_replaced(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: list[int] = []
    subject.run(lambda run: ours.append(backend(run, subject.database)))
    if subject.mode.has_rows:
        subject.database.rows("delete from pglock.job_runs")
    # Nothing tells a client of a broken network, so this session goes on looking alive.
    monkeypatch.setattr(sessions, "_readable", lambda _: False)
    terminate(subject.database, *ours)
    if subject.mode.name == "transaction, name lock only":
        # It claims nothing beforehand, so it is told only by its working transaction.
        with pytest.raises(errors.DatabaseUnavailable):
            subject.run()
    answer = subject.run(lambda run: run.attempt)
    assert isinstance(answer, execution.Ran)
    assert answer.value == 1
    subject.expect("done")


@every_mode
def test_a_server_that_cannot_be_reached_runs_nothing(subject: Subject) -> None:
    plan = sessions.Plan(
        target="postgresql://nobody@127.0.0.1:1/none", level=subject.mode.level, application="x"
    )
    executor = dataclasses.replace(subject.executor, stack=sessions.Stack(plan))
    with pytest.raises(errors.DatabaseUnavailable):
        executor.execute(subject.work(), never)
    assert subject.status() is None


# --- sessions: how many, and whose ----------------------------------------------------------


@every_mode
def test_no_more_sessions_than_runs(subject: Subject) -> None:
    threads, rounds = 5, 10
    query = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name like 'pglock:%%'"
    )
    counts: list[int] = []

    def run_all(number: int) -> None:
        for turn in range(rounds):
            label = f"{number}-{turn}"
            wanted = work(label if subject.mode.period else None, name=f"name-{label}")
            fails = turn % 3 == 0

            def body(_: runs.Run, *, fails: bool = fails) -> None:
                counts.append(subject.database.rows(query)[0][0])
                if fails:
                    raise Ended(status="failed")

            with contextlib.suppress(Ended):
                subject.executor.execute(wanted, body)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run_all, range(threads)))
    assert len(counts) == threads * rounds
    assert max(counts) <= threads
    assert [count for (count,) in subject.database.rows(query)] != [0]


class HandsOn(sessions.Stack):
    """A stack whose sessions are taken by another thread in the very moment they come back."""

    def __init__(self, plan: sessions.Plan) -> None:
        super().__init__(plan)
        self.taken: list[sessions.Session] = []

    @override
    def give(self, session: sessions.Session) -> None:
        super().give(session)
        self.taken.append(super().take())


@every_mode
@pytest.mark.parametrize("end", ["returns", "raises", "is refused"])
def test_a_session_that_was_given_back_is_not_closed_under_its_next_user(
    subject: Subject, end: str
) -> None:
    stack = HandsOn(
        sessions.Plan(target=subject.database.url, level=subject.mode.level, application="pglock")
    )
    executor = dataclasses.replace(subject.executor, stack=stack)

    def body(_: runs.Run) -> None:
        if end == "raises":
            raise Ended(status="failed")

    if end == "is refused":
        subject.run(lambda _: executor.execute(subject.work(), never))
    else:
        with contextlib.suppress(Ended):
            executor.execute(subject.work(), body)
    assert stack.taken
    for session in stack.taken:
        assert session.alive
        session.execute(b"select 1")
        session.close()


# --- struck at any moment -------------------------------------------------------------------


class Struck(BaseException):
    """Strikes anywhere, as a time limit or Ctrl-C does."""


PACKAGE = str(execution.__file__).rpartition("/")[0]


def _is_with(frame: FrameType) -> bool:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ")


@contextlib.contextmanager
def struck_at(number: int) -> Iterator[list[int]]:
    """Raise `Struck` at that line of the package; yield the count of lines."""
    count = [0]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        # When a `with` ends, its own line is traced once more before __exit__ is called. No
        # signal is handled there by CPython, so nothing real can strike at that point.
        if event == "line" and not _is_with(frame):
            count[0] += 1
            if count[0] == number:
                raise Struck
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)
        # Struck in the last line of all, nothing else resets it.
        runs._current.set(None)  # noqa: SLF001


def strike_and_look(subject: Subject, strike: Callable[[], Any]) -> bool:
    """Run once under a strike; whatever happened, the locks are free and the next run works."""
    struck = False
    try:
        strike()
    except Struck:
        struck = True
    except errors.OutcomeUnknown:
        # Without a row nothing can tell whether a COMMIT that was struck has taken place.
        assert subject.mode.name == "transaction, name lock only"
        struck = True
    if subject.mode.has_rows:
        if not struck:
            subject.expect("done")
        age(subject.database)
    eventually(lambda: not advisory_locks(subject.database), 2.0, "no lock is left")
    answer = subject.run(lambda run: run.attempt, max_lost=1000)
    if isinstance(answer, claims.Refused):
        assert answer.kind == "closed"
        assert subject.mode.has_rows
    subject.expect("done")
    if subject.mode.has_rows:
        subject.database.rows("delete from pglock.job_runs")
    # Here, where the warnings of what was dropped half done are expected, and not in some
    # later test.
    gc.collect()
    return struck


# A strike in the middle of connecting, or in psycopg's pipeline: what was half done is dropped.
may_leave_an_idle_connection = pytest.mark.filterwarnings(
    "ignore:.*was deleted while still open:ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@pytest.mark.slow
@may_leave_an_idle_connection
@every_mode
@pytest.mark.parametrize("body_raises", [False, True])
def test_whatever_line_is_struck_no_lock_is_left(  # noqa: C901 - two ways, four modes
    subject: Subject, *, body_raises: bool
) -> None:
    def once() -> None:
        def body(_: runs.Run) -> None:
            if body_raises:
                raise Ended(status="failed")

        with contextlib.suppress(Ended):
            subject.run(body)

    def look_again(number: int) -> bool:
        with struck_at(number):
            once()
        return True

    once()
    if subject.mode.has_rows:
        subject.database.rows("delete from pglock.job_runs")
    with struck_at(0) as lines:
        once()
    if subject.mode.has_rows:
        subject.database.rows("delete from pglock.job_runs")
    assert lines[0] > 50
    numbers = random.sample(range(1, lines[0] + 1), min(60, lines[0]))
    struck = 0
    for number in numbers:
        if not body_raises:
            struck += strike_and_look(subject, functools.partial(look_again, number))
            continue
        with contextlib.suppress(Struck):
            look_again(number)
        eventually(lambda: not advisory_locks(subject.database), 2.0, "no lock is left")
        if subject.mode.has_rows:
            subject.database.rows("delete from pglock.job_runs")
        assert isinstance(subject.run(), execution.Ran)
        if subject.mode.has_rows:
            subject.database.rows("delete from pglock.job_runs")
        struck += 1
    gc.collect()  # here, where a connection that was struck while it was made is expected
    assert struck > len(numbers) / 2


@pytest.mark.slow
@may_leave_an_idle_connection
@every_mode
def test_whatever_moment_is_struck_no_lock_is_left(subject: Subject) -> None:
    armed = [False]

    def handler(*_: object) -> None:
        if armed[0]:
            armed[0] = False
            raise Struck

    def strike(delay: float) -> None:
        # Not an interval timer: the timeout of the tests uses that.
        main = threading.main_thread().ident or 0
        timer = threading.Timer(delay, lambda: signal.pthread_kill(main, signal.SIGUSR1))
        armed[0] = True
        timer.start()
        try:
            subject.run()
        finally:
            armed[0] = False
            timer.join()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        struck = 0
        for _ in range(60):
            if subject.mode.has_rows:
                subject.database.rows("delete from pglock.job_runs")
            delay = random.uniform(0.0001, 0.003)  # noqa: S311 - not for secrets
            struck += strike_and_look(subject, functools.partial(strike, delay))
    finally:
        signal.signal(signal.SIGUSR1, before)
    gc.collect()
    assert struck  # not each time: some strikes come after the end


# --- a database that goes away --------------------------------------------------------------


@pytest.fixture
def own_subject(mode: Mode, own_postgres: PostgresServer, lock_sessions: Sessions) -> Subject:
    schema.migrate(own_postgres.url())
    return Subject(mode, Database("postgres", own_postgres.url()), lock_sessions)


@with_rows
@pytest.mark.parametrize("stop", ["fast", "immediate"])
def test_a_server_restarted_under_the_body(
    own_subject: Subject, own_postgres: PostgresServer, stop: Any
) -> None:
    def body(run: runs.Run) -> str:
        own_postgres.restart(stop)
        eventually(lambda: not run.held, what="the run knows it")
        return "value"

    with pytest.raises(errors.LockLost):
        own_subject.run(body)
    own_subject.expect("failed", "lock lost")
    assert row(own_subject.database, "attempts", "lost_attempts") == (1, 0)


@with_rows
@pytest.mark.parametrize("raises", [False, True])
def test_an_outcome_waits_for_the_server(
    own_subject: Subject, own_postgres: PostgresServer, *, raises: bool
) -> None:
    starter = threading.Thread(target=own_postgres.start)

    def body(run: runs.Run) -> None:
        own_postgres.stop("fast")
        eventually(lambda: not run.held, what="the run knows it")
        starter.start()
        if raises:
            raise Ended(status="retrying", reason="retry", retry_in=1.0)

    try:
        if raises:
            with pytest.raises(Ended):
                own_subject.run(body)
            own_subject.expect("retrying", "retry")
        else:
            with pytest.raises(errors.LockLost):
                own_subject.run(body)
            own_subject.expect("failed", "lock lost")
    finally:
        starter.join()


@with_rows
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("noticed", [False, True])
def test_an_outcome_that_cannot_be_recorded_is_unknown(
    own_subject: Subject,
    own_postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    raises: bool,
    noticed: bool,
) -> None:
    monkeypatch.setattr(settling, "PATIENCE", 1.0)
    if not noticed:
        monkeypatch.setattr(monitor.Monitor, "watch", lambda *_: None)

    def body(run: runs.Run) -> None:
        own_postgres.stop("immediate")
        if noticed:
            eventually(lambda: not run.held, what="the run knows it")
        if raises:
            raise Ended(status="failed", reason="ours")

    expected: Any = Ended if raises else errors.OutcomeUnknown
    if (noticed or own_subject.mode is TRANSACTION) and not raises:
        expected = errors.LockLost  # no COMMIT was sent, so it is known to be rolled back
    started = time.monotonic()
    with pytest.raises(expected):
        own_subject.run(body)
    assert 1.0 <= time.monotonic() - started < 8.0
    if expected is not errors.OutcomeUnknown:
        assert [record.event for record in caplog.records] == ["outcome_unknown"]  # type: ignore[attr-defined]
    own_postgres.start()
    own_subject.expect("running")
    age(own_subject.database)
    answer = own_subject.run(lambda run: (run.attempt, run.lost_attempts))
    assert answer.value == (2, 1)
    own_subject.expect("done")


KILLS_ONCE = """
create sequence kills;
create function kill_once() returns trigger language plpgsql as $$
begin
 if nextval('kills') = 1 then perform pg_terminate_backend(pg_backend_pid()); end if;
 return new;
end $$
"""
KILLS_AT = {
    "before the outcome": (
        "create trigger kill before update on pglock.job_runs for each row"
        " when (new.status = 'done') execute function kill_once()"
    ),
    "in its COMMIT": (
        "create constraint trigger kill after update on pglock.job_runs deferrable initially"
        " deferred for each row when (new.status = 'done') execute function kill_once()"
    ),
}


@with_rows
@pytest.mark.parametrize("moment", KILLS_AT)
def test_a_session_killed_while_its_outcome_is_recorded(subject: Subject, moment: str) -> None:
    subject.database.rows(KILLS_ONCE)
    subject.database.rows("create table effects (n int)")
    subject.database.rows(KILLS_AT[moment])

    def body(run: runs.Run) -> str:
        if run.level == "transaction":
            run.connection.execute(sa.text("insert into effects values (1)"))
        return "value"

    if subject.mode is SESSION:
        assert subject.run(body).value == "value"
        subject.expect("done")
    else:
        with pytest.raises(errors.LockLost):
            subject.run(body)
        status, _ = subject.status() or ("", "")
        assert status == "failed"
        assert subject.database.rows("select count(*) from effects") == [(0,)]
    assert subject.database.rows("select last_value >= 1 and is_called from kills") == [(True,)]
    subject.expect_free()


@with_rows
def test_a_session_killed_after_its_commit_and_before_the_answer(
    own_subject: Subject, own_postgres: PostgresServer
) -> None:
    """The COMMIT has taken place and waits for a standby that does not exist."""
    database = own_subject.database
    database.rows("create table effects (n int)")

    def waits_for(names: str) -> None:
        database.rows(f"alter system set synchronous_standby_names = '{names}'")
        database.rows("select pg_reload_conf()")
        query = "select current_setting('synchronous_standby_names') = %s"
        eventually(lambda: database.rows(query, names) == [(True,)], what="it is read")

    def kill() -> None:
        query = "select pid from pg_stat_activity where wait_event = 'SyncRep'"
        found = eventually(lambda: database.rows(query), what="a commit that waits")
        database.rows("alter system reset synchronous_standby_names")
        # Terminated first: the others are woken, and would be answered, by the new setting.
        terminate(database, found[0][0])
        database.rows("select pg_reload_conf()")

    def body(run: runs.Run) -> str:
        if run.level == "transaction":
            run.connection.execute(sa.text("insert into effects values (1)"))
        waits_for("nobody")
        killer.start()
        return "value"

    killer = threading.Thread(target=kill)
    assert own_subject.run(body).value == "value"
    killer.join()
    own_subject.expect("done")
    assert row(database, "attempts", "lost_attempts") == (1, 0)
    effects = int(own_subject.mode is TRANSACTION)
    assert database.rows("select count(*) from effects") == [(effects,)]
    assert own_postgres.running


# --- what a body may do in its transaction, and what not -------------------------------------


@pytest.fixture
def transactional(database: Database, lock_sessions: Sessions) -> Subject:
    database.rows("create table effects (n int)")
    return Subject(TRANSACTION, database, lock_sessions)


def write(run: runs.Run, number: int = 1) -> None:
    run.connection.execute(sa.text("insert into effects values (:n)"), {"n": number})


def effects(subject: Subject) -> list[int]:
    return [n for (n,) in subject.database.rows("select n from effects order by n")]


def driver(run: runs.Run) -> Any:
    return run.connection.connection.dbapi_connection


def swallow(run: runs.Run, statement: str) -> None:
    with contextlib.suppress(sa.exc.DBAPIError):
        run.connection.execute(sa.text(statement))


UNDONE: dict[str, Callable[[runs.Run], Any]] = {
    "commit()": lambda run: run.connection.commit(),
    "commit() swallowed": lambda run: _suppressed(run.connection.commit),
    "rollback()": lambda run: run.connection.rollback(),
    "close()": lambda run: run.connection.close(),
    "the driver's rollback()": lambda run: driver(run).rollback(),
    "the driver's ROLLBACK": lambda run: driver(run).execute("rollback"),
    "ROLLBACK as text": lambda run: run.connection.exec_driver_sql("rollback"),
    "ROLLBACK and BEGIN": lambda run: run.connection.exec_driver_sql("rollback; begin"),
    "ROLLBACK AND CHAIN": lambda run: run.connection.exec_driver_sql("rollback and chain"),
    "an SQL error swallowed": lambda run: swallow(run, "select 1 / 0"),
    "rollback() of the savepoint": lambda run: run.connection.get_nested_transaction().rollback(),  # type: ignore[union-attr]
    "the driver's connection closed": lambda run: driver(run).close(),
}
COMMITTED: dict[str, Callable[[runs.Run], Any]] = {
    "the driver's commit()": lambda run: driver(run).commit(),
    "the driver's COMMIT": lambda run: driver(run).execute("commit"),
    "COMMIT as text": lambda run: run.connection.exec_driver_sql("commit"),
    "COMMIT and BEGIN": lambda run: run.connection.exec_driver_sql("commit; begin"),
    "COMMIT AND CHAIN": lambda run: run.connection.exec_driver_sql("commit and chain"),
    "END": lambda run: run.connection.exec_driver_sql("end"),
}


def _suppressed(function: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):
        function()


def run_and_end(transactional: Subject, end: Callable[[runs.Run], Any]) -> None:
    def body(run: runs.Run) -> None:
        write(run)
        end(run)

    # SQLAlchemy's own error: it does not go on with a transaction that was not committed.
    with pytest.raises((errors.LockLost, sa.exc.PendingRollbackError)):
        transactional.run(body)
    status, _ = transactional.status() or ("", "")
    assert status == "failed"


@pytest.mark.parametrize("end", UNDONE)
def test_a_body_that_ends_its_transaction_is_not_done(transactional: Subject, end: str) -> None:
    run_and_end(transactional, UNDONE[end])
    assert effects(transactional) == []
    transactional.expect_free()


@pytest.mark.parametrize("end", COMMITTED)
def test_a_body_that_commits_behind_our_back_is_not_done(transactional: Subject, end: str) -> None:
    run_and_end(transactional, COMMITTED[end])
    assert effects(transactional) == [1]  # that cannot be undone any more
    transactional.expect_free()


@pytest.mark.parametrize(
    "end", ["commit() swallowed", "rollback()", "ROLLBACK as text", "COMMIT as text"]
)
def test_what_is_executed_after_the_end_is_refused(transactional: Subject, end: str) -> None:
    def go_on(run: runs.Run) -> None:
        {**UNDONE, **COMMITTED}[end](run)
        write(run, 2)

    run_and_end(transactional, go_on)
    assert 2 not in effects(transactional)
    transactional.expect_free()


def test_writes_and_outcome_are_committed_together(transactional: Subject) -> None:
    def body(run: runs.Run) -> None:
        write(run)
        assert effects(transactional) == []
        assert run.held

    transactional.run(body)
    assert effects(transactional) == [1]
    transactional.expect("done")


def test_a_body_that_raises_has_written_nothing(transactional: Subject) -> None:
    def body(run: runs.Run) -> None:
        write(run)
        raise Ended(status="failed", reason="ours")

    with pytest.raises(Ended):
        transactional.run(body)
    assert effects(transactional) == []
    transactional.expect("failed", "ours")
    transactional.expect_free()


def test_a_body_that_is_replaced_keeps_what_it_wrote(transactional: Subject) -> None:
    def body(run: runs.Run) -> None:
        write(run)
        raise Ended(status="done", reason="replaced", keep=True)

    with pytest.raises(Ended):
        transactional.run(body)
    assert effects(transactional) == [1]
    assert (transactional.status() or ("", ""))[0] == "done"


def test_an_sql_error_that_is_raised_is_recorded(transactional: Subject) -> None:
    def body(run: runs.Run) -> None:
        write(run)
        run.connection.execute(sa.text("select 1 / 0"))

    with pytest.raises(sa.exc.DataError):
        transactional.run(body)
    assert effects(transactional) == []
    transactional.expect("failed", "error")
    transactional.expect_free()


def test_a_savepoint_of_the_body_may_fail(transactional: Subject) -> None:
    def body(run: runs.Run) -> None:
        write(run, 1)
        with contextlib.suppress(sa.exc.DBAPIError), run.connection.begin_nested():
            write(run, 2)
            run.connection.execute(sa.text("select 1 / 0"))
        with run.connection.begin_nested():
            write(run, 3)

    transactional.run(body)
    assert effects(transactional) == [1, 3]
    transactional.expect("done")


def test_an_orm_session_may_commit_and_roll_back_inside(transactional: Subject) -> None:
    statement = sa.text("insert into effects values (:n)")

    def body(run: runs.Run) -> None:
        with orm.Session(bind=run.connection) as session:
            session.execute(statement, {"n": 1})
            session.commit()
            session.execute(statement, {"n": 2})
            session.rollback()
            session.execute(statement, {"n": 3})
            session.commit()
        with orm.Session(bind=run.connection) as session:
            session.execute(statement, {"n": 4})
        assert run.held
        write(run, 5)
        assert effects(transactional) == []

    transactional.run(body)
    assert effects(transactional) == [1, 3, 5]
    transactional.expect("done")


def test_a_session_level_run_has_no_connection(database: Database, lock_sessions: Sessions) -> None:
    subject = Subject(SESSION, database, lock_sessions)

    def body(run: runs.Run) -> None:
        with pytest.raises(AttributeError, match='lock_level="transaction"'):
            _ = run.connection

    subject.run(body)
    subject.expect("done")


# --- what an outcome that is lost on its way does ---------------------------------------------


def test_an_outcome_that_was_recorded_but_not_answered_is_done(
    database: Database, lock_sessions: Sessions
) -> None:
    class LosesItsAnswer(ledger.Ledger):
        lost: ClassVar[list[uuid.UUID]] = []

        @override
        def settle(
            self,
            session: sessions.Session,
            work: claims.Work,
            claim: uuid.UUID,
            *args: Any,
            **more: Any,
        ) -> bool:
            settled = super().settle(session, work, claim, *args, **more)
            if claim not in self.lost:
                self.lost.append(claim)
                session.close()
                msg = "server closed the connection unexpectedly"
                raise psycopg.OperationalError(msg)
            return settled

    subject = Subject(Mode("session", "session", LosesItsAnswer()), database, lock_sessions)
    assert subject.run(lambda _: "value").value == "value"
    subject.expect("done")


def test_a_ledger_statement_may_be_told_beside_a_run(
    database: Database, lock_sessions: Sessions
) -> None:
    subject = Subject(SESSION, database, lock_sessions)

    def act(session: sessions.Session) -> None:
        ledger.Ledger().skip(session, subject.work(), "overlap")

    subject.executor.tell(act)
    subject.expect("skipped", "overlap")
    database.rows("drop schema pglock cascade")
    with pytest.raises(errors.SchemaError, match="has no tables"):
        subject.executor.tell(act)

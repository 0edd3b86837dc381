"""One body under its locks: one contract for every level, and what each level adds to it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
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
    attempts,
    claims,
    errors,
    execution,
    ledger,
    locks,
    migrating,
    monitor,
    outcomes,
    runs,
    session_runs,
    sessions,
    settling,
    stacks,
    statements,
    transaction_locks,
    transaction_runs,
    transactions,
    working_transactions,
)
from celery_pglock.demo.servers import PostgresServer
from tests.integration.workbench import (
    PERIOD,
    Sessions,
    advisory_locks,
    age,
    in_thread,
    may_leave_an_idle_connection,
    replaced,
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
        given = {
            "stack": stack,
            "records": self.mode.records,
            "terms": attempts.Terms(classify=classify),
            **changes,
        }
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
        assert isinstance(answer, attempts.Ran), answer
        if self.mode.has_rows:
            self.database.rows("delete from pglock.job_runs where period = '2030-01-01'")


@pytest.fixture
def subject(mode: Mode, database: Database, lock_sessions: Sessions) -> Iterator[Subject]:
    # The collector, called after each strike, need not look through what was there before.
    gc.freeze()
    yield Subject(mode, database, lock_sessions)
    gc.unfreeze()


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
    assert isinstance(answer, attempts.Ran)
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
    assert isinstance(subject.run(), attempts.Ran)
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
        assert isinstance(subject.run(name="another", job="app:another"), attempts.Ran)
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
    assert isinstance(answers[0], attempts.Ran)
    subject.expect("done")
    subject.expect_free()


@every_mode
def test_a_loss_may_be_tolerated_where_nothing_is_recorded(subject: Subject) -> None:
    terms = dataclasses.replace(subject.executor.terms, tolerate_loss=True)
    tolerant = dataclasses.replace(subject.executor, terms=terms)

    def body(run: runs.Run) -> str:
        cut_off(run, subject.database)
        return "value"

    if subject.mode.level == "transaction":
        with pytest.raises(errors.LockLost):  # what it wrote is gone: that is no loss to tolerate
            tolerant.execute(subject.work(), body)
        return
    answer = tolerant.execute(subject.work(), body)
    assert isinstance(answer, attempts.Ran)
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
        assert isinstance(answer, attempts.Ran)
        assert isinstance(others.result(10), attempts.Ran)
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
    assert isinstance(answer, attempts.Ran)
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
    assert isinstance(answer, attempts.Ran)
    assert answer.value == 1
    subject.expect("done")


@every_mode
def test_a_server_that_cannot_be_reached_runs_nothing(subject: Subject) -> None:
    plan = sessions.Plan(
        target="postgresql://nobody@127.0.0.1:1/none", level=subject.mode.level, application="x"
    )
    executor = dataclasses.replace(subject.executor, stack=stacks.Stack(plan))
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


class HandsOn(stacks.Stack):
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


def _is_block(frame: FrameType) -> bool:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(("with ", "try:"))


@contextlib.contextmanager
def struck_at(number: int) -> Iterator[list[int]]:
    """Raise `Struck` at that line of the package; yield the count of lines."""
    count = [0]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        # When a `with` ends, its own line is traced once more before __exit__ is called, and the
        # line of a `try` is an instruction that no block around it covers. No signal is handled
        # at either by CPython, so nothing real can strike there.
        if event == "line" and not _is_block(frame):
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
    if subject.mode.has_rows and not struck:
        subject.expect("done")
    eventually(lambda: not advisory_locks(subject.database), 2.0, "no lock is left")

    def run_again() -> Any:
        # The server may still be at the statement that was struck, and commit a claim that
        # nobody waits for any more; for two seconds that one is left alone.
        if subject.mode.has_rows:
            age(subject.database)
        answer = subject.run(lambda run: run.attempt, max_lost=1000)
        refused = isinstance(answer, claims.Refused) and answer.kind == "running"
        return None if refused else answer

    answer = eventually(run_again, 5.0, "the period can be had again")
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


@pytest.mark.slow
@may_leave_an_idle_connection
@every_mode
@pytest.mark.parametrize("body_raises", [False, pytest.param(True, marks=pytest.mark.chaos)])
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
        assert isinstance(subject.run(), attempts.Ran)
        if subject.mode.has_rows:
            subject.database.rows("delete from pglock.job_runs")
        struck += 1
    gc.collect()  # here, where a connection that was struck while it was made is expected
    assert struck > len(numbers) / 2


class TimeLimit(Exception):
    """Strikes as a soft time limit does: an Exception, which SQLAlchemy wraps in one of its own."""


@pytest.mark.parametrize("mode", MODES[1::2], ids=lambda mode: mode.name)
@pytest.mark.parametrize(("statement", "began"), [(1, False), (2, True)])
def test_a_time_limit_that_strikes_in_sqlalchemy_comes_out_as_itself(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, statement: int, *, began: bool
) -> None:
    """In the savepoint before the body, and in its release after the body."""
    assert isinstance(subject.run(), attempts.Ran)  # the dialect's own first statements
    if subject.mode.has_rows:
        subject.database.rows("delete from pglock.job_runs")
    make = sa.engine.default.DefaultExecutionContext.create_cursor
    counted = itertools.count(1)
    ran: list[runs.Run] = []

    def struck(context: Any) -> Any:
        if next(counted) == statement:
            raise TimeLimit
        return make(context)

    monkeypatch.setattr(sa.engine.default.DefaultExecutionContext, "create_cursor", struck)
    with pytest.raises(TimeLimit):
        subject.run(ran.append)
    monkeypatch.undo()
    assert bool(ran) is began
    subject.expect("failed", "error")
    subject.expect_free()


@pytest.mark.chaos
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
    migrating.migrate(own_postgres.url())
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
@pytest.mark.parametrize("raises", [False, pytest.param(True, marks=pytest.mark.chaos)])
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


# --- a server that refuses, and lives ---------------------------------------------------------

FAMILY = (
    "create table parents (id int primary key)",
    "create table children (parent int references parents deferrable initially deferred)",
)


@pytest.mark.parametrize(
    "mode", [TRANSACTION, MODES[3]], ids=lambda mode: "with rows" if mode.has_rows else "without"
)
def test_a_commit_that_is_refused_is_the_runs_own_error(subject: Subject) -> None:
    """A deferred constraint: the lock was held all along, and what the body wrote is undone."""
    for statement in (*FAMILY, "create table effects (n int)"):
        subject.database.rows(statement)
    told: list[Any] = []
    terms = attempts.Terms(classify=outcomes.verdict, lost=lambda *loss: told.append(loss))
    executor = dataclasses.replace(subject.executor, terms=terms)

    def body(run: runs.Run) -> None:
        write(run)
        run.connection.execute(sa.text("insert into children values (7)"))

    with pytest.raises(psycopg.errors.ForeignKeyViolation, match=r"Key \(parent\)=\(7\)") as caught:
        executor.execute(subject.work(), body)
    assert caught.value.diag.message_detail is not None
    assert not told
    subject.expect("failed", "error")
    if subject.mode.has_rows:
        error = row(subject.database, "error")
        assert error.startswith("ForeignKeyViolation: insert or update on table")
        assert "(7)" not in error, "the data of a row are nobody's business"
    assert effects(subject) == []
    assert isinstance(executor.execute(subject.work(), lambda _: None), attempts.Ran)
    subject.expect("done")
    if subject.mode.has_rows:
        assert row(subject.database, "attempts", "lost_attempts") == (2, 0)


@pytest.mark.parametrize("mode", [TRANSACTION], ids=["transaction"])
def test_control_taken_for_a_lost_session_a_refused_commit_is_a_lost_lock(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_runs, "_refused", lambda _: False)
    for statement in FAMILY:
        subject.database.rows(statement)

    def body(run: runs.Run) -> None:
        run.connection.execute(sa.text("insert into children values (7)"))

    with pytest.raises(errors.LockLost):
        subject.run(body)
    subject.expect("failed", "rolled back")


@pytest.mark.parametrize("mode", [TRANSACTION], ids=["transaction"])
def test_a_time_out_of_the_role_that_strikes_in_the_settling_is_the_runs_own_error(
    subject: Subject,
) -> None:
    database = subject.database
    database.rows("create table effects (n int)")
    database.rows(f"alter database {database.name} set statement_timeout = '1s'")
    database.rows(
        "create function dawdle() returns trigger language plpgsql as"
        " 'begin perform pg_sleep(20); return new; end'"
    )
    database.rows(
        "create trigger dawdle before update on pglock.job_runs for each row"
        " when (new.status = 'done') execute function dawdle()"
    )
    told: list[Any] = []
    terms = attempts.Terms(classify=outcomes.verdict, lost=lambda *loss: told.append(loss))
    executor = dataclasses.replace(subject.executor, terms=terms)
    with pytest.raises(psycopg.errors.QueryCanceled):
        executor.execute(subject.work(), write)
    assert not told
    subject.expect("failed", "error")
    assert row(database, "error").startswith("QueryCanceled: canceling statement due to")
    assert effects(subject) == []
    database.rows("drop trigger dawdle on pglock.job_runs")
    assert isinstance(executor.execute(subject.work(), write), attempts.Ran)
    subject.expect("done")
    assert effects(subject) == [1]


# --- a session that dies before the body begins ----------------------------------------------


@pytest.mark.parametrize("mode", [TRANSACTION], ids=["transaction"])
@pytest.mark.parametrize("moment", ["before the locks", "before the savepoint"])
def test_a_session_that_dies_between_claim_and_body_is_no_crash(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    lock = transaction_locks._try  # noqa: SLF001 - the moment in question
    killed: list[int] = []

    def kill(session: sessions.Session, *rest: Any) -> Any:
        def end() -> None:
            killed.append(session.connection.info.backend_pid)
            terminate(subject.database, killed[-1])

        if moment == "before the locks":
            end()
        answer = lock(session, *rest)
        assert answer is None
        end()
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(transaction_locks, "_try", kill)
        with pytest.raises(errors.DatabaseUnavailable):
            subject.run(never)
    assert len(killed) == 1
    # Not left as `running`, which the next attempt would take for a crash.
    subject.expect("failed", "error")
    assert row(subject.database, "attempts", "lost_attempts") == (1, 0)
    assert subject.run(lambda run: (run.attempt, run.lost_attempts)).value == (2, 0)
    subject.expect_free()


# --- a run inside a run, and what the outer one loses -----------------------------------------

OUTER = errors.LockLost("app:outer", PERIOD, "its session was ended by the server")


class StruckBy(ledger.Ledger):
    """A ledger in which another run's loss strikes once, after the statement was answered."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self.moment: str | None = moment

    def _strike(self, moment: str) -> None:
        if self.moment == moment:
            self.moment = None
            raise OUTER

    @override
    def claim(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().claim(*args, **kwargs)
        self._strike("claim")
        return answer

    @override
    def settle(self, *args: Any, **kwargs: Any) -> bool:
        settled = super().settle(*args, **kwargs)
        self._strike("settle")
        return settled


# What strikes while an outcome is recorded, and what is recorded in the end.
STRUCK = {
    ("session", "claim", False): ("failed", "error"),
    ("session", "settle", False): ("done", None),
    ("session", "settle", True): ("failed", "ours"),
    ("transaction", "claim", False): ("failed", "error"),
    ("transaction", "settle", False): ("failed", "error"),
    ("transaction", "settle", True): ("failed", "ours"),
}


def run_struck(subject: Subject, moment: str, *, raises: bool, told: list[Any]) -> Any:
    def body(_: runs.Run) -> str:
        if raises:
            raise Ended(status="failed", reason="ours")
        return "value"

    terms = attempts.Terms(classify=classify, lost=lambda *loss: told.append(loss))
    records = StruckBy(moment)
    inner = dataclasses.replace(subject.executor, records=records, terms=terms)
    try:
        return inner.execute(subject.work(), body)
    finally:
        assert records.moment is None, "it has struck"


@with_rows
@pytest.mark.parametrize(
    ("moment", "raises"), [("claim", False), ("settle", False), ("settle", True)]
)
def test_what_an_outer_run_loses_is_neither_swallowed_nor_the_inner_ones(
    subject: Subject, moment: str, *, raises: bool
) -> None:
    told: list[Any] = []
    with pytest.raises(errors.LockLost) as caught:
        run_struck(subject, moment, raises=raises, told=told)
    assert caught.value is OUTER
    assert not told
    subject.expect(*STRUCK[subject.mode.level, moment, raises])
    assert row(subject.database, "attempts", "lost_attempts") == (1, 0)
    subject.expect_free()


@pytest.mark.parametrize("mode", [SESSION], ids=["session"])
@pytest.mark.parametrize(
    ("moment", "raises"), [("claim", False), ("settle", False), ("settle", True)]
)
def test_control_taken_for_the_inner_runs_own_the_loss_is_swallowed_or_the_row_left(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, moment: str, *, raises: bool
) -> None:
    monkeypatch.setattr(attempts, "struck_by", lambda *_: False)
    told: list[Any] = []
    if moment == "claim":
        with pytest.raises(errors.LockLost):
            run_struck(subject, moment, raises=raises, told=told)
        subject.expect("running")  # a crash, to whoever comes next
    elif raises:
        with pytest.raises(Ended):
            run_struck(subject, moment, raises=raises, told=told)
    else:
        assert run_struck(subject, moment, raises=raises, told=told).value == "value"


# --- after the end ---------------------------------------------------------------------------


@every_mode
def test_a_thread_of_the_body_that_outlives_it_is_told_so(subject: Subject) -> None:
    ended = threading.Event()
    found: list[tuple[bool, str]] = []

    def go_on(run: runs.Run) -> None:
        run.check()
        working.set()
        assert ended.wait(20)
        try:
            run.check()
        except errors.LockLost as lost:
            found.append((run.held, lost.reason))

    working = threading.Event()
    started: list[threading.Thread] = []

    def body(run: runs.Run) -> None:
        started.append(threading.Thread(target=go_on, args=[run]))
        started[0].start()
        assert working.wait(20)

    assert isinstance(subject.run(body), attempts.Ran)
    ended.set()
    started[0].join(20)
    assert found == [(False, "its run has ended")]
    subject.expect("done")


# --- controls: what the parts are for --------------------------------------------------------


@pytest.mark.parametrize("end", ["rollback()", "ROLLBACK as text", "ROLLBACK and BEGIN"])
@pytest.mark.parametrize("watched", [True, False], ids=["as it is", "control"])
def test_only_a_transaction_that_is_watched_is_not_done_with_half_of_its_work(
    transactional: Subject, monkeypatch: pytest.MonkeyPatch, end: str, *, watched: bool
) -> None:
    """Without SQLAlchemy's events and the savepoint that closes the body's work."""

    def trusting(transaction: Any) -> bool:
        session = transaction._session  # noqa: SLF001 - as complete() would be without them
        wanted, claim = transaction._work, transaction._claim  # noqa: SLF001
        transaction._closing = True  # noqa: SLF001
        settled = transaction._records.settle(session, wanted, claim, "done")  # noqa: SLF001
        session.execute(b"commit")
        transaction._forget()  # noqa: SLF001
        return bool(settled)

    if not watched:
        for name in ("_on_commit", "_on_rollback", "_on_execute"):
            monkeypatch.setattr(working_transactions.WorkingTransaction, name, lambda *_: None)
        monkeypatch.setattr(working_transactions.WorkingTransaction, "complete", trusting)

    def body(run: runs.Run) -> None:
        write(run, 1)
        UNDONE[end](run)
        write(run, 2)

    if watched:
        with pytest.raises((errors.LockLost, sa.exc.PendingRollbackError)):
            transactional.run(body)
        assert (transactional.status() or ("", ""))[0] == "failed"
        assert effects(transactional) == []
    else:
        transactional.run(body)
        transactional.expect("done")
        assert effects(transactional) == [2]


class SettlesTwice(ledger.Ledger):
    """As when the first answer was lost on its way: the second time no row is changed."""

    @override
    def settle(self, *args: Any, **kwargs: Any) -> bool:
        assert super().settle(*args, **kwargs)
        return super().settle(*args, **kwargs)


@pytest.mark.parametrize("asked", [True, False], ids=["as it is", "control"])
def test_no_row_changed_is_success_only_because_the_row_is_read_again(
    database: Database,
    lock_sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    *,
    asked: bool,
) -> None:
    subject = Subject(Mode("session", "session", SettlesTwice()), database, lock_sessions)
    if asked:
        assert subject.run(lambda _: "value").value == "value"
    else:
        monkeypatch.setattr(session_runs.SessionRun, "_is_done", lambda _: False)
        with pytest.raises(errors.LockLost, match="another attempt"):
            subject.run(lambda _: "value")
    subject.expect("done")


class OneTransaction(ledger.Ledger):
    """Claims in the transaction in which the work is done: a crash takes the claim with it."""

    @override
    def claim(self, session: sessions.Session, *args: Any, **kwargs: Any) -> Any:
        session.execute(b"begin isolation level read committed")
        return super().claim(session, *args, **kwargs)


@pytest.mark.parametrize("committed", [True, False], ids=["as it is", "control"])
def test_only_a_claim_that_is_committed_first_ends_a_crash_loop(
    database: Database, lock_sessions: Sessions, *, committed: bool
) -> None:
    records = ledger.Ledger() if committed else OneTransaction()
    seen = []
    for _ in range(5):
        session = lock_sessions.open(database.url, "transaction")
        wanted = work(max_lost=2)
        answer = records.claim(session, wanted, claim=uuid.uuid4())
        if isinstance(answer, claims.Claimed) and committed:
            transaction = working_transactions.WorkingTransaction(
                session, records, wanted, answer.claim
            )
            assert transaction.begin() is None
        assert bool(advisory_locks(database)) == isinstance(answer, claims.Claimed)
        terminate(database, session.connection.info.backend_pid)
        age(database)
        kind = "claimed" if isinstance(answer, claims.Claimed) else answer.kind
        seen.append((kind, row(database, "status", "attempts", "lost_attempts")))
    if committed:
        assert seen == [
            ("claimed", ("running", 1, 0)),
            ("claimed", ("running", 2, 1)),
            ("claimed", ("running", 3, 2)),
            ("exhausted", ("failed", 3, 3)),
            ("closed", ("failed", 3, 3)),
        ]
    else:
        assert seen == [("claimed", None)] * 5


@pytest.mark.parametrize("given_back", [True, False], ids=["as it is", "control"])
def test_the_first_lock_is_given_back_when_the_second_is_refused(
    database: Database,
    lock_sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    *,
    given_back: bool,
) -> None:
    holder, other = (lock_sessions.open(database.url) for _ in range(2))
    assert locks.acquire(holder, work().name_key, "pglock:other")
    if not given_back:
        text = replaced(
            statements.claim("pglock", "session"),
            b"when not n.name then case when pg_catalog.pg_advisory_unlock(%(run_key)s::bigint) then",
            b"when not n.name then case when true then",
        )
        monkeypatch.setattr(statements, "claim", lambda *_: text)
    answer = ledger.Ledger().claim(other, work(), claim=uuid.uuid4())
    assert isinstance(answer, claims.Refused)
    assert answer.kind == "held"
    kept = [key for key, pid in advisory_locks(database) if pid == other.pid]
    assert kept == ([] if given_back else [work().run_key])

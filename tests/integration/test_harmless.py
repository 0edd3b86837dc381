"""What locks and refusals do to the rest of the database: nothing, while every mode is contended.

A crowd holds locks in each way that there is, beats lead and stand by, and contenders are
refused all the time, at both levels. Meanwhile an index is built and a table is vacuumed as if
nobody were there, and what the server shows of the crowd's sessions is looked at many times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import celery
import psycopg
import pytest
from psycopg import sql
from psycopg.rows import TupleRow, namedtuple_row

from celery_pglock import (
    LockedTask,
    LockLost,
    LockNotAcquired,
    advisory_lock,
    attempts,
    claims,
    execution,
    guards,
    holds,
    idle_sessions,
    leadership,
    ledger,
    locks,
    migrating,
    runs,
    sessions,
    transactions,
)
from celery_pglock.demo.servers import PostgresServer
from tests.integration.workbench import Sessions, advisory_locks, row, terminate, work
from tests.support.databases import Database
from tests.support.processes import eventually
from tests.support.servers import CRASH_SAFE

SAMPLES = int(os.environ.get("PGLOCK_TEST_SAMPLES", "300"))
NUMBERS = itertools.count()
LEDGER = ledger.Ledger()
LOCK_ONLY = locks.NameLockOnly()
LEVELS: list[sessions.Level] = ["session", "transaction"]


def never(_: runs.Run) -> None:
    pytest.fail("it ran")


def failed(error: BaseException) -> claims.Verdict:
    return claims.Verdict(status="failed", reason="error", error=repr(error))


def executor(
    opened: Sessions,
    url: str,
    level: sessions.Level,
    records: transactions.Records = LEDGER,
    **more: Any,
) -> execution.Executor:
    """Return an executor whose sessions say in their names at which level they are."""
    plan = {"application": f"pglock:idle@{level}:1", **more}
    return execution.Executor(
        stack=opened.stack(url, level, **plan),
        records=records,
        terms=attempts.Terms(classify=failed),
    )


def described(error: BaseException) -> str:
    return f"{threading.current_thread().name}: {error!r}"


# --- the long transaction, told while it lasts ---------------------------------------------------


@dataclasses.dataclass
class Running:
    """A task that runs in a thread until it is let go."""

    name: str
    goes_on: threading.Event
    thread: threading.Thread


@pytest.fixture
def run_task(database: Database) -> Iterator[Callable[..., Running]]:
    """Starts tasks that last until they are let go; all are, at the end of the test."""
    app = celery.Celery("app", set_as_current=False)
    app.conf.pglock_database_url = database.url
    started: list[Running] = []

    def start(level: sessions.Level, **options: Any) -> Running:
        begun, goes_on = threading.Event(), threading.Event()
        name = f"{level}-{next(NUMBERS)}"

        @app.task(base=LockedTask, name=name, lock_level=level, **options)
        def last() -> None:
            begun.set()
            assert goes_on.wait(30)

        thread = threading.Thread(target=last)
        thread.start()
        started.append(Running(name, goes_on, thread))
        assert begun.wait(10)
        return started[-1]

    yield start
    for running in started:
        end(running)
    idle_sessions.close_idle()


def end(running: Running) -> None:
    running.goes_on.set()
    running.thread.join(30)
    assert not running.thread.is_alive()


def told_of_length(caplog: pytest.LogCaptureFixture, running: Running) -> list[Any]:
    return [
        record
        for record in list(caplog.records)
        if vars(record).get("event") == "transaction_long"
        and vars(record)["job"] == f"app:{running.name}"
    ]


def test_a_transaction_that_lasts_says_so_once_while_it_lasts(
    run_task: Callable[..., Running],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control is a session-level run that began before the others, and says nothing."""
    monkeypatch.setattr(holds, "LONG_TRANSACTION", 0.2)
    control = run_task("session")
    with_period = run_task("transaction", once_per="day")
    eventually(lambda: told_of_length(caplog, with_period), what="it is told of the first")
    without_period = run_task("transaction", once_per=None)
    eventually(lambda: told_of_length(caplog, without_period), what="it is told of the second")

    assert with_period.thread.is_alive()
    assert without_period.thread.is_alive()
    (first,), (second,) = (told_of_length(caplog, each) for each in (with_period, without_period))
    for record in (first, second):
        assert (record.levelname, record.name) == ("WARNING", "celery_pglock.task")
        assert record.threadName == "celery-pglock-monitor"
        assert 0.2 <= record.seconds < 10
        assert "CREATE INDEX CONCURRENTLY" in record.getMessage()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", first.period)
    assert second.period is None
    print(f"told after {first.seconds} s and {second.seconds} s")

    assert control.thread.is_alive()
    assert not told_of_length(caplog, control)
    for running in (with_period, without_period, control):
        end(running)
    assert len(told_of_length(caplog, with_period)) == 1
    assert not told_of_length(caplog, control)


def test_a_transaction_that_has_ended_in_time_says_nothing(
    run_task: Callable[..., Running],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holds, "LONG_TRANSACTION", 2.0)
    short = run_task("transaction", once_per=None)
    end(short)
    later = run_task("transaction", once_per=None)
    eventually(lambda: told_of_length(caplog, later), what="it is told of the later one")
    assert not told_of_length(caplog, short)


def test_by_itself_a_transaction_is_called_long_after_a_minute() -> None:
    assert holds.LONG_TRANSACTION == 60.0


def test_who_fails_when_told_of_a_length_does_not_end_the_watching(
    database: Database,
    lock_sessions: Sessions,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holds, "LONG_TRANSACTION", 0.1)
    losses: list[holds.Loss] = []

    def fail(_: float) -> None:
        raise ZeroDivisionError

    session = lock_sessions.open(database.url, "transaction")
    session.execute(b"begin")
    hold = holds.Hold(session, losses.append, fail)
    hold.begin()
    eventually(
        lambda: [each for each in caplog.records if "event" in vars(each)], what="the failure"
    )
    (record,) = caplog.records
    assert vars(record)["event"] == "transaction_long_untold"
    assert hold.held
    terminate(database, session.pid)
    eventually(lambda: losses, what="its loss is told all the same")


# --- a role that allows no idle transaction ------------------------------------------------------


@pytest.fixture
def strict_role(database: Database) -> Iterator[str]:
    """The URL of the database for a role whose transactions may idle for one second."""
    name = f"strict_{database.name}"
    quoted = sql.Identifier(name).as_string()
    database.rows(f"create role {quoted} login superuser")
    database.rows(f"alter role {quoted} set idle_in_transaction_session_timeout = '1s'")
    parts = urlsplit(database.url)
    yield urlunsplit(parts._replace(netloc=f"{name}@{parts.hostname}:{parts.port or 5432}"))
    database.rows(f"drop role {quoted}")


def outlast_the_limit(url: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Return when the role's limit has ended an idle transaction that was begun just now."""
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as bare:
        bare.execute("begin")

        def ended() -> bool:
            meanwhile()
            return sessions._readable(bare.fileno())  # noqa: SLF001 - a hang-up, without a query

        eventually(ended, what="the server ends the idle transaction")
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            bare.execute("select 1")


IDLENESS = (
    "select pid, state, xact_start is null and backend_xid is null and backend_xmin is null"
    " from pg_stat_activity where pid = any(%s)"
)


def test_a_session_level_lock_is_no_idle_transaction(
    database: Database,
    strict_role: str,
    lock_sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Case C38: the limit ends whoever idles in a transaction, and this session does not."""
    monkeypatch.setattr(guards, "_warned", set())
    subject, second = (executor(lock_sessions, strict_role, "session") for _ in range(2))
    leader = leadership.Leadership(strict_role, namespace="app", poll=0.05, node="leader:1")
    found: Counter[tuple[str, bool]] = Counter()
    try:
        eventually(leader.stand, what="the leader is elected")

        def body(run: runs.Run) -> tuple[str, bool]:
            (pid,) = {pid for key, pid in advisory_locks(database) if key == run.key}
            pids = [pid, leader._session.pid]  # type: ignore[union-attr] # noqa: SLF001
            watcher = database.connect()

            def look() -> None:
                rows = watcher.execute(IDLENESS, [pids]).fetchall()
                assert len(rows) == 2
                found.update((state, clean) for _, state, clean in rows)

            outlast_the_limit(strict_role, look)
            answer = second.execute(work(), never)
            assert isinstance(answer, claims.Refused)
            return answer.kind, run.held

        answer = subject.execute(work(), body)
        leader.confirm()
        assert leader.held
    finally:
        leader.resign()
    assert isinstance(answer, attempts.Ran)
    assert answer.value == ("running", True)
    assert row(database, "status", "attempts") == ("done", 1)
    print(f"n = {found.total()} samples, {dict(found)}")
    assert set(found) == {("idle", True)}
    assert not caplog.records


def test_a_transaction_level_run_outlasts_the_roles_limit(
    database: Database,
    strict_role: str,
    lock_sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(guards, "_warned", set())
    subject = executor(lock_sessions, strict_role, "transaction")
    answer = subject.execute(work(), lambda _: outlast_the_limit(strict_role))
    assert isinstance(answer, attempts.Ran)
    assert row(database, "status") == "done"
    assert not caplog.records


# What an extension does that keeps roles from changing a limit: it takes the call and does
# nothing. Only in this test's database.
STUBBORN = """
create function public.really_set_config(text, text, boolean) returns text
 language internal as 'set_config_by_name';
create or replace function pg_catalog.set_config(text, text, boolean) returns text
 language sql as $$
 select case when $1 = 'idle_in_transaction_session_timeout' then pg_catalog.current_setting($1)
  else public.really_set_config($1, $2, $3) end $$;
"""


def test_a_limit_that_cannot_be_lifted_is_a_warning_and_the_warning_is_true(
    database: Database,
    strict_role: str,
    lock_sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(guards, "_warned", set())
    database.rows(STUBBORN)
    subject = executor(lock_sessions, strict_role, "transaction")
    with pytest.raises(LockLost):
        subject.execute(work(), lambda _: outlast_the_limit(strict_role))
    (record,) = [each for each in caplog.records if vars(each).get("event") == "guard_not_set"]
    assert record.levelname == "WARNING"
    assert vars(record)["setting"] == "idle_in_transaction_session_timeout"
    assert (vars(record)["found"], vars(record)["wanted"]) == ("1000", "0")
    assert "idle_in_transaction_session_timeout is 1000 at " in record.getMessage()
    assert row(database, "status", "reason") == ("failed", "lock lost")


# --- the crowd -----------------------------------------------------------------------------------

DONE = work("done", name="done", task="done")
RUNNING = work("running", name="running", task="running", node="session:1")
SAME_NAME = work("next", name="running", task="running")
IN_TRANSACTION = work("in", name="in-transaction", task="in", node="transaction:1")
LOCK_HELD = work(None, name="lock-only", task="lock-only", node="session:1")
LOCK_IN_TRANSACTION = work(None, name="in-lock-only", task="in-lock-only", node="transaction:1")


class Crowd:
    """Holders, beats and contenders, each in a thread of its own, over one server.

    Attributes:
        refused: how often contenders were refused, by kind.
        failures: what went wrong in any thread.
        quiet: while it is set the leader gives no sign of life, which is a row that it writes.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.database = Database("postgres", url)
        self.refused: Counter[str] = Counter()
        self.failures: list[str] = []
        self.quiet = threading.Event()
        self._sessions = Sessions()
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._app = celery.Celery("app", set_as_current=False)
        self._app.conf.pglock_database_url = url
        self._app.conf.pglock_lost_after = 4.0

    def __enter__(self) -> Self:
        assert isinstance(self._executor("session").execute(DONE, lambda _: None), attempts.Ran)
        try:
            for level, records, wanted in (
                ("session", LEDGER, RUNNING),
                ("session", LOCK_ONLY, LOCK_HELD),
                ("transaction", LEDGER, IN_TRANSACTION),
                ("transaction", LOCK_ONLY, LOCK_IN_TRANSACTION),
            ):
                self._hold(self._executor(level, records), wanted)  # type: ignore[arg-type]
            self._start_holding(self._hold_script)
            self._start_holding(self._lead)
            for number in range(2):
                self._start(self._stand_by, f"standby:{number}")
            for level in LEVELS:
                for _ in range(2):
                    self._start(self._contend, self._executor(level, LEDGER))
                    self._start(self._contend_for_locks, self._executor(level, LOCK_ONLY))
            self._start(self._wait, self._executor("session"))
            for seconds in (0.0, 0.2):
                self._start(self._contend_for_script, seconds)
            kinds = {"closed", "running", "held", "script", "waited", "standby"}
            eventually(lambda: kinds <= set(self.refused), 30.0, "everybody is refused")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        assert self.failures == []

    def close(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(30)
        self._sessions.close()
        idle_sessions.close_idle()
        self.database.close()

    def go_on(self, refusals: int) -> None:
        """Wait until there were so many more refusals."""
        wanted = self.refused.total() + refusals
        eventually(lambda: self.refused.total() >= wanted, 30.0, "refusals", interval=0.005)
        assert self.failures == []

    def _executor(
        self, level: sessions.Level, records: transactions.Records = LEDGER
    ) -> execution.Executor:
        return executor(self._sessions, self.url, level, records, lost_after=4.0)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                function(*arguments)
            except BaseException as error:  # noqa: BLE001 - shown where the test looks
                self.failures.append(described(error))

        name = f"{function.__name__}-{len(self._threads)}"
        self._threads.append(threading.Thread(target=run, name=name))
        self._threads[-1].start()

    def _start_holding(self, function: Callable[..., None], *arguments: Any) -> None:
        holding = threading.Event()
        self._start(function, holding, *arguments)
        eventually(lambda: holding.is_set() or self.failures, 30.0, f"{function.__name__} holds")
        assert self.failures == []

    def _hold(self, holder: execution.Executor, wanted: claims.Work) -> None:
        def body(holding: threading.Event, run: runs.Run) -> None:
            holding.set()
            while not self._ending.wait(0.5):
                assert run.held

        def hold(holding: threading.Event) -> None:
            answer = holder.execute(wanted, lambda run: body(holding, run))
            assert isinstance(answer, attempts.Ran), answer

        self._start_holding(hold)

    def _hold_script(self, holding: threading.Event) -> None:
        with advisory_lock("script", app=self._app) as run:
            holding.set()
            while not self._ending.wait(0.5):
                assert run.held

    def _candidate(self, node: str) -> leadership.Leadership:
        # A long lease, so that it may be quiet for as long as a measurement takes.
        return leadership.Leadership(self.url, namespace="app", poll=0.05, node=node, lease=120.0)

    def _lead(self, holding: threading.Event) -> None:
        leader = self._candidate("leader:1")
        try:
            eventually(leader.stand, what="it leads")
            holding.set()
            while not self._ending.wait(0.05):
                if not self.quiet.is_set():
                    leader.confirm()
            assert leader.held
        finally:
            leader.resign()

    def _stand_by(self, node: str) -> None:
        standby = self._candidate(node)
        try:
            while not self._ending.is_set() and standby.stand() is None:
                self.refused["standby"] += 1
            # The leader has resigned because it is over, or this one should not lead.
            assert self._ending.is_set()
        finally:
            standby.resign()

    def _contend(self, contender: execution.Executor) -> None:
        self._be_refused(contender, DONE, RUNNING, SAME_NAME, IN_TRANSACTION)

    def _contend_for_locks(self, contender: execution.Executor) -> None:
        self._be_refused(contender, LOCK_HELD, LOCK_IN_TRANSACTION)

    def _be_refused(self, contender: execution.Executor, *wanted: claims.Work) -> None:
        level = contender.stack.take()
        node = f"{level.level}:1"
        contender.stack.give(level)
        for each in itertools.cycle(wanted):
            if self._ending.wait(0.005):
                return
            answer = contender.execute(dataclasses.replace(each, node=node), self._too_early)
            if isinstance(answer, claims.Refused):
                self.refused[answer.kind] += 1

    def _wait(self, contender: execution.Executor) -> None:
        while not self._ending.is_set():
            answer = contender.execute(SAME_NAME, self._too_early, patience=lambda _: 0.2)
            if isinstance(answer, claims.Refused):
                self.refused["waited"] += 1

    def _contend_for_script(self, seconds: float) -> None:
        while not self._ending.wait(0.005):
            try:
                with advisory_lock("script", app=self._app, wait=seconds):
                    self._too_early()
            except LockNotAcquired:
                self.refused["script"] += 1

    def _too_early(self, *_: object) -> None:
        # At the end the holders go first, and then a contender is right to have its lock.
        assert self._ending.is_set(), "a lock was had that is held"


class LoggedServer(PostgresServer):
    """A server that writes nothing by itself and logs each statement."""

    def entries(self) -> list[str]:
        """Return what it has logged; an entry may have several lines."""
        text = self.log_file.read_text(errors="replace")
        return re.split(r"^(?=\d{4}-\d\d-\d\d )", text, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def logged_postgres() -> Iterator[LoggedServer]:
    with LoggedServer({**CRASH_SAFE, "autovacuum": "off", "log_statement": "all"}) as server:
        migrating.migrate(server.url())
        yield server


@pytest.fixture(scope="module")
def _crowd(logged_postgres: LoggedServer) -> Iterator[Crowd]:
    with Crowd(logged_postgres.url()) as crowd:
        yield crowd


@pytest.fixture
def crowd(_crowd: Crowd) -> Iterator[Crowd]:
    """The crowd, which is at work all the time; a test during which it failed fails too."""
    _crowd.go_on(1)
    yield _crowd
    _crowd.go_on(1)


@pytest.fixture
def other(crowd: Crowd) -> Iterator[psycopg.Connection[TupleRow]]:
    """Somebody else's session, with a table `elsewhere` of 1000 rows."""
    with psycopg.connect(crowd.url, autocommit=True, application_name="control") as connection:
        connection.execute("create table elsewhere (id integer)")
        connection.execute("insert into elsewhere select generate_series(1, 1000)")
        try:
            yield connection
        finally:
            connection.execute("drop table elsewhere")


@contextlib.contextmanager
def old_snapshot(url: str) -> Iterator[None]:
    with psycopg.connect(url, autocommit=True, application_name="control") as connection:
        connection.execute("begin isolation level repeatable read")
        connection.execute("select 1")
        yield


@contextlib.contextmanager
def waiting_for_a_lock(url: str, application: str = "control") -> Iterator[int]:
    """Have a session wait in pg_advisory_lock(), as this package's never do."""
    with (
        contextlib.closing(psycopg.connect(url, application_name=application)) as waiting,
        contextlib.closing(
            psycopg.connect(url, autocommit=True, application_name="control")
        ) as holder,
    ):
        # The one that waited last may still be about to end.
        holder.execute("select pg_advisory_lock(99)")
        waiting.pgconn.send_query(b"select pg_advisory_lock(99)")
        waiting.pgconn.flush()
        query = "select pid from pg_locks where not granted and pid = %s"
        pid = waiting.info.backend_pid
        eventually(lambda: holder.execute(query, [pid]).fetchone(), what="it waits")
        yield pid


BLOCKERS = pytest.mark.parametrize(
    "blocker", [old_snapshot, waiting_for_a_lock], ids=["old snapshot", "waiting for a lock"]
)


# --- building an index ---------------------------------------------------------------------------

BUILD = "create index concurrently elsewhere_id on elsewhere (id)"
DROP = "drop index elsewhere_id"


def test_an_index_is_built_concurrently_beside_all_this(
    crowd: Crowd, other: psycopg.Connection[TupleRow]
) -> None:
    other.execute("set statement_timeout = '5s'")
    times = []
    for _ in range(10):
        started = time.monotonic()
        other.execute(BUILD)
        times.append(time.monotonic() - started)
        other.execute(DROP)
        crowd.go_on(10)
    print(f"n = {len(times)}: median {statistics.median(times):.3f} s, maximum {max(times):.3f} s")


@BLOCKERS
def test_control_who_waits_or_has_an_old_snapshot_holds_an_index_up(
    crowd: Crowd, other: psycopg.Connection[TupleRow], blocker: Any
) -> None:
    with blocker(crowd.url):
        other.execute("set statement_timeout = '1s'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            other.execute(BUILD)
    other.execute("set statement_timeout = '5s'")
    other.execute(DROP)
    other.execute(BUILD)


# --- vacuum --------------------------------------------------------------------------------------

# PostgreSQL 15 and later, and 14.
DEAD = re.compile(
    r"(\d+) are dead but not yet removable|(\d+) dead row versions cannot be removed yet"
)


def left_dead(connection: psycopg.Connection[TupleRow]) -> int:
    """Vacuum, and return how many dead rows had to stay because somebody may still see them."""
    notices: list[str] = []

    def take(notice: psycopg.errors.Diagnostic) -> None:
        notices.extend(filter(None, (notice.message_primary, notice.message_detail)))

    connection.add_notice_handler(take)
    try:
        connection.execute("vacuum (verbose, analyze false) elsewhere")
    finally:
        connection.remove_notice_handler(take)
    numbers = [int(a or b) for a, b in DEAD.findall("\n".join(notices))]
    assert len(numbers) == 1, notices
    return numbers[0]


def delete(connection: psycopg.Connection[TupleRow], rows: int = 50) -> None:
    cursor = connection.execute(
        "delete from elsewhere where id in (select id from elsewhere limit %s)", [rows]
    )
    assert cursor.rowcount == rows


def test_vacuum_removes_every_dead_row_beside_all_this(
    crowd: Crowd, other: psycopg.Connection[TupleRow]
) -> None:
    """A statement that is just being answered has a snapshot: for its length, a millisecond.

    So what counts is that no dead row has to stay for longer than such statements last.
    """
    tries = []
    for _ in range(10):
        delete(other)
        answers: list[int] = []

        def vacuumed(answers: list[int] = answers) -> bool:
            answers.append(left_dead(other))
            return answers[-1] == 0

        eventually(vacuumed, 5.0, "vacuum removes every dead row", interval=0.01)
        tries.append(len(answers))
        crowd.go_on(10)
    print(f"n = {len(tries)}: vacuum was run {Counter(tries)} times until no dead row was left")


@BLOCKERS
def test_control_who_waits_or_has_an_old_snapshot_holds_vacuum_back(
    crowd: Crowd, other: psycopg.Connection[TupleRow], blocker: Any
) -> None:
    with blocker(crowd.url):
        delete(other)
        for _ in range(5):
            assert left_dead(other) == 50
            crowd.go_on(20)
    eventually(lambda: left_dead(other) == 0, 5.0, "vacuum removes them afterwards")


def test_a_transaction_level_body_that_has_written_holds_vacuum_back(
    crowd: Crowd, other: psycopg.Connection[TupleRow], lock_sessions: Sessions
) -> None:
    """As documented, and why a long one says so."""
    subject = executor(lock_sessions, crowd.url, "transaction", LOCK_ONLY)

    def body(run: runs.Run) -> list[int]:
        run.connection.exec_driver_sql("insert into elsewhere values (0)")
        delete(other)
        return [left_dead(other) for _ in range(3)]

    answer = subject.execute(work(None, name="writes", node="transaction:1"), body)
    assert isinstance(answer, attempts.Ran)
    assert answer.value == [50, 50, 50]
    eventually(lambda: left_dead(other) == 0, 5.0, "vacuum removes them afterwards")


# --- what the server shows of the sessions -------------------------------------------------------

SAMPLE = """
select a.pid, a.application_name as name, a.state, a.state_change, a.xact_start, a.backend_xid,
 a.backend_xmin, clock_timestamp() - a.xact_start as age,
 (select array_agg(l.locktype) from pg_locks l where l.pid = a.pid and not l.granted) as waits
from pg_stat_activity a
where a.datname = current_database() and a.application_name like 'pglock%'
"""


def sampled(crowd: Crowd, times: int = SAMPLES) -> list[list[Any]]:
    """Look at the crowd's sessions so many times, and see that they are the whole crowd."""
    found: list[list[Any]] = []
    with psycopg.connect(
        crowd.url, autocommit=True, application_name="control", row_factory=namedtuple_row
    ) as watcher:
        for _ in range(times):
            found.append(watcher.execute(SAMPLE).fetchall())
            time.sleep(0.003)  # to spread them, while the crowd goes on
    for rows in found:
        names = {each.name for each in rows}
        expected = {each.application for each in (RUNNING, LOCK_HELD)}
        expected |= {each.application for each in (IN_TRANSACTION, LOCK_IN_TRANSACTION)}
        assert expected <= names
        assert "pglock:leader:app@leader:1" in names
        assert any(name.startswith("pglock:script@") for name in names)
        assert sum(name.startswith("pglock:standby:app@") for name in names) == 2
    return found


def at_transaction_level(session: Any) -> bool:
    return "@transaction:" in session.name


def in_a_transaction(samples: list[list[Any]]) -> list[Any]:
    """Return the session-level sessions that were in a transaction between two statements.

    The server puts a row together while the session goes on, so that of one which just begins a
    statement, half may be from before. Whoever really is in a transaction is seen in the same
    idleness twice.
    """
    seen: Counter[tuple[int, Any]] = Counter()
    wrong = {}
    for each in itertools.chain.from_iterable(samples):
        if at_transaction_level(each) or each.state == "active":
            continue
        if (each.state, each.xact_start, each.backend_xid, each.backend_xmin) != (
            "idle", None, None, None,
        ):  # fmt: skip
            seen[each.pid, each.state_change] += 1
            wrong[each.pid, each.state_change] = each
    return [wrong[which] for which, times in seen.items() if times > 1]


def test_a_session_level_lock_session_is_never_in_a_transaction(crowd: Crowd) -> None:
    samples = sampled(crowd)
    assert in_a_transaction(samples) == []
    looked_at = [each for rows in samples for each in rows if not at_transaction_level(each)]
    holders = [
        each for each in looked_at if each.name in (RUNNING.application, LOCK_HELD.application)
    ]
    longest = max((each.age.total_seconds() for each in looked_at if each.age), default=0.0)
    print(
        f"n = {len(samples)} samples of {len(looked_at)} sessions in all:"
        f" {dict(Counter(each.state for each in looked_at))}, holders:"
        f" {dict(Counter(each.state for each in holders))}, longest statement {longest * 1000:.1f} ms"
    )
    assert Counter(each.state for each in holders)["idle"] > len(holders) * 0.9
    # Nobody stays active either: these are statements, not waits.
    assert longest < 5


def test_control_an_idle_transaction_is_seen(crowd: Crowd) -> None:
    with psycopg.connect(crowd.url, application_name="pglock:control@session:1") as connection:
        connection.execute("select 1")
        assert {each.pid for each in in_a_transaction(sampled(crowd, 10))} == {
            connection.info.backend_pid
        }


def test_a_transaction_level_lock_session_has_no_snapshot_while_its_body_does_nothing(
    crowd: Crowd, lock_sessions: Sessions
) -> None:
    samples = sampled(crowd)
    names = {IN_TRANSACTION.application, LOCK_IN_TRANSACTION.application}
    # Refused contenders have these names for the length of a statement, if at all: the holders
    # are those who are there from the first sample to the last.
    pids = set.intersection(
        *({each.pid for each in rows if each.name in names} for rows in samples)
    )
    assert len(pids) == 2
    found = [each for rows in samples for each in rows if each.pid in pids]
    print(f"n = {len(found)} samples")
    assert {each.state for each in found} == {"idle in transaction"}
    assert {(each.backend_xid, each.backend_xmin) for each in found} == {(None, None)}

    # Asked by a body of its own: those of the holders say nothing that could end a snapshot.
    subject = executor(lock_sessions, crowd.url, "transaction", LOCK_ONLY)
    answer = subject.execute(
        work(None, name="isolation", node="transaction:1"),
        lambda run: run.connection.exec_driver_sql("show transaction_isolation").scalar(),
    )
    assert isinstance(answer, attempts.Ran)
    assert answer.value == "read committed"


def test_a_transaction_level_body_keeps_the_snapshot_of_its_last_query_with_parameters(
    crowd: Crowd, lock_sessions: Sessions
) -> None:
    """Until its next statement, which is another reason why a long transaction says so.

    With parameters a query goes by the extended protocol, and its portal, which has the
    snapshot, stays until the next one is made (PostgreSQL manual, "Extended Query").
    """
    subject = executor(lock_sessions, crowd.url, "transaction", LOCK_ONLY)
    query = "select backend_xmin is not null from pg_stat_activity where application_name = %s"
    wanted = work(None, name="asks", task="asks", node="transaction:1")

    def body(run: runs.Run) -> list[bool]:
        found = []
        for parameters in ((), (1,), ()):
            text = "select %s::integer" if parameters else "select 1"
            run.connection.exec_driver_sql(text, parameters or None)
            ((has_snapshot,),) = crowd.database.rows(query, wanted.application)
            found.append(bool(has_snapshot))
        return found

    answer = subject.execute(wanted, body)
    assert isinstance(answer, attempts.Ran)
    assert answer.value == [False, True, False]


def waiting(samples: list[list[Any]]) -> list[Any]:
    return [each for rows in samples for each in rows if each.waits]


def test_no_statement_ever_waits_for_a_lock(crowd: Crowd) -> None:
    before = crowd.refused.total()
    samples = sampled(crowd)
    print(f"n = {len(samples)} samples, {crowd.refused.total() - before} refusals meanwhile")
    assert waiting(samples) == []


def test_control_a_session_that_waits_is_seen(crowd: Crowd) -> None:
    with waiting_for_a_lock(crowd.url, "pglock:control@session:1") as pid:
        assert {(each.pid, *each.waits) for each in waiting(sampled(crowd, 10))} == {
            (pid, "advisory")
        }


# --- WAL -----------------------------------------------------------------------------------------


def wal_written(crowd: Crowd, act: Callable[[], object]) -> tuple[int, int]:
    """Return how many bytes of WAL were written meanwhile, and during how many refusals.

    The server adds a record of its own now and then, but never takes one away: so the least of
    three measurements is what was written for the crowd.
    """
    found = []
    with psycopg.connect(crowd.url, autocommit=True, application_name="control") as connection:

        def position() -> int:
            query = "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint"
            ((bytes_so_far,),) = connection.execute(query).fetchall()
            return int(bytes_so_far)

        for _ in range(3):
            before, refused = position(), crowd.refused.total()
            act()
            found.append((position() - before, crowd.refused.total() - refused))
    return min(found)


def test_a_crowd_that_is_refused_writes_no_wal(crowd: Crowd) -> None:
    """But for the leader, whose sign of life is a row: it is quiet meanwhile."""
    crowd.quiet.set()
    try:
        # What it was just writing.
        crowd.go_on(50)
        before = crowd.refused.copy()
        written, refusals = wal_written(crowd, lambda: crowd.go_on(400))
        kinds = crowd.refused - before
    finally:
        crowd.quiet.clear()
    print(f"{written} bytes in n = {refusals} refusals; of three such: {dict(kinds)}")
    assert set(kinds) >= {"closed", "running", "held", "script", "waited", "standby"}
    assert written == 0


def test_control_the_leaders_sign_of_life_is_seen_in_the_wal(crowd: Crowd) -> None:
    written, refusals = wal_written(crowd, lambda: crowd.go_on(200))
    print(f"{written} bytes in n = {refusals} refusals with the leader")
    assert written > 0


# --- the log -------------------------------------------------------------------------------------

COMPLAINT = re.compile(r" (?:WARNING|ERROR|FATAL|PANIC):  ")
WAITING_CALL = re.compile(r"pg_advisory_(?:xact_)?lock(?:_shared)?\s*\(")
# Where the prefix of an entry names the application, and that is one of a control.
CONTROL = re.compile(r"\S+ \S+ \S+ \[\d+\] (?:control|pglock:control@\S+) ")


def test_the_servers_log_has_no_complaint_and_no_call_that_waits(
    crowd: Crowd, logged_postgres: LoggedServer
) -> None:
    crowd.go_on(200)
    # The control: an error, and a call that waits, are found in the log by the same judgement.
    with psycopg.connect(crowd.url, autocommit=True, application_name="control") as control:
        with pytest.raises(psycopg.errors.DivisionByZero):
            control.execute("select 1/0")
        control.execute("select pg_advisory_lock(98)")
    entries = logged_postgres.entries()
    of_controls = [each for each in entries if CONTROL.match(each)]
    assert any(COMPLAINT.search(each) for each in of_controls)
    assert any(WAITING_CALL.search(each) for each in of_controls)

    rest = [each for each in entries if not CONTROL.match(each)]
    statements = [each for each in rest if re.search(r" LOG:  (?:execute|statement)", each)]
    tries = sum("pg_try_advisory" in each for each in statements)
    print(
        f"n = {len(statements)} statements, {tries} of them try a lock;"
        f" {crowd.refused.total()} refusals: {dict(crowd.refused)}"
    )
    assert tries > 200
    assert [each for each in rest if COMPLAINT.search(each)] == []
    assert [each for each in statements if WAITING_CALL.search(each)] == []


def test_no_lock_session_sets_a_lock_timeout(crowd: Crowd, logged_postgres: LoggedServer) -> None:
    """It may fire although the lock was granted; each session says 0, whatever its role says."""
    crowd.go_on(1)
    values: Counter[str] = Counter()
    for entry in logged_postgres.entries():
        if "lock_timeout" not in entry or "] pglock migrate " in entry or CONTROL.match(entry):
            continue
        # Two arrays where the guards are set, one where they are read back.
        arrays = [found.split(",") for found in re.findall(r"\$\d = '{([^}]*)}'", entry)]
        assert arrays, entry
        if len(arrays) == 2:
            values[dict(zip(*arrays, strict=True))["lock_timeout"]] += 1
    print(f"n = {values.total()} sessions")
    assert set(values) == {"0"}
    assert values.total() > 10

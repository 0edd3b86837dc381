"""Every way in which a session can end under a hold: who knows it when, and what comes of the run.

A session that ends is told to its holder by the socket: within 50 ms of the moment at which
somebody else can have the key. Where the network, or the server, only falls silent, the holder
counts itself out at its deadline: before the server, which waits three times as long, frees the
key. Either way the run does not end as done, and the next one can have its period.

A transaction is not asked, so silence alone does not tell it: its commit does. It is done only
if that arrives, and until then its lock is held or its work is undone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import queue
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import celery
import psycopg
import pytest
import sqlalchemy as sa

from celery_pglock import (
    advisory_lock,
    attempts,
    errors,
    execution,
    holds,
    idle_sessions,
    ledger,
    migrating,
    outcomes,
    runs,
    sessions,
)
from celery_pglock.demo.servers import PostgresServer, children
from tests.integration.workbench import Sessions, advisory_locks, age, in_thread, row, work
from tests.support.databases import Database
from tests.support.namespaces import (
    HOLES,
    Hole,
    Namespace,
    far_postgres,
    require_namespaces,
    seen_at,
)
from tests.support.processes import Process, Processes, eventually
from tests.support.proxy import Proxy
from tests.support.servers import CRASH_SAFE, in_memory

LOST_AFTER = 1.0
# The documented bound for a client that has vanished.
FREED_AFTER = 3 * LOST_AFTER
# How long silence lasts where a test ends it: longer than the holder may take, and shorter than
# the server does.
SILENCE = 2 * LOST_AFTER
# How late this machine may be when others use it too; no bound of the package's.
SLACK = 1.0
# How often each fault is tried: enough for a median.
SAMPLES = int(os.environ.get("PGLOCK_TEST_FAULTS", "5"))

Level = Literal["session", "transaction", "advisory_lock"]
LEVELS: list[Level] = ["session", "transaction", "advisory_lock"]
every_level = pytest.mark.parametrize("level", LEVELS)
proven_levels = pytest.mark.parametrize("level", ["session", "advisory_lock"])
run_levels = pytest.mark.parametrize("level", ["session", "transaction"])

Body = Callable[[runs.Run], Any]


@dataclasses.dataclass(kw_only=True)
class Holder:
    """Holds a lock as a task does, at either level, or as ``advisory_lock()`` does.

    Attributes:
        level: which of them.
        database: reached past whatever is between the holder and the server.
        url: where the holder reaches it.
        opened: closes what was opened.
        lost_after: as for a task.
    """

    level: Level
    database: Database
    url: str
    opened: Sessions
    lost_after: float = LOST_AFTER

    @property
    def has_rows(self) -> bool:
        return self.level != "advisory_lock"

    @functools.cached_property
    def executor(self) -> execution.Executor:
        level: sessions.Level = "transaction" if self.level == "transaction" else "session"
        return execution.Executor(
            stack=self.opened.stack(self.url, level, lost_after=self.lost_after),
            records=ledger.Ledger(),
            terms=attempts.Terms(classify=outcomes.verdict, interrupt=True),
        )

    @functools.cached_property
    def app(self) -> celery.Celery:
        app = celery.Celery("app", set_as_current=False)
        app.conf.pglock_database_url = self.url
        app.conf.pglock_lost_after = self.lost_after
        return app

    def run(self, body: Body, **more: Any) -> Any:
        """Run a body and return its value; fails if it is refused."""
        if self.level == "advisory_lock":
            with advisory_lock("report", app=self.app) as run:
                return body(run)
        answer = self.executor.execute(work(**more), body)
        assert isinstance(answer, attempts.Ran), answer
        return answer.value

    def another(self, url: str | None = None) -> Holder:
        """Return another one with sessions of its own, which no fault is between."""
        return dataclasses.replace(self, url=url or self.database.url)

    def expect(self, status: str, reason: str | None = None) -> None:
        if self.has_rows:
            assert row(self.database, "status", "reason") == (status, reason)

    def expect_the_next_run_to_have_it(self) -> None:
        eventually(lambda: not advisory_locks(self.database), what="no lock is left")
        assert self.another().run(lambda run: run.attempt) == (2 if self.has_rows else 1)
        self.expect("done")


MakeHolder = Callable[..., Holder]


@pytest.fixture
def make_holder(lock_sessions: Sessions) -> Iterator[MakeHolder]:
    def make(level: Level, database: Database, url: str | None = None, **more: Any) -> Holder:
        return Holder(
            level=level, database=database, url=url or database.url, opened=lock_sessions, **more
        )

    yield make
    idle_sessions.close_idle()


def backend(run: runs.Run, database: Database) -> int:
    """Return the server process that holds the lock of a run."""
    (pid,) = {pid for key, pid in advisory_locks(database) if key == run.key}
    return pid


# --- the moments that are measured -------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments:
    """What happened when (monotonic).

    Attributes:
        struck: the fault began.
        known: the holder said that the lock is not held.
        free: another session had the key.
        ended: the run had ended; its last statement is part of it.
        error: what it ended with.
    """

    struck: float
    known: float
    free: float
    ended: float
    error: BaseException | None


def report(what: str, found: list[Moments]) -> None:
    for name, values in {
        "known after the fault": [it.known - it.struck for it in found],
        "free after the fault": [it.free - it.struck for it in found],
        "known after free": [it.known - it.free for it in found],
        "ended after known": [it.ended - it.known for it in found],
    }.items():
        middle, most = (1000 * value for value in (statistics.median(values), max(values)))
        print(f"{what}: {name}: median {middle:.1f} ms, maximum {most:.1f} ms, n {len(values)}")


def had_by_another(database: Database, key: int, waits: threading.Event | None = None) -> float:
    """Wait until another session has the key, and return when that was; then it is free again."""
    deadline = time.monotonic() + 25
    while True:
        with contextlib.suppress(psycopg.OperationalError):
            connection = psycopg.connect(database.url, autocommit=True, application_name="next")
            with contextlib.closing(connection):
                got = connection.execute("select pg_try_advisory_lock(%s)", [key]).fetchone()
                if waits is not None:
                    waits.set()
                if got != (True,):
                    connection.execute("select pg_advisory_lock(%s)", [key])
                return time.monotonic()
        assert time.monotonic() < deadline, "the key was not free"
        time.sleep(0.002)


def not_held(run: runs.Run) -> float:
    eventually(lambda: not run.held, 25.0, "the holder knows", interval=0.0005)
    return time.monotonic()


Fault = Callable[[runs.Run], object]


def struck(holder: Holder, fault: Fault, act: Callable[[runs.Run], Any]) -> Moments:
    """Run something under a lock, have a fault strike, and return what happened when."""
    if holder.has_rows:
        holder.database.rows("delete from pglock.job_runs")
    started: queue.SimpleQueue[runs.Run] = queue.SimpleQueue()

    def body(run: runs.Run) -> None:
        started.put(run)
        act(run)

    def strike() -> tuple[float, float, float]:
        run = started.get(timeout=20)
        waits = threading.Event()
        with (
            in_thread(lambda: not_held(run)) as known,
            in_thread(lambda: had_by_another(holder.database, run.key, waits)) as free,
        ):
            assert waits.wait(20)
            moment = time.monotonic()
            fault(run)
        return moment, known.result(), free.result()

    error: BaseException | None = None
    with in_thread(strike) as moments:
        try:
            holder.run(body)
        except (errors.LockLost, psycopg.Error, sa.exc.DBAPIError) as raised:
            error = raised
        ended = time.monotonic()
    began, known, free = moments.result()
    return Moments(struck=began, known=known, free=free, ended=ended, error=error)


def expect_lost(holder: Holder, moments: Moments) -> None:
    """The run ended as one that lost its lock, and the next has its period."""
    assert isinstance(moments.error, errors.LockLost), moments.error
    holder.expect("failed", "lock lost")
    holder.expect_the_next_run_to_have_it()


def expect_told_by_the_socket(what: str, found: list[Moments]) -> None:
    report(what, found)
    behind = [it.known - it.free for it in found]
    assert statistics.median(behind) < 0.05
    assert max(behind) < SLACK


# --- what the holder does meanwhile ------------------------------------------------------------


def sleeps(_: runs.Run) -> None:
    """Interrupted, as it is in the main thread."""
    time.sleep(20)


def asks(run: runs.Run) -> None:
    """Learns of it by asking, as it has to in another thread."""
    not_held(run)
    run.check()


def runs_sql_of_its_own(database: Database, _: runs.Run) -> None:
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute("select pg_sleep(20)")


def runs_sql_in_the_transaction(run: runs.Run) -> None:
    run.connection.execute(sa.text("select pg_sleep(20)"))


def struck_in_another_thread(holder: Holder, fault: Fault) -> Moments:
    with in_thread(lambda: struck(holder, fault, asks)) as moments:
        pass
    return moments.result()


# --- the server ends the session ---------------------------------------------------------------


def terminated(database: Database) -> Fault:
    def fault(run: runs.Run) -> None:
        database.rows("select pg_terminate_backend(%s)", backend(run, database))

    return fault


@every_level
@pytest.mark.parametrize("where", ["asleep", "in SQL of its own", "in another thread"])
def test_a_session_that_is_terminated(
    database: Database, make_holder: MakeHolder, level: Level, where: str
) -> None:
    found = []
    for _ in range(SAMPLES):
        holder = make_holder(level, database)
        fault = terminated(database)
        if where == "in another thread":
            moments = struck_in_another_thread(holder, fault)
        else:
            own = functools.partial(runs_sql_of_its_own, database)
            moments = struck(holder, fault, sleeps if where == "asleep" else own)
        expect_lost(holder, moments)
        assert moments.free - moments.struck < SLACK
        assert moments.ended - moments.known < 5.0  # not the 20 s that the body would take
        found.append(moments)
    expect_told_by_the_socket(f"terminated, {level}, {where}", found)


def test_a_transaction_that_is_terminated_in_its_own_sql(
    database: Database, make_holder: MakeHolder
) -> None:
    """The answer to the statement and the end of the socket come together; either may be first.

    The body's own error is its result then, but its period is recorded as the loss that it is.
    """
    found, raised = [], []
    for _ in range(SAMPLES):
        holder = make_holder("transaction", database)
        moments = struck(holder, terminated(database), runs_sql_in_the_transaction)
        assert moments.error is not None
        raised.append(type(moments.error).__name__)
        assert row(database, "status", "reason") == ("failed", "lock lost")
        assert moments.free - moments.struck < SLACK
        holder.expect_the_next_run_to_have_it()
        found.append(moments)
    print(raised)
    expect_told_by_the_socket("terminated in its own SQL", found)


def test_a_transaction_that_idles_for_too_long(database: Database, make_holder: MakeHolder) -> None:
    """The body has taken the guard away, and the server's own limit strikes."""

    def idles(run: runs.Run) -> None:
        run.connection.execute(sa.text("set local idle_in_transaction_session_timeout = 300"))
        sleeps(run)

    found = []
    for _ in range(SAMPLES):
        holder = make_holder("transaction", database)
        moments = struck(holder, lambda _: None, idles)
        expect_lost(holder, moments)
        found.append(moments)
    expect_told_by_the_socket("idle in transaction", found)


# --- the server itself ends --------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that the tests of this file end, one after the other."""
    with PostgresServer(CRASH_SAFE, place=in_memory()) as server:
        migrating.migrate(server.url())
        yield server


@pytest.fixture
def ending(server: PostgresServer) -> Iterator[Database]:
    database = Database("postgres", server.url())
    yield database
    database.close()


def restarted(server: PostgresServer, mode: Any) -> Fault:
    return lambda _: server.restart(mode)


def another_backend_killed(server: PostgresServer) -> Fault:
    """As by the kernel for want of memory: the server then ends all sessions and recovers."""
    url = server.url()

    def fault(_: runs.Run) -> None:
        with contextlib.closing(psycopg.connect(url)) as other:
            os.kill(other.info.backend_pid, signal.SIGKILL)

    return fault


@every_level
@pytest.mark.parametrize("end", ["fast", "immediate", "another backend killed"])
def test_a_server_that_ends(
    server: PostgresServer, ending: Database, make_holder: MakeHolder, level: Level, end: str
) -> None:
    found = []
    for _ in range(math.ceil(SAMPLES / 3)):
        holder = make_holder(level, ending)
        fault = (
            another_backend_killed(server)
            if end == "another backend killed"
            else restarted(server, end)
        )
        moments = struck(holder, fault, sleeps)
        expect_lost(holder, moments)
        found.append(moments)
    expect_told_by_the_socket(f"{end}, {level}", found)


@contextlib.contextmanager
def stopped(server: PostgresServer) -> Iterator[None]:
    """The postmaster and all backends, frozen."""
    pids = [server.pid, *children.child_pids(server.pid)]
    for pid in pids:
        children.send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            children.send(pid, signal.SIGCONT)


@pytest.mark.slow
@proven_levels
def test_a_server_that_is_frozen_is_in_doubt_and_in_doubt_is_lost(
    server: PostgresServer, ending: Database, make_holder: MakeHolder, level: Level
) -> None:
    thawed = []

    def freeze(_: runs.Run) -> None:
        with stopped(server):
            time.sleep(SILENCE)
            thawed.append(time.monotonic())

    holder = make_holder(level, ending)
    moments = struck(holder, freeze, sleeps)
    report(f"frozen server, {level}", [moments])
    assert moments.known - moments.struck < LOST_AFTER + SLACK
    assert moments.known < thawed[0] <= moments.free
    expect_lost(holder, moments)


def test_a_transaction_waits_for_a_frozen_server_and_has_its_lock_all_the_time(
    server: PostgresServer, ending: Database, make_holder: MakeHolder
) -> None:
    """It is not asked; its commit is the proof, and meanwhile nobody else can have the key."""
    ending.rows("delete from pglock.job_runs")
    holder = make_holder("transaction", ending)
    started: queue.SimpleQueue[runs.Run] = queue.SimpleQueue()
    leave = threading.Event()

    def body(run: runs.Run) -> str:
        started.put(run)
        assert leave.wait(20)
        return "value"

    with in_thread(lambda: holder.run(body)) as outcome:
        run = started.get(timeout=20)
        waits = threading.Event()
        with in_thread(lambda: had_by_another(ending, run.key, waits)) as free:
            assert waits.wait(20)
            with stopped(server):
                leave.set()
                time.sleep(SILENCE)
                assert not outcome.done()
                thawed = time.monotonic()
            assert outcome.result(20) == "value"
        assert free.result() >= thawed
    holder.expect("done")


# --- the network between -----------------------------------------------------------------------


@pytest.fixture
def proxy(database: Database) -> Iterator[Proxy]:
    with contextlib.closing(Proxy(database.url)) as proxy:
        yield proxy


@every_level
def test_a_connection_that_is_reset(
    database: Database, proxy: Proxy, make_holder: MakeHolder, level: Level
) -> None:
    found = []
    for _ in range(SAMPLES):
        holder = make_holder(level, database, proxy.url)
        moments = struck(holder, lambda _: proxy.reset(), sleeps)
        expect_lost(holder, moments)
        assert moments.free - moments.struck < SLACK
        found.append(moments)
    expect_told_by_the_socket(f"reset, {level}", found)


def block(proxy: Proxy, hole: Hole) -> None:
    if hole == "both ways":
        proxy.hold()
    else:
        proxy.hold_one_way(hole)


@pytest.mark.parametrize(
    ("level", "hole"), [*(("session", hole) for hole in HOLES), ("advisory_lock", "both ways")]
)
def test_a_black_hole_that_answers_for_the_server(
    database: Database, proxy: Proxy, make_holder: MakeHolder, level: Level, hole: Hole
) -> None:
    """Its kernel acknowledges all that comes, so only an answer from the server is a proof."""

    def swallow(_: runs.Run) -> None:
        block(proxy, hole)
        time.sleep(SILENCE)
        proxy.reset()
        proxy.flow()

    holder = make_holder(level, database, proxy.url)
    moments = struck(holder, swallow, sleeps)
    report(f"black hole {hole}, {level}", [moments])
    assert proxy.swallowed
    # Its last proof was made before the fault.
    assert moments.known - moments.struck < LOST_AFTER + SLACK
    assert moments.known < moments.free
    expect_lost(holder, moments)


def test_control_a_holder_without_a_deadline_says_held_when_the_key_is_free(
    database: Database, proxy: Proxy, make_holder: MakeHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds.Hold, "proves", False, raising=False)
    monkeypatch.setattr(holds.Hold, "due", math.inf)
    monkeypatch.setattr(holds.Hold, "_deadline", math.inf)

    def swallow(run: runs.Run) -> None:
        proxy.hold_one_way("to client")
        terminated(database)(run)
        eventually(lambda: not advisory_locks(database), what="another can have it")
        assert run.held
        proxy.reset()
        proxy.flow()

    moments = struck(make_holder("session", database, proxy.url), swallow, sleeps)
    assert moments.known > moments.free


@pytest.mark.parametrize("hole", HOLES)
def test_a_transaction_that_is_swallowed_is_not_committed(
    database: Database, proxy: Proxy, make_holder: MakeHolder, hole: Hole
) -> None:
    """Nothing tells it before its end, and there it gets no answer: what it wrote is undone."""
    database.rows("create table effects (n integer)")
    holder = make_holder("transaction", database, proxy.url)

    def body(run: runs.Run) -> None:
        run.connection.execute(sa.text("insert into effects values (1)"))
        block(proxy, hole)

    with in_thread(lambda: holder.run(body)) as outcome:
        eventually(lambda: proxy.swallowed, what="its end is swallowed")
        assert not outcome.done()
        proxy.reset()
        proxy.flow()
        with pytest.raises(errors.LockLost):
            outcome.result(20)
    holder.expect("failed", "lock lost")
    assert not database.rows("select from effects")
    holder.expect_the_next_run_to_have_it()


@pytest.mark.slow
@every_level
def test_a_slow_network_loses_nothing(
    database: Database, make_holder: MakeHolder, level: Level
) -> None:
    """50 ms each way. At 700 ms, the control, no answer comes in time."""
    with contextlib.closing(Proxy(database.url, delay=0.05)) as proxy:
        holder = make_holder(level, database, proxy.url)

        def body(run: runs.Run) -> int:
            proofs, until = 0, time.monotonic() + 2.5 * LOST_AFTER
            before: dict[int, float] = {}
            while time.monotonic() < until:
                assert run.held
                for session in sessions.opened():
                    proofs += session.proven > before.get(id(session), math.inf)
                    before[id(session)] = session.proven
                time.sleep(0.005)
            run.check()
            return proofs

        proofs = holder.run(body)
        print(f"{level}: {proofs} proofs over a slow network")
        holder.expect("done")
        if level != "transaction":
            assert proofs >= 3
        if level == "session":

            def slow_down(_: runs.Run) -> None:
                proxy.delay = 0.7
                time.sleep(SILENCE)
                proxy.delay = 0.0

            moments = struck(holder, slow_down, sleeps)
            assert isinstance(moments.error, errors.LockLost)
            holder.expect("failed", "lock lost")


IDLE_LIMIT = 3.0


def rarely_used(holder: Holder, proxy: Proxy, *, silently: bool) -> tuple[int, int]:
    """Run a body that outlasts the limit of a middle box; return its backend before and after."""
    proxy.forget_idle(IDLE_LIMIT, silently=silently)

    def body(run: runs.Run) -> tuple[int, int]:
        before = backend(run, holder.database)
        until = time.monotonic() + 2.2 * IDLE_LIMIT
        while time.monotonic() < until and run.held:
            time.sleep(0.02)
        run.check()
        return before, backend(run, holder.database)

    before, after = holder.run(body, period=f"forgets silently: {silently}", name=str(silently))
    return before, after


@pytest.mark.slow
def test_a_middle_box_that_forgets_idle_connections_meets_none(
    database: Database, make_holder: MakeHolder
) -> None:
    with (
        contextlib.closing(Proxy(database.url)) as resets,
        contextlib.closing(Proxy(database.url)) as swallows,
    ):
        one = make_holder("session", database, resets.url, lost_after=2.0)
        two = make_holder("session", database, swallows.url, lost_after=2.0)
        with (
            in_thread(lambda: rarely_used(one, resets, silently=False)) as first,
            in_thread(lambda: rarely_used(two, swallows, silently=True)) as second,
        ):
            pass
        for outcome in (first, second):
            before, after = outcome.result()
            assert before == after
        assert (resets.forgotten, swallows.forgotten) == (0, 0)
    assert database.rows("select distinct status from pglock.job_runs") == [("done",)]


@pytest.mark.slow
def test_control_without_proofs_the_middle_box_ends_the_session(
    database: Database, proxy: Proxy, make_holder: MakeHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds.Hold, "tick", lambda _: math.inf)
    monkeypatch.setattr(holds.Hold, "_deadline", math.inf)
    holder = make_holder("session", database, proxy.url, lost_after=2.0)
    started = time.monotonic()
    with pytest.raises(errors.LockLost):
        rarely_used(holder, proxy, silently=False)
    assert IDLE_LIMIT <= time.monotonic() - started < 2 * IDLE_LIMIT
    assert proxy.forgotten == 1


# --- packets that are really dropped -----------------------------------------------------------


@pytest.fixture(scope="module")
def far_server() -> Iterator[tuple[Namespace, PostgresServer]]:
    """A namespace, and a server at 127.0.0.1 that also listens there."""
    require_namespaces()
    with Namespace() as namespace, far_postgres(namespace) as server:
        yield namespace, server


@pytest.fixture
def namespace(far_server: tuple[Namespace, PostgresServer]) -> Iterator[Namespace]:
    """The namespace, which is healed at the end of the test."""
    namespace, _ = far_server
    yield namespace
    namespace.heal()


@pytest.fixture
def reachable(far_server: tuple[Namespace, PostgresServer]) -> Database:
    """The server's database, reached past the namespace."""
    database = Database("postgres", far_server[1].url())
    database.rows("delete from pglock.job_runs")
    return database


FAR = """
import math, sys, time
from celery_pglock import attempts, connections, errors, execution, holds, ledger, outcomes, stacks
from tests.integration.workbench import plan, work

url, level, rule = sys.argv[1:]
if rule == "no deadline":
    connect = connections.connect

    def trusting(target, **given):
        for name in ("tcp_user_timeout", "keepalives_idle", "keepalives_interval"):
            given.pop(name)
        return connect(target, **given)

    connections.connect = trusting
    holds.Hold.due = holds.Hold._deadline = math.inf

def body(run):
    print("held", run.key, flush=True)
    while run.held:
        time.sleep(0.0005)
    print("known", time.monotonic(), flush=True)
    run.check()

executor = execution.Executor(
    stack=stacks.Stack(plan(url, level, lost_after=1.0)),
    records=ledger.Ledger(),
    terms=attempts.Terms(classify=outcomes.verdict),
)
try:
    executor.execute(work(job="app:" + level, name=level), body)
except errors.LockLost as lost:
    print("ended", lost.reason, flush=True)
"""


class Far:
    """A holder in a namespace."""

    def __init__(
        self,
        namespace: Namespace,
        database: Database,
        processes: Processes,
        level: sessions.Level,
        rule: str = "as it is",
    ) -> None:
        url = seen_at(namespace.server, database.url)
        self.level = level
        self.database = database
        self.process: Process = processes.start(
            *namespace.command(sys.executable, "-c", FAR, url, level, rule), name=f"far-{level}"
        )
        self.key = int(self.process.wait_for_line(r"^held (-?\d+)$")[1])

    def known(self) -> float:
        return float(self.process.wait_for_line(r"^known ([\d.]+)$", 20)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "hole", [HOLES[0], *(pytest.param(hole, marks=pytest.mark.chaos) for hole in HOLES[1:])]
)
def test_packets_that_are_dropped(
    namespace: Namespace,
    reachable: Database,
    processes: Processes,
    make_holder: MakeHolder,
    hole: Hole,
) -> None:
    """Here both kernels take part: also a transaction, which nobody asks, is told in time.

    Its kernel goes by what it hears. While it does not hear its last packet acknowledged, the
    server sends it again and again, and a holder that still hears that is told only after the
    server has given up. So there must be nothing on its way when the packets are dropped.
    """
    levels: list[sessions.Level] = ["session", "transaction"]
    far = [Far(namespace, reachable, processes, level) for level in levels]
    waits = [threading.Event() for _ in far]
    with (
        in_thread(lambda: had_by_another(reachable, far[0].key, waits[0])) as one,
        in_thread(lambda: had_by_another(reachable, far[1].key, waits[1])) as two,
    ):
        assert all(it.wait(20) for it in waits)
        time.sleep(0.3)  # longer than an acknowledgement is delayed
        began = time.monotonic()
        namespace.block(hole)
    for it, free in zip(far, (one.result(), two.result()), strict=True):
        known = it.known()
        print(
            f"dropped {hole}, {it.level}: known after {known - began:.2f} s,"
            f" free after {free - began:.2f} s"
        )
        # A kernel that gives a transaction up tells the server, if that way is open: both know
        # of it at once.
        assert known < free + (0.05 if hole == "to client" else 0.0)
        # Counted from the server's last packet, which may be its answer to a later proof.
        assert free - began < FREED_AFTER + LOST_AFTER / 2 + SLACK
        if it.level == "session":
            assert known - began < LOST_AFTER + SLACK
        # The next run has the period while the first is still out of reach ...
        eventually(
            lambda key=it.key: key not in dict(advisory_locks(reachable)),  # type: ignore[misc]
            what="the key is free",
        )
        assert row(reachable, "status", job=f"app:{it.level}") == "running"
        near = make_holder(it.level, reachable)
        attempt = near.run(lambda run: run.attempt, job=f"app:{it.level}", name=it.level)
        assert attempt == 2
    namespace.heal()
    for it in far:
        # ... which says so in the end, and changes nothing.
        it.process.wait_for_line("^ended ", 25)
        assert it.process.wait(20) == 0, it.process.output()
        found = row(reachable, "status", "attempts", job=f"app:{it.level}")
        assert found == ("done", 2)


@pytest.mark.slow
def test_control_a_client_that_trusts_its_kernel_says_held_when_the_key_is_free(
    namespace: Namespace, reachable: Database, processes: Processes
) -> None:
    far = Far(namespace, reachable, processes, "session", "no deadline")
    namespace.block("both ways")
    began = time.monotonic()
    had_by_another(reachable, far.key)
    print(f"free after {time.monotonic() - began:.2f} s, and it says held")
    assert "known" not in far.process.output()
    far.process.kill(group=True)


# --- another server takes over -----------------------------------------------------------------


def of_both(first: PostgresServer, second: PostgresServer, more: str = "") -> str:
    return f"postgresql://postgres@127.0.0.1:{first.port},127.0.0.1:{second.port}/postgres{more}"


@pytest.fixture
def pair(own_postgres: PostgresServer) -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary with the tables, and its standby."""
    migrating.migrate(own_postgres.url())
    with own_postgres.standby() as standby:
        yield own_postgres, standby


def never(_: runs.Run) -> None:
    pytest.fail("it ran")


@pytest.mark.slow
@run_levels
def test_a_standby_that_is_promoted_under_a_hold(
    pair: tuple[PostgresServer, PostgresServer], make_holder: MakeHolder, level: Level
) -> None:
    primary, standby = pair
    before, after = (Database("postgres", server.url()) for server in pair)
    with pytest.raises(errors.ServerInRecovery, match=str(standby.port)):
        make_holder(level, after).run(never)
    holder = make_holder(level, before, of_both(standby, primary))
    started: queue.SimpleQueue[runs.Run] = queue.SimpleQueue()
    leave = threading.Event()

    def body(run: runs.Run) -> str:
        started.put(run)
        assert leave.wait(40)
        return "value"

    with in_thread(lambda: holder.run(body, task_id="old")) as outcome:
        run = started.get(timeout=20)
        backend(run, before)  # it is on the primary, although the standby is named first
        eventually(lambda: row(after, "status") == "running", what="the standby has the row")
        with pytest.raises(errors.ServerInRecovery):
            make_holder(level, after).run(never)
        standby.promote()
        assert not advisory_locks(after)
        # The old primary is still there, and so is its lock.
        assert run.held
        run.check()
        stops = time.monotonic()
        with in_thread(lambda: not_held(run)) as known:
            primary.stop("immediate")
            gone = time.monotonic()
        print(f"{level}: known {1000 * (known.result() - stops):.0f} ms after the order to stop")
        assert known.result() < gone + SLACK
        age(after)  # a claim at transaction level is left in peace for a moment
        taken = make_holder(level, after, of_both(primary, standby))
        assert taken.run(lambda run: run.attempt, task_id="new") == 2
        leave.set()
        with pytest.raises(errors.LockLost):
            outcome.result(25)
    found = row(after, "status", "attempts", "task_id")
    assert found == ("done", 2, "new")


def test_a_url_of_several_hosts_finds_the_primary(
    pair: tuple[PostgresServer, PostgresServer], make_holder: MakeHolder
) -> None:
    primary, standby = pair
    database = Database("postgres", primary.url())
    first, last = of_both(standby, primary), of_both(primary, standby)
    wanted = [
        first,
        last,
        of_both(standby, primary, "?target_session_attrs=primary"),
        of_both(standby, primary, "?target_session_attrs=read-write"),
        f"host=127.0.0.1,127.0.0.1 port={standby.port},{primary.port} user=postgres",
    ]
    for number, (level, url) in enumerate(itertools.product(LEVELS, wanted)):
        holder = make_holder(level, database, url)
        assert holder.run(
            lambda run: backend(run, database) > 0, period=f"{number}", job=f"app:{level}"
        )
    # Whoever asks for any server is given the standby, and told that it will not do.
    for level in LEVELS:
        holder = make_holder(
            level, database, of_both(standby, primary, "?target_session_attrs=any")
        )
        with pytest.raises(errors.ServerInRecovery, match=str(standby.port)):
            holder.run(never)
    standby.stop()
    for level in LEVELS:
        holder = make_holder(level, database, first)
        assert holder.run(
            lambda run: backend(run, database) > 0, period="alone", job=f"app:{level}"
        )

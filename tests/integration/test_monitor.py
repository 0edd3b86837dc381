"""Holds that are watched: a loss is seen at once, silence counts as a loss, and no proof is in the way."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import select
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typing_extensions import override

from celery_pglock import (
    attempts,
    claims,
    errors,
    execution,
    holds,
    interruptions,
    ledger,
    locks,
    monitor,
    runs,
    sessions,
    stacks,
)
from tests.integration.workbench import (
    Sessions,
    advisory_locks,
    may_leave_an_idle_connection,
    plan,
    row,
    terminate,
    work,
)
from tests.support.databases import Database
from tests.support.processes import Process, Processes, eventually
from tests.support.proxy import Proxy

LEVELS: list[sessions.Level] = ["session", "transaction"]
both_levels = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture
def proxy(database: Database) -> Iterator[Proxy]:
    proxy = Proxy(database.url)
    yield proxy
    proxy.close()


class Watched:
    """A hold and what was told of its loss, with the moment."""

    def __init__(self, session: sessions.Session) -> None:
        self.losses: list[tuple[holds.Loss, float]] = []
        self.session = session
        self.hold = holds.Hold(session, lambda loss: self.losses.append((loss, time.monotonic())))
        self.hold.begin()


def proven_again(session: sessions.Session, times: int = 3) -> None:
    """Wait until a session was proven so often without anybody else asking."""
    for _ in range(times):
        before = session.proven
        eventually(lambda before=before: session.proven > before, what="it is proven")  # type: ignore[misc]


# --- the end of a session --------------------------------------------------------------------


@both_levels
def test_the_end_of_a_session_is_seen_within_50_ms(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> None:
    delays = []
    for _ in range(20):
        watched = Watched(lock_sessions.open(database.url, level))
        started = time.monotonic()
        database.rows("select pg_terminate_backend(%s)", watched.session.pid)
        eventually(lambda watched=watched: watched.losses, 1.0, "it is told", interval=0.001)  # type: ignore[misc]
        ((loss, moment),) = watched.losses
        delays.append((moment - started) * 1000)
        assert not watched.hold.held
        assert watched.hold.state == "lost"
        assert (loss.reason, loss.backend_pid) == (holds.ENDED, watched.session.pid)
    print(f"{level}: median {statistics.median(delays):.1f} ms, maximum {max(delays):.1f} ms")
    assert statistics.median(delays) < 50


@both_levels
def test_the_end_of_a_session_is_seen_without_epoll_too(
    database: Database,
    lock_sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    level: sessions.Level,
) -> None:
    """As on systems that have none; there the sockets are looked at every 20 ms."""
    monkeypatch.delattr(select, "epoll")
    monkeypatch.setattr(monitor._Process, "monitor", None)  # noqa: SLF001 - a fresh one
    watched, sound = (Watched(lock_sessions.open(database.url, level)) for _ in range(2))
    database.rows("select pg_terminate_backend(%s)", watched.session.pid)
    eventually(lambda: watched.losses, 1.0, "it is told")
    assert (watched.hold.held, sound.hold.held) == (False, True)
    assert sound.hold.release() is None


def test_control_without_the_socket_only_the_next_proof_tells(
    database: Database, lock_sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor.Monitor, "_register", lambda *_: None)
    watched = Watched(lock_sessions.open(database.url, lost_after=2.0))
    terminate(database, watched.session.pid)
    assert watched.hold.held
    eventually(lambda: watched.losses, 3.0, "it is told")
    ((loss, _),) = watched.losses
    assert loss.silent_for >= 1.0


def test_a_connection_that_is_reset_is_lost(proxy: Proxy, lock_sessions: Sessions) -> None:
    watched = Watched(lock_sessions.open(proxy.url))
    proxy.reset()
    eventually(lambda: watched.losses, 1.0, "it is told")


# --- silence -----------------------------------------------------------------------------------


def test_a_quiet_session_is_proven_and_stays_held(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url, lost_after=1.0)
    assert locks.acquire(session, 4711, "pglock:test")
    watched = Watched(session)
    proven_again(session)
    assert watched.hold.held
    assert watched.hold.release() is None
    assert locks.release(session, 4711, "pglock:idle")
    assert not watched.losses
    assert session.alive


def test_silence_is_a_loss_and_the_holder_knows_first(
    proxy: Proxy, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(proxy.url, lost_after=1.0)
    watched = Watched(session)
    proven_again(session, 1)
    proxy.hold()
    proven = session.proven
    eventually(lambda: not watched.hold.held, 2.0, "the deadline", interval=0.005)
    # Well before the server may free a client that has vanished: three times as long.
    assert time.monotonic() - proven < 1.3
    eventually(lambda: watched.losses, 2.0, "it is told")
    ((loss, _),) = watched.losses
    assert loss.reason == "no answer from the server"
    assert 1.0 <= loss.silent_for < 2.0
    assert proxy.swallowed
    # An answer that comes too late changes nothing.
    proxy.flow()
    assert watched.hold.state == "lost"
    assert watched.hold.release() is loss


def test_control_without_proofs_the_deadline_passes_on_a_sound_session(
    database: Database, lock_sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds.Hold, "tick", lambda _: float("inf"))
    watched = Watched(lock_sessions.open(database.url, lost_after=1.0))
    assert watched.hold.held
    eventually(lambda: not watched.hold.held, 2.0, "the deadline")
    assert watched.session.alive


def test_a_thread_that_waits_for_an_answer_is_let_go(proxy: Proxy, lock_sessions: Sessions) -> None:
    session = lock_sessions.open(proxy.url, lost_after=1.0)
    watched = Watched(session)
    proxy.hold()
    started = time.monotonic()
    assert watched.hold.check() is not None
    assert time.monotonic() - started < 2.5
    assert session.connection.closed


def test_control_without_severing_that_thread_waits_on(
    proxy: Proxy, lock_sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions.Session, "sever", lambda _: None)
    watched = Watched(lock_sessions.open(proxy.url, lost_after=1.0))
    proxy.hold()
    waiting = threading.Thread(target=watched.hold.check)
    waiting.start()
    eventually(lambda: watched.losses, 3.0, "it is told")
    waiting.join(0.5)
    assert waiting.is_alive()
    proxy.flow()
    waiting.join(10)


FROZEN = """
import sys, time
from celery_pglock import holds, locks, sessions, stacks

plan = sessions.Plan(target=sys.argv[1], level="session", application="pglock:frozen", lost_after=1.0)
session = stacks.open_session(plan)
assert locks.acquire(session, 4711, "pglock:frozen")
if sys.argv[2] == "deadline is final":
    ask_first = holds.Hold.tick

    def tick(hold):
        if time.monotonic() > hold._deadline:
            hold.lose("deadline")
        return ask_first(hold)

    holds.Hold.tick = tick

def say(*words):
    # In one piece: two threads speak, and print() writes the end of a line by itself.
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

hold = holds.Hold(session, lambda loss: say("lost", loss))
hold.begin()
say("held")
before = time.monotonic()
while True:
    time.sleep(0.01)
    now = time.monotonic()
    if now - before > 1.5:
        say("thawed")
        while not hold.held and hold.state == "held":
            time.sleep(0.001)
        say(hold.state, hold.held, hold.check())
        break
    before = now
time.sleep(60)
"""


def frozen_and_thawed(database: Database, processes: Processes, rule: str) -> Process:
    process = processes.python("-c", FROZEN, database.url, rule, name="frozen")
    process.wait_for_line("^held$")
    process.stop()
    frozen = time.monotonic()
    while time.monotonic() - frozen < 2.0:  # twice the deadline
        assert [key for key, _ in advisory_locks(database)] == [4711]
        time.sleep(0.05)
    process.cont()
    process.wait_for_line("^thawed$")
    return process


def test_a_frozen_process_keeps_its_lock_and_knows_it(
    database: Database, processes: Processes
) -> None:
    process = frozen_and_thawed(database, processes, "ask first")
    process.wait_for_line("^held True None$")
    assert "lost" not in process.output()


def test_control_a_final_deadline_would_lose_a_lock_that_is_there(
    database: Database, processes: Processes
) -> None:
    process = frozen_and_thawed(database, processes, "deadline is final")
    process.wait_for_line("^lost ")
    assert [key for key, _ in advisory_locks(database)] == [4711]


# --- proofs and the body's own statements ------------------------------------------------------


@pytest.fixture
def in_flight(proxy: Proxy, lock_sessions: Sessions) -> Watched:
    """A hold whose proof is on its way and cannot arrive."""
    session = lock_sessions.open(proxy.url, lost_after=4.0)
    watched = Watched(session)
    proven_again(session, 1)
    proxy.hold()
    eventually(lambda: proxy.swallowed, 4.0, "a proof is on its way")
    return watched


def test_a_check_reads_the_answer_to_a_proof(in_flight: Watched, proxy: Proxy) -> None:
    flows = threading.Timer(0.1, proxy.flow)
    flows.start()
    assert in_flight.hold.check() is None
    flows.join()
    assert in_flight.hold.held
    proven_again(in_flight.session, 1)
    assert in_flight.hold.release() is None


def test_what_is_said_after_the_release_reads_the_answer_to_a_proof(
    in_flight: Watched, proxy: Proxy
) -> None:
    assert in_flight.hold.release() is None
    flows = threading.Timer(0.1, proxy.flow)
    flows.start()
    assert in_flight.session.execute(b"select 1 as one").one == 1
    flows.join()
    assert in_flight.session.alive


def test_control_a_statement_that_does_not_read_it_fails(in_flight: Watched, proxy: Proxy) -> None:
    assert in_flight.hold.release() is None
    in_flight.session._asked = None  # noqa: SLF001 - as if there were no proof
    proxy.flow()
    with pytest.raises(Exception, match="another command is already in progress"):
        in_flight.session.execute(b"select 1 as one")


class Eager(holds.Hold):
    """A hold that is proven again as soon as it has been proven."""

    asked = 0

    @property
    @override
    def due(self) -> float:
        if self._owed_since is None:
            self.asked += 1
            return 0.0
        return min(super().due, time.monotonic() + 0.001)


@pytest.mark.parametrize("moment", ["checks", "statements after a release"])
def test_proofs_are_never_in_the_way(
    database: Database, lock_sessions: Sessions, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(holds, "_SOON", 0.001)
    session = lock_sessions.open(database.url)
    deadline = time.monotonic() + 1.5
    hold = Eager(session)
    rounds = asked = 0
    hold.begin()
    while time.monotonic() < deadline:
        if moment == "checks":
            assert hold.check() is None
        else:
            assert hold.release() is None
            assert session.execute(b"select 1 as one").one == 1
            asked += hold.asked
            hold = Eager(session)
            hold.begin()
        rounds += 1
        time.sleep(0.0005)  # so that the proofs have their turn
    asked += hold.asked
    assert hold.release() is None
    assert session.execute(b"select 1 as one").one == 1
    print(f"{rounds} {moment}, {asked} proofs")
    assert rounds > 100
    assert asked > 20


class Struck(BaseException):
    """Strikes anywhere, as a time limit does."""


@may_leave_an_idle_connection
def test_a_time_limit_that_strikes_beside_a_proof_leaves_no_lock(
    database: Database, lock_sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "_SOON", 0.001)
    made: list[Eager] = []

    def eager(*arguments: Any) -> Eager:
        made.append(Eager(*arguments))
        return made[-1]

    monkeypatch.setattr(holds, "Hold", eager)
    executor = execution.Executor(
        stack=lock_sessions.stack(database.url),
        records=ledger.Ledger(),
        terms=attempts.Terms(classify=lambda _: claims.Verdict(status="failed", reason="struck")),
    )
    armed = [False]

    def handle(*_: object) -> None:
        if armed[0]:
            armed[0] = False
            raise Struck

    def body(run: runs.Run) -> None:
        for _ in range(3):
            run.check()
            time.sleep(0.0005)

    # A strike inside somebody's callback of the collector would be lost there.
    gc.disable()
    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.main_thread().ident or 0
    struck = 0
    try:
        for number in range(100):
            delay = random.uniform(0.0005, 0.008)  # noqa: S311 - only a moment
            timer = threading.Timer(delay, lambda: signal.pthread_kill(main, signal.SIGUSR1))
            armed[0] = True
            try:
                timer.start()
                executor.execute(work(f"period {number}"), body)
            except Struck:
                struck += 1
            finally:
                armed[0] = False
                timer.join()
            eventually(lambda: not advisory_locks(database), 2.0, "no lock is left")
            answer = executor.execute(work(f"later {number}"), body)
            assert isinstance(answer, attempts.Ran)
    finally:
        signal.signal(signal.SIGUSR1, before)
        gc.enable()
    # Here, where the warnings of what was dropped half done are expected.
    gc.collect()
    print(f"{struck} of 100 struck, {sum(hold.asked for hold in made)} proofs")
    assert struck > 20
    assert not [hold for hold in made if hold.state == "lost" and "no answer" in str(hold.loss)]


# --- a hold is one hold ------------------------------------------------------------------------


def test_an_event_that_comes_late_does_not_touch_the_next_run(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    first = Watched(session)
    assert first.hold.release() is None
    second = Watched(session)
    first.hold.notice(0x2000)  # EPOLLRDHUP, for the run before
    assert (first.hold.state, second.hold.state) == ("released", "held")
    assert not first.losses
    assert not second.losses
    assert second.hold.held
    terminate(database, session.pid)
    eventually(lambda: second.losses, 1.0, "it is told")
    assert not first.losses
    assert second.hold.release() is not None
    assert second.hold.state == "lost"


def test_what_a_callback_raises_is_contained(database: Database, lock_sessions: Sessions) -> None:
    def fail(_: holds.Loss) -> None:
        raise ZeroDivisionError

    session = lock_sessions.open(database.url)
    holds.Hold(session, fail).begin()
    other = Watched(lock_sessions.open(database.url))
    terminate(database, session.pid, other.session.pid)
    eventually(lambda: other.losses, 1.0, "the other is told")


class Broken(holds.Hold):
    """A hold that fails whatever the monitor asks of it."""

    @override
    def tick(self) -> float:
        raise ZeroDivisionError

    @override
    def notice(self, events: int) -> None:
        raise ZeroDivisionError


def fail_in(moment: str, database: Database, lock_sessions: Sessions) -> Broken:
    """Begin a hold that fails when it is due, or when its socket says something."""
    broken = Broken(lock_sessions.open(database.url, lost_after=0.5 if moment == "tick" else 60.0))
    broken.begin()
    if moment == "notice":
        terminate(database, broken.session.pid)
    return broken


@pytest.mark.parametrize("moment", ["tick", "notice"])
def test_what_a_hold_raises_does_not_end_the_watching(
    database: Database,
    lock_sessions: Sessions,
    caplog: pytest.LogCaptureFixture,
    moment: str,
) -> None:
    broken = fail_in(moment, database, lock_sessions)

    def told() -> list[Any]:
        return [r for r in caplog.records if vars(r).get("event") == "monitor_failed"]

    (record, *_) = eventually(told, 5.0, "it is told")
    assert record.levelname == "ERROR"
    other = Watched(lock_sessions.open(database.url, lost_after=1.0))
    proven_again(other.session, 1)
    terminate(database, other.session.pid)
    eventually(lambda: other.losses, 1.0, "the other is told")
    if moment == "tick":
        count = len(told())
        eventually(lambda: len(told()) > count, 5.0, "it is asked again")
        assert len(told()) < 20, "but not at once"
    broken.release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_control_what_a_hold_raises_would_end_the_thread(
    database: Database, lock_sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor._Process, "monitor", None)  # noqa: SLF001 - a fresh one
    monkeypatch.setattr(monitor, "_tick", lambda timed: timed.tick())
    broken = fail_in("tick", database, lock_sessions)
    thread = monitor.of_this_process()._thread  # noqa: SLF001
    eventually(lambda: not thread.is_alive(), 5.0, "the thread ends")
    other = Watched(lock_sessions.open(database.url, lost_after=60.0))
    terminate(database, other.session.pid)
    assert not other.losses
    assert other.hold.held, "nobody has told it"
    broken.release()


def test_a_session_that_is_closed_is_no_loss(database: Database, lock_sessions: Sessions) -> None:
    watched = Watched(lock_sessions.open(database.url))
    watched.session.close()
    assert watched.hold.state == "released"
    later = Watched(lock_sessions.open(database.url))
    terminate(database, later.session.pid)
    eventually(lambda: later.losses, 1.0, "the next on that descriptor is told")
    assert not watched.losses


@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")
def test_a_hold_that_nobody_has_any_more_is_not_kept(database: Database) -> None:
    """As after a time limit that strikes while its session is being closed."""
    session = stacks.open_session(plan(database.url, lost_after=1.0))
    assert locks.acquire(session, 4711, "pglock:test")
    hold = holds.Hold(session)
    hold.begin()
    proven_again(session, 1)
    descriptor, watching = hold.descriptor, monitor.of_this_process()
    watched = watching._holds  # noqa: SLF001 - what is left in it is seen nowhere else
    assert descriptor in watched
    del session, hold
    eventually(lambda: not advisory_locks(database), 1.5, "the lock is free")
    watching.wake()
    eventually(lambda: descriptor not in watched, 5.0, "nothing refers to it")


FORKED = """
import os, sys, time
from celery_pglock import holds, sessions, stacks

def hold(lost_after=1.0):
    plan = sessions.Plan(target=sys.argv[1], level="session", application="x", lost_after=lost_after)
    session = stacks.open_session(plan)
    hold = holds.Hold(session, lambda loss: print(os.getpid(), "lost", flush=True))
    hold.begin()
    return hold

def proven(hold):
    before = hold.session.proven
    while hold.session.proven == before:
        time.sleep(0.01)

ours = hold()
if (child := os.fork()) == 0:
    ours.release()
    proven(hold())
    print("child proven", flush=True)
    os._exit(0)
os.waitpid(child, 0)
proven(ours)
print("parent proven", ours.held, flush=True)
"""


def test_a_forked_child_watches_its_own(database: Database, processes: Processes) -> None:
    # Python 3.12 warns of every fork beside a thread; that is what is tried here.
    quietly = ("-W", "ignore::DeprecationWarning")
    process = processes.python(*quietly, "-c", FORKED, database.url, name="forked")
    assert process.wait() == 0, process.output()
    assert process.output().split("\n")[:2] == ["child proven", "parent proven True"]


# --- interrupting the body ---------------------------------------------------------------------


def pass_the_time() -> None:
    time.sleep(20)


def read_a_socket() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.recv(1)


def compute() -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        sum(range(1000))


def swallow_it() -> None:
    try:
        pass_the_time()
    except errors.LockLost:
        return


@dataclasses.dataclass
class Told:
    """An executor that interrupts, and what it was told."""

    executor: execution.Executor
    losses: list[tuple[errors.LockLost, holds.Loss]]

    def under(self, **terms: Any) -> execution.Executor:
        changed = dataclasses.replace(self.executor.terms, **terms)
        return dataclasses.replace(self.executor, terms=changed)


@pytest.fixture(params=LEVELS)
def told(request: pytest.FixtureRequest, database: Database, lock_sessions: Sessions) -> Told:
    losses: list[Any] = []
    executor = execution.Executor(
        stack=lock_sessions.stack(database.url, request.param),
        records=ledger.Ledger(),
        terms=attempts.Terms(
            classify=lambda error: claims.Verdict(
                status="failed",
                reason="lock lost" if isinstance(error, errors.LockLost) else "error",
            ),
            lost=lambda _run, error, loss: losses.append((error, loss)),
            interrupt=True,
        ),
    )
    return Told(executor, losses)


def struck_while(database: Database, act: Callable[[], Any]) -> Callable[[runs.Run], Any]:
    def body(run: runs.Run) -> Any:
        (pid,) = {pid for key, pid in advisory_locks(database) if key == run.key}
        killer = threading.Timer(
            0.05, lambda: database.rows("select pg_terminate_backend(%s)", pid)
        )
        killer.start()
        try:
            return act()
        finally:
            killer.join()

    return body


@pytest.mark.parametrize("act", [pass_the_time, read_a_socket, compute, swallow_it])
def test_a_body_in_the_main_thread_is_interrupted(
    told: Told, database: Database, act: Callable[[], None]
) -> None:
    started = time.monotonic()
    with pytest.raises(errors.LockLost):
        told.executor.execute(work(), struck_while(database, act))
    assert time.monotonic() - started < 5
    assert row(database, "status", "reason") == ("failed", "lock lost")
    ((error, loss),) = told.losses
    assert (error.job, error.reason) == ("app:report", loss.reason)


def test_control_a_body_that_is_not_to_be_interrupted_ends_by_itself(
    told: Told, database: Database
) -> None:
    executor = told.under(interrupt=False)
    ended = []

    def act() -> None:
        eventually(lambda: told.losses, what="it is told")
        ended.append(True)

    with pytest.raises(errors.LockLost):
        executor.execute(work(), struck_while(database, act))
    assert ended


def test_a_body_in_another_thread_is_told_at_its_end(told: Told, database: Database) -> None:
    caught: list[BaseException] = []

    def act() -> None:
        eventually(lambda: told.losses, what="it is told")

    def run() -> None:
        try:
            told.executor.execute(work(), struck_while(database, act))
        except errors.LockLost as lost:
            caught.append(lost)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert len(caught) == 1
    assert len(told.losses) == 1


def test_a_late_strike_hits_nobody() -> None:
    first, second = interruptions.Interruption(), interruptions.Interruption()
    with first:
        pass
    with second:
        first.strike(ZeroDivisionError())
        assert interruptions._Handler.number is not None  # noqa: SLF001
        # As if it had been sent in time and were handled only now.
        signal.pthread_kill(
            threading.main_thread().ident or 0,
            interruptions._Handler.number,  # noqa: SLF001
        )
        assert os.getpid()
    third = interruptions.Interruption()
    with third, pytest.raises(ZeroDivisionError):
        third.strike(ZeroDivisionError())


def test_a_strike_before_the_beginning_ends_what_has_not_begun() -> None:
    early = interruptions.Interruption()
    early.strike(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError), early:
        pytest.fail("it began")
    # Once: and nobody is left to be interrupted.
    with early:
        pass
    assert early not in interruptions.Interruption._armed  # noqa: SLF001


@pytest.mark.parametrize("interrupt", [True, False], ids=["as it is", "control"])
def test_a_loss_before_the_body_begins_keeps_it_from_beginning(
    told: Told, database: Database, monkeypatch: pytest.MonkeyPatch, *, interrupt: bool
) -> None:
    begin = holds.Hold.begin

    def begin_and_lose(hold: holds.Hold) -> None:
        begin(hold)
        terminate(database, hold.session.connection.info.backend_pid)
        eventually(lambda: told.losses, what="it is told")

    monkeypatch.setattr(holds.Hold, "begin", begin_and_lose)
    began: list[runs.Run] = []
    with pytest.raises(errors.LockLost):
        told.under(interrupt=interrupt).execute(work(), began.append)
    assert bool(began) is not interrupt
    assert row(database, "status", "reason", "lost_attempts") == ("failed", "lock lost", 0)
    assert len(told.losses) == 1


def test_a_tolerated_loss_is_told_and_recorded_by_the_fence(told: Told, database: Database) -> None:
    executor = told.under(interrupt=False, tolerate_loss=True)

    def act() -> str:
        eventually(lambda: told.losses, what="it is told")
        return "value"

    if executor.stack._plan.level == "transaction":  # noqa: SLF001
        with pytest.raises(errors.LockLost):  # what it wrote is gone
            executor.execute(work(), struck_while(database, act))
        return
    answer = executor.execute(work(), struck_while(database, act))
    assert isinstance(answer, attempts.Ran)
    assert (answer.value, answer.lost) == ("value", None)
    assert row(database, "status") == "done"
    assert len(told.losses) == 1

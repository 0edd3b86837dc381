"""Watching the sessions that hold locks, so that a run learns at once that it has lost its own.

psycopg does not notice that the server has ended a session before it is used again; the socket
does, within a millisecond. A network that swallows packets shows nothing at all, so a quiet
session is asked who it is every half of ``lost_after``, and what it was last proven at, plus
``lost_after``, is how long it counts as held. The server frees a vanished client only after
three times that: the holder's clock runs out first.

There is one thread per process, started with the first hold in it. It waits in epoll, which
can be given another socket while a thread waits in it, so a run that begins or ends wakes
nobody. It asks and reads without waiting, so one session that does not answer delays no other.

A hold is NEW, then HELD, then RELEASED or LOST, and that is final: nothing is reconnected, and
what happens to a session later concerns the hold that has it then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import psycopg

from celery_pglock import sessions

_log: Final = logging.getLogger("celery_pglock.monitor")

ENDED: Final = "its session was ended by the server"

# With no hold left the thread looks once more after this time, and then sleeps until it is
# woken: in a busy process it is hardly ever asleep, so hardly any run has to wake it.
_LINGER: Final = 5.0
# Where threads are greenlets, epoll would stop them all, and elsewhere than on Linux there is
# none: there the sockets are looked at this often.
_TICK: Final = 0.02
# How soon to try again when the body's own thread is just using the session.
_SOON: Final = 0.05

# Outside Linux a hang-up is reported without being asked for.
_HANG_UP: Final[int] = getattr(select, "EPOLLRDHUP", 0)
_ANSWER: Final[int] = select.POLLIN

State = Literal["new", "held", "released", "lost"]


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """How a hold was lost.

    Attributes:
        reason: how it was noticed.
        backend_pid: the server process that held the locks.
        silent_for: seconds since the session was last proven to live.
    """

    reason: str
    backend_pid: int
    silent_for: float


class Hold:
    """What one run holds through one session, from its beginning to its end.

    Args:
        session: whose locks are held. A session-level one is proven by short queries; a
            transaction is proven by its own statements and its commit, so there only the end
            of the connection is watched.
        on_loss: called once, on whatever thread notices, and never after ``release``.
    """

    def __init__(
        self, session: sessions.Session, on_loss: Callable[[Loss], None] = lambda _: None
    ) -> None:
        self.session = session
        self.state: State = "new"
        self.loss: Loss | None = None
        self.descriptor = -1
        self.proves = session.level == "session"
        self._on_loss = on_loss
        self._transition = threading.Lock()
        # Who may use the connection. Reentrant: a statement that fails closes its session,
        # and that ends the hold.
        self._connection = threading.RLock()
        # Since when an answer is owed, whoever asked.
        self._owed_since: float | None = None

    def begin(self) -> None:
        """Start watching."""
        self.session.on_close = weakref.WeakMethod(self.release)
        self.descriptor = self.session.connection.fileno()
        self.state = "held"
        _of_this_process().watch(self)

    @property
    def held(self) -> bool:
        """Whether the locks are held: no after a loss or past the deadline; no query."""
        return self.state == "held" and time.monotonic() < self._deadline

    @property
    def _deadline(self) -> float:
        return self.session.proven + self.session.lost_after if self.proves else math.inf

    def check(self) -> Loss | None:
        """Ask the server, unless it is known; return how the hold was lost, or None."""
        if self.state == "held" and self.proves:
            try:
                with self._asking():
                    pid = self.session.execute(b"select pg_catalog.pg_backend_pid() as pid").pid
            except psycopg.Error as error:
                self._lose(_reason(error))
            else:
                if pid != self.session.pid:
                    self._lose("its session was replaced by another")
        return self.loss

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        with self._connection:
            if taken_over := self._owed_since is not None:
                # The answer that the monitor waits for is read by this statement.
                _of_this_process().listen(self, answers=False)
            self._owed_since = time.monotonic()
            # A statement that fails closes its session, which must not look like a release.
            self.session.on_close, on_close = None, self.session.on_close
            try:
                yield
            finally:
                self.session.on_close = on_close
                self._owed_since = None
                if taken_over:
                    # It sleeps until that answer is overdue.
                    _of_this_process().wake()

    def release(self) -> Loss | None:
        """End the hold; return how it was lost before that, or None.

        Afterwards the session is the caller's alone, with an answer perhaps still on its way,
        which its next statement reads.
        """
        if self.session.owner != os.getpid():
            # A forked child: the locks of this lock may be held by threads it does not have.
            return self.loss
        with self._transition:
            if self.state != "lost":
                self.state = "released"
        _of_this_process().forget(self)
        with self._connection:
            self.session.on_close = None
        return self.loss

    # --- for the monitor's thread --------------------------------------------------------------

    @property
    def due(self) -> float:
        """When the clock says something next: to ask, or that the answer is overdue."""
        if not self.proves:
            return math.inf
        half = self.session.lost_after / 2
        if self._owed_since is None:
            return self.session.proven + half
        # A process that was frozen, or whose interpreter was, comes back with its deadline
        # past and nothing asked: then it asks first, for the locks may well be there.
        return max(self._deadline, self._owed_since + half)

    def tick(self) -> float:
        """Do what the clock says; return when to come back."""
        now = time.monotonic()
        if now < self.due:
            return self.due
        if self._owed_since is not None:
            self._lose("no answer from the server")
            # Whoever waits for an answer, in the body or at its end, has waited long enough.
            self.session.sever()
            return math.inf
        if not self._connection.acquire(blocking=False):
            return now + _SOON
        broken = None
        try:
            if self.state == "held":
                self._owed_since = now
                self.session.ask()
                _of_this_process().listen(self, answers=True)
        except psycopg.Error as error:
            broken = error
        finally:
            self._connection.release()
        if broken is not None:
            self._lose(_reason(broken))
        return self.due

    def notice(self, events: int) -> None:
        """Take what the socket says."""
        if events & ~_ANSWER:
            self._lose(ENDED)
            return
        if not self._connection.acquire(blocking=False):
            # The body's own thread is reading that.
            return
        broken = None
        try:
            if self.state == "held" and self._owed_since is not None and self.session.answered():
                self._owed_since = None
                _of_this_process().listen(self, answers=False)
        except psycopg.Error as error:
            broken = error
        finally:
            self._connection.release()
        if broken is not None:
            self._lose(_reason(broken))

    def _lose(self, reason: str) -> None:
        with self._transition:
            if self.state != "held":
                return
            self.loss = Loss(reason, self.session.pid, time.monotonic() - self.session.proven)
            self.state = "lost"
        _of_this_process().forget(self)
        try:
            self._on_loss(self.loss)
        except Exception:  # noqa: BLE001 - the watching of all others must go on
            _log.exception("telling of a lost lock failed", extra={"event": "lock_lost_untold"})


class View:
    """A hold as its run sees it, which does not keep it alive.

    A time limit can strike where a session is just being closed. Then nothing refers to it any
    more, so psycopg closes it and its lock is free: unless a cycle, or the monitor, kept it.
    """

    def __init__(self, hold: Hold) -> None:
        self._hold = weakref.ref(hold)

    @property
    def held(self) -> bool:
        """Whether the locks are held; no query."""
        hold = self._hold()
        return hold is not None and hold.held

    def check(self) -> str | None:
        """Ask the server; return why the locks are not held, or None."""
        hold = self._hold()
        loss = None if hold is None else hold.check()
        return None if loss is None else loss.reason


class Monitor:
    """The holds of one process, and the thread that watches them."""

    def __init__(self) -> None:
        self._holds: weakref.WeakValueDictionary[int, Hold] = weakref.WeakValueDictionary()
        self._mutex = threading.Lock()
        self._wakes_at = 0.0
        self._looking = cooperative() or not hasattr(select, "epoll")
        self._epoll: Any = _sockets()
        self._bell = threading.Event()
        self._wake_descriptor = -1
        if not self._looking:
            self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._wake_descriptor, _ANSWER)
        self._thread = threading.Thread(target=self._run, name="celery-pglock-monitor", daemon=True)
        self._thread.start()

    def watch(self, hold: Hold) -> None:
        """Watch a hold from now on."""
        with self._mutex:
            # First here, so that a hold that is given up half-way is taken out again.
            self._holds[hold.descriptor] = hold
            self._register(hold.descriptor)
            late = hold.due < self._wakes_at or self._looking
        if late:
            self.wake()

    def _register(self, descriptor: int) -> None:
        try:
            self._epoll.register(descriptor, _HANG_UP)
        except FileExistsError:
            # Left by a socket of that number that a forked child still has open.
            self._epoll.modify(descriptor, _HANG_UP)

    def forget(self, hold: Hold) -> None:
        """Watch a hold no longer."""
        with self._mutex:
            # A descriptor that was closed may be another session's by now.
            if self._holds.get(hold.descriptor) is hold:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(hold.descriptor)
                del self._holds[hold.descriptor]

    def listen(self, hold: Hold, *, answers: bool) -> None:
        """Be woken by answers, or only by the end of the connection.

        Only while an answer is expected: the statements of a body would wake the thread at
        each of theirs.
        """
        events = _HANG_UP | (_ANSWER if answers else 0)
        with self._mutex:
            if self._holds.get(hold.descriptor) is hold:
                with contextlib.suppress(OSError):
                    self._epoll.modify(hold.descriptor, events)

    def abandon(self) -> None:
        """Close what a forked child has inherited; the parent's set of sockets stays as it is."""
        with contextlib.suppress(OSError):
            self._epoll.close()
            if self._wake_descriptor >= 0:
                os.close(self._wake_descriptor)

    def wake(self) -> None:
        """Have the thread look at the clock."""
        if self._looking:
            self._bell.set()
        else:
            os.eventfd_write(self._wake_descriptor, 1)

    def _run(self) -> None:
        until = 0.0
        while True:
            for descriptor, events in self._wait(until):
                self._notice(descriptor, events)
            until = self._look_at_the_clock(lingered=not self._holds and until != math.inf)

    def _notice(self, descriptor: int, events: int) -> None:
        # Not in the loop itself, whose variables would keep the last hold alive.
        if descriptor == self._wake_descriptor:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(descriptor)
        elif (hold := self._holds.get(descriptor)) is not None:
            hold.notice(events)

    def _look_at_the_clock(self, *, lingered: bool) -> float:
        with self._mutex:
            holds = list(self._holds.values())
            # From here on whoever comes rings the bell, until the next look is settled.
            self._wakes_at = math.inf
        next_look = min((hold.tick() for hold in holds), default=math.inf)
        with self._mutex:
            if self._holds or not lingered:
                self._wakes_at = min(next_look, time.monotonic() + _LINGER)
            return self._wakes_at

    def _wait(self, until: float) -> list[tuple[int, int]]:
        left = max(0.0, until - time.monotonic())
        if not self._looking:
            # Rounded up to milliseconds by epoll itself.
            return list(self._epoll.poll(None if left == math.inf else left))
        if self._holds:
            self._bell.wait(min(left, _TICK))
        else:
            self._bell.wait(None if left == math.inf else left)
        self._bell.clear()
        return list(self._epoll.poll(0))


def _reason(error: psycopg.Error) -> str:
    # The first line only: what follows repeats it in libpq's words.
    return next(iter(str(error).splitlines()), ENDED)


def cooperative() -> bool:
    """Whether gevent has made greenlets of this process's threads."""
    patching = sys.modules.get("gevent.monkey")
    return patching is not None and bool(patching.is_module_patched("select"))


class Polled:
    """What ``select.epoll`` offers, by ``select.poll``, for systems without it."""

    def __init__(self) -> None:
        self._events: dict[int, int] = {}

    def register(self, descriptor: int, events: int) -> None:
        """Add a socket; FileExistsError when it is there."""
        if descriptor in self._events:
            raise FileExistsError(descriptor)
        self._events[descriptor] = events

    def modify(self, descriptor: int, events: int) -> None:
        """Change what is looked for; FileNotFoundError when it is not there."""
        if descriptor not in self._events:
            raise FileNotFoundError(descriptor)
        self._events[descriptor] = events

    def unregister(self, descriptor: int) -> None:
        """Take a socket out; FileNotFoundError when it is not there."""
        if self._events.pop(descriptor, None) is None:
            raise FileNotFoundError(descriptor)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """Look at all sockets, for at most ``timeout`` seconds."""
        poller = select.poll()
        for descriptor, events in list(self._events.items()):
            poller.register(descriptor, events)
        return poller.poll(timeout * 1000)

    def close(self) -> None:
        """Forget all sockets."""
        self._events.clear()


def _sockets() -> Any:
    # gevent takes it out of the module, because waiting in it would stop every greenlet.
    if cooperative():
        monkey = sys.modules["gevent.monkey"]
        with contextlib.suppress(AttributeError):
            return monkey.get_original("select", "epoll")()
    return select.epoll() if hasattr(select, "epoll") else Polled()


class _Process:
    """The monitor of this process, once there is one."""

    monitor: Monitor | None = None
    mutex = threading.Lock()


def _of_this_process() -> Monitor:
    with _Process.mutex:
        if _Process.monitor is None:
            _Process.monitor = Monitor()
        return _Process.monitor


def _start_anew() -> None:
    inherited, _Process.monitor = _Process.monitor, None
    # It may have been held by a thread that does not exist in this process.
    _Process.mutex = threading.Lock()
    if inherited is not None:
        inherited.abandon()


os.register_at_fork(after_in_child=_start_anew)

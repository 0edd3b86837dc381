"""The one thread of a process that watches what must not end unnoticed.

It is started with the first hold. It waits in epoll, which can be given another socket while a
thread waits in it, so a run that begins or ends wakes nobody; between the sockets it keeps the
clock for the holds and for the idle sessions. Nothing that it calls may wait for an answer, so
one session that is silent delays no other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import sys
import threading
import time
import weakref
from typing import Any, Final, Protocol

# With no hold left the thread looks once more after this time, and then sleeps until something
# is due: in a busy process it is hardly ever asleep, so hardly any run has to wake it.
_LINGER: Final = 5.0
# Where threads are greenlets, epoll would stop them all, and elsewhere than on Linux there is
# none: there the sockets are looked at this often.
_TICK: Final = 0.02

# Outside Linux a hang-up is reported without being asked for.
_HANG_UP: Final[int] = getattr(select, "EPOLLRDHUP", 0)
ANSWER: Final[int] = select.POLLIN


_log: Final = logging.getLogger("celery_pglock.monitor")

# What epoll is told is 32 bits of milliseconds.
_LONGEST_WAIT: Final = 86400.0
_AFTER_A_FAILURE: Final = 1.0


class Timed(Protocol):
    """What has something to do at a certain time."""

    @property
    def due(self) -> float:
        """When (monotonic); ``math.inf`` for never."""
        ...

    def tick(self) -> float:
        """Do what is due, without waiting for anybody; return when to come back."""
        ...


class Watched(Timed, Protocol):
    """What also has a socket."""

    descriptor: int

    def notice(self, events: int) -> None:
        """Take what the socket says."""
        ...


class Monitor:
    """The holds of one process, and the thread that watches them."""

    def __init__(self) -> None:
        # Not a WeakValueDictionary, whose every change is half a dozen calls; references that died
        # are taken out at the next look at the clock.
        self._holds: dict[int, weakref.ref[Watched]] = {}
        self._timed: weakref.WeakSet[Timed] = weakref.WeakSet()
        self._mutex = threading.Lock()
        self._wakes_at = 0.0
        self._busy_at = -math.inf
        self._looking = cooperative() or not hasattr(select, "epoll")
        self._epoll: Any = _sockets()
        self._bell = threading.Event()
        self._wake_descriptor = -1
        if not self._looking:
            self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._wake_descriptor, ANSWER)
        self._thread = threading.Thread(target=self._run, name="celery-pglock-monitor", daemon=True)
        self._thread.start()

    def watch(self, hold: Watched) -> None:
        """Watch a hold from now on."""
        with self._mutex:
            # First here, so that a hold that is given up half-way is taken out again.
            self._holds[hold.descriptor] = weakref.ref(hold)
            self._register(hold.descriptor)
            self._busy_at = time.monotonic()
            late = hold.due < self._wakes_at or self._looking
        if late:
            self.wake()

    def keep_time_for(self, timed: Timed) -> None:
        """Call its ``tick`` when it is due, for as long as somebody else refers to it."""
        with self._mutex:
            self._timed.add(timed)
        self.be_awake_at(timed.due)

    def be_awake_at(self, due: float) -> None:
        """Look at the clock then, for something whose time is kept already and has changed."""
        # Without the mutex: before the thread asks anything when it is due, it says here that
        # whoever comes is to wake it. So either it sees the change, or this does.
        if due < self._wakes_at:
            self.wake()

    def _register(self, descriptor: int) -> None:
        try:
            self._epoll.register(descriptor, _HANG_UP)
        except FileExistsError:
            # Left by a socket of that number that a forked child still has open.
            self._epoll.modify(descriptor, _HANG_UP)

    def forget(self, hold: Watched) -> None:
        """Watch a hold no longer."""
        with self._mutex:
            # A descriptor that was closed may be another session's by now.
            if self._watches(hold):
                try:  # noqa: SIM105 - ``suppress`` is three calls, and this is in every run
                    self._epoll.unregister(hold.descriptor)
                except OSError:
                    pass
                del self._holds[hold.descriptor]

    def _watches(self, hold: Watched) -> bool:
        watched = self._holds.get(hold.descriptor)
        return watched is not None and watched() is hold

    def listen(self, hold: Watched, *, answers: bool) -> None:
        """Be woken by answers, or only by the end of the connection.

        Only while an answer is expected: the statements of a body would wake the thread at
        each of theirs.
        """
        events = _HANG_UP | (ANSWER if answers else 0)
        with self._mutex:
            if self._watches(hold):
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
            until = self._look_at_the_clock()

    def _notice(self, descriptor: int, events: int) -> None:
        # Not in the loop itself, whose variables would keep the last hold alive.
        if descriptor == self._wake_descriptor:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(descriptor)
        elif (watched := self._holds.get(descriptor)) and (hold := watched()) is not None:
            try:
                hold.notice(events)
            except Exception:  # noqa: BLE001 - the watching of all others must go on
                _log.exception("watching a session failed", extra={"event": "monitor_failed"})

    def _look_at_the_clock(self) -> float:
        with self._mutex:
            # Referred to until the end: what is closed with a hold is not closed in here.
            holds = {number: watched() for number, watched in self._holds.items()}
            for number in [number for number, hold in holds.items() if hold is None]:
                del self._holds[number]
            due: list[Timed] = [*filter(None, holds.values()), *self._timed]
            # From here on whoever comes rings the bell, until the next look is settled.
            self._wakes_at = math.inf
        next_look = min(map(_tick, due), default=math.inf)
        with self._mutex:
            now = time.monotonic()
            if self._holds:
                self._busy_at = now
            linger = self._busy_at + _LINGER
            self._wakes_at = min(next_look, linger) if linger > now else next_look
            return self._wakes_at

    def _wait(self, until: float) -> list[tuple[int, int]]:
        left = max(0.0, until - time.monotonic())
        if left != math.inf:
            left = min(left, _LONGEST_WAIT)
        if not self._looking:
            # Rounded up to milliseconds by epoll itself.
            return list(self._epoll.poll(None if left == math.inf else left))
        if self._holds:
            self._bell.wait(min(left, _TICK))
        else:
            self._bell.wait(None if left == math.inf else left)
        self._bell.clear()
        return list(self._epoll.poll(0))


def _tick(timed: Timed) -> float:
    try:
        return timed.tick()
    except Exception:  # noqa: BLE001 - the watching of all others must go on
        _log.exception("watching a session failed", extra={"event": "monitor_failed"})
        return time.monotonic() + _AFTER_A_FAILURE


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


def of_this_process() -> Monitor:
    """Return the monitor of this process; the first call starts its thread."""
    if (found := _Process.monitor) is not None:
        return found
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

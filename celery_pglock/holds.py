"""What one run holds through one session, from its beginning to its end.

A hold is NEW, then HELD, then RELEASED or LOST, and that is final: nothing is reconnected, and
what happens to a session later concerns the hold that has it then.

psycopg does not notice that the server has ended a session before it is used again; the socket
does, within a millisecond. A network that swallows packets shows nothing at all, so a quiet
session is asked who it is every half of ``lost_after``, and what it was last proven at, plus
``lost_after``, is how long it counts as held. The server frees a vanished client only after
three times that: the holder's clock runs out first.

A transaction is not asked. It is watched for its length instead, for while it is open the
server cannot clean up behind others: of a long one somebody is told while it lasts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Final, Literal

import psycopg

from celery_pglock import monitor, sessions

_log: Final = logging.getLogger("celery_pglock.monitor")

ENDED: Final = "its session was ended by the server"
FORKED: Final = "it is held by the parent of this process"

# Seconds after which a transaction is called long.
LONG_TRANSACTION: Final = 60.0

# How soon to try again when the body's own thread is just using the session.
_SOON: Final = 0.05

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
        on_long: called once, on the monitor's thread, with the seconds so far, when a
            transaction is held for longer than ``LONG_TRANSACTION``; for a session, never.
    """

    def __init__(
        self,
        session: sessions.Session,
        on_loss: Callable[[Loss], None] = lambda _: None,
        on_long: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.session = session
        self.state: State = "new"
        self.loss: Loss | None = None
        self.descriptor = -1
        self.proves = session.level == "session"
        self._on_loss = on_loss
        self._on_long = on_long
        self._began = 0.0
        self._long_at = math.inf
        self._transition = threading.Lock()
        # Who may use the connection. Reentrant: a statement that fails closes its session,
        # and that ends the hold.
        self._connection = threading.RLock()
        # Since when an answer is owed, whoever asked.
        self._owed_since: float | None = None

    def begin(self) -> None:
        """Start watching."""
        self.session.on_close = weakref.ref(self)
        self.descriptor = self.session.connection.fileno()
        self._began = time.monotonic()
        if not self.proves:
            self._long_at = self._began + LONG_TRANSACTION
        self.state = "held"
        monitor.of_this_process().watch(self)

    @property
    def held(self) -> bool:
        """Whether the locks are held: no after a loss, past the deadline, or in a forked child.

        No query. A child would learn of no loss.
        """
        return (
            self.state == "held"
            and time.monotonic() < self._deadline
            and self.session.owner == os.getpid()
        )

    @property
    def _deadline(self) -> float:
        return self.session.proven + self.session.lost_after if self.proves else math.inf

    def check(self) -> Loss | None:
        """Ask the server, unless it is known; return how the hold was lost, or None."""
        if self.session.owner != os.getpid():
            # The connection may be in the hands of a thread that does not exist here.
            silent_for = time.monotonic() - self.session.proven
            return self.loss or Loss(FORKED, self.session.pid, silent_for)
        if self.state == "held" and self.proves:
            try:
                with self._asking():
                    pid = self.session.execute(b"select pg_catalog.pg_backend_pid() as pid").pid
            except psycopg.Error as error:
                self.lose(_reason(error))
            else:
                if pid != self.session.pid:
                    self.lose("its session was replaced by another")
        return self.loss

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        with self._connection:
            if taken_over := self._owed_since is not None:
                # The answer that the monitor waits for is read by this statement.
                monitor.of_this_process().listen(self, answers=False)
            self._owed_since = time.monotonic()
            # A statement that fails closes its session, which must not look like a release.
            self.session.on_close, on_close = None, self.session.on_close
            try:
                yield
            finally:
                if self.state == "held":
                    # Else the session may serve another hold by now.
                    self.session.on_close = on_close
                self._owed_since = None
                if taken_over:
                    # It sleeps until that answer is overdue.
                    monitor.of_this_process().wake()

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
        monitor.of_this_process().forget(self)
        with self._connection:
            self.session.on_close = None
        return self.loss

    # --- for the monitor's thread --------------------------------------------------------------

    @property
    def due(self) -> float:
        """When the clock says something next: to ask, or that the answer is overdue.

        Of a transaction: that it is long.
        """
        if not self.proves:
            return self._long_at
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
        if not self.proves:
            self._long_at = math.inf
            self._tell_length(now - self._began)
            return math.inf
        if self._owed_since is not None:
            self.lose("no answer from the server")
            # Whoever waits for an answer, in the body or at its end, has waited long enough.
            self.session.sever()
            return math.inf
        return self.due if self._if_free(self._ask) else now + _SOON

    def notice(self, events: int) -> None:
        """Take what the socket says."""
        if events & ~monitor.ANSWER:
            self.lose(ENDED)
            return
        # If the body's own thread has the connection, that is reading it.
        self._if_free(self._read)

    def _ask(self) -> None:
        self._owed_since = time.monotonic()
        self.session.ask()
        monitor.of_this_process().listen(self, answers=True)

    def _read(self) -> None:
        if self._owed_since is not None and self.session.answered():
            self._owed_since = None
            monitor.of_this_process().listen(self, answers=False)

    def _if_free(self, act: Callable[[], None]) -> bool:
        """Use the connection unless somebody else does; return whether it could be used."""
        if not self._connection.acquire(blocking=False):
            return False
        broken = None
        try:
            if self.state == "held":
                act()
        except psycopg.Error as error:
            broken = error
        finally:
            self._connection.release()
        if broken is not None:
            # Without the connection: whoever is told may want to use it.
            self.lose(_reason(broken))
        return True

    def _tell_length(self, seconds: float) -> None:
        if self.state != "held":
            return
        try:
            self._on_long(seconds)
        except Exception:  # noqa: BLE001 - the watching of all others must go on
            _log.exception(
                "telling of a long transaction failed", extra={"event": "transaction_long_untold"}
            )

    def lose(self, reason: str) -> None:
        """End the hold as lost and tell it; nothing happens when it has ended already."""
        with self._transition:
            if self.state != "held":
                return
            self.loss = Loss(reason, self.session.pid, time.monotonic() - self.session.proven)
            self.state = "lost"
        monitor.of_this_process().forget(self)
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
        if hold is None or hold.state == "released":
            return "its run has ended"
        loss = hold.check()
        return None if loss is None else loss.reason


def _reason(error: psycopg.Error) -> str:
    # The first line only: what follows repeats it in libpq's words.
    return next(iter(str(error).splitlines()), ENDED)

"""Lock sessions: opened when a run needs one, kept for the next, closed when unused."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import psycopg

from celery_pglock import connections, errors, forks, guards, monitor, sessions

# A session-level session prepares its statements at once, because planning the claim costs as
# much as running it. A transaction-level session may stand behind a pooler, where named
# statements collide.
_PREPARE_THRESHOLD: Final[dict[sessions.Level, int | None]] = {"session": 0, "transaction": None}

# Seconds. Long enough for a job that runs each minute to find its session again; short enough
# for no firewall on the way to have forgotten the connection (usual limits: 350 s and more).
IDLE_FOR: Final = 120.0

# How many times a session is opened anew because this process has forked in the meantime,
# before forks are made to wait.
_FORKED_MEANWHILE: Final = 3


def open_session(
    plan: sessions.Plan,
    unlifted: Callable[[sessions.Session, Sequence[guards.Unlifted]], object] = guards.warn,
) -> sessions.Session:
    """Open a lock session and make it fit to hold locks.

    Args:
        plan: how.
        unlifted: told which limits could not be lifted; by default they are warned of.

    Raises:
        ConfigurationError: the target is no connection string, or its transactions are
            read-only by default.
        DatabaseUnavailable: the server cannot be reached, or refuses the login.
        ServerInRecovery: the server is a standby.
        TransactionPooler: ``plan.level`` is ``"session"`` and a transaction pooler is between.
    """
    session = _connect(plan)
    try:
        unlifted(session, guards.prepare(session, plan))
        session.connection.prepare_threshold = _PREPARE_THRESHOLD[plan.level]
    except psycopg.Error as error:
        session.close()
        reason = " ".join(str(error).split())
        raise errors.DatabaseUnavailable(session.target, reason) from None
    except BaseException:
        session.close()
        raise
    return session


def _connect(plan: sessions.Plan) -> sessions.Session:
    for _ in range(_FORKED_MEANWHILE):
        with forks.kept_away() as before:
            pass
        session = _connect_once(plan)
        with forks.kept_away() as after:
            if after == before:
                return session
        # A child has a copy of this socket, of which no hook knew, and would keep our locks
        # after our death. A session that is closed ends, whoever else has its socket.
        session.close()
    with forks.kept_away():
        return _connect_once(plan)


def _connect_once(plan: sessions.Plan) -> sessions.Session:
    client_timeout = max(1.0, plan.lost_after / 2)
    connection = connections.connect(
        plan.target,
        application=plan.application[:63],
        # Until a pooler is ruled out: there a named statement may meet another server process,
        # and its error would hide what is wrong.
        prepare_threshold=None,
        keepalives_idle=max(1, round(plan.lost_after / 5)),
        keepalives_interval=1,
        keepalives_count=3,
        tcp_user_timeout=round(client_timeout * 1000),
    )
    return sessions.Session(connection, plan)


class Stack:
    """The idle lock sessions of one process, at most one for each run that was in progress."""

    def __init__(self, plan: sessions.Plan) -> None:
        self._plan = plan
        self._pid = os.getpid()
        # The one that was given back last is taken first, so those that are too many get old.
        self._idle: list[tuple[sessions.Session, float]] = []
        self._mutex = threading.Lock()
        self._timed_by: monitor.Monitor | None = None

    def take(self) -> sessions.Session:
        """Return an idle session that looks alive, or open one.

        Raises:
            DatabaseUnavailable, ServerInRecovery, TransactionPooler, ConfigurationError: as
                ``open_session`` does.
        """
        self._forget_after_fork()
        while True:
            with self._mutex:
                session, _ = self._idle.pop() if self._idle else (None, 0.0)
            if session is None:
                return open_session(self._plan)
            if session.alive:
                return session
            session.close()

    def give(self, session: sessions.Session) -> None:
        """Put a session back that holds nothing; any other one is closed."""
        self._forget_after_fork()
        if session.held or session.connection.closed or session.owner != self._pid:
            session.close()
            return
        since = time.monotonic()
        with self._mutex:
            self._idle.append((session, since))
        timer = monitor.of_this_process()
        if self._timed_by is timer:
            timer.be_awake_at(since + IDLE_FOR)
        else:
            # In this order: a time limit may strike in between.
            timer.keep_time_for(self)
            self._timed_by = timer

    @contextlib.contextmanager
    def lent(self) -> Iterator[sessions.Session]:
        """Lend a session for the length of a block, which leaves it holding nothing.

        Whatever the block raises, the session has been closed.
        """
        session = self.take()
        try:
            yield session
        except BaseException:
            session.close()
            raise
        self.give(session)

    def close(self) -> None:
        """Close all idle sessions."""
        self._forget_after_fork()
        with self._mutex:
            idle, self._idle = self._idle, []
        for session, _ in idle:
            session.close()

    @property
    def due(self) -> float:
        """When the session that has been idle for longest is closed."""
        # They are in the order in which they were given back.
        oldest = self._idle[:1]
        return oldest[0][1] + IDLE_FOR if oldest else math.inf

    def tick(self) -> float:
        """Close the sessions that nobody has needed for ``IDLE_FOR``; for the monitor."""
        now = time.monotonic()
        if now >= self.due:
            with self._mutex:
                unused = [session for session, since in self._idle if now >= since + IDLE_FOR]
                self._idle = [kept for kept in self._idle if now < kept[1] + IDLE_FOR]
            for session in unused:
                session.close()
        return self.due

    def _forget_after_fork(self) -> None:
        if self._pid != os.getpid():
            # The mutex may have been held by a thread that does not exist in this process.
            self._mutex = threading.Lock()
            self._idle = []
            self._pid = os.getpid()


class Loan:
    """A session of a stack, for as long as it is ours.

    Once given back it may be another thread's, so whatever is raised after that, a body's own
    exception above all, must not close it here: that would end the other run's locks.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._session: sessions.Session | None = None

    def take(self) -> sessions.Session:
        """Take a session; raises what ``Stack.take`` raises."""
        self._session = self._stack.take()
        return self._session

    def give_back(self) -> None:
        """Give the session back, which holds nothing any more."""
        session, self._session = self._session, None
        if session is not None:
            self._stack.give(session)

    def close(self) -> None:
        """Close the session unless it has been given back."""
        if self._session is not None:
            self._session.close()

"""Dedicated server connections that hold locks: used by one run at a time, proven, closed.

A PostgreSQL advisory lock lives as long as its session, so the session is what has to be
right. A lock session is a psycopg connection of our own, never one of the application's pool
and never SQLAlchemy's, which reconnects silently: the lock would be gone and nobody told. It
belongs to the process that opened it, serves one run at a time, and is never reconnected:
when anything goes wrong it is closed, which is the one sure way to free a lock.

A fork hands the child a copy of the socket, over which ``forks`` lays ``/dev/null``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, Protocol

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.rows import namedtuple_row

from celery_pglock import connections, forks, prepared

Level = Literal["session", "transaction"]

# Seconds for what is left of a statement in whose middle a SystemExit struck.
_LAST_ANSWER: Final = 0.2

_WHO: Final = b"select pg_catalog.pg_backend_pid()"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How lock sessions are opened.

    Attributes:
        target: a libpq connection string, an SQLAlchemy URL, or a function that returns one.
        level: what the session is for.
        application: the first words of ``application_name`` in ``pg_stat_activity``.
        lost_after: seconds after which a silent connection counts as lost.
        lease: seconds after which the server ends the session when it is idle: for a leader,
            which has to show that it is alive. None: the session may idle for ever.
    """

    target: connections.Target = dataclasses.field(repr=False)  # it may hold a password
    level: Level
    application: str
    lost_after: float = 10.0
    lease: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """A statement whose answer is awaited.

    Attributes:
        at: when it was sent (monotonic).
        statement: what it was.
    """

    at: float
    statement: prepared.Statement


class Releasable(Protocol):
    """What ends with the session."""

    def release(self) -> object:
        """End."""
        ...


class Session:
    """One server session that holds the locks of at most one run.

    Not safe for two threads at once, except ``close()``, ``alive`` and ``sever()``.

    Attributes:
        proven: when the last statement that was answered had been *sent* (monotonic): up to
            then the session has lived for certain.
        outlives_exit: a SystemExit in the middle of a statement does not close it, because
            its owner still has to say good-bye: see ``settle``.
        on_close: a weak reference to what is released once when the session is closed, before
            its connection is.
    """

    def __init__(self, connection: psycopg.Connection[Any], plan: Plan) -> None:
        self.connection = connection
        self.level = plan.level
        self.target = connections.describe_open(connection)
        self.owner = os.getpid()
        self.pid = 0
        self.pooled = False
        self.lost_after = plan.lost_after
        self.proven = time.monotonic()
        self.on_close: Callable[[], Releasable | None] | None = None
        self.outlives_exit = False
        self._asked: float | None = None
        self._cursor: psycopg.Cursor[Any] | None = None
        self._prepared: prepared.Prepared | None = None
        self._closing = threading.Lock()
        # Advisory locks are re-entrant: asked twice, the server says yes twice and wants two
        # unlocks. So what this session holds is known here and asked for never again.
        self.held: set[int] = set()
        forks.watch(self)

    @property
    def alive(self) -> bool:
        """Whether the session can still hold anything, as far as is known without a query.

        psycopg's ``closed`` says nothing about a session that the server has ended; the
        socket does: an idle one becomes readable when the server closes it. A broken network
        is not seen here.
        """
        if self.connection.closed or self.owner != os.getpid():
            return False
        return not _readable(self.connection.fileno())

    def cursor(self) -> psycopg.Cursor[Any]:
        """Return a cursor for our own statements, whose rows are named tuples."""
        return self.connection.cursor(row_factory=namedtuple_row)

    def execute(self, query: bytes, parameters: Mapping[str, Any] | None = None) -> Any:
        """Run one statement and return its first row, as a named tuple, or None.

        Raises:
            psycopg.Error: see ``rows``.
        """
        rows = self.rows(query, parameters)
        return rows[0] if rows else None

    def rows(self, query: bytes, parameters: Mapping[str, Any] | None = None) -> list[Any]:
        """Run one statement and return its rows, as named tuples.

        Raises:
            psycopg.Error: as psycopg raises it. Whatever is raised, a time limit that strikes
                in the middle included, the session has been closed: a connection that was
                interrupted looks usable and is not, and its locks must not outlive the run.
        """
        try:
            if self._asked is not None:
                # A proof is on its way and nobody else will read its answer.
                for answer in self.connection.wait(generators.fetch_many(self.connection.pgconn)):
                    self._take(answer)
                self._asked = None
            if self.outlives_exit:
                self._finish_interrupted()
            started = time.monotonic()
            if self.level == "session":
                # Nobody but us uses this connection.
                ours = self._prepared = self._prepared or prepared.Prepared(self.connection)
                rows = ours.rows(query, parameters)
            else:
                rows = self._by_cursor(query, parameters)
        except BaseException as error:
            self._interrupted(error)
            raise
        self.proven = started
        return rows

    def send(self, query: bytes, parameters: Mapping[str, Any] | None = None) -> Sent:
        """Send one statement and do not wait; for a session of level ``session``.

        ``receive`` reads the answer. Another statement before it loses the answer, not what
        the statement does.

        Raises:
            psycopg.Error: see ``rows``.
        """
        try:
            self._finish_interrupted()
            ours = self._prepared = self._prepared or prepared.Prepared(self.connection)
            return Sent(time.monotonic(), ours.send(query, parameters))
        except BaseException as error:
            self._interrupted(error)
            raise

    def receive(self, sent: Sent) -> list[Any]:
        """Wait for the answer to what ``send`` has sent, and return its rows.

        Raises:
            psycopg.Error: see ``rows``.
        """
        try:
            assert self._prepared is not None  # noqa: S101 - `send` has made it
            rows = self._prepared.receive(sent.statement)
        except BaseException as error:
            self._interrupted(error)
            raise
        self.proven = sent.at
        return rows

    def _finish_interrupted(self) -> None:
        if not self.settle(_LAST_ANSWER):
            msg = "a statement that was interrupted is not answered"
            raise psycopg.OperationalError(msg)

    def _interrupted(self, error: BaseException) -> None:
        self._cursor = None
        if isinstance(error, Exception) or not self.outlives_exit:
            self.close()

    def _by_cursor(self, query: bytes, parameters: Mapping[str, Any] | None) -> list[Any]:
        # One for all statements: making one takes as long as all else that is done here.
        cursor = self._cursor = self._cursor or self.cursor()
        cursor.execute(query, parameters)
        # Without a result there is no position in it; `description` would make its columns.
        return cursor.fetchall() if cursor.rownumber is not None else []

    def settle(self, patience: float) -> bool:
        """Read what is left of a statement whose wait was interrupted.

        Args:
            patience: for how many seconds.

        Returns:
            Whether the session is fit for another statement.
        """
        libpq = self.connection.pgconn
        deadline = time.monotonic() + patience
        with contextlib.suppress(psycopg.Error):
            while libpq.transaction_status == TransactionStatus.ACTIVE:
                if not libpq.is_busy():
                    libpq.get_result()
                elif _readable(self.connection.fileno(), deadline - time.monotonic()):
                    libpq.consume_input()
                else:
                    break
            return libpq.transaction_status == TransactionStatus.IDLE
        return False

    def ask(self) -> None:
        """Send a short query and do not wait; ``answered`` or the next statement reads on.

        Raises:
            psycopg.Error: the connection is broken.
        """
        self._asked = time.monotonic()
        # psycopg has made the connection a non-blocking one.
        self.connection.pgconn.send_query(_WHO)
        self.connection.pgconn.flush()

    def answered(self) -> bool:
        """Read what has come of the answer to ``ask``; return whether that is all of it.

        Raises:
            psycopg.Error: the session has ended, or another one answers.
        """
        libpq = self.connection.pgconn
        libpq.consume_input()
        while not libpq.is_busy():
            answer = libpq.get_result()
            if answer is None:
                self.proven, self._asked = self._asked or self.proven, None
                return True
            self._take(answer)
        return False

    def _take(self, answer: Any) -> None:
        if answer.status != ExecStatus.TUPLES_OK or int(answer.get_value(0, 0) or 0) != self.pid:
            msg = "its session was ended by the server"
            raise psycopg.OperationalError(msg)

    def leave(self) -> None:
        """Have no more to do with the connection, which stays open: it belongs to somebody else."""
        self.on_close = None
        forks.forget(self)

    def close(self) -> None:
        """Close the session, which frees all its locks; never raises, may be called twice."""
        self.held.clear()
        forks.forget(self)
        if self.owner != os.getpid():
            # An inherited copy: Terminate would end the parent's session.
            forks.blind(self.connection)
            return
        told, self.on_close = self.on_close, None
        if told is not None and (hold := told()) is not None:
            hold.release()
        with self._closing:
            try:
                self.connection.close()
            except (psycopg.Error, OSError):
                # Whatever a broken connection raises while it is given up, nothing is left to do.
                pass
            finally:
                # A time limit that struck in there has left psycopg thinking it was closed.
                self.connection.pgconn.finish()

    def sever(self) -> None:
        """Break the socket, so that a thread which waits for an answer waits no longer."""
        with contextlib.suppress(OSError, psycopg.Error), self._closing:
            if not self.connection.closed:
                # A descriptor that was closed may be another file's by now: hence the lock.
                with socket.socket(fileno=os.dup(self.connection.fileno())) as same:
                    same.shutdown(socket.SHUT_RDWR)


def server_now(session: Session) -> dt.datetime:
    """Return the server's clock."""
    moment = session.execute(b"select pg_catalog.clock_timestamp() as now").now
    assert isinstance(moment, dt.datetime)  # noqa: S101 - for the type checker
    return moment


def opened() -> Iterator[Session]:
    """Yield the lock sessions that this process has open."""
    here = os.getpid()
    return (each for each in forks.watched() if isinstance(each, Session) and each.owner == here)


def _readable(descriptor: int, within: float = 0.0) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poller.poll(max(0.0, within) * 1000))

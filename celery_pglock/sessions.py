"""Dedicated server connections that hold locks: opened, guarded, lent to one run, closed.

A PostgreSQL advisory lock lives as long as its session, so the session is what has to be
right. A lock session is a psycopg connection of our own, never one of the application's pool
and never SQLAlchemy's, which reconnects silently: the lock would be gone and nobody told. It
belongs to the process that opened it, serves one run at a time, and is never reconnected:
when anything goes wrong it is closed, which is the one sure way to free a lock.

A fork hands the child a copy of the socket. A child that closed it would end its parent's
session; a child that only kept it would keep the lock alive after its parent's death. The
fork hook below lays ``/dev/null`` over the inherited descriptors, which does neither.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import psycopg
import sqlalchemy as sa
from psycopg import generators
from psycopg.pq import ExecStatus
from psycopg.rows import namedtuple_row

from celery_pglock import connections, errors

_log: Final = logging.getLogger("celery_pglock.sessions")

Level = Literal["session", "transaction"]

# Only these two may differ between the levels. A session-level session runs nothing but our
# own short statements, so it bounds them; and it prepares them at once, because planning the
# claim costs as much as running it. A transaction-level session runs the body's SQL, under
# the role's own time-out, and may stand behind a pooler, where named statements collide.
_STATEMENT_TIMEOUT: Final = "15000"
_PREPARE_THRESHOLD: Final[dict[Level, int | None]] = {"session": 0, "transaction": None}
# What has been warned of, once per process.
_warned: set[str] = set()

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


class Session:
    """One server session that holds the locks of at most one run.

    Not safe for two threads at once, except ``close()``, ``alive`` and ``sever()``.

    Attributes:
        proven: when the last statement that was answered had been *sent* (monotonic): up to
            then the session has lived for certain.
        on_close: a weak reference to what is called once when the session is closed, before
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
        self.on_close: Callable[[], Callable[[], object] | None] | None = None
        self._asked: float | None = None
        self._closing = threading.Lock()
        # Advisory locks are re-entrant: asked twice, the server says yes twice and wants two
        # unlocks. So what this session holds is known here and asked for never again.
        self.held: set[int] = set()
        self._engine: sa.Engine | None = None
        _opened[id(self)] = self

    @property
    def engine(self) -> sa.Engine:
        """An SQLAlchemy engine whose only connection is this one, for the transaction level."""
        if self._engine is None:
            self._engine = sa.create_engine(
                "postgresql+psycopg://",
                creator=lambda: self.connection,
                poolclass=sa.StaticPool,
                pool_reset_on_return=None,
                use_native_hstore=False,
            )
            # The dialect asks for the server's version on its first connection and rolls
            # back: that has to be over before any BEGIN of ours.
            self._engine.connect().close()
        return self._engine

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

    def execute(self, query: bytes, parameters: Mapping[str, Any] | None = None) -> Any:
        """Run one statement and return its first row, as a named tuple, or None.

        Raises:
            psycopg.Error: see ``rows``.
        """
        return next(iter(self.rows(query, parameters)), None)

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
            started = time.monotonic()
            with self.connection.cursor(row_factory=namedtuple_row) as cursor:
                cursor.execute(query, parameters)
                rows = cursor.fetchall() if cursor.description else []
        except BaseException:
            self.close()
            raise
        self.proven = started
        return rows

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

    def close(self) -> None:
        """Close the session, which frees all its locks; never raises, may be called twice."""
        self.held.clear()
        _opened.pop(id(self), None)
        if self.owner != os.getpid():
            # An inherited copy: Terminate would end the parent's session.
            _blind(self.connection)
            return
        told, self.on_close = self.on_close, None
        if told is not None and (tell := told()) is not None:
            tell()
        # Exception and not psycopg.Error: whatever a broken connection raises while it is
        # being given up, there is nothing left to do for it.
        with contextlib.suppress(Exception), self._closing:
            self.connection.close()

    def sever(self) -> None:
        """Break the socket, so that a thread which waits for an answer waits no longer."""
        with contextlib.suppress(OSError, psycopg.Error), self._closing:
            if not self.connection.closed:
                # A descriptor that was closed may be another file's by now: hence the lock.
                with socket.socket(fileno=os.dup(self.connection.fileno())) as same:
                    same.shutdown(socket.SHUT_RDWR)


def open_session(plan: Plan) -> Session:
    """Open a lock session and make it fit to hold locks.

    Raises:
        ConfigurationError: the target is no connection string, or its transactions are
            read-only by default.
        DatabaseUnavailable: the server cannot be reached, or refuses the login.
        ServerInRecovery: the server is a standby.
        TransactionPooler: ``plan.level`` is ``"session"`` and a transaction pooler is between.
    """
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
    session = Session(connection, plan)
    try:
        _guard(session, plan)
        connection.prepare_threshold = _PREPARE_THRESHOLD[plan.level]
    except psycopg.Error as error:
        session.close()
        reason = " ".join(str(error).split())
        raise errors.DatabaseUnavailable(session.target, reason) from None
    except BaseException:
        session.close()
        raise
    return session


def _guard(session: Session, plan: Plan) -> None:
    row = session.execute(
        b"select pg_catalog.pg_backend_pid() as pid, pg_catalog.pg_is_in_recovery() as recovery,"
        b" pg_catalog.current_setting('default_transaction_read_only')::bool as read_only"
    )
    if row.recovery:
        raise errors.ServerInRecovery(session.target)
    if row.read_only:
        msg = (
            f"default_transaction_read_only is on for this role or database at {session.target}, "
            f"so nothing could be recorded; turn it off with ALTER ROLE or ALTER DATABASE ... SET "
            f"default_transaction_read_only = off"
        )
        raise errors.ConfigurationError(msg)
    session.pid = row.pid
    # A pooler gives its clients cancel keys of its own, so the pid that libpq was told is not
    # the one of the server process that answers.
    session.pooled = session.connection.info.backend_pid != row.pid
    if session.pooled:
        if plan.level == "transaction":
            # A SET would stay behind on a server connection that others use next.
            return
        if _transaction_pooling(session, plan):
            raise errors.TransactionPooler(session.target)
    release_after = round(plan.lost_after * 3)
    guards = {
        # The session idles while the body works, and must not be ended for it.
        "idle_session_timeout": _milliseconds(plan.lease),
        "idle_in_transaction_session_timeout": _milliseconds(plan.lease),
        "transaction_timeout": "0",
        # A lock_timeout may fire although the lock was granted.
        "lock_timeout": "0",
        # The server frees a client that has vanished well after that client has given up.
        "tcp_keepalives_idle": str(round(plan.lost_after)),
        "tcp_keepalives_interval": str(max(1, round((release_after - plan.lost_after) / 3))),
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": str(release_after * 1000),
        # Without it the lock of a killed worker lasts until its statement has ended.
        "client_connection_check_interval": "500",
        "default_transaction_isolation": "read committed",
        **({"statement_timeout": _STATEMENT_TIMEOUT} if plan.level == "session" else {}),
    }
    # pg_settings leaves out what this server version does not know. SET and not options=,
    # which poolers refuse at connect.
    session.execute(
        b"select pg_catalog.count(pg_catalog.set_config(s.name, w.value, false))"
        b" from rows from (pg_catalog.unnest(%(names)s::text[]),"
        b" pg_catalog.unnest(%(values)s::text[])) as w(name, value)"
        b" join pg_catalog.pg_settings s using (name)",
        {"names": list(guards), "values": list(guards.values())},
    )
    _read_back(session, guards)


def _read_back(session: Session, guards: Mapping[str, str]) -> None:
    """Warn of what could not be set: it may end the session, or keep a dead one alive.

    A statement of its own, because in the one that sets them a setting may be read before it
    is set. Each value is written in the unit in which it is shown here.
    """
    rows = session.rows(
        b"select name, setting, pg_catalog.inet_client_addr() is null as local"
        b" from pg_catalog.pg_settings where name = any(%(names)s)",
        {"names": list(guards)},
    )
    for row in rows:
        # Over a socket in the file system there is no TCP; its settings stay 0.
        skipped = row.local and row.name.startswith("tcp_")
        if skipped or row.setting == guards[row.name] or row.name in _warned:
            continue
        _warned.add(row.name)
        _log.warning(
            "%s is %s at %s and could not be set to %s for a lock session, whose lock may so be "
            "lost early or outlive its holder; have the limits of the role, the database or the "
            "host allow it",
            row.name,
            row.setting,
            session.target,
            guards[row.name],
            extra={
                "event": "guard_not_set",
                "setting": row.name,
                "wanted": guards[row.name],
                "found": row.setting,
            },
        )


def _milliseconds(seconds: float | None) -> str:
    return "0" if seconds is None else str(round(seconds * 1000))


def _transaction_pooling(session: Session, plan: Plan) -> bool:
    """Tell a pooler in transaction mode from one in session mode, with a second connection.

    While the second connection is in a transaction it keeps a server process to itself. In
    session mode ours stays where it was. In transaction mode either the second was given the
    very process that served us, or we are given other processes from one statement to the
    next; or none is left and the statement waits in the pooler.
    """
    other = connections.connect(plan.target, application=plan.application, prepare_threshold=None)
    with contextlib.closing(other):
        other.execute("begin")
        row = other.execute("select pg_catalog.pg_backend_pid()").fetchone()
        if row is None or row[0] == session.pid:
            return True
        for _ in range(20):
            ours = session.execute(b"select pg_catalog.pg_backend_pid() as pid")
            if ours.pid != session.pid:
                return True
        other.execute("rollback")
    return False


def server_now(session: Session) -> dt.datetime:
    """Return the server's clock."""
    moment = session.execute(b"select pg_catalog.clock_timestamp() as now").now
    assert isinstance(moment, dt.datetime)  # noqa: S101 - for the type checker
    return moment


class Stack:
    """The idle lock sessions of one process, at most one for each run that was in progress."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pid = os.getpid()
        self._idle: list[Session] = []
        self._mutex = threading.Lock()

    def take(self) -> Session:
        """Return an idle session that looks alive, or open one.

        Raises:
            DatabaseUnavailable, ServerInRecovery, TransactionPooler, ConfigurationError: as
                ``open_session`` does.
        """
        self._forget_after_fork()
        while True:
            with self._mutex:
                session = self._idle.pop() if self._idle else None
            if session is None:
                return open_session(self._plan)
            if session.alive:
                return session
            session.close()

    def give(self, session: Session) -> None:
        """Put a session back that holds nothing; any other one is closed."""
        self._forget_after_fork()
        if session.held or session.connection.closed or session.owner != self._pid:
            session.close()
            return
        with self._mutex:
            self._idle.append(session)

    def close(self) -> None:
        """Close all idle sessions."""
        self._forget_after_fork()
        with self._mutex:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def _forget_after_fork(self) -> None:
        if self._pid != os.getpid():
            # The mutex may have been held by a thread that does not exist in this process.
            self._mutex = threading.Lock()
            self._idle = []
            self._pid = os.getpid()


_opened: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()


def opened() -> Iterator[Session]:
    """Yield the lock sessions that this process has open."""
    return (session for session in list(_opened.values()) if session.owner == os.getpid())


def _readable(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poller.poll(0))


def _blind(connection: psycopg.Connection[Any]) -> None:
    with contextlib.suppress(psycopg.Error, OSError, ValueError):
        null = os.open(os.devnull, os.O_RDWR)
        try:
            os.dup2(null, connection.fileno(), inheritable=False)
        finally:
            os.close(null)


def _blind_inherited_sessions() -> None:
    for session in list(_opened.values()):
        _blind(session.connection)
    _opened.clear()


os.register_at_fork(after_in_child=_blind_inherited_sessions)

"""What a server session is made to do, and not to do, before it may hold locks.

A role, a database or a host can carry limits that end a session while a body works, or keep a
dead one alive; a standby and a transaction pooler grant locks that exclude nobody. What can be
set is set and read back, what cannot be worked with is refused, and what is left is named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Final

import psycopg

from celery_pglock import connections, errors, sessions

_log: Final = logging.getLogger("celery_pglock.sessions")

# A session-level session runs nothing but our own short statements, so it bounds them, and wants
# none compiled: a clean-up that is estimated to be dear would take longer to compile than to run.
# A transaction-level session runs the body's SQL, under the role's own settings.
_OF_OUR_OWN_STATEMENTS: Final = {"statement_timeout": "15000", "jit": "off"}
# How often a second connection changes its server process, to see whether ours changes too.
_LOOKS: Final = 10
# What has been warned of, once per process.
_warned: set[str] = set()


@dataclasses.dataclass(frozen=True, slots=True)
class Unlifted:
    """A limit that a lock session has although it should not.

    Attributes:
        setting: its name.
        found: what it is, as the server shows it.
        wanted: what a lock session needs.
    """

    setting: str
    found: str
    wanted: str


def vet(session: sessions.Session) -> str | None:
    """Refuse a server on which no lock holds, and find out who answers.

    Returns:
        For how long a transaction may last at most, as the server shows it; None: it knows no
        such limit.

    Raises:
        ServerInRecovery: the server is a standby, which grants advisory locks of its own
            (PostgreSQL manual, "Hot Standby": they are not part of the WAL).
        ConfigurationError: transactions are read-only by default.
        psycopg.Error: the session is broken; it has been closed.
    """
    row = session.execute(
        b"select pg_catalog.pg_backend_pid() as pid, pg_catalog.pg_is_in_recovery() as recovery,"
        b" pg_catalog.current_setting('default_transaction_read_only')::bool as read_only,"
        b" pg_catalog.current_setting('transaction_timeout', true) as longest"
    )
    if row.recovery:
        raise errors.ServerInRecovery(session.target)
    if row.read_only:
        msg = (
            f"default_transaction_read_only is on for this role or database at {session.target}, "
            f"so nothing could be recorded; turn it off with ALTER ROLE or ALTER DATABASE ... SET "
            f"default_transaction_read_only = off"
        )
        raise errors.ReadOnlyByDefault(msg)
    session.pid = row.pid
    # A pooler gives its clients cancel keys of its own, so the pid that libpq was told is not
    # the one of the server process that answers.
    session.pooled = session.connection.info.backend_pid != row.pid
    longest: str | None = row.longest
    return longest


def prepare(session: sessions.Session, plan: sessions.Plan) -> list[Unlifted]:
    """Refuse a session that cannot hold locks, and set what a lock session needs.

    Returns:
        What the limits of the role, the database or the host do not let us set; see ``warn``.

    Raises:
        ServerInRecovery: the server is a standby.
        ConfigurationError: transactions are read-only by default, or a pooler allows none.
        TransactionPooler: ``plan.level`` is ``"session"`` and the session is not ours alone.
        psycopg.Error: the session is broken; it has been closed.
    """
    longest = vet(session)
    if session.pooled:
        if plan.level == "transaction":
            _refuse_statement_pooling(session)
            # A SET would stay behind on a server connection that others use next. So this limit
            # ends a run in the middle of its work.
            if longest is None or longest == "0":
                return []
            return [Unlifted("transaction_timeout", longest, "0")]
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
        **(_OF_OUR_OWN_STATEMENTS if plan.level == "session" else {}),
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
    return _read_back(session, guards)


def warn(session: sessions.Session, unlifted: Iterable[Unlifted]) -> None:
    """Warn of what could not be set, once per process and setting."""
    for limit in unlifted:
        if limit.setting in _warned:
            continue
        _warned.add(limit.setting)
        _log.warning(
            "%s is %s at %s and could not be set to %s for a lock session, whose lock may so be "
            "lost early or outlive its holder; have the limits of the role, the database or the "
            "host allow it",
            limit.setting,
            limit.found,
            session.target,
            limit.wanted,
            extra={
                "event": "guard_not_set",
                "setting": limit.setting,
                "wanted": limit.wanted,
                "found": limit.found,
            },
        )


def _read_back(session: sessions.Session, guards: Mapping[str, str]) -> list[Unlifted]:
    """Return what could not be set: it may end the session, or keep a dead one alive.

    A statement of its own, because in the one that sets them a setting may be read before it
    is set. Each value is written in the unit in which it is shown here.
    """
    rows = session.rows(
        b"select name, setting, pg_catalog.inet_client_addr() is null as local"
        b" from pg_catalog.pg_settings where name = any(%(names)s)",
        {"names": list(guards)},
    )
    return [
        Unlifted(row.name, row.setting, guards[row.name])
        for row in rows
        # Over a socket in the file system there is no TCP; its settings stay 0.
        if not (row.local and row.name.startswith("tcp_")) and row.setting != guards[row.name]
    ]


def _milliseconds(seconds: float | None) -> str:
    return "0" if seconds is None else str(round(seconds * 1000))


def _refuse_statement_pooling(session: sessions.Session) -> None:
    try:
        session.execute(b"begin")
        session.execute(b"rollback")
    except psycopg.errors.ProtocolViolation:
        msg = (
            f"{session.target} is a connection pooler in statement mode, which allows no "
            f"transactions; point pglock_database_url at PostgreSQL itself or at a pool in "
            f"transaction or session mode"
        )
        raise errors.ConfigurationError(msg) from None


def _transaction_pooling(session: sessions.Session, plan: sessions.Plan) -> bool:
    """Tell a pooler in transaction mode from one in session mode, with a second connection.

    While the second connection is in a transaction it keeps a server process to itself. In
    session mode ours stays where it was. In transaction mode either the second was given the
    very process that served us, or we are given other processes from one statement to the
    next: at the latest the one that the second has just given back, since a pooler that is
    quiet hands out what it used last. Or none is left and the statement waits in the pooler.
    """
    other = connections.connect(plan.target, application=plan.application, prepare_threshold=None)

    def moved() -> bool:
        ours = session.execute(b"select pg_catalog.pg_backend_pid() as pid")
        return bool(ours.pid != session.pid)

    with contextlib.closing(other):
        for _ in range(_LOOKS):
            try:
                other.execute("begin")
            except psycopg.errors.ProtocolViolation:
                # pgbouncer's answer in statement mode: it allows no transactions at all.
                return True
            row = other.execute("select pg_catalog.pg_backend_pid()").fetchone()
            if row is None or row[0] == session.pid or moved():
                return True
            other.execute("rollback")
            if moved():
                return True
    return False

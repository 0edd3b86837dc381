"""Advisory locks: try, release, and who holds one.

Only ``pg_try_advisory_*`` is ever used. A session that *waits* in ``pg_advisory_lock`` holds
back vacuum and blocks every CREATE INDEX CONCURRENTLY of the database, and a wait that ends
by a time-out may have been granted all the same.

A session-level lock is freed by an unlock or by the end of its session, and by nothing else:
not by ROLLBACK, not by an error in the statement that took it (PostgreSQL manual, "Advisory
Locks"). A transaction-level lock is freed by the end of its transaction.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Set as AbstractSet
from typing import Final

from psycopg import sql

from celery_pglock import claims, errors, sessions

# pg_locks shows the two halves of a 64-bit key as unsigned numbers; objsubid 1 marks that
# form, 2 the form with two 32-bit keys, which is another space.
HELD_BY: Final = sql.SQL(
    "l.locktype = 'advisory' and l.objsubid = 1 and l.granted"
    " and l.database = (select d.oid from pg_catalog.pg_database d"
    " where d.datname = pg_catalog.current_database())"
    " and l.classid = ((%(key)s::bigint >> 32) & 4294967295)::oid"
    " and l.objid = (%(key)s::bigint & 4294967295)::oid"
)

# The keys of that form that anybody holds in this database, as they are written in rows.
HELD_KEYS: Final = """
select (l.classid::bigint << 32) | l.objid::bigint as key, l.pid from pg_catalog.pg_locks l
where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
 and l.database = (select d.oid from pg_catalog.pg_database d
  where d.datname = pg_catalog.current_database())
"""

_TRY: Final = (
    b"with l as materialized (select pg_catalog.pg_try_advisory_lock(%(key)s::bigint) as got)"
    b" select l.got, case when l.got then pg_catalog.set_config('application_name',"
    b" %(application)s::text, false) end from l"
)
_UNLOCK: Final = (
    b"select pg_catalog.pg_advisory_unlock(%(key)s::bigint) as freed,"
    b" pg_catalog.set_config('application_name', %(application)s::text, false)"
)
_IS_FREE: Final = b"select pg_catalog.pg_try_advisory_xact_lock(%(key)s::bigint) as free"
_HOLDER: Final = (
    sql.SQL(
        "select l.pid, a.application_name as application, a.backend_start"
        " from pg_catalog.pg_locks l"
        " left join pg_catalog.pg_stat_activity a on a.pid = l.pid where {} limit 1"
    )
    .format(HELD_BY)
    .as_bytes()
)


def acquire(session: sessions.Session, key: int, application: str) -> bool:
    """Try to take a session-level lock; return False at once when another session has it.

    Raises:
        LockLost: this very session holds the key already: the server would say yes again.
        psycopg.Error: the session is broken; it has been closed.
    """
    refuse_again(session, {key})
    if not session.execute(_TRY, {"key": key, "application": application[:63]}).got:
        return False
    session.held.add(key)
    return True


def release(session: sessions.Session, key: int, application: str) -> bool:
    """Give a session-level lock back; return False when the server says it was not held.

    A False means that the lock was lost on the way. The session has then been closed.

    Raises:
        psycopg.Error: the session is broken; it has been closed, so the lock is free.
    """
    freed = bool(session.execute(_UNLOCK, {"key": key, "application": application[:63]}).freed)
    session.held.discard(key)
    if not freed:
        session.close()
    return freed


def is_free(session: sessions.Session, key: int) -> bool:
    """Return whether nobody holds the key, on a session that is in no transaction.

    It is taken for the length of the statement. Use it only for a key that nobody may take
    at this moment, because a try in that instant is refused.
    """
    return bool(session.execute(_IS_FREE, {"key": key}).free)


def holder(session: sessions.Session, key: int) -> claims.Holder | None:
    """Return who holds the key now, or None when nobody does any more.

    ``application_name`` is visible to every role; nothing else of another role's session is.
    """
    row = session.execute(_HOLDER, {"key": key})
    if row is None:
        return None
    return claims.Holder(row.pid, row.application, session_since=row.backend_start)


def refuse_again(session: sessions.Session, keys: AbstractSet[int]) -> None:
    """Refuse keys that this session holds.

    Raises:
        LockLost: with the key; it is an error in celery-pglock itself.
    """
    if again := session.held.intersection(keys):
        raise errors.LockLost(
            f"lock key {min(again)}", None, "its session was asked to take it a second time"
        )


class NameLockOnly:
    """What the ledger is for a run with a period, for one without: only the name lock.

    It needs no tables, and keeps nothing by which a message could be known again.
    """

    schema = ""

    def claim(
        self,
        session: sessions.Session,
        work: claims.Work,
        *,
        claim: uuid.UUID,
        window: claims.Window | None = None,  # noqa: ARG002 - the ledger's
    ) -> claims.Claimed | claims.Refused:
        """Take the name lock; at transaction level there is nothing to do beforehand.

        Raises:
            psycopg.Error: the session is broken; it has been closed.
        """
        if session.level == "session" and not acquire(session, work.name_key, work.application):
            return claims.Refused("held", None, dt.datetime.now(dt.UTC))
        return claims.Claimed(claim, attempt=1, lost_attempts=0, before=None)

    def settle(
        self,
        session: sessions.Session,
        work: claims.Work,
        claim: uuid.UUID,  # noqa: ARG002 - the ledger's signature
        status: claims.Status,  # noqa: ARG002
        *,
        reason: str | None = None,  # noqa: ARG002
        error: str | None = None,  # noqa: ARG002
        retry_in: float | None = None,  # noqa: ARG002
    ) -> bool:
        """Give the name lock back; return whether it was still held.

        Raises:
            psycopg.Error: the session is broken; it has been closed.
        """
        if session.level == "transaction":
            return True
        return work.name_key in session.held and release(
            session, work.name_key, work.idle_application
        )

    def read(self, *_: object) -> claims.Row | None:
        """Return None: there is no row."""
        return None

    def settled_as(self, *_: object) -> str | None:
        """Return None: there is no row that could tell."""
        return None

    def give_back(self, *_: object) -> None:
        """Do nothing: nothing was recorded."""

    def skip(self, *_: object) -> None:
        """Do nothing: there is no row."""

    def postpone(self, *_: object) -> None:
        """Do nothing: there is no row."""

    def holder(self, session: sessions.Session, work: claims.Work) -> claims.Holder | None:
        """Return who holds the name lock, or None when nobody does any more."""
        return holder(session, work.name_key)

"""The working transaction of a transaction-level run: lock, body and outcome commit together.

The claim has been committed beforehand, so that a crash leaves a trace. Then: BEGIN READ
COMMITTED; both transaction-level locks; and *in a statement of its own* the question whether
the claim is still ours. Asked together with the locks it would be answered from a snapshot
that is older than they are, and a period that another attempt finished in between would be
run again. Then a savepoint, in which the body works. At its end the outcome is recorded
inside the same transaction, fenced by the claim, and committed: the commit is the proof that
the locks were held all along.

The locks end with the transaction, so a body that ends the transaction ends them. SQLAlchemy's
events catch ``commit()``, ``rollback()`` and anything executed afterwards; the savepoint
catches a COMMIT that was sent as text. What such a COMMIT wrote cannot be undone, but it is
never recorded as done.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import Any, Final, Literal

import psycopg
import sqlalchemy as sa
from psycopg.pq import TransactionStatus
from sqlalchemy import event

from celery_pglock import claims, errors, ledger, locks, sessions

_BEGIN: Final = b"begin isolation level read committed"
# Through a pooler nothing may be SET for longer than the transaction.
_LOCK: Final = b"""
with l as materialized (
 select case when %(run_key)s::bigint is null then true
  else pg_catalog.pg_try_advisory_xact_lock(%(run_key)s::bigint) end as run
), n as materialized (
 select case when run then pg_catalog.pg_try_advisory_xact_lock(%(name_key)s::bigint) end as name
 from l
)
select l.run, n.name,
 pg_catalog.set_config('application_name', %(application)s::text, true),
 pg_catalog.set_config('idle_in_transaction_session_timeout', '0', true)
from l cross join n
"""

# A run lock that is taken although the claim is ours: another claim looks at this period and
# has it for the length of its statement. It will find our claim and give way, so we must not;
# but we have to be done well within the time that protects a claim without locks.
_LOOKED_AT: Final = 1.0
_POLL: Final = 0.01

Records = ledger.Ledger | locks.NameLockOnly


class WorkingTransaction:
    """The transaction of one run, on the session's own SQLAlchemy engine.

    Attributes:
        connection: the ``sqlalchemy.Connection`` for the body, inside a savepoint.
        commit_sent: whether COMMIT was sent: before that, a broken session means ROLLBACK.
    """

    connection: sa.Connection

    def __init__(
        self,
        session: sessions.Session,
        records: Records,
        work: claims.Work,
        claim: uuid.UUID,
    ) -> None:
        self._session = session
        self._records = records
        self._work = work
        self._claim = claim
        self._ended: str | None = None
        self._closing = False
        self.commit_sent = False

    def begin(self) -> Literal["running", "held"] | None:
        """Open the transaction and take the locks; None when all is ours.

        ``running``: the period is in somebody else's hands; ``held``: the lock name is. In
        both cases the transaction has been rolled back.

        Raises:
            psycopg.Error: the session is broken and has been closed.
        """
        session = self._session
        engine = session.engine
        try:
            deadline = time.monotonic() + _LOOKED_AT
            while (refusal := self._lock()) is not None:
                session.execute(b"rollback")
                if refusal != "looked at" or time.monotonic() > deadline:
                    return "held" if refusal == "held" else "running"
                time.sleep(_POLL)
            self.connection = engine.connect()
            self._root = self.connection.begin()
            self._savepoint = self.connection.begin_nested()
            event.listen(self.connection, "commit", self._on_commit)
            event.listen(self.connection, "rollback", self._on_rollback)
            event.listen(self.connection, "before_cursor_execute", self._on_execute)
        except BaseException:
            session.close()
            raise
        return None

    def _lock(self) -> Literal["running", "held", "looked at"] | None:
        work = self._work
        connection = self._session.connection
        try:
            with connection.pipeline():
                connection.execute(_BEGIN)
                locked = connection.execute(
                    _LOCK,
                    {
                        "run_key": work.run_key,
                        "name_key": work.name_key,
                        "application": work.application,
                    },
                )
                mine = self._ask_whose(connection)
        except psycopg.Error as error:
            # A time limit that strikes while the pipeline is left is hidden behind psycopg's
            # "cannot exit pipeline mode"; told as that, it would be taken for a database fault.
            struck = error.__context__
            while isinstance(struck, psycopg.Error):
                struck = struck.__context__
            if struck is not None:
                raise struck from None
            raise
        run, name, *_ = locked.fetchone() or (False, False)
        if not mine():
            return "running"
        if not run:
            return "looked at"
        return None if name else "held"

    def _ask_whose(self, connection: psycopg.Connection[Any]) -> Any:
        if not isinstance(self._records, ledger.Ledger) or self._work.period is None:
            return lambda: True
        asked = self._records.ask_whose(connection, self._work, self._claim)
        return lambda: asked.fetchone() is not None

    def complete(self) -> bool:
        """Record ``done`` and commit; return False, rolled back, when the claim was not ours.

        Raises:
            TransactionEnded: the body ended the transaction or left it broken.
            psycopg.Error, sqlalchemy.exc.DBAPIError: the session broke; ``commit_sent`` tells
                whether it may have been committed.
        """
        self._closing = True
        try:
            if self._ended is None and not self._savepoint.is_active:
                self._ended = "its savepoint was rolled back or released"
            if self._ended is None:
                self._release()
            self._refuse_ended()
            if not self._records.settle(self._session, self._work, self._claim, "done"):
                self._session.execute(b"rollback")
                return False
            self.commit_sent = True
            self._session.execute(b"commit")
        except errors.TransactionEnded:
            raise
        except BaseException:
            self._session.close()
            raise
        finally:
            self._forget()
        return True

    def abandon(
        self, status: claims.Status, reason: str | None, error: str | None, retry_in: float | None
    ) -> bool:
        """Undo the body's work and record what came of it, all under the locks.

        Recorded in a transaction of its own it would race with the next holder.

        Returns:
            Whether the row was still ours.

        Raises:
            psycopg.Error: the session is broken and has been closed; nothing is recorded.
        """
        self._closing = True
        session = self._session
        try:
            if self._status() != TransactionStatus.IDLE and not self._undo():
                # The savepoint is gone; what is left can only be rolled back. (A refused
                # commit() takes it from SQLAlchemy, and the work that is still open would
                # be committed with the outcome.)
                session.execute(b"rollback")
            settled = self._records.settle(
                session,
                self._work,
                self._claim,
                status,
                reason=reason,
                error=error,
                retry_in=retry_in,
            )
            if self._status() != TransactionStatus.IDLE:
                session.execute(b"commit")
        except BaseException:
            session.close()
            raise
        finally:
            self._forget()
        return settled

    @property
    def open(self) -> bool:
        """Whether the transaction, and with it the locks, still stands; no query."""
        status = self._status()
        return self._ended is None and (
            status == TransactionStatus.ACTIVE
            or (
                status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)
                and self._session.alive
            )
        )

    def _undo(self) -> bool:
        """Roll back to the savepoint; False when that cannot be done."""
        if not self._savepoint.is_active:
            return False
        try:
            self._savepoint.rollback()
        except (sa.exc.SQLAlchemyError, psycopg.Error):
            return False
        return True

    def _release(self) -> None:
        if self._status() == TransactionStatus.INERROR:
            self._ended = "an SQL error was swallowed and the transaction is aborted"
            return
        try:
            self._savepoint.commit()
        except sa.exc.DBAPIError as error:
            if error.connection_invalidated or self._session.connection.closed:
                raise
            # 25P01: no transaction is open; 3B001: it is another one, without our savepoint.
            self._ended = "it was ended by a COMMIT or ROLLBACK that was sent as text"
        except errors.TransactionEnded as error:
            self._ended = error.reason

    def _refuse_ended(self) -> None:
        if self._ended is not None:
            raise errors.TransactionEnded(self._work.job, self._work.period, self._ended)

    def _status(self) -> TransactionStatus:
        return self._session.connection.info.transaction_status

    def _forget(self) -> None:
        # SQLAlchemy rolls back what it believes to be open. Our own COMMIT or ROLLBACK came
        # first, so there is nothing open any more and psycopg sends nothing.
        with contextlib.suppress(sa.exc.SQLAlchemyError, psycopg.Error):
            self.connection.close()

    def _on_commit(self, _: sa.Connection) -> None:
        if not self._closing:
            self._ended = "the body called commit()"
            raise errors.TransactionEnded(self._work.job, self._work.period, self._ended)

    def _on_rollback(self, _: sa.Connection) -> None:
        if not self._closing:
            self._ended = "the body called rollback() or close()"

    def _on_execute(self, *_: object) -> None:
        if self._ended is None and self._status() == TransactionStatus.IDLE:
            self._ended = "it was ended by a COMMIT or ROLLBACK that was sent as text"
        # What is executed after the end would commit by itself.
        self._refuse_ended()

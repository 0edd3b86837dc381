"""The working transaction of a transaction-level run, on a connection of our own by SQLAlchemy.

The locks end with the transaction, so a body that ends the transaction ends them. SQLAlchemy's
events catch ``commit()``, ``rollback()`` and anything executed afterwards; the savepoint
catches a COMMIT that was sent as text. What such a COMMIT wrote cannot be undone, but it is
never recorded as done.

Imported only where there are such runs, because it imports SQLAlchemy; in a worker before it
forks: see ``transaction_runs.preload``.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
import weakref
from typing import Final

import psycopg
import sqlalchemy as sa
import sqlalchemy.dialects.postgresql.psycopg  # else imported by the first run
from psycopg.pq import TransactionStatus
from sqlalchemy import event

from celery_pglock import claims, errors, sessions, transaction_locks, transactions

# SQLAlchemy wraps whatever strikes while it prepares a statement in a StatementError.
_FAULTS: Final = (psycopg.Error, sa.exc.StatementError)


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
        records: transactions.Records,
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
        self.afterwards: BaseException | None = None

    def begin(self) -> transaction_locks.Refusal | None:
        """Open the transaction and take the locks; None when all is ours.

        Raises:
            psycopg.Error: the session is broken and has been closed.
        """
        session = self._session
        outer = sys.exception()
        try:
            engine = engine_of(session)
            refusal = transaction_locks.take(session, self._records, self._work, self._claim)
            if refusal is not None:
                return refusal
            self.connection = engine.connect()
            self._root = self.connection.begin()
            self._savepoint = self.connection.begin_nested()
            event.listen(self.connection, "commit", self._on_commit)
            event.listen(self.connection, "rollback", self._on_rollback)
            event.listen(self.connection, "before_cursor_execute", self._on_execute)
        except BaseException as error:
            session.close()
            if (struck := transactions.hidden_behind(error, outer, _FAULTS)) is not None:
                raise struck from None
            if isinstance(error, sa.exc.DBAPIError) and isinstance(error.orig, psycopg.Error):
                # Ours and not the body's: told as any other fault of the database.
                raise error.orig from None
            raise
        return None

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
        except BaseException as error:
            self._session.close()
            if (struck := _struck_inside(error)) is not None:
                raise struck from None
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

    def missed_by(self, interruption: BaseException) -> BaseException | None:  # noqa: ARG002
        """Return None: the body has left nothing for after the commit."""
        return None

    @staticmethod
    def driver_error(error: BaseException) -> psycopg.Error | None:
        """Return psycopg's error, as it is or as SQLAlchemy's cause, or None."""
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        return cause if isinstance(cause, psycopg.Error) else None

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


def _struck_inside(error: BaseException) -> BaseException | None:
    """Return what struck inside SQLAlchemy and is no fault of a statement, or None."""
    if isinstance(error, sa.exc.StatementError) and not isinstance(error, sa.exc.DBAPIError):
        return error.orig
    return None


_engines: weakref.WeakKeyDictionary[sessions.Session, sa.Engine] = weakref.WeakKeyDictionary()


def engine_of(session: sessions.Session) -> sa.Engine:
    """Return an SQLAlchemy engine whose only connection is this session's."""
    engine = _engines.get(session)
    if engine is None:
        # Not by way of the session: one that is in a cycle outlives who holds it.
        connection = session.connection
        engine = sa.create_engine(
            "postgresql+psycopg://",
            creator=lambda: connection,
            poolclass=sa.StaticPool,
            pool_reset_on_return=None,
            use_native_hstore=False,
        )
        _engines[session] = engine
        # The dialect asks for the server's version on its first connection and rolls
        # back: that has to be over before any BEGIN of ours.
        engine.connect().close()
    return engine

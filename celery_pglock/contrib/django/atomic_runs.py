"""The transaction of a run on Django's own connection: ``transaction.atomic()``, twice.

The outer block is the transaction, whose first statements take the locks and whose last records
the outcome. In the inner one, a savepoint, the body works: its models write through the same
connection, its own ``atomic()`` blocks nest, and what it leaves to ``transaction.on_commit()`` is
called when all is committed and the locks are free, or forgotten together with its work.

Django refuses ``commit()``, ``rollback()`` and ``set_autocommit()`` in there. What gets past it
(the connection closed, a COMMIT sent as text, an error swallowed) is found at the end of the body:
such a run is not done.
"""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING, Any

import django.db
import psycopg
from django.db import transaction
from psycopg.pq import TransactionStatus

from celery_pglock import claims, errors, sessions, transaction_locks, transactions

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


class AtomicTransaction:
    """The transaction of one run, as ``transactions.Transaction`` says.

    Attributes:
        connection: Django's object around the connection.
        commit_sent: whether COMMIT was sent.
        afterwards: what an ``on_commit()`` function has raised.
    """

    connection: BaseDatabaseWrapper

    def __init__(
        self,
        session: Any,  # a BorrowedSession; the protocol knows of sessions
        records: transactions.Records,
        work: claims.Work,
        claim: uuid.UUID,
    ) -> None:
        self.connection = session.wrapper
        self._session: sessions.Session = session
        self._records = records
        self._work = work
        self._claim = claim
        self._committed = False
        self._left_for_later = False
        self.commit_sent = False
        self.afterwards: BaseException | None = None

    def begin(self) -> transaction_locks.Refusal | None:
        """Enter both blocks, between them take the locks; None when all is ours.

        Raises:
            psycopg.Error: the session is broken and has been closed.
        """
        outer = sys.exception()
        try:
            alias = self.connection.alias
            self._whole = transaction.atomic(using=alias, durable=True)
            self._body = transaction.atomic(using=alias)
            self._whole.__enter__()
            # Whatever isolation DATABASES asks for: a snapshot that is older than the locks
            # could not tell whether the claim is still ours.
            refusal = transaction_locks.take(
                self._session, self._records, self._work, self._claim, transaction_locks.BEGUN
            )
            if refusal is not None:
                self._roll_back()
                return refusal
            # The first to be called when the commit has been answered.
            transaction.on_commit(self._take_note, using=alias)
            self._body.__enter__()
            self._keep_open()
        except BaseException as error:
            self._session.close()
            if (struck := transactions.hidden_behind(error, outer)) is not None:
                raise struck from None
            if (cause := self.driver_error(error)) is not None:
                # Ours and not the body's: told as any other fault of the database.
                raise cause from None
            raise
        return None

    def complete(self) -> bool:
        """Record ``done`` and commit; return False, rolled back, when the claim was not ours.

        Raises:
            TransactionEnded: the body ended the transaction or left it broken.
            psycopg.Error, django.db.Error: the session broke; ``commit_sent`` tells whether it
                may have been committed.
        """
        try:
            self._refuse_ended()
            self._release()
            if not self._records.settle(self._session, self._work, self._claim, "done"):
                self._roll_back()
                return False
            self._left_for_later = len(self.connection.run_on_commit) > 1
            self._let_go()
            self.commit_sent = True
            self._whole.__exit__(None, None, None)
        except errors.TransactionEnded:
            raise
        except BaseException as error:
            if not self._committed:
                self._session.close()
                raise
            # By now an error can only be that of an on_commit() function.
            self.afterwards = error
        finally:
            self._let_go()
        return True

    def abandon(
        self, status: claims.Status, reason: str | None, error: str | None, retry_in: float | None
    ) -> bool:
        """Undo the body's work and record what came of it, all under the locks.

        Returns:
            Whether the row was still ours.

        Raises:
            psycopg.Error, django.db.Error: the session is broken and has been closed; nothing is
                recorded.
        """
        try:
            self._refuse_closed()
            if not (undone := self._undo()):
                self._roll_back()
            settled = self._records.settle(
                self._session,
                self._work,
                self._claim,
                status,
                reason=reason,
                error=error,
                retry_in=retry_in,
            )
            if undone:
                self._whole.__exit__(None, None, None)
        except BaseException as broken:
            self._session.close()
            if (cause := self.driver_error(broken)) is not None:
                raise cause from None
            raise
        finally:
            self._let_go()
        return settled

    @property
    def open(self) -> bool:
        """Whether the transaction, and with it the locks, still stands; no query."""
        status = self._status()
        return self._ours and (
            status == TransactionStatus.ACTIVE
            or (
                status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)
                and self._session.alive
            )
        )

    def missed_by(self, interruption: BaseException) -> BaseException | None:
        """Return what kept ``on_commit()`` functions from being called, if there were any."""
        return interruption if self._left_for_later else None

    @staticmethod
    def driver_error(error: BaseException) -> psycopg.Error | None:
        """Return psycopg's error, as it is or as Django's cause, or None."""
        cause = error.__cause__ if isinstance(error, django.db.Error) else error
        return cause if isinstance(cause, psycopg.Error) else None

    @property
    def _ours(self) -> bool:
        return (
            self.connection.connection is self._session.connection
            and not self.connection.closed_in_transaction
            and not self._session.connection.closed
        )

    def _refuse_ended(self) -> None:
        if (ended := self._how_ended()) is not None:
            raise errors.TransactionEnded(self._work.job, self._work.period, ended)

    def _how_ended(self) -> str | None:
        if not self._ours:
            return "its connection was closed"
        status = self._status()
        if status == TransactionStatus.IDLE:
            return "it was ended by a COMMIT or ROLLBACK that was sent as text"
        if status == TransactionStatus.INERROR:
            return "an SQL error was swallowed and the transaction is aborted"
        if self.connection.needs_rollback:
            return "an error inside atomic() was swallowed, or set_rollback(True) was called"
        if not self._body_is_innermost:
            return "the body has not left an atomic() block of its own"
        return None

    @property
    def _body_is_innermost(self) -> bool:
        return [*self.connection.atomic_blocks][-1:] == [self._body]

    def _release(self) -> None:
        try:
            self._body.__exit__(None, None, None)
        except django.db.Error as error:
            cause = self.driver_error(error)
            if cause is None or cause.diag.severity_nonlocalized != "ERROR":
                raise
            # 25P01: no transaction is open; 3B001: it is another one, without our savepoint.
            ended = "it was ended by a COMMIT or ROLLBACK that was sent as text"
            raise errors.TransactionEnded(self._work.job, self._work.period, ended) from None

    def _refuse_closed(self) -> None:
        if not self._ours:
            # Out of a pool it may be open, and in other hands.
            msg = "its connection was closed"
            raise psycopg.OperationalError(msg)

    def _undo(self) -> bool:
        """Roll back to the savepoint; False when that cannot be done."""
        if (
            self._status() not in (TransactionStatus.INTRANS, TransactionStatus.INERROR)
            or not self._body_is_innermost
        ):
            return False
        self._body.__exit__(transaction.TransactionManagementError, None, None)
        return not self.connection.needs_rollback

    def _roll_back(self) -> None:
        """Leave what blocks are open, undoing all."""
        if [*self.connection.atomic_blocks] not in ([self._whole], [self._whole, self._body]):
            self._session.close()
            return
        for block in reversed(self.connection.atomic_blocks[:]):
            block.__exit__(transaction.TransactionManagementError, None, None)

    def _take_note(self) -> None:
        self._committed = True

    def _keep_open(self) -> None:
        # close_old_connections() takes a connection that is not in autocommit for one that
        # somebody forgot, and closes it. This one is in use.
        vars(self.connection)["close_if_unusable_or_obsolete"] = _do_nothing

    def _let_go(self) -> None:
        vars(self.connection).pop("close_if_unusable_or_obsolete", None)

    def _status(self) -> TransactionStatus:
        return self._session.connection.info.transaction_status


def _do_nothing() -> None:
    """Stand for what Django does with its connections between two requests."""

"""What the working transaction of a transaction-level run does: lock, body and outcome as one.

The claim has been committed beforehand, so that a crash leaves a trace. The transaction begins
with its locks (see ``transaction_locks``). Then a savepoint, in which the body works. At its end
the outcome is recorded inside the same transaction, fenced by the claim, and committed: the
commit is the proof that the locks were held all along.

Whose connection it is on, and so how it is made, is said elsewhere: see ``working_transactions``
for one of our own, by SQLAlchemy.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Protocol

import psycopg

from celery_pglock import claims, sessions, transaction_locks

Records = transaction_locks.Records


class Transaction(Protocol):
    """The transaction of one run, whoever's connection it is on.

    Attributes:
        connection: what the body writes through.
        commit_sent: whether COMMIT was sent: before that, a broken session means ROLLBACK.
        afterwards: what was raised, after the commit, by what the body had left for then.
    """

    commit_sent: bool
    afterwards: BaseException | None

    @property
    def connection(self) -> Any:
        """What the body writes through."""
        ...

    @property
    def open(self) -> bool:
        """Whether the transaction, and with it the locks, still stands; no query."""
        ...

    def begin(self) -> transaction_locks.Refusal | None:
        """Open the transaction and take the locks; None when all is ours."""
        ...

    def complete(self) -> bool:
        """Record ``done`` and commit; return False, rolled back, when the claim was not ours."""
        ...

    def abandon(
        self, status: claims.Status, reason: str | None, error: str | None, retry_in: float | None
    ) -> bool:
        """Undo the body's work and record what came of it; return whether the row was ours."""
        ...

    def missed_by(self, interruption: BaseException) -> BaseException | None:
        """Return what must not be forgotten although the transaction has been committed.

        Args:
            interruption: it struck between the commit and its answer.
        """
        ...

    @staticmethod
    def driver_error(error: BaseException) -> psycopg.Error | None:
        """Return the driver's error in one that this connection raises, or None."""
        ...


Begin = Callable[[sessions.Session, Records, claims.Work, uuid.UUID], Transaction]


def hidden_behind(
    error: BaseException,
    outer: BaseException | None,
    faults: tuple[type[Exception], ...] = (psycopg.Error,),
) -> BaseException | None:
    """Return what struck while the transaction began, if a database error hides it, or None.

    A time limit that strikes while psycopg's pipeline is left, or in the connection's first
    queries, comes out as "cannot exit pipeline mode" or "another command is already in progress".
    Told as that, it would be taken for a fault of the database.

    Args:
        error: what was raised.
        outer: what was being handled before, which has nothing to do with it.
        faults: the database errors that may hide it.
    """
    found: BaseException | None = error
    while isinstance(found, faults) and found is not outer:
        found = found.__context__
    return None if found is outer or found is error else found

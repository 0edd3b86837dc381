"""A run at transaction level: the body in the transaction that is its lock.

What the body writes and the outcome commit together or not at all; a failure is recorded in
the same transaction after the body's work has been undone, so under the locks as well.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from typing import TypeVar

import psycopg

from celery_pglock import (
    attempts,
    claims,
    errors,
    holds,
    runs,
    schema,
    sessions,
    transaction_locks,
    transactions,
)

T = TypeVar("T")


def preload() -> None:
    """Import what ``on_own_connection`` needs, SQLAlchemy above all.

    For a process that is going to fork: its children then share it, and their first runs do not
    wait for it.
    """
    from celery_pglock import working_transactions  # noqa: F401


def on_own_connection(
    session: sessions.Session, records: transactions.Records, work: claims.Work, claim: uuid.UUID
) -> transactions.Transaction:
    """Make the transaction of a run on its session's own connection, by SQLAlchemy."""
    # It takes longer to import than all of celery-pglock, and most processes have no such run.
    from celery_pglock import working_transactions

    return working_transactions.WorkingTransaction(session, records, work, claim)


@dataclasses.dataclass(frozen=True, slots=True)
class TransactionRun:
    """Runs one body in a transaction of its own, under a claim that is committed already.

    Attributes:
        attempt: the claim.
        transact: makes the transaction.
    """

    attempt: attempts.Attempt
    transact: transactions.Begin

    def run(self, body: Callable[[runs.Run], T]) -> attempts.Ran[T] | claims.Refused:
        """Run the body and commit with what came of it; raises as ``Executor.execute`` does."""
        attempt = self.attempt
        session, records, work = attempt.session, attempt.records, attempt.work
        transaction = self.transact(session, records, work, attempt.claim)
        with schema.translated(session.target, records.schema):
            refusal = self._begin(transaction)
            if refusal is not None:
                # Between the claim and the locks somebody else was quicker. The row is ours
                # no longer when it was this period, and waits again when it was another.
                records.give_back(session, work, attempt.claim, "lock taken before start")
                return claims.Refused(refusal, records.read(session, work))
        guarded = attempt.guarded(
            transaction.connection,
            lambda: None if transaction.open else "its transaction has ended",
        )
        try:
            value = guarded.work(body, attempt.terms.started)
        except BaseException as error:
            if attempt.inherited:
                raise
            if session.connection.closed:
                # The body's own statement has met the end of the session before the monitor.
                guarded.hold.lose(holds.ENDED)
            loss = guarded.hold.release()
            verdict = attempt.terms.classify(error)
            if loss is not None and (verdict.keep or transaction.driver_error(error) is not None):
                verdict = attempts.lost_lock(attempt.lost(loss.reason))
            if verdict.keep:
                self._commit(transaction)
                if transaction.afterwards is not None:
                    raise transaction.afterwards from error
            else:
                self._abandon(transaction, verdict)
            raise
        if not attempt.inherited:
            guarded.hold.release()
            self._commit(transaction)
        return attempts.Ran(value, guarded.run, afterwards=transaction.afterwards)

    def _begin(self, transaction: transactions.Transaction) -> transaction_locks.Refusal | None:
        try:
            return transaction.begin()
        except BaseException as struck:
            # The claim is committed already: without a word it would count as a crash.
            self._settle_strike(self.attempt.terms.classify(struck), struck, patience=0)
            raise

    def _settle_strike(
        self, verdict: claims.Verdict, struck: BaseException, patience: float | None = None
    ) -> None:
        attempt = self.attempt
        attempt.loan.close()
        attempt.settlement.failure(attempt.work, attempt.claim, verdict, struck, patience)

    def _commit(self, transaction: transactions.Transaction) -> None:
        attempt = self.attempt
        settlement, work, claim = attempt.settlement, attempt.work, attempt.claim
        try:
            committed = transaction.complete()
        except errors.TransactionEnded as ended:
            verdict = claims.Verdict(status="failed", reason="transaction ended", error=str(ended))
            self._abandon(transaction, verdict)
            raise
        except BaseException as error:
            cause = transaction.driver_error(error)
            if cause is not None and _refused(cause):
                # The server's own answer: a deferred constraint, a time-out. All is rolled back.
                self._settle_strike(attempt.terms.classify(error), error)
                raise
            if transaction.commit_sent and settlement.was_committed(work, claim, error):
                transaction.afterwards = transaction.missed_by(error)
                return
            if cause is None:
                if not transaction.commit_sent:
                    self._settle_strike(attempt.terms.classify(error), error)
                raise
            lost = attempt.lost(holds.ENDED)
            if not transaction.commit_sent:
                settlement.failure(work, claim, attempts.lost_lock(lost), error)
            raise lost from error
        if not committed:
            attempt.loan.close()
            raise attempt.lost("another attempt has taken the period over")
        attempt.loan.give_back()

    def _abandon(self, transaction: transactions.Transaction, verdict: claims.Verdict) -> None:
        attempt = self.attempt
        try:
            transaction.abandon(verdict.status, verdict.reason, verdict.error, verdict.retry_in)
            attempt.loan.give_back()
        except BaseException as error:
            self._settle_strike(verdict, error)
            broken = isinstance(error, psycopg.Error | errors.LockLost)
            if not broken or attempts.struck_by(error, attempt.work):
                raise


def _refused(error: psycopg.Error) -> bool:
    """Whether the server has refused a statement and lives; else the session has ended."""
    return error.diag.severity_nonlocalized == "ERROR"

"""One body, run once under its locks, at either level: claim, work, settle.

Nothing here knows Celery. What a body's exception means (a retry, a failure) is told by a
function that is handed in; what a refusal means for the message is the caller's business.

Whatever happens between the claim and the end of the settling, a time limit that strikes at
any bytecode included, the session is closed: the one way that surely frees its locks.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import psycopg
import sqlalchemy as sa

from celery_pglock import (
    claims,
    errors,
    interruptions,
    monitor,
    runs,
    schema,
    sessions,
    settling,
    transactions,
)

T = TypeVar("T")

_POLL: Final = 0.05
_LONGEST_POLL: Final = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Ran(Generic[T]):
    """The body ran and its period is recorded as done.

    Attributes:
        value: what the body returned.
        run: the run.
        lost: why the lock is known to have been lost, when ``lost`` is tolerated.
    """

    value: T
    run: runs.Run
    lost: errors.LockLost | None = None


class _Loan:
    """A session of the stack, for as long as it is ours.

    Once given back it may be another thread's, so whatever is raised after that, a body's own
    exception above all, must not close it here: that would end the other run's locks.
    """

    def __init__(self, stack: sessions.Stack) -> None:
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Runs bodies over one stack of sessions.

    Attributes:
        stack: where lock sessions come from; its level is the level of the runs.
        records: the ledger, or what stands for it when only the name lock is wanted.
        classify: what a body's exception means.
        started: called under the locks, before the body; must not raise.
        lost: called when a hold is lost, on whatever thread notices, while the body may still
            be working; exceptions are contained.
        tolerate_loss: a lost lock is no error of the run: it is told, and the outcome is
            recorded if nobody has taken the period over.
        interrupt: a lost lock ends a body that works in the main thread, with ``LockLost``.
    """

    stack: sessions.Stack
    records: transactions.Records
    classify: Callable[[BaseException], claims.Verdict]
    started: Callable[[runs.Run], None] = lambda _: None
    lost: Callable[[runs.Run, errors.LockLost, monitor.Loss], None] = lambda *_: None
    tolerate_loss: bool = False
    interrupt: bool = False

    def execute(
        self,
        work: claims.Work,
        body: Callable[[runs.Run], T],
        *,
        patience: Callable[[claims.Refused], float] = lambda _: 0.0,
        window: claims.Window | None = None,
    ) -> Ran[T] | claims.Refused:
        """Run ``body`` if the period is to be had, and record what came of it.

        Args:
            work: what is to be run.
            body: the work itself; it is given its ``Run``.
            patience: for how many seconds in all a refusal is worth trying again.
            window: refuse with ``moved`` when the server's clock is outside it.

        Returns:
            What the body returned, or why it did not run.

        Raises:
            BaseException: the body's own exception, once it is recorded.
            DatabaseUnavailable, ServerInRecovery, TransactionPooler, SchemaError,
            ConfigurationError: nothing is known of the lock, and the body did not run.
            LockLost: the body ran, but its period was not its own any more.
            OutcomeUnknown: the body ran, but that could not be recorded.
        """
        started = time.monotonic()
        pause = _POLL
        claim = uuid.uuid4()
        while True:
            loan = _Loan(self.stack)
            try:
                session, answer = self._claim(loan, work, claim, window)
                if isinstance(answer, claims.Claimed):
                    outcome = self._run(loan, session, work, answer, body)
                    if not isinstance(outcome, claims.Refused):
                        return outcome
                    answer = outcome
                    claim = uuid.uuid4()
                if answer.kind == "held":
                    with schema.translated(session.target, self.records.schema):
                        answer = dataclasses.replace(
                            answer, holder=self.records.holder(session, work)
                        )
                loan.give_back()
            except BaseException:
                loan.close()
                raise
            left = patience(answer) - (time.monotonic() - started)
            if left <= 0:
                return answer
            time.sleep(min(pause, left))
            pause = min(pause * 2, _LONGEST_POLL)

    @property
    def _settlement(self) -> settling.Settlement:
        return settling.Settlement(stack=self.stack, records=self.records)

    def tell(self, act: Callable[[sessions.Session], T]) -> T:
        """Run a ledger statement over a session of the stack, for instance to record a skip.

        Raises:
            DatabaseUnavailable, SchemaError: as ``execute`` does.
        """
        session = self.stack.take()
        try:
            with schema.translated(session.target, self.records.schema):
                result = act(session)
        except BaseException:
            session.close()
            raise
        self.stack.give(session)
        return result

    def _claim(
        self, loan: _Loan, work: claims.Work, claim: uuid.UUID, window: claims.Window | None
    ) -> tuple[sessions.Session, claims.Claimed | claims.Refused]:
        for last in (False, True):
            session = loan.take()
            try:
                with schema.translated(session.target, self.records.schema):
                    return session, self.records.claim(session, work, claim=claim, window=window)
            except errors.DatabaseUnavailable:
                # An idle session may have died unseen. The same claim again is the same
                # attempt, so asking once more over a new session is safe.
                if last:
                    raise
                self.stack.close()
        raise AssertionError

    def _run(
        self,
        loan: _Loan,
        session: sessions.Session,
        work: claims.Work,
        claimed: claims.Claimed,
        body: Callable[[runs.Run], T],
    ) -> Ran[T] | claims.Refused:
        if session.level == "session":
            return self._run_at_session_level(loan, session, work, claimed, body)
        return self._run_at_transaction_level(loan, session, work, claimed, body)

    def _run_at_session_level(
        self,
        loan: _Loan,
        session: sessions.Session,
        work: claims.Work,
        claimed: claims.Claimed,
        body: Callable[[runs.Run], T],
    ) -> Ran[T]:
        interruption = interruptions.Interruption()
        hold = monitor.Hold(session, lambda loss: self._tell_loss(run, interruption, loss))
        view = monitor.View(hold)
        run = runs.Run(
            name=work.name,
            key=work.name_key,
            level="session",
            job=work.job,
            period=work.period,
            due=work.due_at,
            attempt=claimed.attempt,
            term=work.term,
            lost_attempts=claimed.lost_attempts,
            _held=lambda: view.held,
            _prove=view.check,
        )
        try:
            hold.begin()
            with interruption, runs.entered(run):
                self.started(run)
                value = body(run)
        except BaseException as error:
            self._settle_failure(loan, hold, work, claimed.claim, self.classify(error))
            raise
        lost = self._settle_success(loan, hold, work, claimed.claim)
        return Ran(value, run, lost)

    def _tell_loss(
        self, run: runs.Run, interruption: interruptions.Interruption, loss: monitor.Loss
    ) -> None:
        lost = errors.LockLost(run.job, run.period, loss.reason)
        if self.interrupt:
            interruption.strike(lost)
        self.lost(run, lost, loss)

    def _settle_success(
        self, loan: _Loan, hold: monitor.Hold, work: claims.Work, claim: uuid.UUID
    ) -> errors.LockLost | None:
        session = hold.session
        try:
            try:
                settled = hold.release() is None and (
                    self.records.settle(session, work, claim, "done")
                    or self._is_done(session, work, claim)
                )
            except (psycopg.Error, errors.LockLost) as error:
                settled = self._settlement.outcome(
                    work, claim, claims.Verdict(status="done"), error
                )
            except BaseException as interruption:
                # A time limit or a stop that struck after the body had ended: what is done is
                # recorded before anything else.
                session.close()
                if hold.loss is not None or not self._settlement.outcome(
                    work, claim, claims.Verdict(status="done"), interruption
                ):
                    raise
                settled = True
            if hold.loss is not None:
                return self._settle_loss(session, hold.loss, work, claim)
        except BaseException:
            loan.close()
            raise
        if settled:
            loan.give_back()
            return None
        session.close()
        lost = errors.LockLost(
            work.job,
            work.period,
            "another attempt has taken the period over"
            if work.period is not None
            else "its session ended before the body did",
        )
        if not self.tolerate_loss:
            raise lost
        return lost

    def _settle_loss(
        self,
        session: sessions.Session,
        loss: monitor.Loss,
        work: claims.Work,
        claim: uuid.UUID,
    ) -> errors.LockLost | None:
        """End a run that returned although its lock is known to be lost: never as done.

        Where a loss is tolerated the fence decides, as it does when nobody has noticed.
        """
        session.close()
        lost = errors.LockLost(work.job, work.period, loss.reason)
        if self.tolerate_loss:
            done = claims.Verdict(status="done")
            return None if self._settlement.outcome(work, claim, done, lost) else lost
        self._settlement.failure(work, claim, _lost_lock(lost), lost)
        raise lost

    def _is_done(self, session: sessions.Session, work: claims.Work, claim: uuid.UUID) -> bool:
        return (
            not session.connection.closed
            and self.records.settled_as(session, work, claim) == "done"
        )

    def _settle_failure(
        self,
        loan: _Loan,
        hold: monitor.Hold,
        work: claims.Work,
        claim: uuid.UUID,
        verdict: claims.Verdict,
    ) -> None:
        """Record a body's exception; whatever goes wrong here must not hide that exception."""
        session = hold.session
        try:
            if (loss := hold.release()) is not None:
                lost = errors.LockLost(work.job, work.period, loss.reason)
                if verdict.status == "done" and not self.tolerate_loss:
                    verdict = _lost_lock(lost)
                raise lost  # noqa: TRY301 - to where a session that broke in settling goes
            self.records.settle(
                session,
                work,
                claim,
                verdict.status,
                reason=verdict.reason,
                error=verdict.error,
                retry_in=verdict.retry_in,
            )
            loan.give_back()
        except (psycopg.Error, errors.LockLost) as error:
            session.close()
            self._settlement.failure(work, claim, verdict, error)
        except BaseException:
            loan.close()
            raise

    def _run_at_transaction_level(
        self,
        loan: _Loan,
        session: sessions.Session,
        work: claims.Work,
        claimed: claims.Claimed,
        body: Callable[[runs.Run], T],
    ) -> Ran[T] | claims.Refused:
        transaction = transactions.WorkingTransaction(session, self.records, work, claimed.claim)
        with schema.translated(session.target, self.records.schema):
            refusal = transaction.begin()
            if refusal is not None:
                # Between the claim and the locks somebody else was quicker. The row is ours
                # no longer when it was this period, and waits again when it was another.
                self.records.give_back(session, work, claimed.claim, "lock taken before start")
                return claims.Refused(refusal, self.records.read(session, work))
        interruption = interruptions.Interruption()
        hold = monitor.Hold(session, lambda loss: self._tell_loss(run, interruption, loss))
        view = monitor.View(hold)
        run = runs.Run(
            name=work.name,
            key=work.name_key,
            level="transaction",
            job=work.job,
            period=work.period,
            due=work.due_at,
            attempt=claimed.attempt,
            term=work.term,
            lost_attempts=claimed.lost_attempts,
            _connection=transaction.connection,
            _held=lambda: view.held and transaction.open,
            _prove=lambda: (
                view.check() or (None if transaction.open else "its transaction has ended")
            ),
        )
        try:
            hold.begin()
            with interruption, runs.entered(run):
                self.started(run)
                value = body(run)
        except BaseException as error:
            hold.release()
            verdict = self.classify(error)
            if verdict.keep:
                self._commit(loan, transaction, work, claimed.claim)
            else:
                self._abandon(loan, transaction, work, claimed.claim, verdict)
            raise
        hold.release()
        self._commit(loan, transaction, work, claimed.claim)
        return Ran(value, run)

    def _commit(
        self,
        loan: _Loan,
        transaction: transactions.WorkingTransaction,
        work: claims.Work,
        claim: uuid.UUID,
    ) -> None:
        try:
            committed = transaction.complete()
        except errors.TransactionEnded as ended:
            verdict = claims.Verdict(status="failed", reason="transaction ended", error=str(ended))
            self._abandon(loan, transaction, work, claim, verdict)
            raise
        except (psycopg.Error, sa.exc.DBAPIError) as error:
            if transaction.commit_sent and self._settlement.was_committed(work, claim, error):
                return
            lost = errors.LockLost(work.job, work.period, monitor.ENDED)
            if not transaction.commit_sent:
                self._settlement.failure(work, claim, _lost_lock(lost), error)
            raise lost from error
        except BaseException as interruption:
            if transaction.commit_sent and self._settlement.was_committed(
                work, claim, interruption
            ):
                return
            raise
        if not committed:
            loan.close()
            raise errors.LockLost(
                work.job, work.period, "another attempt has taken the period over"
            )
        loan.give_back()

    def _abandon(
        self,
        loan: _Loan,
        transaction: transactions.WorkingTransaction,
        work: claims.Work,
        claim: uuid.UUID,
        verdict: claims.Verdict,
    ) -> None:
        try:
            transaction.abandon(verdict.status, verdict.reason, verdict.error, verdict.retry_in)
            loan.give_back()
        except (psycopg.Error, errors.LockLost) as error:
            loan.close()
            self._settlement.failure(work, claim, verdict, error)
        except BaseException:
            loan.close()
            raise


def _lost_lock(lost: errors.LockLost) -> claims.Verdict:
    return claims.Verdict(status="failed", reason="lock lost", error=str(lost))

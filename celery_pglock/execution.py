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
from typing import Final, TypeVar

import psycopg

from celery_pglock import (
    attempts,
    claims,
    errors,
    quick,
    runs,
    schema,
    session_runs,
    sessions,
    settling,
    stacks,
    transaction_runs,
    transactions,
)

T = TypeVar("T")

_POLL: Final = 0.05
_LONGEST_POLL: Final = 0.5


@quick.dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Runs bodies over one stack of sessions.

    Attributes:
        stack: where lock sessions come from; its level is the level of the runs.
        records: the ledger, or what stands for it when only the name lock is wanted.
        terms: what is done about what happens to a body.
        transact: makes the transaction of a run at transaction level.
    """

    stack: stacks.Stack
    records: transactions.Records
    terms: attempts.Terms
    transact: transactions.Begin = transaction_runs.on_own_connection

    def execute(
        self,
        work: claims.Work,
        body: Callable[[runs.Run], T],
        *,
        patience: Callable[[claims.Refused], float] = lambda _: 0.0,
        window: claims.Window | None = None,
    ) -> attempts.Ran[T] | claims.Refused:
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
            loan = stacks.Loan(self.stack)
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

    def tell(self, act: Callable[[sessions.Session], T]) -> T:
        """Run a ledger statement over a session of the stack, for instance to record a skip.

        Raises:
            DatabaseUnavailable, SchemaError: as ``execute`` does.
        """
        with (
            self.stack.lent() as session,
            schema.translated(session.target, self.records.schema),
        ):
            return act(session)

    def _claim(
        self, loan: stacks.Loan, work: claims.Work, claim: uuid.UUID, window: claims.Window | None
    ) -> tuple[sessions.Session, claims.Claimed | claims.Refused]:
        for last in (False, True):
            session = loan.take()
            try:
                return session, self.records.claim(session, work, claim=claim, window=window)
            except psycopg.Error as error:
                fault = schema.fault(error, session.target, self.records.schema)
                if last or isinstance(fault, errors.SchemaError):
                    raise fault from error
                # An idle session may have died unseen. The same claim again is the same
                # attempt, so asking once more over a new session is safe.
                self.stack.close()
            except BaseException as struck:
                if isinstance(struck, errors.PGLockError) and not attempts.struck_by(struck, work):
                    raise
                # Whether the server has done it is not known: the claim itself tells.
                session.close()
                settling.Settlement(stack=self.stack, records=self.records).failure(
                    work, claim, self.terms.classify(struck), struck, patience=0
                )
                raise
        raise AssertionError

    def _run(
        self,
        loan: stacks.Loan,
        session: sessions.Session,
        work: claims.Work,
        claimed: claims.Claimed,
        body: Callable[[runs.Run], T],
    ) -> attempts.Ran[T] | claims.Refused:
        attempt = attempts.Attempt(
            loan=loan,
            session=session,
            records=self.records,
            work=work,
            claimed=claimed,
            terms=self.terms,
            stack=self.stack,
        )
        if session.level == "session":
            return session_runs.SessionRun(attempt).run(body)
        return transaction_runs.TransactionRun(attempt, self.transact).run(body)

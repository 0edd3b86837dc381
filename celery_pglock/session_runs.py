"""A run at session level: the body under session-level locks, and the fenced end of it.

The locks are freed in the statement that records the outcome, so a run costs one round trip
in and one out. Whatever strikes in between, the session is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import psycopg

from celery_pglock import attempts, claims, errors, holds, quick, runs

T = TypeVar("T")

_DONE: Final = claims.Verdict(status="done")


@quick.dataclass(frozen=True, slots=True)
class SessionRun:
    """Runs one body under the locks that its session already holds.

    Attributes:
        attempt: the claim.
    """

    attempt: attempts.Attempt

    def run(self, body: Callable[[runs.Run], T]) -> attempts.Ran[T]:
        """Run the body and record what came of it; raises as ``Executor.execute`` does."""
        guarded = self.attempt.guarded()
        try:
            value = guarded.work(body, self.attempt.terms.started)
        except BaseException as error:
            if not self.attempt.inherited:
                self._settle_failure(guarded.hold, self.attempt.terms.classify(error))
            raise
        if self.attempt.inherited:
            return attempts.Ran(value, guarded.run)
        return attempts.Ran(value, guarded.run, self._settle_success(guarded.hold))

    def _settle_success(self, hold: holds.Hold) -> errors.LockLost | None:
        attempt = self.attempt
        session, work, claim = attempt.session, attempt.work, attempt.claim
        try:
            try:
                settled = hold.release() is None and (
                    attempt.records.settle(session, work, claim, "done") or self._is_done()
                )
            except (psycopg.Error, errors.LockLost) as error:
                if attempts.struck_by(error, work):
                    session.close()
                    attempt.settlement.failure(work, claim, _DONE, error)
                    raise
                settled = attempt.settlement.outcome(work, claim, _DONE, error)
            except BaseException as interruption:
                # A time limit or a stop that struck after the body had ended: what is done is
                # recorded before anything else.
                session.close()
                if hold.loss is not None or not attempt.settlement.outcome(
                    work, claim, _DONE, interruption
                ):
                    raise
                settled = True
            if hold.loss is not None:
                return self._settle_loss(hold.loss)
        except BaseException:
            attempt.loan.close()
            raise
        if settled:
            attempt.loan.give_back()
            return None
        session.close()
        lost = attempt.lost(
            "another attempt has taken the period over"
            if work.period is not None
            else "its session ended before the body did",
        )
        if not attempt.terms.tolerate_loss:
            raise lost
        return lost

    def _settle_loss(self, loss: holds.Loss) -> errors.LockLost | None:
        """End a run that returned although its lock is known to be lost: never as done.

        Where a loss is tolerated the fence decides, as it does when nobody has noticed.
        """
        attempt = self.attempt
        attempt.session.close()
        lost = attempt.lost(loss.reason)
        if attempt.terms.tolerate_loss:
            return (
                None
                if attempt.settlement.outcome(attempt.work, attempt.claim, _DONE, lost)
                else lost
            )
        attempt.settlement.failure(attempt.work, attempt.claim, attempts.lost_lock(lost), lost)
        raise lost

    def _is_done(self) -> bool:
        attempt = self.attempt
        return (
            not attempt.session.connection.closed
            and attempt.records.settled_as(attempt.session, attempt.work, attempt.claim) == "done"
        )

    def _settle_failure(self, hold: holds.Hold, verdict: claims.Verdict) -> None:
        """Record a body's exception; whatever goes wrong here must not hide that exception."""
        attempt = self.attempt
        try:
            if (loss := hold.release()) is not None:
                lost = attempt.lost(loss.reason)
                if verdict.status == "done" and not attempt.terms.tolerate_loss:
                    verdict = attempts.lost_lock(lost)
                raise lost  # noqa: TRY301 - to where a session that broke in settling goes
            attempt.records.settle(
                attempt.session,
                attempt.work,
                attempt.claim,
                verdict.status,
                reason=verdict.reason,
                error=verdict.error,
                retry_in=verdict.retry_in,
            )
            attempt.loan.give_back()
        except BaseException as error:
            attempt.loan.close()
            attempt.settlement.failure(attempt.work, attempt.claim, verdict, error)
            broken = isinstance(error, psycopg.Error | errors.LockLost)
            if not broken or attempts.struck_by(error, attempt.work):
                raise

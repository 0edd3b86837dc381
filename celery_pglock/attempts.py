"""One attempt: a claimed period, the session whose locks it has, and the body under them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from celery_pglock import (
    claims,
    errors,
    holds,
    interruptions,
    quick,
    runs,
    sessions,
    settling,
    stacks,
    transactions,
)

T = TypeVar("T")


@quick.dataclass(frozen=True, slots=True)
class Ran(Generic[T]):
    """The body ran and its period is recorded as done.

    Attributes:
        value: what the body returned.
        run: the run.
        lost: why the lock is known to have been lost, when ``lost`` is tolerated.
        afterwards: what was raised, once all was committed, by what the body had left for then.
    """

    value: T
    run: runs.Run
    lost: errors.LockLost | None = None
    afterwards: BaseException | None = None


@quick.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is done about a body's beginning, its exceptions and a lost lock.

    Attributes:
        classify: what a body's exception means.
        started: called under the locks, before the body; must not raise.
        lost: called when a hold is lost, on whatever thread notices, while the body may still
            be working; exceptions are contained.
        long: called once, with the seconds so far, by the monitor's thread when a
            transaction-level run lasts unduly long; exceptions are contained.
        tolerate_loss: a lost lock is no error of the run: it is told, and the outcome is
            recorded if nobody has taken the period over.
        interrupt: a lost lock ends a body that works in the main thread, with ``LockLost``.
    """

    classify: Callable[[BaseException], claims.Verdict]
    started: Callable[[runs.Run], None] = lambda _: None
    lost: Callable[[runs.Run, errors.LockLost, holds.Loss], None] = lambda *_: None
    long: Callable[[runs.Run, float], None] = lambda *_: None
    tolerate_loss: bool = False
    interrupt: bool = False


@quick.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A claim, and what is needed to work under it and to settle it.

    Attributes:
        loan: the session's; given back or closed by whoever settles.
        session: it holds the locks, or will when its transaction has begun.
        records: the ledger, or what stands for it.
        work: what is run.
        claimed: under which claim.
        terms: what is done about what happens.
        stack: where sessions come from to settle over when this one no longer can.
    """

    loan: stacks.Loan
    session: sessions.Session
    records: transactions.Records
    work: claims.Work
    claimed: claims.Claimed
    terms: Terms
    stack: stacks.Stack

    @property
    def settlement(self) -> settling.Settlement:
        """What settles when the session itself no longer can."""
        return settling.Settlement(stack=self.stack, records=self.records)

    @property
    def claim(self) -> uuid.UUID:
        """The fence: only under it may the row be settled."""
        return self.claimed.claim

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child of the process that works under the claim.

        A body that forks, and whose child leaves it by an exception or a return, comes here
        twice. What came of it is for the parent to say, whose locks it still works under.
        """
        return self.session.owner != os.getpid()

    def guarded(
        self,
        connection: Any = None,
        ended: Callable[[], str | None] = lambda: None,
    ) -> Guarded:
        """Make the run and its hold, which is not begun yet.

        Args:
            connection: for the body, at transaction level.
            ended: why the locks are gone although the session lives, or None.
        """
        interruption = interruptions.Interruption()

        def tell(loss: holds.Loss) -> None:
            lost = errors.LockLost(run.job, run.period, loss.reason)
            if self.terms.interrupt:
                interruption.strike(lost)
            self.terms.lost(run, lost, loss)

        hold = holds.Hold(self.session, tell, lambda seconds: self.terms.long(run, seconds))
        view = holds.View(hold)
        run = runs.Run(
            name=self.work.name,
            key=self.work.name_key,
            level=self.session.level,
            job=self.work.job,
            period=self.work.period,
            due=self.work.due_at,
            attempt=self.claimed.attempt,
            term=self.work.term,
            lost_attempts=self.claimed.lost_attempts,
            _connection=connection,
            _held=lambda: view.held and ended() is None,
            _prove=lambda: view.check() or ended(),
        )
        return Guarded(run, hold, interruption)

    def lost(self, reason: str) -> errors.LockLost:
        """Return the error of this attempt's lost lock."""
        return errors.LockLost(self.work.job, self.work.period, reason)


@quick.dataclass(frozen=True, slots=True)
class Guarded:
    """A run whose locks are watched from ``work`` until the hold is released.

    Attributes:
        run: the run, for the body.
        hold: what is watched.
    """

    run: runs.Run
    hold: holds.Hold
    _interruption: interruptions.Interruption

    def work(self, body: Callable[[runs.Run], T], started: Callable[[runs.Run], Any]) -> T:
        """Run the body; it may be interrupted, with ``LockLost``, until it returns."""
        self.hold.begin()
        with self._interruption, runs.entered(self.run):
            started(self.run)
            return body(self.run)


def struck_by(error: BaseException, work: claims.Work) -> bool:
    """Whether an error is the loss of another run's lock, which strikes while this one settles.

    A run that was called inside the body of another is interrupted by what that one loses.
    """
    return isinstance(error, errors.LockLost) and (error.job, error.period) != (
        work.job,
        work.period,
    )


def lost_lock(lost: errors.LockLost) -> claims.Verdict:
    """Return what is recorded of a run that lost its lock."""
    return claims.Verdict(status="failed", reason="lock lost", error=str(lost))

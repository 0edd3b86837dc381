"""Recording an outcome when the session it was worked under cannot any more.

The database went away under the body, or a time limit struck in the middle of the settling.
What came of the body is then recorded over new sessions, for a bounded time. That is safe
without the locks: settling is fenced by the claim, and whoever takes the period over changes
the claim.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Final

import psycopg

from celery_pglock import claims, errors, ledger, locks, quick, stacks, transactions

_log = logging.getLogger("celery_pglock.settling")

PATIENCE: Final = 10.0
_POLL: Final = 0.05
_LONGEST_POLL: Final = 0.5


def first_line(error: BaseException) -> str:
    """Return what an error says, without what follows: a statement, or the data of a row."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@quick.dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """Settles over sessions of a stack, not over the one that held the locks.

    Attributes:
        stack: where sessions come from.
        records: the ledger, or what stands for it.
    """

    stack: stacks.Stack
    records: transactions.Records

    def failure(
        self,
        work: claims.Work,
        claim: uuid.UUID,
        verdict: claims.Verdict,
        cause: BaseException,
        patience: float | None = None,
    ) -> None:
        """Record what an exception means; when that cannot be done it is only logged.

        The exception itself is on its way to the caller and must not be hidden.
        """
        try:
            self.outcome(work, claim, verdict, cause, patience)
        except errors.OutcomeUnknown as unknown:
            _log.error("%s", unknown, extra={"event": "outcome_unknown", "job": work.job})

    def outcome(
        self,
        work: claims.Work,
        claim: uuid.UUID,
        verdict: claims.Verdict,
        cause: BaseException,
        patience: float | None = None,
    ) -> bool:
        """Record an outcome over new sessions, for a bounded time; fenced by the claim.

        Args:
            work: whose.
            claim: under which claim.
            verdict: what is recorded.
            cause: why it cannot be recorded over the run's own session.
            patience: for how many seconds it is tried again; None: for ``PATIENCE``.

        Returns:
            Whether the period was still ours. Nobody else can have run it then: a take-over
            changes the claim.

        Raises:
            OutcomeUnknown: no session could be had in time.
        """
        if isinstance(self.records, locks.NameLockOnly):
            return False
        deadline = time.monotonic() + (PATIENCE if patience is None else patience)
        pause = _POLL
        while True:
            try:
                with self.stack.lent() as session:
                    settled = self.records.settle(
                        session,
                        work,
                        claim,
                        verdict.status,
                        reason=verdict.reason,
                        error=verdict.error,
                        retry_in=verdict.retry_in,
                    ) or (self.records.settled_as(session, work, claim) == verdict.status)
            except (psycopg.Error, errors.DatabaseUnavailable, errors.ServerInRecovery):
                if time.monotonic() > deadline:
                    raise errors.OutcomeUnknown(
                        work.job, work.period, verdict.status, first_line(cause)
                    ) from cause
                time.sleep(pause)
                pause = min(pause * 2, _LONGEST_POLL)
            else:
                return settled

    def was_committed(self, work: claims.Work, claim: uuid.UUID, cause: BaseException) -> bool:
        """Find out whether a COMMIT that was never answered took place.

        Only once the run lock is free has the old transaction ended one way or the other; the
        row, read after that, tells which.

        Raises:
            OutcomeUnknown: no answer in time.
        """
        if work.run_key is None or not isinstance(self.records, ledger.Ledger):
            raise errors.OutcomeUnknown(work.job, work.period, "done", first_line(cause)) from cause
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                status = self._status_once_free(work, claim, work.run_key)
                if status == "running":
                    verdict = claims.Verdict(
                        status="failed",
                        reason="rolled back",
                        error=first_line(cause),
                    )
                    self.failure(work, claim, verdict, cause)
                if status != "locked":
                    return status == "done"
            except (psycopg.Error, errors.DatabaseUnavailable, errors.ServerInRecovery):
                pass
            if time.monotonic() > deadline:
                raise errors.OutcomeUnknown(
                    work.job, work.period, "done", first_line(cause)
                ) from cause
            time.sleep(_POLL)

    def _status_once_free(self, work: claims.Work, claim: uuid.UUID, run_key: int) -> str | None:
        with self.stack.lent() as session:
            if not locks.is_free(session, run_key):
                return "locked"
            return self.records.settled_as(session, work, claim)

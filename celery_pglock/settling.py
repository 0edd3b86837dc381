"""Recording an outcome when the session it was worked under cannot any more.

The database went away under the body, or a time limit struck in the middle of the settling.
What came of the body is then recorded over new sessions, for a bounded time. That is safe
without the locks: settling is fenced by the claim, and whoever takes the period over changes
the claim.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from typing import Final

import psycopg

from celery_pglock import claims, errors, ledger, locks, sessions, transactions

_log = logging.getLogger("celery_pglock.settling")

PATIENCE: Final = 10.0
_POLL: Final = 0.05
_LONGEST_POLL: Final = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """Settles over sessions of a stack, not over the one that held the locks.

    Attributes:
        stack: where sessions come from.
        records: the ledger, or what stands for it.
    """

    stack: sessions.Stack
    records: transactions.Records

    def failure(
        self, work: claims.Work, claim: uuid.UUID, verdict: claims.Verdict, cause: BaseException
    ) -> None:
        """Record what a body's exception means; when that cannot be done it is only logged.

        The body's own exception is on its way to the caller and must not be hidden.
        """
        try:
            self.outcome(work, claim, verdict, cause)
        except errors.OutcomeUnknown as unknown:
            _log.error("%s", unknown, extra={"event": "outcome_unknown", "job": work.job})

    def outcome(
        self, work: claims.Work, claim: uuid.UUID, verdict: claims.Verdict, cause: BaseException
    ) -> bool:
        """Record an outcome over new sessions, for a bounded time; fenced by the claim.

        Returns:
            Whether the period was still ours. Nobody else can have run it then: a take-over
            changes the claim.

        Raises:
            OutcomeUnknown: no session could be had in time.
        """
        if isinstance(self.records, locks.NameLockOnly):
            return False
        deadline = time.monotonic() + PATIENCE
        pause = _POLL
        while True:
            try:
                session = self.stack.take()
                try:
                    settled = self.records.settle(
                        session,
                        work,
                        claim,
                        verdict.status,
                        reason=verdict.reason,
                        error=verdict.error,
                        retry_in=verdict.retry_in,
                    ) or (self.records.settled_as(session, work, claim) == verdict.status)
                except BaseException:
                    session.close()
                    raise
                self.stack.give(session)
            except (psycopg.Error, errors.DatabaseUnavailable, errors.ServerInRecovery):
                if time.monotonic() > deadline:
                    raise errors.OutcomeUnknown(
                        work.job, work.period, verdict.status, " ".join(str(cause).split())
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
            raise errors.OutcomeUnknown(
                work.job, work.period, "done", " ".join(str(cause).split())
            ) from cause
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                status = self._status_once_free(work, claim, work.run_key)
                if status == "running":
                    verdict = claims.Verdict(
                        status="failed",
                        reason="rolled back",
                        error=" ".join(str(cause).split()),
                    )
                    self.failure(work, claim, verdict, cause)
                if status != "locked":
                    return status == "done"
            except (psycopg.Error, errors.DatabaseUnavailable, errors.ServerInRecovery):
                pass
            if time.monotonic() > deadline:
                raise errors.OutcomeUnknown(
                    work.job, work.period, "done", " ".join(str(cause).split())
                ) from cause
            time.sleep(_POLL)

    def _status_once_free(self, work: claims.Work, claim: uuid.UUID, run_key: int) -> str | None:
        session = self.stack.take()
        try:
            status: str | None = "locked"
            if locks.is_free(session, run_key):
                status = self.records.settled_as(session, work, claim)
        except BaseException:
            session.close()
            raise
        self.stack.give(session)
        return status

"""One call of a LockedTask, from its message to its outcome.

This is where the parts meet: what the message says, which period it belongs to, the engine
room that runs the body under its locks, and what becomes of a message whose body did not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from celery_pglock import (
    attempts,
    checkins,
    claims,
    errors,
    events,
    execution,
    identity,
    keys,
    ledger,
    messages,
    notices,
    outcomes,
    periods,
    policies,
    quick,
    refusals,
    runs,
)

if TYPE_CHECKING:
    import celery
    from celery.app.task import Context

# A holder that was gone when it was asked for had just ended, and a claim whose row cannot be
# seen yet is just being committed: worth another try at once.
_UNDECIDED: Final = 1.0


@quick.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a task with a lock.

    Attributes:
        policy: the task, its options and the application's settings.
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.
        body: calls the task's own code.
        request: the task's request, which is looked up anew each time that Celery is asked for it.
    """

    policy: policies.Policy
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    body: Callable[[], Any]
    request: Context
    _entered: list[runs.Run] = dataclasses.field(default_factory=list)

    @property
    def task(self) -> celery.Task[..., Any]:
        """The task."""
        return self.policy.task

    @property
    def ran(self) -> bool:
        """Whether the body was begun."""
        return bool(self._entered)

    def make(self) -> Any:
        """Run the body if the call may run; return its value or what stands for a skip.

        Raises:
            BaseException: the body's own exception.
            Ignore: the call did not run, and its message is dealt with.
            JobSkipped: a direct call did not run.
            LockNotAcquired: it did not run, and ``lock_conflict="raise"``.
            CrashRetriesExhausted: its period is given up.
            LockLost, OutcomeUnknown: it ran, and is not recorded as done.
            ConfigurationError, SchemaError, ServerInRecovery, TransactionPooler: it did not
                run, and something has to be put right first.
            DatabaseUnavailable: it did not run, and ``lock_unavailable="raise"`` or it has
                been postponed for too long.
        """
        delivery = messages.read(self.request)
        policy = self.policy
        config, task = policy.config, policy.task.name
        name, key = policy.chosen.lock(config.namespace, task, self.args, self.kwargs, self.request)
        notices.of_delivery(config.namespace, task, delivery, policy.once_per)
        try:
            return self._attempt(delivery, name, key)
        except errors.DatabaseUnavailable as error:
            # From inside the body it is the body's own affair, and that has run.
            if self._entered or policy.lock_unavailable == "raise":
                raise
            unclaimed = self._work(delivery, name, key, _node(self.request))
            if not self._postpone(delivery, unclaimed, str(error), record=False):
                raise
            raise messages.drop() from None

    def _attempt(self, delivery: messages.Delivery, name: str, key: int) -> Any:
        node = _node(self.request)
        executor, identifier = self.policy.machinery(node)
        now: dt.datetime | None = None
        while True:
            who = identifier.identify(delivery, name, now)
            work = self._work(delivery, name, key, node, who)
            if delivery.seen == 0 and work.origin is not None:
                work = self._seen(executor, work)
            answer = self._execute(executor, delivery, work, who.window)
            if isinstance(answer, attempts.Ran):
                return answer.value
            if answer.kind != "moved":
                return self._refused(executor, delivery, work, answer)
            now = answer.now

    def _work(
        self,
        delivery: messages.Delivery,
        name: str,
        key: int,
        node: str,
        who: identity.Identity | None = None,
    ) -> claims.Work:
        """Return what is to be run, or as much as is known before its period is."""
        policy, run_key, origin = self.policy, None, None
        namespace = policy.config.namespace
        job, period = (f"{namespace}:{name}", None) if who is None else (who.job, who.period)
        if period is not None:
            run_key = keys.of_run(namespace, job, period)
            origin = self._origin(delivery, job, period)
        return claims.Work(
            job=job,
            period=period,
            name=name,
            name_key=key,
            run_key=run_key,
            task=policy.task.name,
            task_id=delivery.task_id,
            node=node,
            max_lost=policy.max_crash_retries,
            due_at=delivery.due,
            entry=delivery.entry,
            term=delivery.term,
            seen=delivery.seen,
            again=delivery.redelivered,
            origin=origin,
        )

    def _origin(self, delivery: messages.Delivery, job: str, period: str) -> tuple[str, str] | None:
        if delivery.entry is None or delivery.due is None:
            return None
        origin = (
            f"{self.policy.config.namespace}:{delivery.entry}",
            periods.occurrence(delivery.due),
        )
        return None if origin == (job, period) else origin

    def _seen(self, executor: execution.Executor, work: claims.Work) -> claims.Work:
        """Return the work of a rescue copy, sent for the beat's own row, under a calendar rule.

        Raises:
            Ignore: the message that was thought lost has been started after all.
        """
        records = executor.records
        if not isinstance(records, ledger.Ledger):
            return work
        seen = executor.tell(lambda session: records.seen(session, work))
        if seen is None:
            events.dropped(work, "its message was not lost")
            checkins.end(self.task, settled=True)
            raise messages.drop()
        return dataclasses.replace(work, seen=seen)

    def _execute(
        self,
        executor: execution.Executor,
        delivery: messages.Delivery,
        work: claims.Work,
        window: claims.Window | None,
    ) -> attempts.Ran[Any] | claims.Refused:
        def body(run: runs.Run) -> Any:
            self._entered.append(run)
            if not delivery.direct:
                messages.fix(self.request, work)
            return self.body()

        def patience(refused: claims.Refused) -> float:
            return self._patience(delivery, work, refused)

        try:
            answer = executor.execute(work, body, patience=patience, window=window)
        except BaseException as error:
            if isinstance(error, errors.LockLost) and not attempts.struck_by(error, work):
                events.lost(self.task, next(iter(self._entered), None), error)
            for run in self._entered:
                events.finished(self.task, run, outcomes.verdict(error).status, error)
            raise
        if isinstance(answer, attempts.Ran):
            if answer.lost is not None:
                events.lost(self.task, answer.run, answer.lost)
            events.finished(self.task, answer.run, "lost" if answer.lost else "done")
            if answer.afterwards is not None:
                # The period is done; what was to follow the commit is the task's own error.
                raise answer.afterwards
        return answer

    def _patience(
        self, delivery: messages.Delivery, work: claims.Work, refused: claims.Refused
    ) -> float:
        seconds = 0.0
        if refusals.insists(delivery, work, refused, self.policy.lock_conflict):
            seconds = messages.wait(self.task)
        if refusals.claim_in_progress(refused):
            seconds = max(seconds, _UNDECIDED)
        if refused.kind == "held":
            seconds = max(seconds, self.policy.lock_wait)
            if refusals.holder_unknown(work, refused):
                seconds = max(seconds, _UNDECIDED)
        return seconds

    def _refused(
        self,
        executor: execution.Executor,
        delivery: messages.Delivery,
        work: claims.Work,
        refused: claims.Refused,
    ) -> Any:
        conflict = self.policy.lock_conflict
        reason = refusals.reason(work, refused)
        answer = refusals.decide(delivery, work, refused, conflict)
        if answer == "postpone" and not self._postpone(delivery, work, reason, executor=executor):
            answer = "raise" if conflict == "raise" else "skip"
        match answer:
            case "give up":
                raise errors.CrashRetriesExhausted(work.job, work.period, refused.lost_attempts)
            case "raise":
                raise errors.LockNotAcquired(work.job, work.period, reason)
            case "drop":
                events.dropped(work, reason)
                if not delivery.superseded(refused.before):
                    # Else a later copy of it has the same check-in.
                    checkins.end(self.task, settled=True)
                raise messages.drop()
            case "postpone":
                raise messages.drop()
            case "skip":
                skips = self._record_skip(executor, work, refused, reason)
                return self._skip(delivery, work, refused, reason, skips)

    def _record_skip(
        self,
        executor: execution.Executor,
        work: claims.Work,
        refused: claims.Refused,
        reason: str,
    ) -> int | None:
        """Record a skip; return how many there were in a row, where that is known."""
        records = executor.records
        if not isinstance(records, ledger.Ledger):
            return None
        skips = None
        if refused.kind == "held":
            skips = executor.tell(lambda session: records.skip(session, work, reason))
        if work.origin is not None:
            executor.tell(lambda session: records.close_origin(session, work, reason))
        return skips

    def _skip(
        self,
        delivery: messages.Delivery,
        work: claims.Work,
        refused: claims.Refused,
        reason: str,
        skips: int | None,
    ) -> Any:
        events.skipped(
            self.task,
            work,
            refused,
            reason,
            redelivered=delivery.redelivered,
            skips=skips,
            alarm=self.policy.config.warn_after_skips,
        )
        checkins.end(self.task, settled=refusals.settled(refused))
        return outcomes.skip(self.task, delivery, work, reason, self.policy.skip_state)

    def _postpone(
        self,
        delivery: messages.Delivery,
        work: claims.Work,
        reason: str,
        *,
        executor: execution.Executor | None = None,
        record: bool = True,
    ) -> bool:
        """Send the message again for later; return False when it has waited long enough."""
        if delivery.direct or delivery.eager:
            return False
        copy = messages.next_copy(self.task, delivery)
        if copy is None:
            return False
        # First the message, then its number in the row: the other way round a crash in
        # between would leave a number for which there is no message.
        messages.send(self.task, self.args, self.kwargs, work if record else None, copy)
        if executor is not None and work.period is not None:
            records = executor.records
            # It has been sent; without its number in the row a copy of it that turns up again
            # is postponed once more than needed.
            with contextlib.suppress(errors.DatabaseUnavailable):
                executor.tell(lambda session: records.postpone(session, work, copy.number, reason))
        events.postponed(
            self.task, work, reason, copy.number, copy.countdown, unavailable=not record
        )
        return True


def _node(request: Context) -> str:
    hostname = request.hostname or socket.gethostname()
    return f"{hostname}:{os.getpid()}"

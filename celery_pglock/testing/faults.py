"""What goes wrong, on the real database: others that run, hold and die, and a lock that is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import celery
import psycopg
from typing_extensions import override

from celery_pglock import (
    advisory,
    attempts,
    calls,
    claims,
    errors,
    events,
    execution,
    idle_sessions,
    messages,
    options,
    policies,
    refusals,
    runs,
    sessions,
    settings,
    stacks,
    transactions,
)
from celery_pglock.testing import databases, deliveries, outbox

_HELD_BY = (
    "select pid from pg_catalog.pg_locks where locktype = 'advisory' and granted"
    " and (classid::bigint << 32) | objid::bigint = %s and objsubid = 1 and database ="
    " (select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())"
)


class Elsewhere:
    """A run of an occurrence in another process: it holds its locks, and its row is ``running``.

    Its session is one of its own, as another process has it.

    Attributes:
        message: its message, which a broker delivers once more when that process dies:
            ``deliver(elsewhere.message, redelivered=True)``.
    """

    def __init__(
        self, message: outbox.Message, end: Callable[[], None], settle: Callable[[], None]
    ) -> None:
        self.message = message
        self._end = end
        self._settle = settle

    def die(self) -> None:
        """End its process, here and now: the locks are free, and its row stays ``running``."""
        self._end()

    def finish(self) -> None:
        """Record it as done and give its locks back, unless it has died."""
        self._settle()
        self._end()


@contextlib.contextmanager
def running(
    task: celery.Task[..., Any],
    due: dt.datetime,
    *,
    entry: str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Elsewhere]:
    """Have an occurrence run in another process while a block lasts; it is done at its end.

    Its body is not executed: what counts for others is that it holds its locks. A later
    occurrence of the same entry is skipped then, one of another job under the same lock name is
    postponed, and the same occurrence is skipped.

    Args:
        task: a LockedTask of the application that is pointed at the test's database.
        due: when the occurrence was due, with its time zone.
        entry: the schedule entry; by default the name of the task.
        args: the entry's positional arguments.
        kwargs: the entry's keyword arguments.

    Yields:
        The run, which can ``die()`` in the middle of the block.

    Raises:
        RuntimeError: it cannot run, because its period is settled or a lock is taken.
    """
    elsewhere = _begin(task, deliveries.published(task, due, entry=entry, args=args, kwargs=kwargs))
    try:
        yield elsewhere
    finally:
        elsewhere.finish()


def dead_attempt(
    task: celery.Task[..., Any],
    due: dt.datetime,
    *,
    entry: str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    times: int = 1,
) -> outbox.Message:
    """Leave what an attempt leaves whose process died: a row ``running``, and no lock.

    The next run of the occurrence takes it over, as attempt 2 (``current_run().attempt``), or is
    given up if too many have died (``max_crash_retries``).

    Args:
        task: a LockedTask of the application that is pointed at the test's database.
        due: when the occurrence was due, with its time zone.
        entry: the schedule entry; by default the name of the task.
        args: the entry's positional arguments.
        kwargs: the entry's keyword arguments.
        times: how many attempts have died, one after another.

    Returns:
        Its message. A broker delivers it once more, which ``deliver(…, redelivered=True)`` does.

    Raises:
        RuntimeError: it cannot run, because its period is settled or a lock is taken.
        TypeError: the task has ``once_per=None``, so an attempt that dies leaves nothing.
    """
    message = deliveries.published(task, due, entry=entry, args=args, kwargs=kwargs)
    for attempt in range(times):
        _begin(task, message, recorded=True, redelivered=attempt > 0).die()
    return message


@contextlib.contextmanager
def holding(name: str | int, *, app: celery.Celery | None = None) -> Iterator[runs.Run]:
    """Hold a lock name while a block lasts, as a script with ``advisory_lock`` does.

    For another job's run under that name, which has a row, use ``running``.

    Args:
        name: the lock name, or the key itself.
        app: the application; by default the one that is pointed at the test's database.

    Raises:
        LockNotAcquired: the lock is taken.
    """
    app, _ = databases.of(app)
    with advisory.advisory_lock(name, app=app) as run:
        yield run


def lose_lock(run: runs.Run | None = None, *, app: celery.Celery | None = None) -> None:
    """Make a run lose its lock: have the server end its session, and wait until it is known.

    Call it where the loss is to strike, from something that the body calls. There it raises
    ``LockLost``, as it would strike anywhere in a body in the main thread; with
    ``lock_lost="warn"``, and in other threads, it returns, and ``current_run().held`` is False.

    Args:
        run: by default the current one.
        app: its application; by default the one that is pointed at the test's database.

    Raises:
        LockLost: see above.
        NoCurrentRun: there is no run.
        RuntimeError: nobody holds its lock.
    """
    _, database = databases.of(app)
    run = runs.current_run() if run is None else run
    held_by = database.rows(_HELD_BY, run.key)
    if not held_by:
        raise RuntimeError(f'nobody holds lock "{run.name}"')
    told = threading.Event()

    def hear(*, job: str, period: str | None, **_: Any) -> None:
        if (job, period) == (run.job, run.period):
            told.set()

    # Told after the body has been struck: ``held`` says no a moment before that.
    events.lock_lost.connect(hear, weak=False)
    try:
        for (pid,) in held_by:
            database.rows("select pg_catalog.pg_terminate_backend(%s)", pid)
        databases.wait_until(told.is_set, f'the loss of lock "{run.name}" is told')
    finally:
        events.lock_lost.disconnect(hear)


def _begin(
    task: celery.Task[..., Any],
    message: outbox.Message,
    *,
    recorded: bool = False,
    redelivered: bool = False,
) -> Elsewhere:
    app, database = databases.of(task.app)
    chosen, config = options.locked(task), settings.of(app)
    if chosen is None or (recorded and not chosen.recorded(config.options)):
        raise TypeError(f"task {task.name!r} has once_per=None: of an attempt nothing is left")
    with deliveries.requested(task, message, redelivered=redelivered):
        begun: _Begun = _Claim(
            policy=policies.Policy(task, config, chosen),
            args=tuple(message.args),
            kwargs=message.kwargs,
            body=lambda: None,
            request=task.request,
        ).make()
    return Elsewhere(message, lambda: begun.end(database), begun.settle)


@dataclasses.dataclass(frozen=True, slots=True)
class _Begun:
    """A claim, and the session that holds its locks."""

    session: sessions.Session
    records: transactions.Records
    work: claims.Work
    claim: uuid.UUID

    def settle(self) -> None:
        if not self.session.connection.closed:
            # The test may have ended it, with the database or by a statement of its own.
            with contextlib.suppress(psycopg.Error, errors.LockLost):
                self.records.settle(self.session, self.work, self.claim, "done")

    def end(self, database: databases.Database) -> None:
        pid = self.session.pid
        self.session.close()
        # The server hears of it a moment later, and until then it has the locks.
        query = "select from pg_catalog.pg_stat_activity where pid = %s"
        with contextlib.suppress(errors.DatabaseUnavailable):
            databases.wait_until(
                lambda: not database.rows(query, pid), f"server process {pid} ends"
            )


class _Claim(calls.Call):
    """A call that goes as far as its claim, which it makes over a session of its own."""

    __slots__ = ()

    @override
    def _execute(
        self,
        executor: execution.Executor,
        delivery: messages.Delivery,
        work: claims.Work,
        window: claims.Window | None,
    ) -> attempts.Ran[Any] | claims.Refused:
        # At session level, also for a task at transaction level: the locks are the same ones,
        # and these need no transaction that stays open.
        session = stacks.open_session(idle_sessions.plan(self.policy.config, "session", work.node))
        claim, records = uuid.uuid4(), executor.records
        try:
            answer = records.claim(session, work, claim=claim, window=window)
        except BaseException:
            session.close()
            raise
        if isinstance(answer, claims.Claimed):
            # What is returned in place of a body's value comes back from ``make``.
            return attempts.Ran(_Begun(session, records, work, claim), cast("runs.Run", None))
        if answer.kind == "held":
            holder = records.holder(session, work)
            answer = dataclasses.replace(answer, holder=holder)
        session.close()
        raise RuntimeError(
            f"{work.job} {work.period} cannot run elsewhere: {refusals.reason(work, answer)}"
        )

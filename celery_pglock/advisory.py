"""``advisory_lock()``: the lock of a task for whatever is no task, a command or a script."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Final

import psycopg
from celery import Celery
from celery.app import app_or_default

from celery_pglock import (
    claims,
    errors,
    events,
    holds,
    idle_sessions,
    interruptions,
    keys,
    locks,
    notices,
    refusals,
    runs,
    schema,
    sessions,
    settings,
    stacks,
    values,
)

_POLL: Final = 0.05
_LONGEST_POLL: Final = 0.5


@contextlib.contextmanager
def advisory_lock(
    name: str | int, *, app: Celery | None = None, wait: float = 0.0
) -> Iterator[runs.Run]:
    """Hold the lock of a name for the length of a ``with`` block.

    It excludes tasks with this ``lock_name`` (a task without one has its registered name), and
    every other block under the name, in all processes on the same database and namespace. It
    is a session-level lock and ends with the process. Nothing is recorded, and no tables are
    needed.

    Args:
        name: the lock name, or a number that is the 64-bit key itself.
        app: the application whose settings say where to lock; by default the current one.
        wait: for how many seconds to try.

    Yields:
        The run, of which ``held`` and ``check()`` tell whether the lock is still held; its
        ``period`` is None. ``current_run()`` is for tasks and does not return it.

    Raises:
        LockNotAcquired: the lock is taken; the sentence says who has it.
        LockLost: the lock was lost before the block ended. In the main thread the block is
            interrupted, unless ``pglock_lock_lost`` is ``"warn"``: then it is only logged.
        DatabaseUnavailable, ServerInRecovery, TransactionPooler, ConfigurationError: no lock
            can be had, and the block does not run.
    """
    config = settings.of(app_or_default(app))
    work = _work(config.namespace, name)
    if not config.enabled:
        notices.disabled()
        yield _run(work, None)
        return
    patience = values.seconds(wait, "wait")
    stack = idle_sessions.stack(config, "session", work.node)
    session = _acquire(stack, work, patience)
    raises = config.options["lock_lost"] == "raise"
    interruption = interruptions.Interruption()

    def tell(loss: holds.Loss) -> None:
        lost = errors.LockLost(run.job, None, loss.reason)
        if raises:
            interruption.strike(lost)
        events.lost(None, run, lost, loss)

    hold = holds.Hold(session, tell)
    run = _run(work, holds.View(hold))
    try:
        hold.begin()
        with interruption:
            yield run
    except BaseException:
        # What the block raised is on its way to the caller and must not be hidden.
        _release(stack, hold, work)
        raise
    lost = _release(stack, hold, work)
    if lost is not None and raises:
        raise lost


def _work(namespace: str, name: str | int) -> claims.Work:
    what = "name of advisory_lock()"
    if isinstance(name, int):
        key = keys.check_key(name, what)
    else:
        key = keys.from_name(namespace, "task", keys.check_name(name, what))
    return claims.Work(
        job=f"{namespace}:{name}",
        period=None,
        name=str(name),
        name_key=key,
        run_key=None,
        task=str(name),
        node=f"{socket.gethostname()}:{os.getpid()}",
    )


def _run(work: claims.Work, view: holds.View | None) -> runs.Run:
    return runs.Run(
        name=work.name,
        key=work.name_key,
        level="session",
        job=work.job,
        period=None,
        due=None,
        attempt=1,
        term=None,
        _held=lambda: view is None or view.held,
        _prove=lambda: None if view is None else view.check(),
    )


def _acquire(stack: stacks.Stack, work: claims.Work, patience: float) -> sessions.Session:
    deadline = time.monotonic() + patience
    pause = _POLL
    while True:
        session = _session_that_answers(stack)
        try:
            with schema.translated(session.target, ""):
                if locks.acquire(session, work.name_key, work.application):
                    return session
                refused = claims.Refused("held", None, holder=locks.holder(session, work.name_key))
        except BaseException:
            session.close()
            raise
        stack.give(session)
        left = deadline - time.monotonic()
        if left <= 0:
            raise errors.LockNotAcquired(work.job, None, refusals.reason(work, refused))
        time.sleep(min(pause, left))
        pause = min(pause * 2, _LONGEST_POLL)


def _session_that_answers(stack: stacks.Stack) -> sessions.Session:
    session = stack.take()
    try:
        session.execute(b"select 1")
    except psycopg.Error:
        # An idle session may have died unseen; it has been closed, and the others may be dead.
        stack.close()
        return stack.take()
    except BaseException:
        session.close()
        raise
    return session


def _release(stack: stacks.Stack, hold: holds.Hold, work: claims.Work) -> errors.LockLost | None:
    session = hold.session
    if session.owner != os.getpid():
        # A forked child leaves the block; the lock is its parent's.
        session.close()
        return None
    try:
        loss = hold.release()
        if loss is None and locks.release(session, work.name_key, work.idle_application):
            stack.give(session)
            return None
    except psycopg.Error:
        loss = None
    except BaseException:
        session.close()
        raise
    session.close()
    lost = errors.LockLost(work.job, None, holds.ENDED if loss is None else loss.reason)
    if loss is None:
        # Nobody has noticed before, so nobody has told.
        events.lost(None, None, lost)
    return lost

"""The run that is in progress, as its body sees it."""

from __future__ import annotations

import contextvars
import dataclasses
import datetime as dt
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery_pglock import errors, sessions

if TYPE_CHECKING:
    # Imported at run time by what makes such a connection: see ``working_transactions``.
    import sqlalchemy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Run:
    """One run under its locks.

    Attributes:
        name: the lock name.
        key: its key in ``pg_locks``.
        level: ``"session"`` or ``"transaction"``.
        job: ``<namespace>:<name>``, what runs once per period.
        period: the label under which the run is recorded; None with ``once_per=None``. Read
            it here and never from the clock: a late run still belongs to its own period.
        due: the instant at which the occurrence was due; None for a message without one.
        attempt: how many times this period has been claimed. It only grows, so a service
            outside the database that remembers the highest one can refuse a stale run (a
            fencing token).
        term: the leader's term in which the message was sent; None for other messages.
        lost_attempts: how many earlier attempts died without an outcome.
    """

    name: str
    key: int
    level: sessions.Level
    job: str
    period: str | None
    due: dt.datetime | None
    attempt: int
    term: int | None
    lost_attempts: int = 0
    _connection: Any = None
    _held: Callable[[], bool]
    _prove: Callable[[], str | None]
    _untold: Any = dataclasses.field(default_factory=threading.Lock, compare=False)

    @property
    def connection(self) -> sqlalchemy.Connection:
        """The connection whose transaction is the lock, at transaction level.

        What is written through it commits together with the ``done`` of the period, or not
        at all. It is inside a savepoint: an ORM ``Session(bind=connection)`` may commit.

        Raises:
            AttributeError: at session level, where the lock session is never in a
                transaction.
        """
        connection: sqlalchemy.Connection | None = self._connection
        if connection is None:
            msg = (
                f'run of job "{self.job}" has no connection: its lock_level is "session"; use '
                f'the application\'s own connections, or lock_level="transaction"'
            )
            raise AttributeError(msg)
        return connection

    @property
    def held(self) -> bool:
        """Whether the locks are held, as far as is known without a query.

        False within milliseconds once the server has ended the session, and, at session
        level, when it has not been heard of for ``pglock_lost_after``.
        """
        return self._held()

    def check(self) -> None:
        """Ask the server whether the locks are held; one short query at session level.

        At transaction level nothing is asked: the commit is the proof.

        Raises:
            LockLost: the session or the transaction that held them has ended, or does not
                answer. Stop working; the run will not be recorded as done.
        """
        if (reason := self._prove()) is not None:
            raise errors.LockLost(self.job, self.period, reason)


def first_to_tell(run: Run) -> bool:
    """Return True once for each run: to the first who notices that its locks are lost."""
    untold: threading.Lock = run._untold  # noqa: SLF001 - not for those who see a run
    return untold.acquire(blocking=False)


# Held weakly: a time limit may strike in the very line that would forget the run, and the next
# body in this thread must not find it.
_current: contextvars.ContextVar[weakref.ref[Run] | None] = contextvars.ContextVar(
    "celery_pglock_run", default=None
)


def current_run() -> Run:
    """Return the run whose body is being executed in this thread or greenlet.

    Raises:
        NoCurrentRun: there is none: outside a LockedTask, or with ``pglock_enabled`` off.
    """
    run = in_progress()
    if run is None:
        raise errors.NoCurrentRun
    return run


def in_progress() -> Run | None:
    """Return the run whose body is being executed here, or None."""
    current = _current.get()
    return None if current is None else current()


class entered:  # noqa: N801 - called like a function; a generator takes twice as long
    """Make ``run`` the current one for the length of a ``with`` block."""

    __slots__ = ("_before", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before = _current.get()

    def __enter__(self) -> Run:
        _current.set(weakref.ref(self._run))
        return self._run

    def __exit__(self, *_: object) -> None:
        _current.set(self._before)

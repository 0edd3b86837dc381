"""What can go wrong, each as one class whose sentence names the object and the remedy.

Celery sends exceptions between processes, pickled or as JSON, and rebuilds them with
``cls(*exc.args)``. So every class here keeps its positional arguments as ``args`` and
makes its sentence in ``__str__``. No argument ever holds a password.
"""

from __future__ import annotations

from typing_extensions import override


class PGLockError(Exception):
    """Base of all errors of celery-pglock."""


class ConfigurationError(PGLockError):
    """A setting, a task option or a lock name is wrong; the sentence says which and what to do."""


class ReadOnlyByDefault(ConfigurationError):
    """The role or the database makes transactions read-only, so nothing could be recorded."""


class DatabaseUnavailable(PGLockError):
    """PostgreSQL could not be reached, so nothing is known about the lock.

    Args:
        target: ``host:port/database``, without user and password.
        reason: what libpq said.
    """

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(target, reason)
        self.target = target
        self.reason = reason

    @override
    def __str__(self) -> str:
        return (
            f"cannot use PostgreSQL at {self.target}: {self.reason}; check pglock_database_url "
            f"and that the server accepts connections"
        )


class ServerInRecovery(PGLockError):
    """The server is a standby: it grants advisory locks that no other server knows of.

    Args:
        target: ``host:port/database``.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.target = target

    @override
    def __str__(self) -> str:
        return (
            f"PostgreSQL at {self.target} is in recovery (a standby grants advisory locks that "
            f"exclude nobody); point pglock_database_url at the primary, or list all hosts and "
            f"add target_session_attrs=read-write"
        )


class TransactionPooler(PGLockError):
    """A pooler in transaction mode stands before the server: session locks do not hold there.

    Args:
        target: ``host:port/database``.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.target = target

    @override
    def __str__(self) -> str:
        return (
            f"{self.target} is a connection pooler in transaction mode, through which session "
            f"locks do not hold; point pglock_database_url at PostgreSQL itself or at a pool in "
            f'session mode, or set lock_level="transaction"'
        )


class SchemaError(PGLockError):
    """The tables are missing, older than this release needs, or damaged.

    Args:
        schema: the PostgreSQL schema that was looked at.
        fault: what is wrong with it.
        remedy: the command that repairs it.
    """

    def __init__(self, schema: str, fault: str, remedy: str) -> None:
        super().__init__(schema, fault, remedy)
        self.schema = schema
        self.fault = fault
        self.remedy = remedy

    @override
    def __str__(self) -> str:
        return f'schema "{self.schema}" {self.fault}; {self.remedy}'


class LockNotAcquired(PGLockError):
    """The lock is taken and ``lock_conflict="raise"``.

    Args:
        job: the job that could not run.
        period: its period, or None.
        reason: who holds the lock.
    """

    def __init__(self, job: str, period: str | None, reason: str) -> None:
        super().__init__(job, period, reason)
        self.job = job
        self.period = period
        self.reason = reason

    @override
    def __str__(self) -> str:
        return f"{_named(self.job, self.period)} did not run: {self.reason}"


class JobSkipped(LockNotAcquired):
    """A task that was called directly (``task()``) did not run; the sentence says why."""


class LockLost(PGLockError):
    """The session that held the locks is gone, or another attempt has taken the period over.

    With ``lock_lost="raise"`` it is also what interrupts a body in the main thread.

    Args:
        job: the job that was running.
        period: its period, or None.
        reason: how it was noticed.
    """

    def __init__(self, job: str, period: str | None, reason: str) -> None:
        super().__init__(job, period, reason)
        self.job = job
        self.period = period
        self.reason = reason

    @override
    def __str__(self) -> str:
        return (
            f"{_named(self.job, self.period)} lost its lock: {self.reason}; what it did may "
            f"overlap with another run and is not recorded as done"
        )


class TransactionEnded(LockLost):
    """The body of a transaction-level task ended the transaction that is its lock."""

    @override
    def __str__(self) -> str:
        return (
            f"{_named(self.job, self.period)} is not done: {self.reason}; a task with "
            f'lock_level="transaction" must not commit, roll back or close '
            f"current_run().connection, nor swallow its SQL errors outside a savepoint"
        )


class OutcomeUnknown(PGLockError):
    """The body ended, but what came of it could not be recorded.

    Args:
        job: the job that ran.
        period: its period.
        outcome: what should have been recorded.
        reason: why it could not be.
    """

    def __init__(self, job: str, period: str | None, outcome: str, reason: str) -> None:
        super().__init__(job, period, outcome, reason)
        self.job = job
        self.period = period
        self.outcome = outcome
        self.reason = reason

    @override
    def __str__(self) -> str:
        return (
            f"{_named(self.job, self.period)} ended as {self.outcome}, but that could not be "
            f"recorded: {self.reason}; the next delivery of this period counts it as a crash "
            f"(max_crash_retries)"
        )


class CrashRetriesExhausted(PGLockError):
    """More attempts at this period died without an outcome than ``max_crash_retries`` allows.

    Args:
        job: the job.
        period: the period that is given up.
        lost_attempts: how many attempts died.
    """

    def __init__(self, job: str, period: str | None, lost_attempts: int) -> None:
        super().__init__(job, period, lost_attempts)
        self.job = job
        self.period = period
        self.lost_attempts = lost_attempts

    @override
    def __str__(self) -> str:
        return (
            f"{_named(self.job, self.period)} is given up: {self.lost_attempts} attempt(s) died "
            f"without an outcome, more than max_crash_retries allows; find out why the worker "
            f"died before the period is run again"
        )


class LeadershipLost(PGLockError):
    """A beat has ceased to be the leader; it goes on as a standby.

    Args:
        namespace: of the beats that compete.
        term: the number of the leadership that ended.
        reason: how it was noticed.
    """

    def __init__(self, namespace: str, term: int, reason: str) -> None:
        super().__init__(namespace, term, reason)
        self.namespace = namespace
        self.term = term
        self.reason = reason

    @override
    def __str__(self) -> str:
        return (
            f'leadership of namespace "{self.namespace}", term {self.term}, is lost: '
            f"{self.reason}; nothing more is sent until it is won again"
        )


class RerunRefused(PGLockError):
    """A period was not opened again; nothing was changed and nothing was sent.

    Args:
        job: ``<namespace>:<name>``.
        period: its label.
        reason: why, and what to do.
    """

    def __init__(self, job: str, period: str, reason: str) -> None:
        super().__init__(job, period, reason)
        self.job = job
        self.period = period
        self.reason = reason

    @override
    def __str__(self) -> str:
        return f'job "{self.job}", period "{self.period}" is not run again: {self.reason}'


class EntryChanged(PGLockError):
    """A schedule entry was not saved, because it is not what was read; nothing was written.

    Args:
        entry: its name.
    """

    def __init__(self, entry: str) -> None:
        super().__init__(entry)
        self.entry = entry

    @override
    def __str__(self) -> str:
        return (
            f"entry {self.entry!r} was changed or deleted by somebody else since it was read; read "
            f"it again with Entry.get({self.entry!r}) and make your change to that"
        )


class NoCurrentRun(PGLockError, LookupError):
    """``current_run()`` was called outside the body of a LockedTask that holds its lock."""

    @override
    def __str__(self) -> str:
        return (
            "no locked run is in progress here; call current_run() inside the body of a task "
            "with base=LockedTask (and with pglock_enabled left on)"
        )


def _named(job: str, period: str | None) -> str:
    return f'job "{job}"' if period is None else f'job "{job}", period "{period}",'

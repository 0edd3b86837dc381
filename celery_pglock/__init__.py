"""Periodic Celery jobs that run once, on PostgreSQL advisory locks and a ledger.

A name is imported from its module when it is first asked for: a worker does without the
scheduler, and a beat without the tasks.
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    from celery_pglock.advisory import advisory_lock
    from celery_pglock.beat import LeaderScheduler
    from celery_pglock.beat_events import (
        leadership_gained,
        leadership_lost,
        occurrence_missed,
        occurrence_sent,
    )
    from celery_pglock.database_entries import Entry
    from celery_pglock.errors import (
        ConfigurationError,
        CrashRetriesExhausted,
        DatabaseUnavailable,
        EntryChanged,
        JobSkipped,
        LeadershipLost,
        LockLost,
        LockNotAcquired,
        NoCurrentRun,
        OutcomeUnknown,
        PGLockError,
        ReadOnlyByDefault,
        RerunRefused,
        SchemaError,
        ServerInRecovery,
        TransactionEnded,
        TransactionPooler,
    )
    from celery_pglock.events import (
        lock_lost,
        run_finished,
        run_postponed,
        run_skipped,
        run_started,
    )
    from celery_pglock.mixin import LeaderMixin
    from celery_pglock.runs import Run, current_run
    from celery_pglock.task import LockedTask

__all__ = [
    "ConfigurationError",
    "CrashRetriesExhausted",
    "DatabaseUnavailable",
    "Entry",
    "EntryChanged",
    "JobSkipped",
    "LeaderMixin",
    "LeaderScheduler",
    "LeadershipLost",
    "LockLost",
    "LockNotAcquired",
    "LockedTask",
    "NoCurrentRun",
    "OutcomeUnknown",
    "PGLockError",
    "ReadOnlyByDefault",
    "RerunRefused",
    "Run",
    "SchemaError",
    "ServerInRecovery",
    "TransactionEnded",
    "TransactionPooler",
    "advisory_lock",
    "current_run",
    "leadership_gained",
    "leadership_lost",
    "lock_lost",
    "occurrence_missed",
    "occurrence_sent",
    "run_finished",
    "run_postponed",
    "run_skipped",
    "run_started",
]

# Where a name is that is not an error.
_HOMES: typing.Final = {
    "Entry": "database_entries",
    "LeaderMixin": "mixin",
    "LeaderScheduler": "beat",
    "LockedTask": "task",
    "Run": "runs",
    "advisory_lock": "advisory",
    "current_run": "runs",
    "leadership_gained": "beat_events",
    "leadership_lost": "beat_events",
    "lock_lost": "events",
    "occurrence_missed": "beat_events",
    "occurrence_sent": "beat_events",
    "run_finished": "events",
    "run_postponed": "events",
    "run_skipped": "events",
    "run_started": "events",
}


def __getattr__(name: str) -> typing.Any:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

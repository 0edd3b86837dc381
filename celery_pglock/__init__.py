"""Periodic Celery jobs that run once, on PostgreSQL advisory locks and a ledger."""

from __future__ import annotations

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

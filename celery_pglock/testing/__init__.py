"""A kit for testing one's own LockedTasks with pytest, on a real PostgreSQL.

``pytest_plugins = ["celery_pglock.testing"]`` in the top-level ``conftest.py`` gives the fixture
``pglock_database``: a database of the test's own, at which the application is pointed. In it
``run_occurrence`` does in this process what a beat and a worker do; ``at`` is the clock of the
periods; ``running``, ``holding``, ``dead_attempt``, ``lose_lock`` and ``Database.unavailable``
are what goes wrong. Nothing is a mock: the sessions, locks and rows are PostgreSQL's.

PYTEST_DONT_REWRITE: there is no ``assert`` in here, and a ``conftest.py`` may import from it.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("pytest") is None:
    raise ImportError("celery_pglock.testing needs pytest: run pip install pytest")

from celery_pglock.testing.clock import at
from celery_pglock.testing.databases import Database, Row
from celery_pglock.testing.deliveries import Outcome, State, deliver, run_occurrence
from celery_pglock.testing.faults import Elsewhere, dead_attempt, holding, lose_lock, running
from celery_pglock.testing.fixtures import (
    pglock_app,
    pglock_database,
    pglock_server_url,
    pglock_templates,  # noqa: F401 - a fixture of the others
)
from celery_pglock.testing.outbox import Message
from celery_pglock.testing.skips import ExpectedSkip, expect_skipped

__all__ = [
    "Database",
    "Elsewhere",
    "ExpectedSkip",
    "Message",
    "Outcome",
    "Row",
    "State",
    "at",
    "dead_attempt",
    "deliver",
    "expect_skipped",
    "holding",
    "lose_lock",
    "pglock_app",
    "pglock_database",
    "pglock_server_url",
    "run_occurrence",
    "running",
]

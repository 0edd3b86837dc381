"""The tasks of `tests.apps.tasks`, in an application that does too much while it is imported.

It is finalized, asks celery-pglock for its settings and takes a lock, so that the parent of a
prefork worker has a lock session before it forks; and it has an SQLAlchemy engine of its own
with a connection in its pool, which each child disposes of, as SQLAlchemy advises.

With `APP_SAYS_NO_GOOD_BYE` its children end without closing their lock sessions.
"""

from __future__ import annotations

import os
from typing import Any

import psycopg
import sqlalchemy as sa
from celery import signals

from celery_pglock import advisory_lock, idle_sessions, settings
from tests.apps import recording, tasks

app = tasks.app
app.finalize()
settings.of(app)

with advisory_lock("early", app=app):
    pass

if os.environ.get("APP_SAYS_NO_GOOD_BYE"):
    signals.worker_process_shutdown.disconnect(idle_sessions.close_idle)

engine = sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(recording.url()))
with engine.connect() as _connection:
    _connection.execute(sa.text("SELECT 1"))


@signals.worker_process_init.connect
def forget_inherited_connections(**_: Any) -> None:
    """Do what SQLAlchemy's users do in a process that was forked."""
    engine.dispose()
    recording.note("disposed")

"""Tasks for soft time limits: their locks are reached through a slow proxy, if one is named.

`APP_LOCK_URL` is where the locks are. With `APP_KEEP_STRUCK` a lock session is never closed,
which is the control: what makes up for a strike is taken away.
"""

from __future__ import annotations

import os
import time
from typing import Any

import celery
import sqlalchemy as sa

from celery_pglock import LockedTask, current_run, idle_sessions, sessions

app = celery.Celery(
    os.environ["APP_NAMESPACE"],
    broker=os.environ["APP_BROKER_URL"],
    backend=os.environ["APP_RESULT_BACKEND"],
)
app.conf.update(
    task_default_queue=os.environ["APP_QUEUE"],
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    pglock_database_url=os.environ["APP_LOCK_URL"],
)
register: Any = app.task

if os.environ.get("APP_KEEP_STRUCK"):
    kept: list[sessions.Session] = []

    def keep(self: sessions.Session) -> None:
        kept.append(self)

    sessions.Session.close = keep  # type: ignore[method-assign]


def soft_session(key: str, seconds: float) -> int:  # noqa: ARG001 - lock_by
    """Work for some time."""
    time.sleep(seconds)
    return os.getpid()


def soft_transaction(key: str, seconds: float) -> int:  # noqa: ARG001 - lock_by
    """Work for some time, in the transaction too."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            current_run().connection.execute(sa.text("SELECT 1"))
        except sa.exc.StatementError as wrapped:
            raise (wrapped.orig or wrapped) from None
        time.sleep(0.01)
    return os.getpid()


def forget_sessions() -> None:
    """Have the next run open its session."""
    idle_sessions.close_idle()


LOCKED: dict[str, Any] = {"base": LockedTask, "lock_by": ("key",)}
register(name="soft_session", **LOCKED)(soft_session)
register(name="soft_transaction", lock_level="transaction", **LOCKED)(soft_transaction)
register(name="forget_sessions")(forget_sessions)

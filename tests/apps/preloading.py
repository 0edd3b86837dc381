"""An application with a task of the level that the environment names: it tells what its processes import, and when."""

from __future__ import annotations

import os
import sys
from typing import Any

import celery.signals

from celery_pglock import LockedTask, current_run
from tests.apps import configured, recording

app = configured.application()

_inherited: set[str] = set()


@celery.signals.worker_process_init.connect
def _begin(**_: Any) -> None:
    _inherited.update(sys.modules)


@app.task(base=LockedTask, name="first", lock_level=os.environ["APP_LEVEL"])
def first() -> None:
    """Tell what this process had from its parent, and what it has imported since."""
    if os.environ["APP_LEVEL"] == "transaction":
        current_run().connection.exec_driver_sql("SELECT 1")
    recording.note(
        "imported", inherited=sorted(_inherited), since=sorted(set(sys.modules) - _inherited)
    )

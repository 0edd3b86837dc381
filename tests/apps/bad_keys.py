"""An application with two tasks whose lock names are two and whose lock is one."""

from __future__ import annotations

from celery_pglock import LockedTask, keys
from tests.apps import bad_settings

app = bad_settings.application()


@app.task(base=LockedTask, name="first")
def first() -> None:
    """Be locked by name."""


@app.task(base=LockedTask, name="second", lock_name=keys.from_name("bad", "task", "first"))
def second() -> None:
    """Be locked by a number that is the key of the other's name."""

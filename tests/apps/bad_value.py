"""An application with a task whose option has a value that it cannot have."""

from __future__ import annotations

from celery_pglock import LockedTask
from tests.apps import bad_settings

app = bad_settings.application()


@app.task(base=LockedTask, name="nightly", once_per="daily")
def nightly() -> None:
    """Have a period that there is not."""

"""An application with a task whose option is misspelt."""

from __future__ import annotations

from celery_pglock import LockedTask
from tests.apps import bad_settings

app = bad_settings.application()


@app.task(base=LockedTask, name="misspelt", lock_levl="transaction")
def misspelt() -> None:
    """Have an option that nobody reads."""

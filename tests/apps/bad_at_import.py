"""An application that looks at its tasks while it is imported, one of them misspelt."""

from __future__ import annotations

from celery_pglock import LockedTask
from tests.apps import bad_settings

app = bad_settings.application()


@app.task(base=LockedTask, name="misspelt", lock_conflct="raise")
def misspelt() -> None:
    """Have an option that nobody reads."""


NAMES = sorted(app.tasks)

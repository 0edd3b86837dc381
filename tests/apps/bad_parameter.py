"""An application with a task that locks by a parameter which it does not have."""

from __future__ import annotations

from celery_pglock import LockedTask
from tests.apps import bad_settings

app = bad_settings.application()


@app.task(base=LockedTask, name="per_tenant", lock_by=("tenants",))
def per_tenant(tenant: str) -> None:
    """Have a parameter of another name."""

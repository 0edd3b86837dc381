"""The example of the documentation: every minute, one invoice for each customer."""

from __future__ import annotations

import os

from celery import Celery
from celery.schedules import crontab
from sqlalchemy import text

from celery_pglock import LockedTask, current_run

app = Celery("proj", broker=os.environ["BROKER_URL"])
app.conf.update(
    pglock_database_url=os.environ["DATABASE_URL"],
    pglock_heartbeat_file=os.environ.get("HEARTBEAT_FILE"),
    broker_connection_retry_on_startup=True,
    beat_schedule={"invoices": {"task": "proj.write_invoices", "schedule": crontab()}},
)


@app.task(
    name="proj.write_invoices",
    base=LockedTask,
    once_per="minute",
    lock_level="transaction",
    acks_late=True,
)
def write_invoices() -> int:
    """Write the invoices of one period, all of them or none."""
    run = current_run()
    run.connection.execute(
        text("CREATE TABLE IF NOT EXISTS invoices (period text, customer integer)")
    )
    result = run.connection.execute(
        text("INSERT INTO invoices SELECT :period, customer FROM generate_series(1, 50) customer"),
        {"period": run.period},
    )
    return result.rowcount

"""An application for beats and workers under test: its entries come from the environment.

`APP_ENTRIES` is a JSON object of entry name to seconds, `APP_TASK` what they send. Each run leaves a row in `ran`, which
has no constraint that could hide a double.
"""

from __future__ import annotations

import json
import os

import celery
import psycopg

from celery_pglock import LockedTask, current_run

app = celery.Celery(os.environ["APP_NAMESPACE"], broker=os.environ["APP_BROKER_URL"])
app.conf.update(
    task_default_queue=os.environ["APP_QUEUE"],
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    result_expires=None,
    pglock_database_url=os.environ["APP_DATABASE_URL"],
    beat_schedule={
        name: {
            "task": f"tests.apps.beat_app.{os.environ.get('APP_TASK', 'job')}",
            "schedule": seconds,
        }
        for name, seconds in json.loads(os.environ["APP_ENTRIES"]).items()
    },
    **json.loads(os.environ.get("APP_SETTINGS", "{}")),
)

if bad := os.environ.get("APP_UNSENDABLE"):
    app.conf.beat_schedule[json.loads(bad)] = {
        "task": "tests.apps.beat_app.job",
        "schedule": 1.0,
        "kwargs": {"object": object()},
    }


@app.task(
    base=LockedTask,
    lock_name=lambda _, request: request.headers["pglock_job"],
    lock_conflict="postpone",
)
def job(**_: object) -> None:
    """Leave a row. Each entry has a lock name of its own, so that none waits for another.

    Occurrences that pile up while no worker is there come all at once; they are to run one
    after the other here, and not to be skipped as overlaps: what was sent is counted by them.
    """
    run = current_run()
    with psycopg.connect(os.environ["APP_DATABASE_URL"], autocommit=True) as connection:
        connection.execute(
            "INSERT INTO ran (entry, due, attempt) VALUES (%s, %s, %s)",
            (run.job.partition(":")[2], run.due, run.attempt),
        )


@app.task(base=LockedTask)
def quick() -> None:
    """Do nothing; any beat may send it."""

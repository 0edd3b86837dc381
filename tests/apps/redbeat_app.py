"""redbeat, gated and alone."""

from __future__ import annotations

import json
import os
from typing import ClassVar

import celery
import psycopg
from redbeat import RedBeatScheduler  # type: ignore[import-untyped]

from celery_pglock import LeaderMixin

app = celery.Celery(os.environ["APP_NAMESPACE"], broker=os.environ["APP_BROKER_URL"])
app.conf.update(
    task_default_queue=os.environ["APP_QUEUE"],
    broker_connection_retry_on_startup=True,
    result_expires=None,
    redbeat_redis_url=os.environ["APP_BROKER_URL"],
    redbeat_key_prefix=f"{os.environ['APP_QUEUE']}:",
    pglock_database_url=os.environ["APP_DATABASE_URL"],
    beat_schedule={
        name: {"task": "tests.apps.redbeat_app.job", "schedule": seconds, "args": (name,)}
        for name, seconds in json.loads(os.environ["APP_ENTRIES"]).items()
    },
    **json.loads(os.environ.get("APP_SETTINGS", "{}")),
)


class Gated(LeaderMixin, RedBeatScheduler):  # type: ignore[misc]
    """Its own tick, while this beat leads."""

    own_tick: ClassVar[bool | None] = True


@app.task
def job(name: str) -> None:
    with psycopg.connect(os.environ["APP_DATABASE_URL"], autocommit=True) as connection:
        connection.execute(
            "INSERT INTO ran (entry, due, attempt) VALUES (%s, clock_timestamp(), 1)", (name,)
        )

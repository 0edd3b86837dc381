"""An application with one good task; its settings come from the environment, good or bad."""

from __future__ import annotations

import json
import os

import celery

from celery_pglock import LockedTask


def application(name: str = "bad") -> celery.Celery:
    """Return the application that the variables `BAD_BROKER_URL` and `BAD_SETTINGS` describe."""
    app = celery.Celery(name, broker=os.environ.get("BAD_BROKER_URL"))
    app.conf.update(
        task_default_queue=os.environ.get("BAD_QUEUE", "bad"),
        **json.loads(os.environ.get("BAD_SETTINGS", "{}")),
    )
    return app


app = application()


@app.task(base=LockedTask, name="good")
def good(a: int = 1) -> int:
    """Do nothing wrong."""
    return a

"""An application that the environment configures, for workers under test."""

from __future__ import annotations

import json
import os

import celery

from celery_pglock.demo import redelivery
from tests.apps import recording


def application() -> celery.Celery:
    """Return the application that the variables `APP_*` describe; its workers leave notes.

    `APP_DATABASE_URL`, `APP_BROKER_URL`, `APP_RESULT_BACKEND` (may be missing),
    `APP_NAMESPACE`, `APP_QUEUE`, `APP_TRANSPORT_OPTIONS` and `APP_SETTINGS` (both JSON).
    """
    options = json.loads(os.environ.get("APP_TRANSPORT_OPTIONS", "{}"))
    if "unacked_restore_interval" in options:
        redelivery.look_each_second()
    app = celery.Celery(
        os.environ["APP_NAMESPACE"],
        broker=os.environ["APP_BROKER_URL"],
        backend=os.environ.get("APP_RESULT_BACKEND") or None,
    )
    app.conf.update(
        task_default_queue=os.environ["APP_QUEUE"],
        broker_transport_options=options,
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        timezone="Europe/Berlin",
        pglock_database_url=os.environ["APP_DATABASE_URL"],
    )
    app.conf.update(json.loads(os.environ.get("APP_SETTINGS", "{}")))
    recording.start()
    return app

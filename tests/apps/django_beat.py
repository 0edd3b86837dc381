"""A Django project with django-celery-beat: `python -m tests.apps.django_beat` makes its tables."""

from __future__ import annotations

import json
import os

import celery
import django
import psycopg
import psycopg.conninfo
from django.conf import settings
from django.core.management import call_command

from celery_pglock import LockedTask, current_run

_where = psycopg.conninfo.conninfo_to_dict(os.environ["APP_DATABASE_URL"])
settings.configure(
    INSTALLED_APPS=["django_celery_beat"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": _where["dbname"],
            "USER": _where.get("user"),
            "PASSWORD": _where.get("password"),
            "HOST": _where.get("host"),
            "PORT": _where.get("port"),
        }
    },
    USE_TZ=True,
    TIME_ZONE="UTC",
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
)
django.setup()

app = celery.Celery(os.environ["APP_NAMESPACE"], broker=os.environ["APP_BROKER_URL"])
app.conf.update(
    task_default_queue=os.environ["APP_QUEUE"],
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    result_expires=None,
    pglock_database_url=os.environ["APP_DATABASE_URL"],
    beat_schedule={
        name: {"task": "tests.apps.django_beat.job", "schedule": seconds}
        for name, seconds in json.loads(os.environ.get("APP_CONFIGURED", "{}")).items()
    },
    **json.loads(os.environ.get("APP_SETTINGS", "{}")),
)


@app.task(
    base=LockedTask,
    bind=True,
    lock_name=lambda _, request: request.headers["periodic_task_name"],
    lock_conflict="postpone",
)
def job(self: LockedTask, /, **_: object) -> None:
    """Leave a row, of which a message of a scheduler without due instants has none in it."""
    run = current_run()
    with psycopg.connect(os.environ["APP_DATABASE_URL"], autocommit=True) as connection:
        connection.execute(
            "INSERT INTO ran (entry, due, attempt) VALUES (%s, coalesce(%s, clock_timestamp()), %s)",
            ((self.request.headers or {})["periodic_task_name"], run.due, run.attempt),
        )


if __name__ == "__main__":
    call_command("migrate", verbosity=0)

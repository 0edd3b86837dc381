"""The application on the screenshots: a shop whose jobs are sound, slow, broken or blocked."""

from __future__ import annotations

import datetime as dt
import os
import time
from typing import Any

import celery
from celery.schedules import crontab

from celery_pglock import LockedTask, current_run

app = celery.Celery("shop", broker=os.environ["SHOP_BROKER_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    timezone="Europe/Berlin",
    worker_prefetch_multiplier=1,
    pglock_database_url=os.environ["SHOP_DATABASE_URL"],
)


def _count() -> int:
    """Return the number of the occurrence, counted in two seconds."""
    due = current_run().due or dt.datetime.now(dt.UTC)
    return int(due.timestamp()) // 2


@app.task(name="shop.work", base=LockedTask, lock_by=["what"])
def work(what: str) -> None:
    """Do something short."""
    del what
    time.sleep(0.2)


@app.task(name="shop.charge_cards", base=LockedTask)
def charge_cards() -> None:
    """Fail now and then."""
    if _count() % 9 == 0:
        raise ConnectionError
    time.sleep(0.3)


@app.task(name="shop.export_orders", base=LockedTask, bind=True, max_retries=1)
def export_orders(self: Any) -> None:
    """Succeed at the second attempt now and then."""
    if _count() % 7 == 0 and not self.request.retries:
        raise self.retry(countdown=1)
    time.sleep(0.1)


@app.task(name="shop.rebuild_search", base=LockedTask)
def rebuild_search() -> None:
    """Last for longer than the time between two occurrences, sometimes."""
    time.sleep(7 if _count() % 8 == 0 else 0.5)


@app.task(name="shop.send_newsletter", base=LockedTask)
def send_newsletter() -> None:
    """Never get so far: somebody holds its lock."""


app.conf.beat_schedule = {
    **{
        name: {"task": "shop.work", "schedule": every, "args": (name,)}
        for name, every in {
            "check-stock": 2.0,
            "close-baskets": 3.0,
            "fetch-rates": 4.0,
            "refresh-prices": 2.0,
            "sync-warehouse": 5.0,
            "thumbnails": 3.0,
        }.items()
    },
    "charge-cards": {"task": "shop.charge_cards", "schedule": 2.0},
    "export-orders": {"task": "shop.export_orders", "schedule": 2.0},
    "rebuild-search": {"task": "shop.rebuild_search", "schedule": 2.0},
    "send-newsletter": {"task": "shop.send_newsletter", "schedule": 4.0},
    "invoices": {
        "task": "shop.work",
        "schedule": crontab(minute="0", hour="7", day_of_week="mon-fri"),
        "args": ("invoices",),
    },
}

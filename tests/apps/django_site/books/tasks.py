"""Tasks whose models write rows."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from celery import shared_task
from django.db import transaction

from celery_pglock import LockedTask
from tests.apps.django_site.books.models import Row

LATE: Any = {
    "base": LockedTask,
    "lock_by": ("key",),
    "acks_late": True,
    "reject_on_worker_lost": True,
    "max_crash_retries": 1000,
}


def save(key: str, count: int, pause: float = 0.0) -> None:
    """Save rows one by one, by the ORM, in no less time than it takes to be killed."""
    for number in range(count):
        Row(job=key, number=number).save()
        time.sleep(pause)


register: Any = shared_task
register(name="books.save", lock_level="transaction", **LATE)(save)
register(name="books.save_at_session_level", **LATE)(save)


@shared_task(name="books.plain")
def plain(number: int) -> None:
    """Save a row without a lock."""
    Row(job="plain", number=number).save()


@shared_task(
    bind=True, name="books.twice", base=LockedTask, lock_level="transaction", lock_by=("key",)
)
def twice(self: LockedTask, key: str) -> None:
    """Save a row and ask for a retry, once; what the second attempt saves stays."""
    Row(job=key, number=self.request.retries or 0).save()
    transaction.on_commit(partial(plain.delay, self.request.retries or 0))
    if not self.request.retries:
        raise self.retry(countdown=0)

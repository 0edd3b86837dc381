"""The nightly run: one invoice for each customer, all of them or none."""

from __future__ import annotations

from celery import shared_task
from django.db import transaction

from celery_pglock import LockedTask, current_run

from .models import Customer, Invoice


@shared_task(
    name="invoices.write",
    base=LockedTask,
    once_per="day",
    lock_level="transaction",
    acks_late=True,
)
def write() -> None:
    """Write the invoices of a day, and have them sent once they are there."""
    day = current_run().period
    for customer in Customer.objects.all():
        Invoice(day=day, customer=customer).save()
    transaction.on_commit(lambda: send.delay(day))


@shared_task(name="invoices.send", base=LockedTask, lock_by=["day"])
def send(day: str) -> int:
    """Send the invoices of a day; return how many there are."""
    return Invoice.objects.filter(day=day).count()

"""Customers, and one invoice for each of them and day."""

from __future__ import annotations

from django.db import models


class Customer(models.Model):
    """Who is billed."""

    name = models.TextField()

    def __str__(self) -> str:
        """Return the name."""
        return self.name


class Invoice(models.Model):
    """What one of them is billed for a day."""

    day = models.TextField()
    customer = models.ForeignKey(Customer, on_delete=models.PROTECT)

    def __str__(self) -> str:
        """Return whose it is, and of when."""
        return f"{self.customer_id} on {self.day}"

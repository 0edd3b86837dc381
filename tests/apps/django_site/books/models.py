"""Rows, and a table that refuses some of them only at the commit."""

from __future__ import annotations

from django.db import models
from typing_extensions import override


class Shelf(models.Model):
    """What a row may stand on."""

    class Meta:
        app_label = "books"

    @override
    def __str__(self) -> str:
        return f"shelf {self.pk}"


class Row(models.Model):
    """One row of a job; its shelf is looked for at the commit."""

    job: models.TextField[str, str] = models.TextField()
    number: models.IntegerField[int, int] = models.IntegerField()
    shelf: models.ForeignKey[Shelf | None, Shelf | None] = models.ForeignKey(
        Shelf, null=True, on_delete=models.CASCADE
    )

    class Meta:
        app_label = "books"
        constraints = (models.UniqueConstraint(fields=["job", "number"], name="row_once"),)

    @override
    def __str__(self) -> str:
        return f"{self.job} {self.number}"

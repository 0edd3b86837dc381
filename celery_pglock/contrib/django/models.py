"""The tables as Django models, to read: ``JobRun.objects.filter(status="failed")``.

Not managed by Django: the numbered SQL files are their one source, also for its migrations.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, ClassVar, Final, NoReturn, TypeVar

from django.db import models
from typing_extensions import override

from celery_pglock.contrib.django import pairs, project

T = TypeVar("T", bound=models.Model)

_READ: Final = (
    "the rows of celery-pglock are read here and not written; use celery -A <your app> pglock "
    "pause, resume, rerun or prune"
)


def table(name: str) -> str:
    """Return a table's name as Django takes it: quoted already, with its schema."""
    schema = project.schema().replace('"', '""')
    return f'"{schema}"."{name}"'


class Reader(models.Manager[T]):
    """Reads from the database of ``pglock_django_alias``, where one is set."""

    @override
    def get_queryset(self) -> models.QuerySet[T]:
        return super().get_queryset().using(self._db or project.alias())


class _Read(models.Model):
    """A row that is written by the package's own statements alone."""

    class Meta:
        """Has no table."""

        abstract = True

    @override
    def save(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a row is settled under the claim that it belongs to.

        Raises:
            TypeError: always.
        """
        raise TypeError(_READ)

    @override
    def delete(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a period whose row is gone may run again.

        Raises:
            TypeError: always.
        """
        raise TypeError(_READ)


class JobRun(_Read):
    """One row per job and period: what ran, what did not, and why."""

    class Status(models.TextChoices):
        """The states of a row."""

        SENT = "sent"
        RUNNING = "running"
        RETRYING = "retrying"
        DONE = "done"
        FAILED = "failed"
        SKIPPED = "skipped"
        MISSED = "missed"

    identity = pairs.PairField("job", "period")
    job: models.TextField[str, str] = models.TextField()
    period: models.TextField[str, str] = models.TextField()
    due_at: models.DateTimeField[dt.datetime | None, dt.datetime | None] = models.DateTimeField(
        null=True
    )
    status: models.TextField[str, str] = models.TextField(choices=Status.choices)
    attempts: models.IntegerField[int, int] = models.IntegerField()
    lost_attempts: models.IntegerField[int, int] = models.IntegerField()
    postponements: models.IntegerField[int, int] = models.IntegerField()
    rescues: models.IntegerField[int, int] = models.IntegerField()
    task: models.TextField[str | None, str | None] = models.TextField(null=True)
    task_id: models.TextField[str | None, str | None] = models.TextField(null=True)
    entry: models.TextField[str | None, str | None] = models.TextField(null=True)
    node: models.TextField[str | None, str | None] = models.TextField(null=True)
    term: models.BigIntegerField[int | None, int | None] = models.BigIntegerField(null=True)
    sent_at: models.DateTimeField[dt.datetime | None, dt.datetime | None] = models.DateTimeField(
        null=True
    )
    started_at: models.DateTimeField[dt.datetime | None, dt.datetime | None] = models.DateTimeField(
        null=True
    )
    finished_at: models.DateTimeField[dt.datetime | None, dt.datetime | None] = (
        models.DateTimeField(null=True)
    )
    retry_at: models.DateTimeField[dt.datetime | None, dt.datetime | None] = models.DateTimeField(
        null=True
    )
    reason: models.TextField[str | None, str | None] = models.TextField(null=True)
    error: models.TextField[str | None, str | None] = models.TextField(null=True)

    objects: ClassVar[Reader[JobRun]] = Reader()

    class Meta:
        """Where it is."""

        managed = False
        db_table = table("job_runs")
        ordering = ("-due_at", "-started_at")
        verbose_name = "run"

    @override
    def __str__(self) -> str:
        return f"{self.job} {self.period}"


class BeatEntry(_Read):
    """A schedule entry: what it was last sent for, when it is due next, whether it is paused."""

    identity = pairs.PairField("namespace", "entry")
    namespace: models.TextField[str, str] = models.TextField()
    entry: models.TextField[str, str] = models.TextField()
    task: models.TextField[str, str] = models.TextField()
    schedule: models.TextField[str, str] = models.TextField()
    due_at: models.DateTimeField[dt.datetime | None, dt.datetime | None] = models.DateTimeField(
        null=True
    )
    published_at: models.DateTimeField[dt.datetime | None, dt.datetime | None] = (
        models.DateTimeField(null=True)
    )
    total_run_count: models.BigIntegerField[int, int] = models.BigIntegerField()
    next_due_at: models.DateTimeField[dt.datetime | None, dt.datetime | None] = (
        models.DateTimeField(null=True)
    )
    paused_until: models.DateTimeField[dt.datetime | None, dt.datetime | None] = (
        models.DateTimeField(null=True)
    )
    paused_reason: models.TextField[str | None, str | None] = models.TextField(null=True)
    seen_at: models.DateTimeField[dt.datetime, dt.datetime] = models.DateTimeField()

    objects: ClassVar[Reader[BeatEntry]] = Reader()

    class Meta:
        """Where it is."""

        managed = False
        db_table = table("beat_entries")
        ordering = ("namespace", "entry")
        verbose_name = "schedule entry"
        verbose_name_plural = "schedule entries"

    @override
    def __str__(self) -> str:
        return self.entry

"""The tables of the first release."""

from __future__ import annotations

from django.db import migrations, models

from celery_pglock.contrib.django import models as current
from celery_pglock.contrib.django import operations, pairs


class Migration(migrations.Migration):
    """Apply the SQL files, and tell Django which models the tables have."""

    initial = True
    # Their connection is another: in a transaction of this one nothing could be built concurrently.
    atomic = False
    dependencies = ()

    operations = (
        operations.ApplySteps("0002_beat"),
        migrations.CreateModel(
            name="JobRun",
            fields=[
                ("identity", pairs.PairField("job", "period", serialize=False)),
                ("job", models.TextField()),
                ("period", models.TextField()),
                ("due_at", models.DateTimeField(null=True)),
                ("status", models.TextField(choices=current.JobRun.Status.choices)),
                ("attempts", models.IntegerField()),
                ("lost_attempts", models.IntegerField()),
                ("postponements", models.IntegerField()),
                ("rescues", models.IntegerField()),
                ("task", models.TextField(null=True)),
                ("task_id", models.TextField(null=True)),
                ("entry", models.TextField(null=True)),
                ("node", models.TextField(null=True)),
                ("term", models.BigIntegerField(null=True)),
                ("sent_at", models.DateTimeField(null=True)),
                ("started_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(null=True)),
                ("retry_at", models.DateTimeField(null=True)),
                ("reason", models.TextField(null=True)),
                ("error", models.TextField(null=True)),
            ],
            options={
                "verbose_name": "run",
                "db_table": current.table("job_runs"),
                "ordering": ("-due_at", "-started_at"),
                "managed": False,
            },
        ),
        migrations.CreateModel(
            name="BeatEntry",
            fields=[
                ("identity", pairs.PairField("namespace", "entry", serialize=False)),
                ("namespace", models.TextField()),
                ("entry", models.TextField()),
                ("task", models.TextField()),
                ("schedule", models.TextField()),
                ("due_at", models.DateTimeField(null=True)),
                ("published_at", models.DateTimeField(null=True)),
                ("total_run_count", models.BigIntegerField()),
                ("next_due_at", models.DateTimeField(null=True)),
                ("paused_until", models.DateTimeField(null=True)),
                ("paused_reason", models.TextField(null=True)),
                ("seen_at", models.DateTimeField()),
            ],
            options={
                "verbose_name": "schedule entry",
                "verbose_name_plural": "schedule entries",
                "db_table": current.table("beat_entries"),
                "ordering": ("namespace", "entry"),
                "managed": False,
            },
        ),
    )

"""The columns of entries that are kept in the database."""

from __future__ import annotations

from django.db import migrations

from celery_pglock.contrib.django import operations


class Migration(migrations.Migration):
    """Apply the SQL file; none of its columns is shown by a model."""

    # Its connection is another: in a transaction of this one nothing could be built concurrently.
    atomic = False
    dependencies = (("celery_pglock", "0001_initial"),)

    operations = (operations.ApplySteps("0003_entries"),)

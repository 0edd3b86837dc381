"""The tables of the books."""

from __future__ import annotations

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    """Create them."""

    initial = True
    dependencies = ()

    operations = (
        migrations.CreateModel(
            name="Shelf",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                )
            ],
        ),
        migrations.CreateModel(
            name="Row",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("job", models.TextField()),
                ("number", models.IntegerField()),
                (
                    "shelf",
                    models.ForeignKey(
                        null=True, on_delete=django.db.models.deletion.CASCADE, to="books.shelf"
                    ),
                ),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=["job", "number"], name="row_once")]
            },
        ),
    )

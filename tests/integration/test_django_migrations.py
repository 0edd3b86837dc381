"""Django's migrations and `pglock migrate` make the same tables, in either order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from celery_pglock import migrating, schema
from tests.integration.test_schema import NAMES, catalog
from tests.support.databases import Database
from tests.support.django_site import environment, pointed
from tests.support.processes import Processes

# Django is set up.
pytestmark = pytest.mark.usefixtures("site")

SELECT = "SELECT name FROM pglock.schema_version ORDER BY number"


def migrate(database: Database, **options: Any) -> None:
    from django.core.management import call_command

    with pointed(default=database.url):
        call_command("migrate", "celery_pglock", verbosity=0, **options)


def recorded(database: Database) -> list[str]:
    return [name for (name,) in database.rows(SELECT)]


@pytest.fixture
def by_command(database: Database) -> dict[str, list[Any]]:
    """What the server knows of tables that `pglock migrate` has made."""
    return catalog(database, "pglock")


def test_they_make_the_same_tables(
    blank_database: Database, by_command: dict[str, list[Any]]
) -> None:
    migrate(blank_database)
    assert catalog(blank_database, "pglock") == by_command
    assert recorded(blank_database) == NAMES
    # And the other way round: each finds what the other has done.
    assert migrating.migrate(blank_database.url) == []
    schema.verify(blank_database.url)


def test_tables_that_the_command_has_made_are_taken_as_they_are(
    database: Database, by_command: dict[str, list[Any]]
) -> None:
    database.rows("INSERT INTO pglock.job_runs (job, period, status) VALUES ('a:b', 'p', 'done')")
    migrate(database)
    migrate(database)
    assert catalog(database, "pglock") == by_command
    assert recorded(database) == NAMES
    from celery_pglock.contrib.django.models import JobRun

    with pointed(default=database.url):
        assert [run.job for run in JobRun.objects.all()] == ["a:b"]


def test_a_step_that_only_one_of_them_has_applied_is_applied_by_the_other(
    blank_database: Database, by_command: dict[str, list[Any]]
) -> None:
    migrating.migrate(blank_database.url)
    blank_database.rows("DROP TABLE pglock.beat_entries, pglock.beat_terms")
    blank_database.rows("DELETE FROM pglock.schema_version WHERE number > 1")
    migrate(blank_database)
    assert catalog(blank_database, "pglock") == by_command


def test_both_at_once_make_the_tables_once(blank_database: Database) -> None:
    barrier = threading.Barrier(2, timeout=30)

    def by_command() -> list[str]:
        barrier.wait()
        return migrating.migrate(blank_database.url)

    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(by_command)
        barrier.wait()
        migrate(blank_database)
        assert applied.result() in ([], NAMES[1:], NAMES)
    assert recorded(blank_database) == NAMES


def test_there_is_a_migration_for_the_newest_step() -> None:
    """Whoever adds an SQL file adds a migration that names it, or `migrate` would not run it."""
    from django.db.migrations.loader import MigrationLoader

    from celery_pglock.contrib.django.operations import ApplySteps

    loader = MigrationLoader(None)
    steps = [
        operation.through
        for (app, _), migration in sorted(loader.disk_migrations.items())
        if app == "celery_pglock"
        for operation in migration.operations
        if isinstance(operation, ApplySteps)
    ]
    assert steps[-1] == NAMES[-1]


def test_the_models_have_the_columns_of_the_tables(site_database: Database) -> None:
    """All but those that nobody should read there."""
    from celery_pglock.contrib.django import models

    hidden = {
        "job_runs": {"claim", "name_key", "backend_pid"},
        "beat_entries": {
            *("definition", "anchor", "task_id"),
            *("revision", "edited_at", "added", "registered"),
        },
    }
    for model in (models.JobRun, models.BeatEntry):
        table = model._meta.db_table  # noqa: SLF001 - Django's public _meta
        fields = {f.column for f in model._meta.get_fields()} - {"identity"}  # type: ignore[union-attr]  # noqa: SLF001
        name = table.split('"')[3]
        columns = {
            column
            for (column,) in site_database.rows(
                "SELECT column_name FROM information_schema.columns"
                " WHERE table_schema = 'pglock' AND table_name = %s",
                name,
            )
        }
        assert columns - hidden[name] == fields
        assert list(model.objects.all()) == []


def test_the_schema_is_that_of_the_settings(processes: Processes, blank_database: Database) -> None:
    env = environment(blank_database.url, CELERY_PGLOCK_SCHEMA="jobs")
    script = (
        "import django; django.setup()\n"
        "from django.core.management import call_command\n"
        "call_command('migrate')\n"
        "call_command('makemigrations', check_changes=True, dry_run=True)\n"
    )
    command = processes.python("-c", script, env=env)
    assert command.wait() == 0, command.output()
    assert len(catalog(blank_database, "jobs")["tables"]) == 4
    assert not blank_database.rows("SELECT 1 FROM pg_namespace WHERE nspname = 'pglock'")


@pytest.mark.usefixtures("site_database")
def test_no_migration_is_missing() -> None:
    from django.core.management import call_command

    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def test_the_sql_can_be_read_beforehand(
    blank_database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    from django.core.management import call_command

    with pointed(default=blank_database.url):
        call_command("sqlmigrate", "celery_pglock", "0001", no_color=True)
    text = capsys.readouterr().out
    assert 'CREATE TABLE "pglock".job_runs' in text
    assert not blank_database.rows("SELECT 1 FROM pg_namespace WHERE nspname = 'pglock'")
    # What it prints is all that is needed.
    with psycopg.connect(blank_database.url, autocommit=True) as connection:
        connection.execute(text.encode())
    schema.verify(blank_database.url)


def test_another_database_of_the_project_is_left_alone(blank_database: Database) -> None:
    from django.core.management import call_command

    with pointed(other=blank_database.url):
        call_command("migrate", "celery_pglock", database="other", verbosity=0)
    assert not blank_database.rows("SELECT 1 FROM pg_namespace WHERE nspname = 'pglock'")


def test_migrating_backwards_deletes_no_history(site_database: Database) -> None:
    from django.core.management import call_command
    from django.db.migrations.exceptions import IrreversibleError

    with pytest.raises(IrreversibleError):
        call_command("migrate", "celery_pglock", "zero", verbosity=0)
    assert recorded(site_database) == NAMES

"""Users whose own tables are Alembic's: ours beside them, and nothing is proposed about ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import sqlalchemy as sa

from celery_pglock import errors, migrating, schema, tables
from tests.support.databases import Database
from tests.support.processes import REPOSITORY
from tests.support.requirements import require, since

NAMES = ["pglock", "Jobs", "with space", 'quo"ted', "per%cent"]

Differences = list[Any]
Compare = Callable[..., Differences]


@pytest.fixture
def listed(blank_database: Database) -> None:
    """Skip where SQLAlchemy, and so Alembic, does not see a schema of the default name."""
    engine = sa.create_engine(url(blank_database), poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.execute(sa.text("create schema pglock"))
        seen = "pglock" in sa.inspect(connection).get_schema_names()
        connection.rollback()
    since(seen, "an SQLAlchemy that does not take every schema pg… for one of the system")


@pytest.fixture
def compare(blank_database: Database, listed: None) -> Compare:  # noqa: ARG001 - may skip
    """Have Alembic compare a metadata with the database; return what it would propose."""
    require(_has_alembic(), "alembic (pip install alembic)")
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    def compare(metadata: sa.MetaData, **options: Any) -> Differences:
        engine = sa.create_engine(url(blank_database), poolclass=sa.NullPool)
        with engine.connect() as connection:
            context = MigrationContext.configure(
                connection,
                opts={"compare_type": True, "compare_server_default": True, **options},
            )
            return list(compare_metadata(context, metadata))

    return compare


def _has_alembic() -> bool:
    try:
        import alembic
    except ImportError:
        return False
    return bool(alembic.__version__)


def url(database: Database) -> str:
    return urlunsplit(urlsplit(database.url)._replace(scheme="postgresql+psycopg"))


def users_metadata() -> sa.MetaData:
    """Return what an application has of its own."""
    metadata = sa.MetaData()
    sa.Table("users", metadata, sa.Column("id", sa.Integer, primary_key=True))
    return metadata


def make_users_tables(database: Database) -> None:
    engine = sa.create_engine(url(database), poolclass=sa.NullPool)
    users_metadata().create_all(engine)


@pytest.mark.parametrize("name", NAMES)
def test_after_migrate_autogenerate_finds_nothing_to_do(
    blank_database: Database, compare: Compare, name: str
) -> None:
    make_users_tables(blank_database)
    migrating.migrate(blank_database.url, name)
    metadata = users_metadata()
    tables.mirror(metadata, name)
    assert compare(metadata, include_schemas=True) == []


def test_without_the_mirror_it_would_drop_the_tables(
    blank_database: Database, compare: Compare
) -> None:
    """What the mirror is for; and in the default configuration it is not needed."""
    make_users_tables(blank_database)
    migrating.migrate(blank_database.url)
    proposed = compare(users_metadata(), include_schemas=True)
    dropped = {change[1].name for change in proposed if change[0] == "remove_table"}
    assert dropped == {table.name for table in tables.mirror(sa.MetaData()).values()}
    assert compare(users_metadata()) == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("alter table pglock.job_runs drop column reason", "add_column"),
        ("alter table pglock.job_runs add column more text", "remove_column"),
        ("alter table pglock.job_runs alter column attempts type bigint", "modify_type"),
        ("alter table pglock.job_runs alter column attempts set default 1", "modify_default"),
        ("alter table pglock.job_runs alter column attempts drop not null", "modify_nullable"),
        (
            "alter table pglock.job_runs drop constraint job_runs_job_period_key",
            "add_constraint",
        ),
        ("drop index pglock.job_runs_open_idx", "add_index"),
        ("create index another on pglock.beat_terms (node)", "remove_index"),
    ],
)
def test_control_it_does_find_what_differs(
    blank_database: Database, compare: Compare, change: str, kind: str
) -> None:
    migrating.migrate(blank_database.url)
    blank_database.rows(change)
    metadata = sa.MetaData()
    tables.mirror(metadata)
    found = [
        step[0]
        for part in compare(metadata, include_schemas=True)
        for step in (part if isinstance(part, list) else [part])
    ]
    assert found == [kind]


def test_tables_that_are_made_from_the_mirror_are_the_same_once_that_is_recorded(
    blank_database: Database, compare: Compare
) -> None:
    """`create_all` makes them and records nothing; migrate says what to record."""
    metadata = sa.MetaData()
    tables.mirror(metadata)
    engine = sa.create_engine(url(blank_database), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema("pglock"))
        metadata.create_all(connection)
    assert compare(metadata, include_schemas=True) == []
    with pytest.raises(errors.SchemaError, match="pglock migrate"):
        schema.verify(blank_database.url)
    for step in schema.migrations():
        with pytest.raises(errors.SchemaError, match=f"what step {step.name} makes") as caught:
            migrating.migrate(blank_database.url)
        remedy = str(caught.value).partition("record that: ")[2]
        blank_database.rows(remedy.partition("; and run")[0])
    assert migrating.migrate(blank_database.url) == []
    schema.verify(blank_database.url)
    assert compare(metadata, include_schemas=True) == []


def test_a_metadata_may_be_given_the_mirror_again() -> None:
    """As by an environment that several of Alembic's commands run in one process."""
    metadata = sa.MetaData()
    first = tables.mirror(metadata, "jobs")
    again = tables.mirror(metadata, "jobs")
    assert all(again[name] is table for name, table in first.items())
    assert len(metadata.tables) == len(first)


ENVIRONMENT = """
import sqlalchemy as sa
from alembic import context

from celery_pglock import tables

metadata = sa.MetaData()
sa.Table("users", metadata, sa.Column("id", sa.Integer, primary_key=True))
tables.mirror(metadata)
engine = sa.create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(
        connection=connection, target_metadata=metadata, include_schemas=True, compare_type=True
    )
    with context.begin_transaction():
        context.run_migrations()
"""


@pytest.mark.usefixtures("listed")
def test_alembics_own_command_finds_nothing_to_do(blank_database: Database, tmp_path: Path) -> None:
    """Between two databases that differ by nothing but ours: `alembic check`."""
    require(_has_alembic(), "alembic (pip install alembic)")
    make_users_tables(blank_database)
    scripts = tmp_path / "scripts"
    (scripts / "versions").mkdir(parents=True)
    (scripts / "env.py").write_text(dedent(ENVIRONMENT))
    config = tmp_path / "alembic.ini"
    address = url(blank_database).replace("%", "%%")
    config.write_text(f"[alembic]\nscript_location = {scripts}\nsqlalchemy.url = {address}\n")

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "alembic", "-c", str(config), "check"],
            cwd=REPOSITORY,
            check=False,
            capture_output=True,
            text=True,
        )

    before = check()
    assert before.returncode != 0, "the control: the tables are not there yet"
    assert "job_runs" in before.stdout + before.stderr
    migrating.migrate(blank_database.url)
    after = check()
    assert after.returncode == 0, after.stdout + after.stderr
    assert "No new upgrade operations detected" in after.stdout + after.stderr

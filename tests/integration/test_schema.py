"""The tables: made once, by whoever may, checked, and mirrored by SQLAlchemy."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql

from celery_pglock import errors, keys, ledger, migrating, schema, sessions, tables
from celery_pglock.demo.servers import PostgresServer
from tests.integration.workbench import Sessions, advisory_locks, work
from tests.support.databases import Database

NAMES = [step.name for step in schema.migrations()]
STRANGE = ["Jobs", "with space", 'quo"ted', "per%cent", "per%(s)s", "{braces}", "select", "ünïcode"]


def sqlalchemy_url(database: Database) -> str:
    return urlunsplit(urlsplit(database.url)._replace(scheme="postgresql+psycopg"))


def catalog(database: Database, name: str) -> dict[str, list[Any]]:
    """Return what the server knows of a schema, in the server's own words."""
    tables = database.rows(
        "select table_name from information_schema.tables where table_schema = %s", name
    )
    columns = database.rows(
        "select table_name, column_name, data_type, is_nullable, column_default"
        " from information_schema.columns where table_schema = %s"
        " order by table_name, ordinal_position",
        name,
    )
    constraints = database.rows(
        "select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint"
        " where connamespace = %s::text::regnamespace and contype <> 'n' order by 1, 2",
        sql.Identifier(name).as_string(),
    )
    indexes = database.rows(
        "select tablename, indexname, indexdef from pg_indexes where schemaname = %s order by 1, 2",
        name,
    )
    return {
        "tables": sorted(tables),
        "columns": columns,
        "constraints": constraints,
        "indexes": indexes,
    }


@pytest.fixture
def role(blank_database: Database) -> Iterator[str]:
    """The URL of the same database for a role without any right in it."""
    name = f"role_{blank_database.name}"
    quoted = sql.Identifier(name).as_string()
    blank_database.rows(f"create role {quoted} login password 'secret'")
    parts = urlsplit(blank_database.url)
    netloc = f"{name}:secret@{parts.hostname}:{parts.port or 5432}"
    yield urlunsplit(parts._replace(netloc=netloc))
    blank_database.rows(f"drop owned by {quoted}")
    blank_database.rows(f"drop role {quoted}")


# --- migrate --------------------------------------------------------------------------------


def test_migrating_twice_is_migrating_once(blank_database: Database) -> None:
    assert migrating.migrate(blank_database.url) == NAMES
    before = catalog(blank_database, "pglock")
    assert migrating.migrate(blank_database.url) == []
    assert catalog(blank_database, "pglock") == before
    recorded = blank_database.rows("select name from pglock.schema_version order by number")
    assert [name for (name,) in recorded] == NAMES
    schema.verify(blank_database.url)
    assert not advisory_locks(blank_database)


@pytest.mark.slow
def test_eight_at_once_make_the_tables_once(blank_database: Database) -> None:
    """Twenty rounds; each starts eight in the same instant, on an empty schema."""
    for number in range(20):
        name = f"round_{number}"
        barrier = threading.Barrier(8, timeout=30)

        def start(barrier: threading.Barrier = barrier, name: str = name) -> list[str]:
            barrier.wait()
            return migrating.migrate(blank_database.url, name)

        with ThreadPoolExecutor(8) as pool:
            applied = [future.result() for future in [pool.submit(start) for _ in range(8)]]
        assert sorted(applied) == [[]] * 7 + [NAMES]
        schema.verify(blank_database.url, name)


def test_control_eight_at_once_are_not_safe_by_if_not_exists(blank_database: Database) -> None:
    """What the lock of the migrations is for."""
    failed = 0
    for number in range(20):
        barrier = threading.Barrier(8, timeout=30)

        def start(barrier: threading.Barrier = barrier, number: int = number) -> bool:
            with psycopg.connect(blank_database.url, autocommit=True) as connection:
                barrier.wait()
                try:
                    connection.execute(f"create table if not exists t{number} (a int)".encode())
                except psycopg.Error:
                    return False
                return True

        with ThreadPoolExecutor(8) as pool:
            done = [future.result() for future in [pool.submit(start) for _ in range(8)]]
        failed += done.count(False)
    assert failed > 0


def test_a_migration_that_hangs_is_told(
    blank_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrating, "_PATIENCE", 0.2)
    holder = blank_database.connect()
    with holder.transaction():
        key = keys.from_name("pglock", "migrate", "pglock")
        holder.execute("select pg_advisory_xact_lock(%s)", [key])
        with pytest.raises(errors.SchemaError, match="being migrated by somebody else"):
            migrating.migrate(blank_database.url)


def test_a_step_that_fails_leaves_nothing(
    blank_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = schema.migrations()
    broken = schema.Migration(9999, "9999_broken", "create table {schema}.half (); select 1 / 0;")
    monkeypatch.setattr(schema, "migrations", lambda: (*steps, broken))
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrating.migrate(blank_database.url)
    assert not blank_database.rows("select 1 from pg_class where relname = 'half'")
    # What came before it is there, and is not applied a second time.
    applied = blank_database.rows("select number from pglock.schema_version order by number")
    assert applied == [(step.number,) for step in steps]
    monkeypatch.undo()
    assert migrating.migrate(blank_database.url) == []


@pytest.mark.parametrize("name", STRANGE)
def test_any_schema_name_will_do(
    blank_database: Database, lock_sessions: Sessions, name: str
) -> None:
    assert migrating.migrate(blank_database.url, name) == NAMES
    assert migrating.migrate(blank_database.url, name) == []
    schema.verify(blank_database.url, name)
    records = ledger.Ledger(name)
    for level in ("session", "transaction"):
        session = lock_sessions.open(blank_database.url, level)
        wanted = work(level, name=level)
        claim = schema_claim(records, session, wanted)
        assert records.settle(session, wanted, claim, "done")
        records.skip(session, work("skipped"), "why")
        records.postpone(session, work("postponed"), 1, "why")
        records.give_back(session, wanted, claim, "why")
        assert records.holder(session, wanted) is None
        assert records.period_of(session, wanted.job, "nobody") is None
    table = sql.Identifier(name, "job_runs").as_string()
    found = blank_database.rows(f"select count(*) from {table}")  # noqa: S608 - quoted
    assert found == [(4,)]


def schema_claim(records: ledger.Ledger, session: sessions.Session, wanted: Any) -> Any:
    claim = uuid.uuid4()
    records.claim(session, wanted, claim=claim)
    return claim


# --- rights ---------------------------------------------------------------------------------


def test_a_role_without_rights_is_told_what_to_do(role: str) -> None:
    with pytest.raises(errors.SchemaError, match="permission denied") as caught:
        migrating.migrate(role)
    assert "pglock migrate --sql" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_role_without_rights_finds_the_tables_that_others_have_made(
    blank_database: Database, lock_sessions: Sessions, role: str
) -> None:
    migrating.migrate(blank_database.url)
    name = sql.Identifier(urlsplit(role).username or "").as_string()
    session = lock_sessions.open(role)
    told = pytest.raises(errors.SchemaError, match="may not be used by this role")
    with told, schema.translated("x", "pglock"):
        ledger.Ledger().read(session, work())
    blank_database.rows(schema.grants("pglock", name))
    assert migrating.migrate(role) == []
    schema.verify(role)
    session = lock_sessions.open(role)
    records = ledger.Ledger()
    claim = schema_claim(records, session, work())
    assert records.settle(session, work(), claim, "done")


def test_tables_in_a_schema_that_the_role_owns_need_no_right_on_the_database(
    blank_database: Database, role: str
) -> None:
    name = sql.Identifier(urlsplit(role).username or "").as_string()
    blank_database.rows(f"create schema pglock authorization {name}")
    assert migrating.migrate(role) == NAMES


def test_a_standby_is_refused(own_postgres: PostgresServer) -> None:
    migrating.migrate(own_postgres.url())
    with own_postgres.standby() as standby:
        for act in (migrating.migrate, schema.verify):
            with pytest.raises(errors.ServerInRecovery):
                act(standby.url())


# --- check ----------------------------------------------------------------------------------


def fault_of(database: Database) -> str:
    with pytest.raises(errors.SchemaError) as caught:
        schema.verify(database.url)
    return str(caught.value)


def test_missing_tables_are_told_with_the_command(blank_database: Database) -> None:
    fault = fault_of(blank_database)
    assert f"has no tables of celery-pglock in database '{blank_database.name}'" in fault
    assert "celery -A <your app> pglock migrate" in fault


def test_an_older_schema_is_told_with_what_is_missing(database: Database) -> None:
    last = NAMES[-1]
    if len(NAMES) == 1:
        pytest.fail("with one migration nothing can be older")
    database.rows("delete from pglock.schema_version where name = %s", last)
    assert f"is older than this release needs (missing: {last})" in fault_of(database)


def test_a_newer_schema_is_fine(database: Database) -> None:
    database.rows("insert into pglock.schema_version values (9999, '9999_of_the_next_release')")
    schema.verify(database.url)
    assert migrating.migrate(database.url) == []


def test_a_missing_unique_constraint_is_told_with_what_restores_it(database: Database) -> None:
    database.rows("alter table pglock.job_runs drop constraint job_runs_job_period_key")
    fault = fault_of(database)
    assert "without its UNIQUE (job, period)" in fault
    database.rows(fault.partition("run: ")[2])
    schema.verify(database.url)


@pytest.mark.parametrize(
    ("index", "enough"),
    [
        ("unique index x on pglock.job_runs (period, job)", True),
        ("unique index x on pglock.job_runs (job, period) where status = 'done'", False),
        ("unique index x on pglock.job_runs (job, period, status)", False),
        ("unique index x on pglock.job_runs (job)", False),
        ("index x on pglock.job_runs (job, period)", False),
    ],
)
def test_only_an_index_that_keeps_periods_unique_is_enough(
    database: Database, index: str, *, enough: bool
) -> None:
    database.rows("alter table pglock.job_runs drop constraint job_runs_job_period_key")
    database.rows(f"create {index}")
    if enough:
        schema.verify(database.url)
    else:
        assert "without its UNIQUE" in fault_of(database)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("drop schema pglock cascade", "has no tables"),
        ("alter table pglock.job_runs drop column reason", "is older than this release needs"),
        (
            "alter table pglock.job_runs drop constraint job_runs_job_period_key",
            r"without its UNIQUE \(job, period\)",
        ),
    ],
)
def test_a_fault_is_also_told_by_the_claim_itself(
    database: Database, lock_sessions: Sessions, change: str, fault: str
) -> None:
    session = lock_sessions.open(database.url)
    database.rows(change)
    with pytest.raises(errors.SchemaError, match=fault), schema.translated("x", "pglock"):
        schema_claim(ledger.Ledger(), session, work())
    assert not advisory_locks(database)


# --- the mirror and the script --------------------------------------------------------------


def test_the_mirror_agrees_with_the_migrations(
    blank_database: Database, database: Database
) -> None:
    metadata = sa.MetaData()
    tables.mirror(metadata)
    engine = sa.create_engine(sqlalchemy_url(blank_database), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema("pglock"))
        metadata.create_all(connection)
    names = {table.name for table in metadata.tables.values()}
    made = {name for (name,) in catalog(database, "pglock")["tables"]}
    assert names == made
    mirrored, migrated = (
        {
            what: [row for row in rows if row[0].split(".")[-1].strip('"') in names]
            for what, rows in catalog(of, "pglock").items()
        }
        for of in (blank_database, database)
    )
    assert mirrored == migrated
    assert all(migrated.values())


@pytest.mark.parametrize("name", ["pglock", *STRANGE])
def test_the_script_makes_what_migrate_makes(
    blank_database: Database, database: Database, name: str
) -> None:
    with psycopg.connect(blank_database.url, autocommit=True) as connection:
        connection.execute(schema.script(name).encode())
    migrating.migrate(database.url, name)
    assert catalog(blank_database, name) == catalog(database, name)
    schema.verify(blank_database.url, name)
    assert migrating.migrate(blank_database.url, name) == []

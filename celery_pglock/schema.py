"""The tables in PostgreSQL: numbered migrations, and the check that they are there.

``celery_pglock/migrations/NNNN_name.sql`` are applied in the order of their numbers, each in
one transaction together with its row in ``schema_version``. Release N runs on the schema of
release N+1, so the schema is migrated first and the code deployed afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import re
import time
from collections.abc import Iterator
from typing import Any, Final

import psycopg
from psycopg import sql

from celery_pglock import connections, errors, keys

MIGRATE_COMMAND: Final = "run: celery -A <your app> pglock migrate"

_FILE: Final = re.compile(r"(\d{4})_\w+\.sql")
_PATIENCE: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step; ``text`` is its SQL with ``{schema}`` where the schema's name goes."""

    number: int
    name: str
    text: str


@functools.cache
def migrations() -> tuple[Migration, ...]:
    """Return all migrations of this release, in their order."""
    found = []
    for entry in importlib.resources.files("celery_pglock").joinpath("migrations").iterdir():
        if match := _FILE.fullmatch(entry.name):
            text = entry.read_text(encoding="utf-8")
            found.append(Migration(int(match[1]), entry.name.removesuffix(".sql"), text))
    return tuple(sorted(found, key=lambda migration: migration.number))


def script(schema: str = "pglock") -> str:
    """Return the SQL of all migrations, for review or for another tool."""
    preamble = (
        sql.SQL(
            "CREATE SCHEMA IF NOT EXISTS {schema};\n"
            "CREATE TABLE IF NOT EXISTS {schema}.schema_version (\n"
            "    number integer PRIMARY KEY,\n"
            "    name text NOT NULL,\n"
            "    applied_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()\n"
            ");\n"
        )
        .format(schema=sql.Identifier(schema))
        .as_string()
    )
    steps = [
        f"\n-- {step.name}\n{_text(step, schema)}{_record(step, schema)};\n"
        for step in migrations()
    ]
    return f"BEGIN;\n{preamble}{''.join(steps)}COMMIT;\n"


def grants(schema: str = "pglock", role: str = "<role>") -> str:
    """Return the GRANT statements for a role that runs workers and beats but may not migrate."""
    name = sql.Identifier(schema).as_string()
    return (
        f"GRANT USAGE ON SCHEMA {name} TO {role};\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {name} TO {role};\n"
    )


def migrate(target: connections.Target, schema: str = "pglock") -> list[str]:
    """Bring the schema up to this release and return the names of the steps applied.

    May be started on many machines at once: one works, the others wait for it (at most 60 s)
    and find nothing left to do. When nothing is to be done, no right to create anything is
    needed.

    Raises:
        DatabaseUnavailable: the server cannot be reached.
        ServerInRecovery: the server is a standby.
        SchemaError: the role may not create what is missing, something of that name is there
            already, or another migration holds on.
    """
    with contextlib.closing(_connect(target)) as connection:
        applied: list[str] = []
        with _migration_lock(connection, schema):
            with translated(connections.describe_open(connection), schema):
                pending = _pending(connection, schema)
            for step in pending:
                _apply(connection, schema, step)
                applied.append(step.name)
        check(connection, schema)
        return applied


def verify(target: connections.Target, schema: str = "pglock") -> None:
    """Check the schema from outside; see ``check``.

    Raises:
        DatabaseUnavailable: the server cannot be reached.
        ServerInRecovery: the server is a standby.
        SchemaError: the tables are missing, older, or without their UNIQUE constraint.
    """
    with contextlib.closing(_connect(target)) as connection:
        check(connection, schema)


def check(connection: psycopg.Connection[Any], schema: str) -> None:
    """Check that the tables are there, new enough, and keep one row per (job, period).

    Raises:
        SchemaError: with the command that repairs it.
        DatabaseUnavailable: the connection broke.
    """
    with translated(connections.describe_open(connection), schema):
        _check(connection, schema)


def _check(connection: psycopg.Connection[Any], schema: str) -> None:
    if pending := _pending(connection, schema):
        if len(pending) == len(migrations()):
            fault = f"has no tables of celery-pglock in database {connection.info.dbname!r}"
        else:
            fault = f"is older than this release needs (missing: {pending[0].name})"
        raise errors.SchemaError(schema, fault, MIGRATE_COMMAND)
    # Without this constraint two claims of one period both insert, and both run.
    found = connection.execute(
        "select 1 from pg_catalog.pg_index i"
        " join pg_catalog.pg_class c on c.oid = i.indrelid"
        " join pg_catalog.pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = %s and c.relname = 'job_runs' and i.indisunique and i.indisvalid"
        " and i.indpred is null and (select pg_catalog.array_agg(a.attname::text order by"
        " a.attname) from pg_catalog.pg_attribute a where a.attrelid = c.oid"
        " and a.attnum = any (i.indkey::int2[])) = array['job', 'period']",
        [schema],
    ).fetchone()
    if found is None:
        name = sql.Identifier(schema, "job_runs").as_string()
        raise errors.SchemaError(
            schema,
            "has a table job_runs without its UNIQUE (job, period), so nothing would keep a "
            "period from running twice",
            f"run: ALTER TABLE {name} ADD CONSTRAINT job_runs_job_period_key UNIQUE (job, period)",
        )


@contextlib.contextmanager
def translated(target: str, schema: str) -> Iterator[None]:
    """Turn what psycopg raises in a ledger statement into what the user can act upon.

    Raises:
        SchemaError: tables, constraint or rights are missing.
        DatabaseUnavailable: anything else.
    """
    try:
        yield
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
        raise errors.SchemaError(
            schema, "has no tables of celery-pglock", MIGRATE_COMMAND
        ) from error
    except psycopg.errors.UndefinedColumn as error:
        fault = "is older than this release needs"
        raise errors.SchemaError(schema, fault, MIGRATE_COMMAND) from error
    except psycopg.errors.InvalidColumnReference as error:
        fault = "has a table job_runs without its UNIQUE (job, period)"
        raise errors.SchemaError(
            schema, fault, "run: celery -A <your app> pglock migrate --check"
        ) from error
    except psycopg.errors.InsufficientPrivilege as error:
        fault = f"may not be used by this role ({str(error).splitlines()[0]})"
        raise errors.SchemaError(
            schema, fault, "run the GRANTs that celery -A <your app> pglock migrate prints"
        ) from error
    except psycopg.Error as error:
        raise errors.DatabaseUnavailable(target, " ".join(str(error).split())) from error


def _connect(target: connections.Target) -> psycopg.Connection[Any]:
    connection = connections.connect(target, application="pglock migrate", prepare_threshold=None)
    row = connection.execute("select pg_catalog.pg_is_in_recovery()").fetchone()
    if row is not None and row[0]:
        parameters = connections.parameters(target)
        connection.close()
        raise errors.ServerInRecovery(connections.describe(parameters))
    return connection


@contextlib.contextmanager
def _migration_lock(connection: psycopg.Connection[Any], schema: str) -> Iterator[None]:
    # A transaction-level lock works through any pooler. It is tried, never waited for: a
    # blocked waiter would hold back vacuum and every CREATE INDEX CONCURRENTLY.
    key = keys.from_name("pglock", "migrate", schema)
    deadline = time.monotonic() + _PATIENCE
    while True:
        with connection.transaction():
            row = connection.execute(
                "select pg_catalog.pg_try_advisory_xact_lock(%s::bigint)", [key]
            ).fetchone()
            if row is not None and row[0]:
                yield
                return
        if time.monotonic() > deadline:
            raise errors.SchemaError(
                schema,
                f"is being migrated by somebody else for more than {_PATIENCE:.0f} s",
                "wait for it to end, or end its session, and run migrate again",
            )
        time.sleep(0.05)


def _pending(connection: psycopg.Connection[Any], schema: str) -> list[Migration]:
    table_name = sql.Identifier(schema, "schema_version").as_string()
    row = connection.execute("select pg_catalog.to_regclass(%s)", [table_name]).fetchone()
    if row is None or row[0] is None:
        return list(migrations())
    query = sql.SQL("select number from {}").format(sql.Identifier(schema, "schema_version"))
    done = {number for (number,) in connection.execute(query)}
    return [step for step in migrations() if step.number not in done]


def _apply(connection: psycopg.Connection[Any], schema: str, step: Migration) -> None:
    try:
        # Asked first, because CREATE SCHEMA IF NOT EXISTS wants the right to create one even
        # where there is one.
        if not _exists(connection, "select pg_catalog.to_regnamespace(%s)", [_quoted(schema)]):
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        version = sql.Identifier(schema, "schema_version").as_string()
        if not _exists(connection, "select pg_catalog.to_regclass(%s)", [version]):
            connection.execute(
                sql.SQL(
                    "CREATE TABLE {} (number integer PRIMARY KEY, name text NOT NULL,"
                    " applied_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp())"
                ).format(sql.Identifier(schema, "schema_version"))
            )
        connection.execute(_text(step, schema).encode())
        connection.execute(_record(step, schema).encode())
    except psycopg.errors.InsufficientPrivilege as error:
        reason = str(error).splitlines()[0]
        raise errors.SchemaError(
            schema,
            f"cannot be migrated by role {connection.info.user!r} ({reason})",
            "run: celery -A <your app> pglock migrate --sql, and let the owner of the database "
            "apply what it prints",
        ) from None
    except (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateObject) as error:
        # Made by hand or by Alembic: what is there is not ours to judge.
        reason = str(error).splitlines()[0]
        raise errors.SchemaError(
            schema,
            f"holds already what step {step.name} makes ({reason})",
            f"drop it, or if it is right record that: {_record(step, schema)}; and run migrate "
            f"again",
        ) from None


def _exists(connection: psycopg.Connection[Any], query: Any, parameters: list[str]) -> bool:
    row = connection.execute(query, parameters).fetchone()
    return row is not None and row[0] is not None


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()


def _text(step: Migration, schema: str) -> str:
    return step.text.replace("{schema}", _quoted(schema))


def _record(step: Migration, schema: str) -> str:
    return (
        sql.SQL("INSERT INTO {} (number, name) VALUES ({}, {})")
        .format(
            sql.Identifier(schema, "schema_version"),
            sql.Literal(step.number),
            sql.Literal(step.name),
        )
        .as_string()
    )

"""The tables in PostgreSQL: the numbered steps that make them, and the check that they are there.

The steps are ``celery_pglock/migrations/NNNN_name.sql``; ``migrating`` applies them. One whose text
begins with ``-- concurrently`` is run outside of a transaction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import re
from collections.abc import Iterator
from typing import Any, Final

import psycopg
from psycopg import sql

from celery_pglock import connections, errors

MIGRATE_COMMAND: Final = "run: celery -A <your app> pglock migrate"

_FILE: Final = re.compile(r"(\d{4})_\w+\.sql")
_CONCURRENTLY: Final = "-- concurrently\n"
_RIGHTS: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")
_TABLES: Final = ("job_runs", "beat_entries", "beat_terms", "schema_version")


@dataclasses.dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step; ``text`` is its SQL with ``{schema}`` where the schema's name goes."""

    number: int
    name: str
    text: str

    @property
    def concurrent(self) -> bool:
        """Whether it is run outside of a transaction."""
        return self.text.startswith(_CONCURRENTLY)

    def rendered(self, schema: str) -> str:
        """Return its SQL for a schema."""
        return self.text.replace("{schema}", _quoted(schema))

    def record(self, schema: str) -> str:
        """Return the statement which records that it was applied, without a semicolon."""
        return (
            sql.SQL("INSERT INTO {} (number, name) VALUES ({}, {})")
            .format(
                sql.Identifier(schema, "schema_version"),
                sql.Literal(self.number),
                sql.Literal(self.name),
            )
            .as_string()
        )


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
    text = f"BEGIN;\n{preamble}"
    inside = True
    for step in migrations():
        if step.concurrent is inside:
            text += "COMMIT;\n" if inside else "BEGIN;\n"
            inside = not inside
        text += f"\n-- {step.name}\n{step.rendered(schema)}{step.record(schema)};\n"
    return f"{text}COMMIT;\n" if inside else text


def grants(schema: str = "pglock", role: str = "<role>") -> str:
    """Return the GRANT statements for a role that runs workers and beats but may not migrate."""
    name = sql.Identifier(schema).as_string()
    return (
        f"GRANT USAGE ON SCHEMA {name} TO {role};\n"
        f"GRANT {', '.join(_RIGHTS)} ON ALL TABLES IN SCHEMA {name} TO {role};\n"
    )


def verify(target: connections.Target, schema: str = "pglock") -> None:
    """Check the schema from outside; see ``check``.

    Raises:
        DatabaseUnavailable: the server cannot be reached.
        ServerInRecovery: the server is a standby.
        SchemaError: the tables are missing, older, or without their UNIQUE constraint.
    """
    with contextlib.closing(connect(target)) as connection:
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
    for fault in (outdated, without_unique):
        if (error := fault(connection, schema)) is not None:
            raise error


def outdated(connection: psycopg.Connection[Any], schema: str) -> errors.SchemaError | None:
    """Return what is to be said of tables that are missing, or older than this release needs."""
    missing = pending(connection, schema)
    if not missing:
        return None
    if len(missing) == len(migrations()):
        fault = f"has no tables of celery-pglock in database {connection.info.dbname!r}"
    else:
        fault = f"is older than this release needs (missing: {missing[0].name})"
    return errors.SchemaError(schema, fault, MIGRATE_COMMAND)


def without_unique(connection: psycopg.Connection[Any], schema: str) -> errors.SchemaError | None:
    """Return what is to be said of a ``job_runs`` that may hold a period twice.

    Without this constraint two claims of one period both insert, and both run.
    """
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
    if found is not None:
        return None
    name = sql.Identifier(schema, "job_runs").as_string()
    return errors.SchemaError(
        schema,
        "has a table job_runs without its UNIQUE (job, period), so nothing would keep a "
        "period from running twice",
        f"run: ALTER TABLE {name} ADD CONSTRAINT job_runs_job_period_key UNIQUE (job, period)",
    )


def rights_missing(connection: psycopg.Connection[Any], schema: str) -> list[str]:
    """Return what ``grants`` would give and the role of this connection has not.

    Asked of the catalogue, so that no right is needed to ask; empty where there is no schema.
    """
    rows = connection.execute(
        "select 'USAGE on schema' as missing from pg_catalog.pg_namespace n"
        " where n.nspname = %(schema)s and not pg_catalog.has_schema_privilege(n.oid, 'USAGE')"
        " union all"
        " select p.name || ' on ' || c.relname from pg_catalog.pg_class c"
        " join pg_catalog.pg_namespace n on n.oid = c.relnamespace"
        " cross join pg_catalog.unnest(%(rights)s::text[]) as p(name)"
        " where n.nspname = %(schema)s and c.relkind in ('r', 'p')"
        " and c.relname = any(%(tables)s::text[])"
        " and not pg_catalog.has_table_privilege(c.oid, p.name)"
        " order by 1",
        {"schema": schema, "rights": list(_RIGHTS), "tables": list(_TABLES)},
    ).fetchall()
    return [missing for (missing,) in rows]


@contextlib.contextmanager
def translated(target: str, schema: str) -> Iterator[None]:
    """Turn what psycopg raises in a ledger statement into what the user can act upon.

    Raises:
        SchemaError, DatabaseUnavailable: see ``fault``.
    """
    try:
        yield
    except psycopg.Error as error:
        raise fault(error, target, schema) from error


def fault(
    error: psycopg.Error, target: str, schema: str
) -> errors.SchemaError | errors.DatabaseUnavailable:
    """Return what the user can act upon of an error of a ledger statement.

    ``SchemaError`` when tables, constraint or rights are missing, else ``DatabaseUnavailable``.
    """
    match error:
        case psycopg.errors.UndefinedTable() | psycopg.errors.InvalidSchemaName():
            return errors.SchemaError(schema, "has no tables of celery-pglock", MIGRATE_COMMAND)
        case psycopg.errors.UndefinedColumn():
            return errors.SchemaError(schema, "is older than this release needs", MIGRATE_COMMAND)
        case psycopg.errors.InvalidColumnReference():
            what = "has a table job_runs without its UNIQUE (job, period)"
            remedy = "run: celery -A <your app> pglock migrate --check"
            return errors.SchemaError(schema, what, remedy)
        case psycopg.errors.InsufficientPrivilege():
            what = f"may not be used by this role ({str(error).splitlines()[0]})"
            remedy = "run the GRANTs that celery -A <your app> pglock migrate prints"
            return errors.SchemaError(schema, what, remedy)
        case _:
            return errors.DatabaseUnavailable(target, " ".join(str(error).split()))


def connect(target: connections.Target) -> psycopg.Connection[Any]:
    """Connect to a database in which tables can be made.

    Raises:
        DatabaseUnavailable: the server cannot be reached.
        ServerInRecovery: the server is a standby.
    """
    connection = connections.connect(target, application="pglock migrate", prepare_threshold=None)
    try:
        row = connection.execute("select pg_catalog.pg_is_in_recovery()").fetchone()
    except psycopg.Error as error:
        # For instance a pooler that has no server connection left for a second client.
        raise errors.DatabaseUnavailable(
            connections.describe(connections.parameters(target)), " ".join(str(error).split())
        ) from None
    if row is not None and row[0]:
        parameters = connections.parameters(target)
        connection.close()
        raise errors.ServerInRecovery(connections.describe(parameters))
    return connection


def pending(connection: psycopg.Connection[Any], schema: str) -> list[Migration]:
    """Return the steps that were not applied yet, in their order."""
    table_name = sql.Identifier(schema, "schema_version").as_string()
    row = connection.execute("select pg_catalog.to_regclass(%s)", [table_name]).fetchone()
    if row is None or row[0] is None:
        return list(migrations())
    query = sql.SQL("select number from {}").format(sql.Identifier(schema, "schema_version"))
    done = {number for (number,) in connection.execute(query)}
    return [step for step in migrations() if step.number not in done]


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()

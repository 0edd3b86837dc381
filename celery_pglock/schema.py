"""The tables in PostgreSQL: numbered migrations, and the check that they are there.

``celery_pglock/migrations/NNNN_name.sql`` are applied in the order of their numbers, each in
one transaction together with its row in ``schema_version``. Release N runs on the schema of
release N+1, so the schema is migrated first and the code deployed afterwards, while workers
and beats go on. Hence two rules for a step:

- It waits for no lock for longer than 50 ms at a time. Whoever waits for a table stands in
  front of all who come later, so one long run at transaction level would hold up every claim.
- What reads the whole table, an index above all, is a step of its own whose text begins with
  ``-- concurrently``: its statements run outside of a transaction, one by one, each such that
  a second try begins anew (PostgreSQL manual, "Building Indexes Concurrently").
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg
from psycopg import sql

from celery_pglock import connections, errors, keys

MIGRATE_COMMAND: Final = "run: celery -A <your app> pglock migrate"

_FILE: Final = re.compile(r"(\d{4})_\w+\.sql")
_CONCURRENTLY: Final = "-- concurrently\n"
_RIGHTS: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")
_TABLES: Final = ("job_runs", "beat_entries", "beat_terms", "schema_version")
_PATIENCE: Final = 60.0
_LOCK_TIMEOUT: Final = "50ms"
_POLL: Final = 0.05


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
        text += f"\n-- {step.name}\n{_text(step, schema)}{_record(step, schema)};\n"
    return f"{text}COMMIT;\n" if inside else text


def grants(schema: str = "pglock", role: str = "<role>") -> str:
    """Return the GRANT statements for a role that runs workers and beats but may not migrate."""
    name = sql.Identifier(schema).as_string()
    return (
        f"GRANT USAGE ON SCHEMA {name} TO {role};\n"
        f"GRANT {', '.join(_RIGHTS)} ON ALL TABLES IN SCHEMA {name} TO {role};\n"
    )


def _untold(_: Migration) -> None:
    """Keep it to oneself."""


def migrate(
    target: connections.Target,
    schema: str = "pglock",
    *,
    begun: Callable[[Migration], object] = _untold,
) -> list[str]:
    """Bring the schema up to this release and return the names of the steps applied.

    May be started on many machines at once: one works, the others wait for it (at most 60 s)
    and find nothing left to do. When nothing is to be done, no right to create anything is
    needed.

    Args:
        target: the database.
        schema: where the tables are to be.
        begun: told of each step before it is applied.

    Raises:
        DatabaseUnavailable: the server cannot be reached.
        ServerInRecovery: the server is a standby.
        SchemaError: the role may not create what is missing, something of that name is there
            already, or another migration holds on.
    """
    with contextlib.closing(_connect(target)) as connection:
        applied: list[str] = []
        with _migration_lock(connection, schema), contextlib.closing(_connect(target)) as working:
            with translated(connections.describe_open(working), schema):
                pending = _pending(working, schema)
            for step in pending:
                begun(step)
                _apply(working, schema, step)
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
    for fault in (outdated, without_unique):
        if (error := fault(connection, schema)) is not None:
            raise error


def outdated(connection: psycopg.Connection[Any], schema: str) -> errors.SchemaError | None:
    """Return what is to be said of tables that are missing, or older than this release needs."""
    pending = _pending(connection, schema)
    if not pending:
        return None
    if len(pending) == len(migrations()):
        fault = f"has no tables of celery-pglock in database {connection.info.dbname!r}"
    else:
        fault = f"is older than this release needs (missing: {pending[0].name})"
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


def _connect(target: connections.Target) -> psycopg.Connection[Any]:
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
                _unhurried(connection, local=True)
                # In a transaction a query with parameters keeps its snapshot until the next
                # statement, and a step that builds an index would wait for it for ever.
                connection.execute("set local lock_timeout = 0")
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
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            if step.concurrent:
                _unhurried(connection, local=False)
                for statement in _statements(_text(step, schema)):
                    connection.execute(statement.encode())
                connection.execute(_record(step, schema).encode())
            else:
                with connection.transaction():
                    _unhurried(connection, local=True)
                    connection.execute(
                        "select pg_catalog.set_config('lock_timeout', %s, true)", [_LOCK_TIMEOUT]
                    )
                    _make_schema(connection, schema)
                    connection.execute(_text(step, schema).encode())
                    connection.execute(_record(step, schema).encode())
        # The deadlock is with the index building of a migrator that was killed: the server goes
        # on with it, and each waits for the other.
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            if time.monotonic() > deadline:
                raise errors.SchemaError(
                    schema,
                    f"could not be migrated by step {step.name}, because its tables are in use "
                    f"without a pause ({str(error).splitlines()[0]})",
                    "wait for long runs at transaction level to end, or stop them, and run "
                    "migrate again",
                ) from None
            time.sleep(_POLL)
        except psycopg.errors.InsufficientPrivilege as error:
            reason = str(error).splitlines()[0]
            raise errors.SchemaError(
                schema,
                f"cannot be migrated by role {connection.info.user!r} ({reason})",
                "run: celery -A <your app> pglock migrate --sql, and let the owner of the database "
                "apply what it prints",
            ) from None
        except (
            psycopg.errors.DuplicateTable,
            psycopg.errors.DuplicateColumn,
            psycopg.errors.DuplicateObject,
        ) as error:
            # Made by hand or by Alembic: what is there is not ours to judge.
            reason = str(error).splitlines()[0]
            raise errors.SchemaError(
                schema,
                f"holds already what step {step.name} makes ({reason})",
                f"drop it, or if it is right record that: {_record(step, schema)}; and run migrate "
                f"again",
            ) from None
        else:
            return


def _unhurried(connection: psycopg.Connection[Any], *, local: bool) -> None:
    """Let no limit of the role end a step, or the transaction that keeps others from migrating."""
    connection.execute(
        "select pg_catalog.set_config(name, '0', %s) from pg_catalog.pg_settings where name in"
        " ('statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout',"
        " 'transaction_timeout')",
        [local],
    )


def _make_schema(connection: psycopg.Connection[Any], schema: str) -> None:
    # Asked first, because CREATE SCHEMA IF NOT EXISTS wants the right to create one even
    # where there is one.
    if not _exists(connection, "select pg_catalog.to_regnamespace(%s)", [_quoted(schema)]):
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    version = sql.Identifier(schema, "schema_version")
    if not _exists(connection, "select pg_catalog.to_regclass(%s)", [version.as_string()]):
        connection.execute(
            sql.SQL(
                "CREATE TABLE {} (number integer PRIMARY KEY, name text NOT NULL,"
                " applied_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp())"
            ).format(version)
        )


def _statements(text: str) -> list[str]:
    # Steps are ours, and have no semicolon inside a literal.
    return [part for part in map(str.strip, text.split(";")) if part]


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

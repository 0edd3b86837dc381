"""Brings the tables up to this release, while workers and beats go on.

The steps are applied in the order of their numbers, each in one transaction together with its
row in ``schema_version``. Release N runs on the schema of release N+1, so the schema is migrated
first and the code deployed afterwards. Hence two rules for a step:

- It waits for no lock for longer than 50 ms at a time. Whoever waits for a table stands in
  front of all who come later, so one long run at transaction level would hold up every claim.
- What reads the whole table, an index above all, is a step of its own whose text begins with
  ``-- concurrently``: its statements run outside of a transaction, one by one, each such that
  a second try begins anew (PostgreSQL manual, "Building Indexes Concurrently").
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg
from psycopg import sql

from celery_pglock import connections, errors, keys

# By their names, because what is called ``schema`` here is PostgreSQL's.
from celery_pglock.schema import Migration, check, connect, pending, translated

_PATIENCE: Final = 60.0
_LOCK_TIMEOUT: Final = "50ms"
_POLL: Final = 0.05


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
    with contextlib.closing(connect(target)) as connection:
        applied: list[str] = []
        with _migration_lock(connection, schema), contextlib.closing(connect(target)) as working:
            with translated(connections.describe_open(working), schema):
                steps = pending(working, schema)
            for step in steps:
                begun(step)
                _apply(working, schema, step)
                applied.append(step.name)
        check(connection, schema)
        return applied


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


def _apply(connection: psycopg.Connection[Any], schema: str, step: Migration) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            if step.concurrent:
                _unhurried(connection, local=False)
                for statement in _statements(step.rendered(schema)):
                    connection.execute(statement.encode())
                connection.execute(step.record(schema).encode())
            else:
                with connection.transaction():
                    _unhurried(connection, local=True)
                    connection.execute(
                        "select pg_catalog.set_config('lock_timeout', %s, true)", [_LOCK_TIMEOUT]
                    )
                    _make_schema(connection, schema)
                    connection.execute(step.rendered(schema).encode())
                    connection.execute(step.record(schema).encode())
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
                f"drop it, or if it is right record that: {step.record(schema)}; and run migrate "
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
    if not _exists(
        connection, "select pg_catalog.to_regnamespace(%s)", [sql.Identifier(schema).as_string()]
    ):
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

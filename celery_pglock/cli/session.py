"""One connection for the length of a command, its faults turned into sentences."""

from __future__ import annotations

import contextlib
import functools
import getpass
import socket
from collections.abc import Iterator
from typing import Any

import psycopg

from celery_pglock import connections, errors, patience, schema, settings


def target(config: settings.Settings) -> connections.Target:
    """Return where the database is; what a function of the user's raises becomes a sentence.

    Raises:
        ConfigurationError: ``pglock_database_url`` is not set.
    """
    return functools.partial(connections.resolved, config.target())


@contextlib.contextmanager
def opened(config: settings.Settings, command: str) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection in autocommit to a database, whatever is in it.

    Raises:
        DatabaseUnavailable, ServerInRecovery, SchemaError: with the remedy.
    """
    connection = connections.connect(
        target(config),
        application=f"pglock {command}",
        factory=patience.Patient,
    )
    where = connections.describe_open(connection)
    with contextlib.closing(connection), schema.translated(where, config.schema):
        # A standby knows of no lock that is held, and would say that nobody leads.
        if connection.execute("select pg_catalog.pg_is_in_recovery()").fetchone() == (True,):
            raise errors.ServerInRecovery(where)
        yield connection


@contextlib.contextmanager
def connected(config: settings.Settings, command: str) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection in autocommit to a database that has our tables.

    Raises:
        DatabaseUnavailable, ServerInRecovery, SchemaError: with the remedy.
    """
    with opened(config, command) as connection:
        schema.check(connection, config.schema)
        yield connection


def who() -> str:
    """Return who gives the command, for the record."""
    return f"{getpass.getuser()}@{socket.gethostname()}"

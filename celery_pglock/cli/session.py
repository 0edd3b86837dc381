"""One connection for the length of a command, its faults turned into sentences."""

from __future__ import annotations

import contextlib
import functools
import getpass
import socket
from collections.abc import Iterator
from typing import Any

import psycopg

from celery_pglock import connections, patience, schema, settings


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
        DatabaseUnavailable, SchemaError: with the remedy.
    """
    connection = connections.connect(
        target(config),
        application=f"pglock {command}",
        factory=patience.Patient,
    )
    where = connections.describe_open(connection)
    with contextlib.closing(connection), schema.translated(where, config.schema):
        yield connection


@contextlib.contextmanager
def connected(config: settings.Settings, command: str) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection in autocommit to a database that has our tables.

    Raises:
        DatabaseUnavailable, SchemaError: with the remedy.
    """
    with opened(config, command) as connection:
        schema.check(connection, config.schema)
        yield connection


def who() -> str:
    """Return who gives the command, for the record."""
    return f"{getpass.getuser()}@{socket.gethostname()}"

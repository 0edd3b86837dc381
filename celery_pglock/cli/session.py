"""One connection for the length of a command, its faults turned into sentences."""

from __future__ import annotations

import contextlib
import getpass
import socket
from collections.abc import Iterator
from typing import Any

import psycopg

from celery_pglock import connections, schema, settings


@contextlib.contextmanager
def connected(config: settings.Settings, command: str) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection in autocommit to a database that has our tables.

    Raises:
        DatabaseUnavailable, SchemaError: with the remedy.
    """
    application = f"pglock {command}"
    with contextlib.closing(
        connections.connect(config.target(), application=application)
    ) as connection:
        schema.check(connection, config.schema)
        with schema.translated(connections.describe_open(connection), config.schema):
            yield connection


def who() -> str:
    """Return who gives the command, for the record."""
    return f"{getpass.getuser()}@{socket.gethostname()}"

"""A database per test: empty, or with the tables in place."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import TupleRow

from tests.support.kept import KeptConnection
from tests.support.servers import TestedPostgres

SCHEMA = "pglock"


class Database:
    """A database of one test.

    Attributes:
        name: Its name.
        url: Its libpq URL, as a superuser.
    """

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self._kept: KeptConnection | None = None
        self._connections: list[psycopg.Connection[TupleRow]] = []

    def connect(self, **parameters: Any) -> psycopg.Connection[TupleRow]:
        """Open an autocommit connection, closed at the end of the test if it is still open.

        Args:
            **parameters: As for `psycopg.connect`, e.g. `application_name`.
        """
        connection = psycopg.connect(self.url, **{"autocommit": True, **parameters})
        self._connections.append(connection)
        return connection

    def rows(self, query: str, *parameters: object) -> list[TupleRow]:
        """Run a statement on a connection of its own and return its rows (none: an empty list)."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(query.encode(), parameters or None)
            return cursor.fetchall() if cursor.rownumber is not None else []

    def ask(self, query: str, *parameters: object) -> list[TupleRow]:
        """Run a statement as `rows` does, within `kept` on one connection: for who asks often."""
        ask = self.rows if self._kept is None else self._kept.rows
        return ask(query, *parameters)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a connection for `ask` for the length of a block."""
        self._kept = KeptConnection(self.url)
        try:
            yield
        finally:
            self._kept.close()
            self._kept = None

    def close(self) -> None:
        """Close the connections that `connect` opened."""
        for connection in self._connections:
            connection.close()


@pytest.fixture
def blank_database(postgres_server: TestedPostgres) -> Iterator[Database]:
    """An empty database."""
    with _database(postgres_server, template="template1") as database:
        yield database


@pytest.fixture
def database(postgres_server: TestedPostgres, template_database: str) -> Iterator[Database]:
    """A database with the package's tables in the schema `pglock`."""
    with _database(postgres_server, template=template_database) as database:
        yield database


@pytest.fixture(scope="module")
def read_database(postgres_server: TestedPostgres, template_database: str) -> Iterator[Database]:
    """A database with the package's tables, in which the tests of a module only read."""
    with _database(postgres_server, template=template_database) as database:
        yield database


@pytest.fixture(scope="module")
def read_blank_database(postgres_server: TestedPostgres) -> Iterator[Database]:
    """An empty database, in which the tests of a module only read."""
    with _database(postgres_server, template="template1") as database:
        yield database


@pytest.fixture(scope="session")
def template_database(postgres_server: TestedPostgres) -> Iterator[str]:
    """The name of the database that `database` copies; nobody else may be connected to it."""
    from celery_pglock import migrating

    with _database(postgres_server, template="template1") as template:
        migrating.migrate(template.url, schema=SCHEMA)
        yield template.name


@contextmanager
def _database(server: TestedPostgres, *, template: str) -> Iterator[Database]:
    name = f"pglock_test_{uuid.uuid4().hex[:12]}"
    create = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
    database = Database(name, server.url(name))
    try:
        with database.kept():
            yield database
    finally:
        database.close()
        # A connection of its own: the one above would be idle for as long as the test runs.
        with psycopg.connect(server.url(), autocommit=True) as admin:
            admin.execute(drop.format(sql.Identifier(name)))

"""The fixtures: a server, an application, and a database for each test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import celery
import psycopg
import pytest
from celery.app import app_or_default

from celery_pglock import errors, settings
from celery_pglock.demo.servers import BinariesNotFoundError, PostgresServer
from celery_pglock.testing import databases

URL_VARIABLE: Final = "PGLOCK_TEST_URL"

# It has to outlive no crash of the machine.
_SETTINGS: Final[dict[str, str | int]] = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
}


@pytest.fixture(scope="session")
def pglock_server_url() -> Iterator[str]:
    """The URL of a PostgreSQL, as a role that may create databases.

    That of the environment variable ``PGLOCK_TEST_URL``; else of a server that is started for
    this run, from the wheel of ``celery-pglock[demo]`` or the system's programs. Override it
    with one of your own.
    """
    if url := os.environ.get(URL_VARIABLE):
        yield url
        return
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(PostgresServer(_SETTINGS))
        except BinariesNotFoundError:
            raise pytest.fail.Exception(
                f"celery_pglock.testing needs a PostgreSQL: set {URL_VARIABLE} to the URL of one "
                f"where tests may create databases, or run pip install 'celery-pglock[demo]'",
                pytrace=False,
            ) from None
        yield server.url()


@pytest.fixture(scope="session")
def pglock_templates(pglock_server_url: str) -> Iterator[databases.Templates]:
    """Databases with the tables in them, of which those of the tests are copies."""
    try:
        templates = databases.Templates(databases.Server(pglock_server_url))
    except errors.ConfigurationError:
        raise _refused("what it says is not a PostgreSQL connection string") from None
    yield templates
    templates.close()


@pytest.fixture
def pglock_app() -> celery.Celery:
    """The application under test: the current one, that is, the last that was made.

    Override it where there are several.
    """
    app = app_or_default()
    if app.main in (None, "default"):
        pytest.fail(
            "celery_pglock.testing does not know your Celery application: import it in the tests, "
            "or write a fixture pglock_app that returns it",
            pytrace=False,
        )
    return app


@pytest.fixture
def pglock_database(
    pglock_app: celery.Celery, pglock_templates: databases.Templates
) -> Iterator[databases.Database]:
    """A database of this test's own, with the tables in it, at which ``pglock_app`` is pointed.

    Whatever ``pglock_database_url`` and ``pglock_enabled`` say, and whether they were read before.
    Afterwards it is dropped, and they are as they were.
    """
    # Read for this once: what a test sets before the application reads it has to have effect.
    with settings.replaced(pglock_app) as config:
        schema = config.schema
    with contextlib.ExitStack() as stack:
        try:
            database = stack.enter_context(pglock_templates.copy(schema))
        except (errors.DatabaseUnavailable, psycopg.Error) as error:
            raise _refused(str(error)) from None
        stack.enter_context(databases.pointed(pglock_app, database))
        yield database


def _refused(why: str) -> BaseException:
    return pytest.fail.Exception(
        f"celery_pglock.testing cannot make a database with the URL that {URL_VARIABLE} or the "
        f"fixture pglock_server_url names: {why}",
        pytrace=False,
    )

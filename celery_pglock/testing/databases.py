"""A database of a test's own, and an application pointed at it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

from celery import Celery
from psycopg import sql
from psycopg.rows import class_row

from celery_pglock import connections, idle_sessions, migrating, settings

_APPLICATION: Final = "pglock:testing"
# Far longer than the server takes to end a session, also on a machine that is busy.
_PATIENCE: Final = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of ``job_runs``, as the reference of the schema describes it."""

    job: str
    period: str
    due_at: dt.datetime | None
    status: str
    reason: str | None
    error: str | None
    attempts: int
    lost_attempts: int
    postponements: int
    rescues: int
    task: str | None
    task_id: str | None
    entry: str | None
    node: str | None
    term: int | None
    sent_at: dt.datetime | None
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    retry_at: dt.datetime | None


@dataclasses.dataclass(frozen=True, slots=True)
class Database:
    """A database of a test's own, with the tables in it.

    Attributes:
        url: its libpq URL, which SQLAlchemy takes too: for tables of one's own, for instance.
        name: its name.
        schema: where the tables are: the ``pglock_schema`` of the application.
    """

    url: str = dataclasses.field(repr=False)  # may hold a password
    name: str
    schema: str
    _accept: Callable[..., None] = dataclasses.field(repr=False)

    def rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run a statement on a connection of its own; return its rows, none for an empty list."""
        with connections.connect(self.url, application=_APPLICATION) as connection:
            cursor = connection.execute(query.encode(), parameters or None)
            return cursor.fetchall() if cursor.rownumber is not None else []

    def runs(self, job: str | None = None) -> list[Row]:
        """Return the rows of all runs, or of one job's, in the order of job and period.

        Args:
            job: ``<namespace>:<name>``.
        """
        query = sql.SQL("select {} from {} where job = coalesce(%s, job) order by job, period")
        columns = map(sql.Identifier, (field.name for field in dataclasses.fields(Row)))
        with connections.connect(self.url, application=_APPLICATION) as connection:
            cursor = connection.cursor(row_factory=class_row(Row))
            table = sql.Identifier(self.schema, "job_runs")
            return cursor.execute(
                query.format(sql.SQL(", ").join(columns), table), [job]
            ).fetchall()

    @contextlib.contextmanager
    def unavailable(self) -> Iterator[None]:
        """Make the database refuse connections, and end those there are, for a block.

        Really: the server does that, for this database only. Locks that are held in it are
        lost, like those of a run in progress.
        """
        self._accept(connections_allowed=False)
        try:
            yield
        finally:
            self._accept(connections_allowed=True)


class Server:
    """The PostgreSQL in which tests have their databases.

    Args:
        url: how to reach it, as a role that may create databases.

    Raises:
        ConfigurationError: it is no connection string.
    """

    def __init__(self, url: str) -> None:
        self._parameters = connections.parameters(url)

    def url(self, name: str | None = None) -> str:
        """Return the URL of a database, by default of the one that ``url`` named."""
        return _url(self._parameters, name)

    @contextlib.contextmanager
    def database(self, schema_name: str, template: str = "template0") -> Iterator[Database]:
        """Make a database for the length of a block.

        Raises:
            DatabaseUnavailable: the server cannot be reached.
            psycopg.Error: the role may not create databases.
        """
        name = f"pglock_test_{uuid.uuid4().hex[:12]}"
        self._execute("create database {} template {}", name, template)
        try:
            yield Database(self.url(name), name, schema_name, functools.partial(self.accept, name))
        finally:
            self._execute("drop database if exists {} with (force)", name)

    def accept(self, name: str, *, connections_allowed: bool) -> None:
        """Let a database accept connections; or refuse them, and end those that there are."""
        word = "true" if connections_allowed else "false"
        self._execute(f"alter database {{}} with allow_connections {word}", name)
        if connections_allowed:
            return
        with connections.connect(self.url(), application=_APPLICATION) as connection:
            others = "from pg_catalog.pg_stat_activity where datname = %s"
            connection.execute(
                f"select pg_catalog.pg_terminate_backend(pid) {others}".encode(), [name]
            )
            wait_until(
                lambda: not connection.execute(f"select {others}".encode(), [name]).fetchall(),
                f"the server ends the sessions of {name}",
            )

    def _execute(self, statement: str, *names: str) -> None:
        # A connection of its own each time: nobody may be connected to what is copied.
        text = sql.SQL(statement).format(*map(sql.Identifier, names))
        with connections.connect(self.url(), application=_APPLICATION) as connection:
            connection.execute(text)


class Templates:
    """Databases with the tables in them, of which those of the tests are copies.

    Args:
        server: where.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._made: dict[str, Database] = {}
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def copy(self, schema_name: str) -> Iterator[Database]:
        """Make a database with the tables in this schema, for the length of a block."""
        template = self._made.get(schema_name)
        if template is None:
            template = self._stack.enter_context(self._server.database(schema_name))
            migrating.migrate(template.url, schema_name)
            self._made[schema_name] = template
        with self._server.database(schema_name, template.name) as database:
            yield database

    def close(self) -> None:
        """Drop them."""
        self._stack.close()


_pointed: weakref.WeakKeyDictionary[Celery, Database] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def pointed(app: Celery, database: Database) -> Iterator[None]:
    """Point an application at a database for the length of a block.

    It is enabled there, also where the tests' configuration says otherwise, and nothing is too
    old for its history: tests like dates that do not change.
    """
    before = _pointed.get(app)
    there = {"database_url": database.url, "django_alias": None}
    with settings.replaced(app, **there, enabled=True, retention=None):
        _pointed[app] = database
        try:
            yield
        finally:
            # Sessions that outlive their database would fail in the next test.
            idle_sessions.close_idle()
            if before is None:
                del _pointed[app]
            else:
                _pointed[app] = before


def of(app: Celery | None) -> tuple[Celery, Database]:
    """Return an application, by default the one that is pointed at a database, and that database.

    Raises:
        RuntimeError: it is not: what is done for a test must not be done to another database.
    """
    if app is None and _pointed:
        *_, app = _pointed
    if app is None or app not in _pointed:
        who = "no application is" if app is None else f"application {app.main!r} is not"
        raise RuntimeError(
            f"{who} pointed at a database of this test; have the test use the fixture "
            f"pglock_database, and the fixture pglock_app return the application of the task"
        )
    return app, _pointed[app]


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that the server is about to do.

    Raises:
        TimeoutError: it has not.
    """
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_PATIENCE:g} s: {what}")
        time.sleep(0.005)


def _url(parameters: Mapping[str, Any], name: str | None) -> str:
    rest = {key: str(value) for key, value in parameters.items()}
    user, password = rest.pop("user", ""), rest.pop("password", None)
    named = rest.pop("dbname", user)
    database = quote(named if name is None else name, safe="")
    secret = "" if password is None else f":{quote(password, safe='')}"
    login = f"{quote(user, safe='')}{secret}@" if user else ""
    place = ""
    if not {"/", ",", "@", ":"} & set(rest.get("host", "/")):
        place = rest.pop("host") + (f":{rest.pop('port')}" if "port" in rest else "")
    # A host that is a directory, or several: as parameters.
    query = urlencode(rest, quote_via=quote)
    return f"postgresql://{login}{place}/{database}{f'?{query}' if query else ''}"

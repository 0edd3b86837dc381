"""Where the database is, and reaching it: connection strings of any spelling, bounded waiting.

Nothing that is raised here repeats a connection string, because it may hold a password.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import psycopg
from psycopg import conninfo

from celery_pglock import errors

Target = str | Callable[[], str]

_DRIVER_SUFFIX: Final = re.compile(r"postgres(?:ql)?\+\w+://")


def parameters(target: Target) -> dict[str, Any]:
    """Return libpq's parameters for a connection string, an SQLAlchemy URL or a function.

    Raises:
        ConfigurationError: it is none of these. The text itself is not repeated, because it
            may hold a password.
    """
    text = target() if callable(target) else target
    try:
        found = _parsed(text)
        # Not all that a URL of SQLAlchemy's says is known to libpq.
        conninfo.make_conninfo(**found)
    except (psycopg.Error, ValueError, TypeError, AttributeError):
        # "from None": the original sentence quotes the text.
        msg = (
            "pglock_database_url is not a PostgreSQL connection string; write it like "
            "postgresql://user@host:5432/database"
        )
        raise errors.ConfigurationError(msg) from None
    if _misread(text, found):
        msg = (
            "pglock_database_url cannot be read: its host, port or database is none; in a URL the "
            "characters @ / : ? # % of a password must be percent-encoded (@ is %40, / is %2F)"
        )
        raise errors.ConfigurationError(msg)
    return found


def resolved(target: Target) -> str:
    """Return the connection string, of a function what it returns now.

    Raises:
        ConfigurationError: the function raised something.
    """
    if not callable(target):
        return target
    try:
        return target()
    except errors.PGLockError:
        # Of an alias of DATABASES: it names what is wrong.
        raise
    except Exception as error:  # noqa: BLE001 - it is the user's own function
        # Its own sentence may hold what it was about to return.
        msg = (
            f"the function that pglock_database_url is raised {type(error).__name__}; have it "
            f"return a connection string"
        )
        raise errors.ConfigurationError(msg) from None


def _parsed(text: str) -> dict[str, Any]:
    if not text.strip():
        # libpq would connect to whatever the environment or a default says.
        msg = "empty"
        raise ValueError(msg)
    if _DRIVER_SUFFIX.match(text):
        # It takes longer to import than all of celery-pglock; libpq's own URLs do without.
        from celery_pglock import sqlalchemy_urls

        return sqlalchemy_urls.parameters(text)
    return conninfo.conninfo_to_dict(text)


def _misread(text: str, found: Mapping[str, Any]) -> bool:
    """Whether the end of a password was taken for a host, a port or a database.

    Both parsers do that with a password that holds a bare ``@`` or ``/``, and ``describe``
    would then show it. (A host may begin with ``@``: a socket in the abstract namespace.)
    """
    hosts = str(found.get("host") or "").split(",")
    ports = str(found.get("port") or "").split(",")
    database = str(found.get("dbname") or "")
    return (
        any("@" in host[1:] for host in hosts)
        or any(port and not port.isdecimal() for port in ports)
        or ("@" in database and "://" in text and database in text)
    )


def describe(found: Mapping[str, Any]) -> str:
    """Return ``host:port/database`` for messages: nothing of user or password."""
    host = found.get("host") or found.get("hostaddr") or "localhost"
    port = found.get("port") or "5432"
    database = found.get("dbname") or found.get("user") or "postgres"
    return f"{host}:{port}/{database}"


def describe_open(connection: psycopg.Connection[Any]) -> str:
    """Return ``host:port/database`` of an open connection."""
    info = connection.info
    return describe({"host": info.host, "port": info.port, "dbname": info.dbname})


def connect(
    target: Target,
    *,
    application: str,
    factory: type[psycopg.Connection[Any]] = psycopg.Connection,
    **overrides: Any,
) -> psycopg.Connection[Any]:
    """Open an autocommit connection with bounded waiting; for commands and migrations.

    Args:
        target: where.
        application: its ``application_name``.
        factory: the class of the connection.
        **overrides: parameters that stand above those of the connection string.

    Raises:
        ConfigurationError: the target is no connection string.
        DatabaseUnavailable: the server cannot be reached or refuses the login.
    """
    given = parameters(target)
    several_hosts = "," in str(given.get("host") or "")
    wanted = {
        "connect_timeout": 5,
        "keepalives": 1,
        **({"target_session_attrs": "read-write"} if several_hosts else {}),
        "application_name": application,
        **given,
        # What a lock session needs stands above what the connection string says.
        **overrides,
    }
    try:
        return factory.connect(autocommit=True, **wanted)
    except psycopg.Error as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise errors.DatabaseUnavailable(describe(given), reason) from None

"""The databases of ``DATABASES``, by alias, for connections of our own.

They are opened with the very parameters that Django would use, and are no Django connections:
``close_old_connections()`` and ``CONN_MAX_AGE`` do not know of them.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

import django.db
from django.core.exceptions import ImproperlyConfigured
from psycopg import conninfo, pq

from celery_pglock import errors

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def wrapper(alias: str) -> BaseDatabaseWrapper:
    """Return Django's connection of this thread; it may not be open.

    Raises:
        ConfigurationError: there is no such alias, or its database is not PostgreSQL.
    """
    known = list(django.db.connections)
    if alias not in known:
        nearest = difflib.get_close_matches(alias, known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
        msg = f"pglock_django_alias names {alias!r}, which is not in DATABASES; {hint}"
        raise errors.ConfigurationError(msg)
    found = django.db.connections[alias]
    if found.vendor != "postgresql":
        msg = (
            f"pglock_django_alias names {alias!r}, whose ENGINE is {found.settings_dict['ENGINE']}"
            f", and only PostgreSQL has advisory locks; name an alias of a PostgreSQL database"
        )
        raise errors.ConfigurationError(msg)
    return found


def target(alias: str) -> str:
    """Return libpq's connection string of an alias, with all that Django would say at connect.

    Raises:
        ConfigurationError: there is no such alias, it is not PostgreSQL, or is not complete.
    """
    found: Any = wrapper(alias)  # the parameters are PostgreSQL's
    try:
        given = found.get_connection_params()
    except ImproperlyConfigured as error:
        msg = f"DATABASES[{alias!r}] cannot be used: {error}"
        raise errors.ConfigurationError(msg) from None
    # The rest, adapters and a class of cursors, is for Django's own connections.
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    parameters = {name: value for name, value in given.items() if name in known}
    if role := found.settings_dict["OPTIONS"].get("assume_role"):
        # Django's own way is a SET ROLE afterwards.
        escaped = re.sub(r"([\\\s])", r"\\\1", role)
        parameters["options"] = f"{parameters.get('options', '')} -c role={escaped}".strip()
    return conninfo.make_conninfo(**parameters)

"""What SQLAlchemy's URLs say, in libpq's words.

Imported only where such a URL is given, because it imports SQLAlchemy.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from psycopg import conninfo
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg


def parameters(text: str) -> dict[str, Any]:
    """Return libpq's parameters for a URL with any driver's name in it.

    Raises:
        ValueError: it is no such URL. The text itself is not repeated, because it may hold a
            password.
    """
    try:
        url = sa.make_url(text).set(drivername="postgresql+psycopg")
        translate: Any = PGDialect_psycopg  # SQLAlchemy leaves it untyped
        args, found = translate().create_connect_args(url)
    except sa.exc.SQLAlchemyError:
        msg = "SQLAlchemy cannot read the URL"
        raise ValueError(msg) from None
    return {**conninfo.conninfo_to_dict(*args), **found}

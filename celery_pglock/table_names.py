"""The tables by name, for statements."""

from __future__ import annotations

import functools

from psycopg import sql


def names(schema: str) -> dict[str, sql.Identifier]:
    """Return the quoted names of the tables: ``runs``, ``entries``, ``terms``.

    For texts that are executed with parameters, in which psycopg reads every ``%``.
    """
    doubled = schema.replace("%", "%%")
    return {
        "runs": sql.Identifier(doubled, "job_runs"),
        "entries": sql.Identifier(doubled, "beat_entries"),
        "terms": sql.Identifier(doubled, "beat_terms"),
    }


@functools.cache
def statement(template: str, schema: str) -> bytes:
    """Return a text as it is sent: with the quoted names of the tables in this schema."""
    return sql.SQL(template).format(**names(schema)).as_bytes()

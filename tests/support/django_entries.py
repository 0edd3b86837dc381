"""django-celery-beat's entries, edited as an admin would, by statements of our own."""

from __future__ import annotations

import dataclasses
from typing import Any

import psycopg

from tests.support.stage import Stage

APP = "tests.apps.django_beat"

# What its signals do on each change that is to be seen.
_CHANGED = """
INSERT INTO django_celery_beat_periodictasks (ident, last_update)
VALUES (1, clock_timestamp()) ON CONFLICT (ident) DO UPDATE SET last_update = excluded.last_update
"""
_INTERVAL = """
INSERT INTO django_celery_beat_intervalschedule (every, period)
VALUES (%s, 'seconds') RETURNING id
"""
_CLOCKED = """
INSERT INTO django_celery_beat_clockedschedule (clocked_time) VALUES (%s) RETURNING id
"""


@dataclasses.dataclass(frozen=True)
class Entries:
    """The tables of one stage."""

    stage: Stage

    def add(self, name: str, seconds: int | None = None, **columns: Any) -> None:
        """Add an entry that is due every so many seconds, or at `at`."""
        with self._changing() as connection:
            if seconds is not None:
                query, value, column = _INTERVAL, seconds, "interval_id"
            else:
                query, value, column = _CLOCKED, columns.pop("at"), "clocked_id"
            row = connection.execute(query.encode(), (value,)).fetchone()
            assert row is not None
            given = {
                "name": name,
                "task": f"{APP}.job",
                "args": "[]",
                "kwargs": "{}",
                "headers": "{}",
                "description": "",
                "enabled": True,
                "one_off": False,
                "total_run_count": 0,
                column: row[0],
                **columns,
            }
            names, places = ", ".join(given), ", ".join(["%s"] * len(given))
            connection.execute(
                f"INSERT INTO django_celery_beat_periodictask ({names}, date_changed)"  # noqa: S608
                f" VALUES ({places}, clock_timestamp())".encode(),
                list(given.values()),
            )

    def edit(self, name: str, **columns: Any) -> None:
        with self._changing() as connection:
            places = ", ".join(f"{column} = %s" for column in columns)
            connection.execute(
                f"UPDATE django_celery_beat_periodictask SET {places},"  # noqa: S608
                " date_changed = clock_timestamp() WHERE name = %s".encode(),
                [*columns.values(), name],
            )

    def set_interval(self, name: str, seconds: int) -> None:
        with self._changing() as connection:
            connection.execute(
                "UPDATE django_celery_beat_intervalschedule SET every = %s WHERE id ="
                " (SELECT interval_id FROM django_celery_beat_periodictask WHERE name = %s)",
                (seconds, name),
            )

    def row(self, name: str) -> Any:
        """Return enabled, last_run_at and total_run_count of an entry, or None."""
        rows = self.stage.rows(
            "SELECT enabled, last_run_at, total_run_count FROM django_celery_beat_periodictask"
            " WHERE name = %s",
            name,
        )
        return rows[0] if rows else None

    def names(self) -> set[str]:
        rows = self.stage.rows("SELECT name FROM django_celery_beat_periodictask")
        return {name for (name,) in rows}

    def _changing(self) -> _Changing:
        return _Changing(self.stage.url)


class _Changing:
    """One transaction, at whose end it is told that something has changed."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url)

    def __enter__(self) -> psycopg.Connection[Any]:
        return self._connection

    def __exit__(self, *_: object) -> None:
        with self._connection as connection:
            connection.execute(_CHANGED.encode())

"""Schedule entries that are kept in the database, as an application makes them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from celery import Celery
from celery import schedules as celery_schedules
from celery.app import app_or_default

from celery_pglock import (
    connections,
    definitions,
    entry_rows,
    errors,
    schedule_json,
    schema,
    settings,
)

_log: Final = logging.getLogger("celery_pglock.entries")


@dataclasses.dataclass(slots=True)
class Entry:
    """A schedule entry that is kept in the database, and not in ``beat_schedule``.

    ::

        Entry("invoices of acme", crontab(minute=0, hour=7), "proj.invoices", ["acme"]).save()

    The beat that leads knows of it within a second, and of each change. Where an entry of
    ``beat_schedule`` has the same name that one counts.

    Args:
        name: at most 500 characters.
        schedule: seconds, a ``timedelta``, or Celery's ``schedule``, ``crontab`` or ``solar``.
        task: the task's registered name.
        args: positional arguments, as JSON can hold them.
        kwargs: keyword arguments.
        options: further options of ``apply_async``: ``queue``, ``expires``, ``priority``, …
        zone: the name of the time zone of a crontab; by default that of the application, or of
            the crontab itself if it was given one.
        revision: of an entry that was read: the edit that it is; else None.

    Raises:
        ConfigurationError: something of it is wrong or cannot be kept as JSON.
    """

    name: str
    schedule: float | dt.timedelta | celery_schedules.BaseSchedule
    task: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None
    zone: str | None = None
    revision: int | None = None

    def __post_init__(self) -> None:
        self._definition()

    def save(self, *, app: Celery | None = None) -> None:
        """Keep it: a new entry over any other of its name, a read one over what was read.

        It counts from now on: a new entry, or one whose schedule was edited, is due at the next
        instant of its schedule. An edit of anything else leaves it where it is.

        Args:
            app: the application; by default the current one.

        Raises:
            EntryChanged: it was read, and somebody has changed or deleted it since. Nothing was
                written.
            ConfigurationError: something of it is wrong.
            DatabaseUnavailable, SchemaError: it could not be written.
        """
        text = self._definition().text()
        with _rows(app) as rows:
            revision = rows.save(self.name, self.task, text, revision=self.revision)
        if revision is None:
            raise errors.EntryChanged(self.name)
        self.revision = revision

    def delete(self, *, app: Celery | None = None) -> bool:
        """Remove it, whoever has changed it; return whether it was there.

        Raises:
            DatabaseUnavailable, SchemaError: it could not be removed.
        """
        with _rows(app) as rows:
            self.revision = None
            return rows.delete(self.name)

    @classmethod
    def get(cls, name: str, *, app: Celery | None = None) -> Entry | None:
        """Return the entry of this name from the database, or None.

        Raises:
            ConfigurationError: somebody has written something wrong into it by hand.
            DatabaseUnavailable, SchemaError: it could not be read.
        """
        app = app_or_default(app)
        with _rows(app) as rows:
            found = rows.read([definitions.name(name)])
        return _entry(found[0], app) if found else None

    @classmethod
    def all(cls, *, app: Celery | None = None) -> list[Entry]:
        """Return all entries in the database by their names.

        One into which somebody has written something wrong by hand is left out, with a WARNING.

        Raises:
            DatabaseUnavailable, SchemaError: they could not be read.
        """
        app = app_or_default(app)
        with _rows(app) as rows:
            found = rows.read()
        entries = []
        for row in found:
            try:
                entries.append(_entry(row, app))
            except errors.ConfigurationError as error:
                _log.warning("%s", error, extra={"event": "entry_broken", "entry": row.entry})
        return entries

    def _definition(self) -> definitions.Definition:
        schedule = schedule_json.written(self.name, self.schedule, self.zone)
        return definitions.checked(
            self.name,
            {
                "version": definitions.VERSION,
                "task": self.task,
                "schedule": schedule,
                "args": self.args,
                "kwargs": {} if self.kwargs is None else self.kwargs,
                "options": {} if self.options is None else self.options,
            },
        )


@contextlib.contextmanager
def _rows(app: Celery | None) -> Iterator[entry_rows.EntryRows]:
    config = settings.of(app_or_default(app))
    target = config.target()
    with (
        contextlib.closing(connections.connect(target, application="pglock entries")) as connection,
        schema.translated(connections.describe_open(connection), config.schema),
    ):
        yield entry_rows.EntryRows(connection, config.schema, config.namespace)


def _entry(row: entry_rows.Row, app: Celery) -> Entry:
    found = definitions.read(row.entry, row.definition)
    return Entry(
        row.entry,
        schedule_json.made(row.entry, found.schedule, app),
        found.task,
        found.args,
        found.kwargs,
        found.options,
        found.schedule.get("zone"),
        row.revision,
    )

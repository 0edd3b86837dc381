"""Where a leader's entries come from: the configuration, and the database beside it.

Of two entries of one name the configuration's counts. What cannot be read in the database is
left out, and said once; it stops nobody else's.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import celery.beat
from celery import schedules as celery_schedules

from celery_pglock import (
    beat_events,
    beat_rows,
    definitions,
    errors,
    schedule_json,
)

_MOST_SCHEDULES: Final = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """An entry from the database.

    Attributes:
        entry: as a scheduler has it; None: its definition cannot be read.
        revision: the edit that it is.
        edited_at: when that was made.
        added: the edit since which it has been there.
        text: the hash of its definition, which somebody may have changed by hand.
    """

    entry: celery.beat.ScheduleEntry | None
    revision: int
    edited_at: dt.datetime | None
    added: int | None
    text: int

    def is_of(self, row: beat_rows.Stored) -> bool:
        """Whether it was read from what the row still says."""
        return (self.revision, self.text) == (row.revision, hash(row.definition))


class Sources:
    """The entries of one application by their names, from both places.

    Args:
        app: whose entries.
        configured: those of the configuration.
    """

    def __init__(self, app: Any, configured: Mapping[str, celery.beat.ScheduleEntry]) -> None:
        self.configured = dict(configured)
        self._app = app
        self._kept: dict[str, Kept] = {}
        # Many entries share few schedules, and of a crontab the reading takes its time.
        self._schedules: dict[str, celery_schedules.BaseSchedule] = {}
        self._told_of_both: set[str] = set()

    def get(self, name: str) -> celery.beat.ScheduleEntry | None:
        """Return the entry that counts, or None."""
        configured = self.configured.get(name)
        if configured is not None:
            return configured
        kept = self._kept.get(name)
        return None if kept is None else kept.entry

    def items(self) -> Iterator[tuple[str, celery.beat.ScheduleEntry]]:
        """Return all entries that count, by their names."""
        yield from self.configured.items()
        for name, kept in self._kept.items():
            if kept.entry is not None and name not in self.configured:
                yield name, kept.entry

    def kept(self, name: str) -> Kept | None:
        """Return what the database has under this name if it counts, also if it is broken."""
        return None if name in self.configured else self._kept.get(name)

    def read(self, stored: Mapping[str, beat_rows.Stored], between: Callable[[], None]) -> None:
        """Take the definitions of all rows for those that there are.

        Args:
            stored: all rows of the namespace.
            between: called before each, to feed the lease.
        """
        for name in self._kept.keys() - stored.keys():
            del self._kept[name]
        self.learn(stored.keys(), stored, between)

    def learn(
        self,
        names: Collection[str],
        stored: Mapping[str, beat_rows.Stored],
        between: Callable[[], None],
    ) -> None:
        """Take the definitions of these rows for what there is under these names."""
        for name in names:
            between()
            row = stored.get(name)
            if row is None or row.definition is None:
                self._kept.pop(name, None)
                self._told_of_both.discard(name)
                continue
            if name in self.configured and name not in self._told_of_both:
                self._told_of_both.add(name)
                beat_events.configured_too(name)
            before = self._kept.get(name)
            if before is None or not before.is_of(row):
                self._kept[name] = self._look_at(name, row)

    def _look_at(self, name: str, row: beat_rows.Stored) -> Kept:
        try:
            entry = self._entry(name, row)
        except errors.ConfigurationError as error:
            beat_events.entry_broken(name, str(error))
            entry = None
        return Kept(entry, row.revision, row.edited_at, row.added, hash(row.definition))

    def _entry(self, name: str, row: beat_rows.Stored) -> celery.beat.ScheduleEntry:
        found = definitions.read(name, row.definition or "")
        key = json.dumps(found.schedule, sort_keys=True)
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = schedule_json.made(name, found.schedule, self._app)
            if len(self._schedules) >= _MOST_SCHEDULES:
                self._schedules.clear()
            self._schedules[key] = schedule
        return celery.beat.ScheduleEntry(
            name=name,
            task=found.task,
            schedule=schedule,
            args=tuple(found.args),
            kwargs=found.kwargs,
            options=found.options,
            last_run_at=row.edited_at,
            app=self._app,
        )

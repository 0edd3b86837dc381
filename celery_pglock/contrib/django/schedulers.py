"""``celery beat -S pglock-django``: django-celery-beat's entries, sent by one beat of many.

The entries are edited in the admin as before, and what it shows of them (last run, number of
runs) is kept up. When they are due, and what was sent, is in the tables of this package.
"""

from __future__ import annotations

import datetime as dt
import logging
from typing import Any, Final

from django.db import close_old_connections
from django_celery_beat.schedulers import (  # type: ignore[import-untyped]
    DatabaseScheduler,
    ModelEntry,
)
from django_celery_beat.utils import now  # type: ignore[import-untyped]
from typing_extensions import override

from celery_pglock import mixin

_log: Final = logging.getLogger("celery_pglock.beat")

# So many entries are written back in one statement.
_CHUNK: Final = 500


class LeaderDatabaseScheduler(mixin.LeaderMixin, DatabaseScheduler):  # type: ignore[misc]
    """django-celery-beat's scheduler, of which as many may run as you like: one of them sends.

    A standby reads and writes none of its tables. What the configuration's ``beat_schedule``
    has is written there by a leader, at its first take-over.
    """

    _dirty: set[str]

    @override
    def on_takeover(self) -> None:
        """Read everything anew; what another beat has written since is not overwritten."""
        super().on_takeover()
        close_old_connections()
        self._dirty.clear()
        self._schedule = None
        # Before the entries are read: what is changed in between is seen by the next look.
        self._last_timestamp = self.Changes.last_change() or _long_ago()
        self._initial_read = True

    def schedule_changed(self) -> bool:
        """Return whether an entry has changed since this was asked last."""
        changed = bool(super().schedule_changed())
        # Without a time it would take the first change ever for what it has read already.
        self._last_timestamp = self._last_timestamp or _long_ago()
        return changed

    def enabled_models_qs(self) -> Any:
        """Return all entries that are enabled.

        Its own leaves out crontabs whose hour is far off, to keep its heap small. An entry that
        comes and goes would count anew each time, and what it missed would not be made up for.
        """
        return self.Model.objects.enabled()

    def all_as_schedule(self) -> dict[str, ModelEntry]:
        """Return the entries by their names, without those that cannot be read."""
        entries = {}
        for model in self.enabled_models():
            self._feed()
            try:
                entries[model.name] = self.Entry(model, app=self.app)
            except Exception:  # noqa: BLE001 - the others have to go on
                _log.exception(
                    "entry %r of django-celery-beat cannot be read, and is left out",
                    model.name,
                    extra={"event": "schedule_failed", "entry": model.name},
                )
        return entries

    @override
    def _ended_entry(self, name: str) -> ModelEntry | None:
        close_old_connections()
        model = self.Model.objects.filter(name=name, one_off=True).first()
        return None if model is None else self.Entry(model, app=self.app)

    @override
    def _write_back(self) -> None:
        # Its own way takes two statements for each entry, and overwrites what is edited between
        # the two; meanwhile nothing would be sent.
        close_old_connections()
        known: dict[str, ModelEntry] = self._schedule or {}
        waiting = [name for name in self._dirty if name in known]
        self._dirty.clear()
        # When an entry is switched off its last run is forgotten, and stays so.
        enabled = self.Model.objects.filter(enabled=True)
        for first in range(0, len(waiting), _CHUNK):
            try:
                enabled.bulk_update(
                    [known[name].model for name in waiting[first : first + _CHUNK]],
                    ["last_run_at", "total_run_count"],
                )
            except BaseException:
                self._dirty.update(waiting[first:])
                raise
            self._feed()


def _long_ago() -> dt.datetime:
    # With a zone or without, as this project's are.
    moment: dt.datetime = now() - dt.timedelta(days=1)
    return moment

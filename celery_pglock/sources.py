"""Where the entries come from: the scheduler behind the mixin, asked by a leader only.

It is read again and again, since its entries may be kept in a database that people edit. And it
is told what became of them, because that is where people look: when did it run last, how often?
Some entries end by it: after their only run, or when they have expired, they switch themselves
off when they are asked whether they are due (``is_due``). Nobody asks them here, so that is done
when it is time for it.

Whatever it raises is told, and what is known of the schedule goes on.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from celery_pglock import beat_events, bounds, complaints, errors

# As often as django-celery-beat looks for changes, at least.
_LOOK_EVERY: Final = 5.0


class Source:
    """The scheduler behind the mixin.

    Args:
        read: returns its schedule, by the names of the entries.
        forget: has it forget what it keeps in memory.
        set_up: has it set itself up, once.
        reserve: notes that an entry is sent, and returns it anew; None: nothing is noted, and no
            entry ends by itself.
        zone: of times without one.

    Attributes:
        entries: its entries as they are known.
        unread: how many times in a row they could not be read at a take-over.
    """

    def __init__(
        self,
        *,
        read: Callable[[], Mapping[str, Any]],
        forget: Callable[[], None],
        set_up: Callable[[], None],
        reserve: Callable[[Any], Any] | None,
        zone: dt.tzinfo,
    ) -> None:
        self.entries: dict[str, Any] = {}
        self.unread = 0
        self.trouble = complaints.Complaint(beat_events.scheduler_failed)
        self._read_schedule = read
        self._forget = forget
        self._set_up = set_up
        self._reserve = reserve
        self._zone = zone
        self._was_set_up = False
        self._look_at = 0.0
        # The schedule as it was read last: the scheduler's own object, and what was in it.
        self._schedule: object = None
        self._snapshot: Mapping[str, Any] = {}
        self._untold: dict[str, None] = {}

    def take_over(self, *, reads: bool) -> bool:
        """Begin anew after another beat has led; return whether that worked.

        Args:
            reads: whether its schedule is read at all.

        Raises:
            LeadershipLost: it feeds the lease itself, and was too slow.
        """
        try:
            self._forget()
            if not self._was_set_up:
                self._set_up()
                self._was_set_up = True
            if reads:
                self._read()
        except errors.LeadershipLost:
            raise
        except Exception as error:  # noqa: BLE001 - whatever its store raises
            self.unread += 1
            self.trouble.of(error)
            return False
        self.unread, self._look_at = 0, 0.0
        return True

    def look(self, at_most: float) -> bool:
        """Look for changes if it is time for it; return whether there are any.

        Args:
            at_most: after how many seconds again.

        Raises:
            LeadershipLost: as ``take_over``.
        """
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + min(_LOOK_EVERY, at_most)
        try:
            self._expire()
            changed = self._read()
        except errors.LeadershipLost:
            raise
        except Exception as error:  # noqa: BLE001 - whatever its store raises
            self.trouble.of(error)
            # It may take for read what it has not.
            with contextlib.suppress(Exception):
                self._forget()
            return False
        self.trouble.settled()
        return changed

    def sent(self, name: str) -> None:
        """Remember an entry whose message has been handed over, for ``tell``."""
        if self._reserve is not None:
            self._untold[name] = None

    def settle(self, exhausted: Iterable[str]) -> None:
        """Remember those whose only run was sent by a leader that could not tell them."""
        for name in exhausted:
            found = bounds.of(self.entries[name], self._zone)
            if found is not None and found.once is not None:
                self.sent(name)

    def tell(self) -> None:
        """Tell entries that they were sent; one for which that fails is told later."""
        for name in list(self._untold):
            entry = self.entries.get(name)
            try:
                if entry is not None:
                    self._tell(name, entry)
            except Exception as error:  # noqa: BLE001 - whatever its store raises
                self.trouble.of(error)
            else:
                del self._untold[name]

    def end(self) -> None:
        """Tell nothing any more: this beat does not lead."""
        self.unread = 0
        self._untold.clear()

    def _read(self) -> bool:
        schedule = self._read_schedule()
        if schedule is self._schedule and schedule == self._snapshot:
            return False
        self._schedule, self._snapshot = schedule, dict(schedule)
        # An entry whose schedule was deleted has none.
        self.entries = {
            name: entry
            for name, entry in schedule.items()
            if getattr(entry, "schedule", None) is not None
        }
        return True

    def _tell(self, name: str, entry: Any) -> None:
        found = bounds.of(entry, self._zone)
        if self._reserve is not None and (found is None or not found.spent):
            self.entries[name] = self._reserve(entry)
        if found is not None and found.once is not None:
            entry.is_due()
            # It is to be gone before anything else is done.
            self._look_at = 0.0

    def _expire(self) -> None:
        if self._reserve is None:
            return
        now = dt.datetime.now(dt.UTC)
        for entry in self.entries.values():
            found = bounds.of(entry, self._zone)
            expired = found is not None and found.until is not None and found.until <= now
            if expired and getattr(entry.model, "enabled", False):
                entry.is_due()

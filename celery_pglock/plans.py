"""One schedule entry as the leader plans it; pure."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable
from typing import Final

from celery_pglock import beat_rows, occurrences

# How many passed-over occurrences of one entry are recorded one by one.
_MOST_MISSED: Final = 1000

# Until when an entry is paused that somebody has to resume.
FOREVER: Final = dt.datetime(9999, 1, 1, tzinfo=dt.UTC)


@dataclasses.dataclass(slots=True, kw_only=True)
class Planned:
    """An entry while this beat leads.

    Attributes:
        name: the entry's name.
        task: the task's name.
        text: its schedule in canonical text.
        schedule: makes the schedule, given from where intervals are counted.
        recorded: its task keeps a row in the ledger.
        catchup: how many of the newest occurrences missed in a downtime are made up.
        due: its due instants.
        late: the occurrence before was sent when the one after it was due already.
        next_due_at: the next of them that is to be sent.
        paused_until: none that is due before it is sent.
        missed_until: what is due up to then is made up as ``catchup`` says.
        ahead: its unconfirmed claim is of a time that has not come yet.
        revision: which edit of its definition in the database this is; None: it is configured.
        edited_at: when that was made.
        added: the edit since which it has been in the database.
    """

    name: str
    task: str
    text: str
    schedule: Callable[[dt.datetime], occurrences.Schedule]
    recorded: bool
    catchup: int
    due: occurrences.Schedule = dataclasses.field(init=False)
    late: bool = False
    next_due_at: dt.datetime | None = None
    paused_until: dt.datetime | None = None
    missed_until: dt.datetime | None = None
    ahead: bool = False
    revision: int | None = None
    edited_at: dt.datetime | None = None
    added: int | None = None

    def same_as(self, other: Planned) -> bool:
        """Whether the other one is to be planned just like this one."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("task", "text", "recorded", "catchup", "revision")
        )

    def goes_on(self, before: beat_rows.Stored) -> bool:
        """Whether this is what was stored, and not another schedule or an entry that came back."""
        came_back = (
            self.added is not None
            and before.registered is not None
            and before.registered < self.added
        )
        return before.schedule == self.text and not came_back

    def begins_at(self, before: beat_rows.Stored | None, now: dt.datetime) -> dt.datetime:
        """Return from when on an entry counts that is new or was edited.

        From now; but what is in the database was written at a moment that is known, and nobody
        may have led then. (Not where the configuration had an entry of that name until now.)
        """
        if self.revision is None or self.edited_at is None or before is None:
            return now
        if before.registered is None or before.registered >= self.revision:
            return now
        return min(self.edited_at, now)

    def after_pause(self) -> dt.datetime | None:
        """Return the first occurrence that is not due during the pause, or None."""
        until = self.paused_until
        if until is None or until.year >= FOREVER.year:
            return None
        return self.due.after(until - dt.timedelta(microseconds=1))

    def after_shorter_pause(self, before: beat_rows.Stored) -> dt.datetime | None:
        """Return when an entry is due that was perhaps passed over under a longer pause.

        Somebody may have made it shorter, or ended it, while nobody led.
        """
        after = self.after_pause()
        stored = before.next_due_at
        if after is None or (before.due_at is not None and before.due_at >= after):
            return stored
        return after if stored is None or after < stored else stored

    def make_up(
        self, due_at: dt.datetime, window: dt.timedelta | None
    ) -> tuple[dt.datetime, list[dt.datetime]]:
        """Return the occurrence to send for one that is due, and those it passes over.

        Args:
            due_at: the occurrence that is due.
            window: how old an occurrence may be that is made up for; None: as old as it is.
        """
        until = self.missed_until
        if until is None or due_at > until:
            return due_at, []
        keep = self.catchup
        most = _MOST_MISSED + keep
        # The stored instant counts as it stands, whatever the schedule says today.
        late = [due_at, *occurrences.newest(self.due, due_at, until, most)][-most:]
        if window is not None:
            keep = min(keep, sum(due >= until - window for due in late))
        passed = late[: max(0, len(late) - keep)]
        kept = late[len(passed) :]
        following = kept[0] if kept else self.due.after(until)
        # A schedule that never comes again is sent once more, rather than never.
        return (due_at, []) if following is None else (following, passed)

    def bring_back(
        self, before: beat_rows.Stored, back: dt.timedelta, now: dt.datetime
    ) -> beat_rows.Reset:
        """Plan an entry anew whose claims lie beyond now, since the clock was set back by so much."""
        stored = self.next_due_at
        if isinstance(self.due, occurrences.Interval):
            if not back % self.due.every:
                # It would come to the same instants again, and they are done.
                back -= dt.timedelta.resolution
            anchor = before.anchor - back
            self.due = self.schedule(anchor)
            self.next_due_at = None if stored is None else stored - back
        else:
            anchor = min(before.anchor, now)
            again = self.due.after(now)
            if stored is None or (again is not None and again < stored):
                self.next_due_at = again
        until = now
        if self.next_due_at is not None:
            until = min(now, self.next_due_at - dt.timedelta.resolution)
        newest = occurrences.newest(self.due, min(anchor, until), until, 1)
        return self.reset(anchor, newest[0] if newest else None)

    def registration(self, anchor: dt.datetime) -> beat_rows.Registration:
        """Return what is to be stored of an entry that is new, or not what it was."""
        return beat_rows.Registration(
            entry=self.name,
            task=self.task,
            schedule=self.text,
            anchor=anchor,
            next_due_at=self.next_due_at,
            registered=self.revision,
        )

    def reset(self, anchor: dt.datetime, due_at: dt.datetime | None) -> beat_rows.Reset:
        """Return what is to be stored of the entry instead of its claims."""
        return beat_rows.Reset(
            entry=self.name, anchor=anchor, due_at=due_at, next_due_at=self.next_due_at
        )

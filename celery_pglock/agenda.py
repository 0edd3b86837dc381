"""What the leader has to send and when; pure: it is told the time and what is stored.

Only the next occurrence of each entry is kept, in a heap. So an idle tick looks at one of
them, however many entries there are.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

from celery_pglock import beat_rows, clocks, plans

# An entry that is due for longer than this although somebody led all the time was not known to
# who led: it was taken out and is there again, or belongs to another release.
_UNSEEN: Final = dt.timedelta(days=1)

# When an entry is asked again whose schedule has raised an exception.
_LOOK_AGAIN: Final = dt.timedelta(minutes=1)


def _nothing() -> None:
    """There is no lease to feed."""


class Agenda:
    """The entries of one namespace, planned by its leader.

    Args:
        namespace: of the application.
        catchup_window: how many seconds old an occurrence may be that is made up for; None: as
            old as it is.

    Attributes:
        unsent: occurrences that are claimed and perhaps not sent, by their entries; they go
            first.
        passed_over: entries of which nothing is made up, to be recorded and taken out.
        resets: entries to be stored anew, because the server's clock was set back.
        set_back: by how much at least it was, or zero.
        outdated: an entry has to be taken over once more, now that its claim is sent.
        failed: entries that are left out, because their schedule has raised this; to be told and
            taken out.
        look_again_at: when all are to be taken over once more for their sake, or None.
    """

    def __init__(self, namespace: str, catchup_window: float | None = None) -> None:
        self.unsent: dict[str, beat_rows.Occurrence] = {}
        self.passed_over: list[beat_rows.Passed] = []
        self.resets: list[beat_rows.Reset] = []
        self.set_back = dt.timedelta(0)
        self.outdated = False
        self.failed: list[tuple[str, Exception]] = []
        self.look_again_at: dt.datetime | None = None
        self._namespace = namespace
        self._window = None if catchup_window is None else dt.timedelta(seconds=catchup_window)
        self._between: Callable[[], None] = _nothing
        self._planned: dict[str, plans.Planned] = {}
        self._heap: list[tuple[dt.datetime, str]] = []

    @property
    def next_due_at(self) -> dt.datetime | None:
        """When the next occurrence is due, or None."""
        return self._heap[0][0] if self._heap else None

    def take_over(
        self,
        entries: Iterable[plans.Planned],
        stored: Mapping[str, beat_rows.Stored],
        *,
        now: dt.datetime,
        missed_until: dt.datetime | None,
        between: Callable[[], None],
        clock_was: dt.datetime | None = None,
    ) -> list[beat_rows.Registration]:
        """Plan all entries from what the leader before has stored.

        A new entry counts from now on, and so does one whose schedule was edited; but what
        was claimed for it is sent first.

        If the server's clock was set back, what is stored is of a time that has not come yet,
        and nothing would be sent until it has. An interval goes on as it would have, from an
        anchor that is set back with the clock: what is due from now on was never due before. Any
        other schedule names instants of the clock, and comes to some of them once more.

        Args:
            entries: those that are configured.
            stored: those that are known.
            now: the server's clock.
            missed_until: what fell due up to then did so while nobody led, and is made up as
                ``catchup`` says. What fell due afterwards is late, and all of it is sent; but
                for an entry that is due for longer than a day, which whoever led did not know.
            between: called before each entry, to feed the lease; also by ``pop``.
            clock_was: what the server's clock was last known to say; beyond now, if it was set
                back.

        Returns:
            The entries that have to be stored anew.
        """
        self.clear()
        self._between = between
        registrations = []
        last_known = now if clock_was is None else clock_was
        for planned in entries:
            between()
            with self._asking(planned, now):
                before = stored.get(planned.name)
                if before is None or not planned.goes_on(before):
                    registrations.append(self._begin(planned, before, now, missed_until))
                else:
                    registrations += self._go_on(planned, before, now, last_known, missed_until)
                self._enter(planned, before)
        return registrations

    def take_up(
        self,
        edited: Collection[plans.Planned],
        removed: Collection[str],
        stored: Mapping[str, beat_rows.Stored],
        *,
        now: dt.datetime,
        missed_until: dt.datetime | None,
    ) -> list[beat_rows.Registration]:
        """Plan anew what was added or edited while this beat leads, and leave out what is gone.

        The others stay as they are. An entry counts from now on if it is new, was out for a
        while or has another schedule; else it goes on. What was claimed for it is sent first.

        Args:
            edited: entries that are new or not what they were.
            removed: names of entries that are gone.
            stored: what is known of the edited ones.
            now: the server's clock.
            missed_until: as for ``take_over``.

        Returns:
            The entries that have to be stored anew.
        """
        was_in = {
            planned.name: self._planned[planned.name]
            for planned in edited
            if planned.name in self._planned
        }
        self._take_out({planned.name for planned in edited}.union(removed))
        registrations = []
        for planned in edited:
            self._between()
            with self._asking(planned, now):
                before = stored.get(planned.name)
                was = was_in.get(planned.name)
                if before is None or was is None or not planned.goes_on(before):
                    registrations.append(self._begin(planned, before, now, missed_until))
                else:
                    planned.late = was.late
                    registrations += self._go_on(planned, before, now, now, missed_until)
                self._enter(planned, before)
        return registrations

    def knows(self, planned: plans.Planned) -> bool:
        """Whether an entry is planned already just like this one."""
        known = self._planned.get(planned.name)
        return known is not None and known.same_as(planned)

    def exhausted(self) -> list[str]:
        """Return the names of entries of which nothing is to be sent any more."""
        return [
            name
            for name, planned in self._planned.items()
            if planned.next_due_at is None and name not in self.unsent
        ]

    def _take_out(self, names: Collection[str]) -> None:
        for name in names:
            self._planned.pop(name, None)
            self.unsent.pop(name, None)
        self._heap = [due for due in self._heap if due[1] not in names]
        heapq.heapify(self._heap)

    def _enter(self, planned: plans.Planned, before: beat_rows.Stored | None) -> None:
        self._planned[planned.name] = planned
        if before is not None and before.due_at is not None and before.unconfirmed:
            # Its next occurrence is left as it is stored: that claim was made already.
            self.unsent[planned.name] = self._occurrence(
                planned, before.due_at, next_due_at=planned.next_due_at, late=True
            )
        else:
            self._push(planned)

    def _begin(
        self,
        planned: plans.Planned,
        before: beat_rows.Stored | None,
        now: dt.datetime,
        missed_until: dt.datetime | None,
    ) -> beat_rows.Registration:
        """Plan an entry that is new or was edited."""
        begin = planned.begins_at(before, now)
        planned.due = planned.schedule(begin)
        planned.next_due_at = planned.due.after(begin)
        if before is not None and before.due_at is not None:
            if before.due_at > now:
                planned.ahead = before.unconfirmed
                if not planned.ahead:
                    self.resets.append(planned.reset(begin, None))
            elif before.due_at > begin:
                planned.next_due_at = planned.due.after(before.due_at)
        planned.missed_until = self._missed_until(planned, now, missed_until)
        return planned.registration(begin)

    @staticmethod
    def _missed_until(
        planned: plans.Planned, now: dt.datetime, missed_until: dt.datetime | None
    ) -> dt.datetime | None:
        unseen = planned.next_due_at is not None and planned.next_due_at < now - _UNSEEN
        return now if unseen else missed_until

    def _go_on(
        self,
        planned: plans.Planned,
        before: beat_rows.Stored,
        now: dt.datetime,
        last_known: dt.datetime,
        missed_until: dt.datetime | None,
    ) -> list[beat_rows.Registration]:
        """Plan an entry from where it was left; return it if it has to be stored anew."""
        planned.due = planned.schedule(before.anchor)
        planned.paused_until = before.paused_until
        planned.next_due_at = planned.after_shorter_pause(before)
        self._set_back(planned, before, now, last_known)
        planned.missed_until = self._missed_until(planned, now, missed_until)
        if before.task is None or before.task == planned.task:
            return []
        return [planned.registration(before.anchor)]

    @contextlib.contextmanager
    def _asking(self, planned: plans.Planned, now: dt.datetime) -> Iterator[None]:
        """Leave an entry out for a while whose schedule raises, whatever that is.

        It is a class of the user's own, and the others have to go on.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            self.failed.append((planned.name, error))
            self.look_again_at = now + _LOOK_AGAIN

    def clear(self) -> None:
        """Forget everything: this beat does not lead."""
        self.unsent, self.passed_over, self._planned, self._heap = {}, [], {}, []
        self.resets, self.set_back, self.outdated = [], dt.timedelta(0), False
        self.failed, self.look_again_at = [], None

    def pop(self, now: dt.datetime, most: int) -> list[beat_rows.Occurrence]:
        """Take out what is due, at most ``most`` entries, one occurrence each."""
        due: list[beat_rows.Occurrence] = []
        while self._heap and self._heap[0][0] <= now and len(due) < most:
            # Looking through a long downtime takes its time, for each entry.
            self._between()
            due_at, name = heapq.heappop(self._heap)
            planned = self._planned[name]
            with self._asking(planned, now):
                occurrence = self._take(planned, due_at, now)
                if occurrence is not None:
                    due.append(occurrence)
        return due

    def _take(
        self, planned: plans.Planned, due_at: dt.datetime, now: dt.datetime
    ) -> beat_rows.Occurrence | None:
        """Return what is to be sent for an entry that is due, or None if it is passed over."""
        if planned.paused_until is not None and due_at < planned.paused_until:
            self._pass_over(planned, planned.after_pause(), ())
            return None
        send, missed = planned.make_up(due_at, self._window)
        if send > now:
            self._pass_over(planned, send, missed)
            return None
        following = planned.due.after(send)
        overdue = following is not None and following <= now
        late, planned.late = overdue or planned.late, overdue
        return self._occurrence(planned, send, next_due_at=following, late=late, missed=missed)

    def sent(self, occurrence: beat_rows.Occurrence) -> None:
        """Plan the next occurrence of an entry whose last one is confirmed."""
        self.unsent.pop(occurrence.entry, None)
        planned = self._planned[occurrence.entry]
        planned.next_due_at = occurrence.next_due_at
        self.outdated = self.outdated or planned.ahead
        self._push(planned)

    def _push(self, planned: plans.Planned) -> None:
        if planned.next_due_at is not None:
            heapq.heappush(self._heap, (planned.next_due_at, planned.name))

    def pause(self, paused: Mapping[str, dt.datetime], now: dt.datetime) -> None:
        """Take over until when entries are paused; what is resumed is due again from now on.

        An entry that is paused stays where it is, and is passed over when it would be due.
        """
        changed = False
        for name, until in paused.items():
            planned = self._planned.get(name)
            if planned is None or planned.paused_until == until:
                continue
            planned.paused_until = until
            if name in self.unsent:
                continue
            # Also when the pause was only made shorter: under the longer one it may have been
            # passed over already.
            with self._asking(planned, now):
                following = planned.after_pause() if until > now else planned.due.after(now)
                if following is not None and (
                    planned.next_due_at is None or following < planned.next_due_at
                ):
                    changed = True
                    self._heap = [due for due in self._heap if due[1] != name]
                    self._pass_over(planned, following, ())
        if changed:
            heapq.heapify(self._heap)

    def _set_back(
        self,
        planned: plans.Planned,
        before: beat_rows.Stored,
        now: dt.datetime,
        last_known: dt.datetime,
    ) -> None:
        """Bring an entry back to the present if what is stored of it lies beyond it."""
        told = (last_known, before.anchor, before.due_at, before.published_at)
        back = max(moment for moment in told if moment is not None) - now
        if back <= clocks.TOLERATED:
            return
        self.set_back = max(self.set_back, back)
        if before.unconfirmed:
            planned.ahead = True
            return
        self.resets.append(planned.bring_back(before, back, now))

    def put_back(self, occurrence: beat_rows.Occurrence) -> None:
        """Plan an occurrence anew that could not be claimed."""
        heapq.heappush(self._heap, (occurrence.due_at, occurrence.entry))

    def _pass_over(
        self,
        planned: plans.Planned,
        next_due_at: dt.datetime | None,
        missed: Iterable[dt.datetime],
    ) -> None:
        self.passed_over.append(
            beat_rows.Passed(
                entry=planned.name,
                task=planned.task,
                next_due_at=next_due_at,
                recorded=planned.recorded,
                missed=tuple(missed),
                revision=planned.revision,
            )
        )
        planned.next_due_at = next_due_at
        self._push(planned)

    def _occurrence(
        self,
        planned: plans.Planned,
        due_at: dt.datetime,
        *,
        next_due_at: dt.datetime | None,
        late: bool,
        missed: Iterable[dt.datetime] = (),
    ) -> beat_rows.Occurrence:
        return beat_rows.Occurrence(
            entry=planned.name,
            task=planned.task,
            due_at=due_at,
            next_due_at=next_due_at,
            task_id=beat_rows.task_id(self._namespace, planned.name, due_at),
            recorded=planned.recorded,
            late=late,
            missed=tuple(missed),
            revision=planned.revision,
        )

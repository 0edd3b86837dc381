"""What the leader has to send and when; pure: it is told the time and what is stored.

Only the next occurrence of each entry is kept, in a heap. So an idle tick looks at one of
them, however many entries there are.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from celery_pglock import occurrences, schedule_store

# How many passed-over occurrences of one entry are recorded one by one.
_MOST_MISSED: Final = 1000


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


class Agenda:
    """The entries of one namespace, planned by its leader.

    Attributes:
        unsent: occurrences that are claimed and perhaps not sent, by their entries; they go
            first.
        passed_over: entries of which nothing is made up, to be recorded and taken out.
    """

    def __init__(self, namespace: str) -> None:
        self.unsent: dict[str, schedule_store.Occurrence] = {}
        self.passed_over: list[schedule_store.Passed] = []
        self._namespace = namespace
        self._planned: dict[str, Planned] = {}
        self._heap: list[tuple[dt.datetime, str]] = []
        self._downtime_until: dt.datetime | None = None

    @property
    def next_due_at(self) -> dt.datetime | None:
        """When the next occurrence is due, or None."""
        return self._heap[0][0] if self._heap else None

    def take_over(
        self,
        entries: Iterable[Planned],
        stored: Mapping[str, schedule_store.Stored],
        *,
        now: dt.datetime,
        after_downtime: bool,
        between: Callable[[], None],
    ) -> list[schedule_store.Registration]:
        """Plan all entries from what the leader before has stored.

        A new entry counts from now on, and so does one whose schedule was edited; but what
        was claimed for it is sent first.

        Args:
            entries: those that are configured.
            stored: those that are known.
            now: the server's clock.
            after_downtime: nobody led for a while; occurrences of that time are made up as
                ``catchup`` says. Else they are late, and all of them are sent.
            between: called before each entry, to feed the lease.

        Returns:
            The entries that have to be stored anew.
        """
        self.clear()
        self._downtime_until = now if after_downtime else None
        registrations = []
        for planned in entries:
            between()
            before = stored.get(planned.name)
            fresh = before is None or before.schedule != planned.text
            anchor = now if before is None or fresh else before.anchor
            planned.due = planned.schedule(anchor)
            if before is None or fresh:
                planned.next_due_at = planned.due.after(now)
                registrations.append(
                    schedule_store.Registration(
                        entry=planned.name,
                        task=planned.task,
                        schedule=planned.text,
                        anchor=anchor,
                        next_due_at=planned.next_due_at,
                    )
                )
            else:
                planned.next_due_at = before.next_due_at
            self._planned[planned.name] = planned
            if before is not None and before.due_at is not None and before.published_at is None:
                # Its next occurrence is left as it is stored: that claim was made already.
                self.unsent[planned.name] = self._occurrence(
                    planned, before.due_at, next_due_at=planned.next_due_at, late=True
                )
            else:
                self._push(planned)
        return registrations

    def clear(self) -> None:
        """Forget everything: this beat does not lead."""
        self.unsent, self.passed_over, self._planned, self._heap = {}, [], {}, []

    def pop(self, now: dt.datetime, most: int) -> list[schedule_store.Occurrence]:
        """Take out what is due, at most ``most`` entries, one occurrence each."""
        due: list[schedule_store.Occurrence] = []
        while self._heap and self._heap[0][0] <= now and len(due) < most:
            due_at, name = heapq.heappop(self._heap)
            planned = self._planned[name]
            send, missed = self._make_up(planned, due_at)
            if send > now:
                self._pass_over(planned, send, missed)
                continue
            following = planned.due.after(send)
            overdue = following is not None and following <= now
            due.append(
                self._occurrence(
                    planned,
                    send,
                    next_due_at=following,
                    late=overdue or planned.late,
                    missed=missed,
                )
            )
            planned.late = overdue
        return due

    def sent(self, occurrence: schedule_store.Occurrence) -> None:
        """Plan the next occurrence of an entry whose last one is confirmed."""
        self.unsent.pop(occurrence.entry, None)
        planned = self._planned[occurrence.entry]
        planned.next_due_at = occurrence.next_due_at
        self._push(planned)

    def _push(self, planned: Planned) -> None:
        if planned.next_due_at is not None:
            heapq.heappush(self._heap, (planned.next_due_at, planned.name))

    def _pass_over(
        self, planned: Planned, next_due_at: dt.datetime, missed: Iterable[dt.datetime]
    ) -> None:
        self.passed_over.append(
            schedule_store.Passed(
                entry=planned.name,
                task=planned.task,
                next_due_at=next_due_at,
                recorded=planned.recorded,
                missed=tuple(missed),
            )
        )
        planned.next_due_at = next_due_at
        self._push(planned)

    def _make_up(
        self, planned: Planned, due_at: dt.datetime
    ) -> tuple[dt.datetime, list[dt.datetime]]:
        """Return the occurrence to send for one that is due, and those it passes over."""
        until = self._downtime_until
        if until is None or due_at > until:
            return due_at, []
        keep = planned.catchup
        most = _MOST_MISSED + keep
        # The stored instant counts as it stands, whatever the schedule says today.
        late = [due_at, *occurrences.newest(planned.due, due_at, until, most)][-most:]
        passed = late[: max(0, len(late) - keep)]
        kept = late[len(passed) :]
        following = kept[0] if kept else planned.due.after(until)
        # A schedule that never comes again is sent once more, rather than never.
        return (due_at, []) if following is None else (following, passed)

    def _occurrence(
        self,
        planned: Planned,
        due_at: dt.datetime,
        *,
        next_due_at: dt.datetime | None,
        late: bool,
        missed: Iterable[dt.datetime] = (),
    ) -> schedule_store.Occurrence:
        return schedule_store.Occurrence(
            entry=planned.name,
            task=planned.task,
            due_at=due_at,
            next_due_at=next_due_at,
            task_id=schedule_store.task_id(self._namespace, planned.name, due_at),
            recorded=planned.recorded,
            late=late,
            missed=tuple(missed),
        )

"""What can be seen of the actors while they play: read from the history as it grows."""

from __future__ import annotations

import time
from typing import Any, Final

import psycopg

from tests.chaos import history
from tests.chaos.history import Event

# Rows: so many numbers may be given in the time that one takes to be committed.
_LATE: Final = 200


class Watch:
    """Reads the history again and again.

    Attributes:
        events: all so far, in the order in which they were seen.
        working: the `begin` of each run that has not ended, as far as is known.
        leader: the process that leads, as far as is known; 0 for none.
        done: how many runs are recorded as done.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self.events: list[Event] = []
        self.working: dict[str, Event] = {}
        self.leader = 0
        self.done = 0
        self._seen_at: dict[str, float] = {}
        self._known: set[str] = set()

    def look(self) -> None:
        """Read what is new."""
        # A number is given before its row is committed, so a row may come after a higher one.
        after = (self.events[-1].seq if self.events else 0) - _LATE
        for event in history.read(self._connection, after):
            if event.uid not in self._known:
                self._known.add(event.uid)
                self.events.append(event)
                self._learn(event)

    def _learn(self, event: Event) -> None:
        run = event.run or ""
        match event.kind:
            case "begin":
                self.working[run] = event
                self._seen_at[run] = time.monotonic()
            case "end" | "finished":
                self.working.pop(run, None)
                self.done += event.kind == "finished" and event.detail.get("status") == "done"
            case "gained":
                self.leader = event.pid
            case "ousted":
                if self.leader == event.pid:
                    self.leader = 0

    def at_work(self, into: float) -> list[Event]:
        """Return the runs that began at least so many seconds ago, the oldest first."""
        before = time.monotonic() - into
        return [begin for run, begin in self.working.items() if self._seen_at[run] <= before]

    def forget(self, pids: set[int]) -> None:
        """Take the runs of processes that were killed off the list."""
        for run, begin in list(self.working.items()):
            if begin.pid in pids:
                del self.working[run]

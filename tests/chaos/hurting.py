"""What is under way: each deed is written down before it is done, and undone when it is time.

The checker needs to know whom it may excuse, and for what time. A deed that finds no occasion
(nobody leads, nobody works) waits a little for one.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

from tests.chaos import plan
from tests.chaos.sender import Sender
from tests.chaos.stage import Stage
from tests.chaos.strikes import Harm
from tests.chaos.watch import Watch

# Seconds: an occasion comes in this time or not at all.
_OCCASION: Final = 6.0
_TRY_EVERY: Final = 0.1

# What a beat says first of all, once it takes part.
_SAID: Final = re.compile("standby: |leadership gained: ")
_BEGINNING: Final = 8_000


class Hurting:
    """Knows what is under way, what has to be undone when, and writes both down.

    Args:
        stage: with its actors running.
        watch: what is known of them.
        sender: sends messages a second time.

    Attributes:
        done: how many faults were done.
        dropped: those that found no occasion.
        fallen: who has ended without being hurt, with its last words.
    """

    def __init__(self, stage: Stage, watch: Watch, sender: Sender) -> None:
        self.stage = stage
        self.watch = watch
        self.sender = sender
        self.done = 0
        self.dropped: list[plan.Fault] = []
        self.fallen: list[str] = []
        self.frozen: set[int] = set()
        self._try_at = 0.0
        self._numbers = itertools.count(1)
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._waiting: list[tuple[float, plan.Fault]] = []

    # --- time ---------------------------------------------------------------------------------

    def step(self, due: Iterable[plan.Fault]) -> None:
        """Undo what has lasted for long enough, and do what is due."""
        self._undo(time.monotonic())
        self._revive()
        now = time.monotonic()
        self._waiting += [(now + _OCCASION, fault) for fault in due]
        if now < self._try_at:
            return
        self._try_at = now + _TRY_EVERY
        waiting, self._waiting = self._waiting, []
        for until_then, fault in waiting:
            if self._deed(fault):
                self.done += 1
            elif time.monotonic() > until_then:
                self.dropped.append(fault)
            else:
                self._waiting.append((until_then, fault))

    def heal(self) -> None:
        """Undo everything, and start whoever is away."""
        self.dropped += [fault for _, fault in self._waiting]
        self._waiting = []
        while self._later:
            # A worker that is stopping has a moment to do so.
            self._undo(time.monotonic() if self._stopping() else float("inf"))
            time.sleep(0.02)
        if self.stage.clock is not None:
            self.stage.clock.set(0.0)

    def _deed(self, fault: plan.Fault) -> bool:
        """Do what a fault of the plan says; return whether there was an occasion."""
        raise NotImplementedError

    def _revive(self) -> None:
        """Start again whoever has ended for a reason of his own."""

    def _stopping(self) -> bool:
        return any(actor.leaving and actor.alive for actor in self.stage.actors)

    def _undo(self, now: float) -> None:
        later, self._later = self._later, []
        for at, undo in later:
            if at > now or undo() is False:
                self._later.append((at, undo))

    def after(self, seconds: float, undo: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + seconds, undo))

    # --- what is written ----------------------------------------------------------------------

    def strike(
        self,
        fault: plan.Fault,
        harm: Harm,
        victims: Collection[int] | None,
        *,
        leader: bool = False,
        late: bool = False,
    ) -> int:
        number = next(self._numbers)
        detail = {
            "id": number,
            "fault": "ended by itself" if late else fault.kind,
            "harm": harm,
            "victims": None if victims is None else sorted(victims),
            "leader": leader,
            "late": late,
            "ready": self._standing_by() if leader else 0,
            "beats": any(word in fault.kind for word in ("leader", "standby", "packets")),
            "lasts": fault.lasts,
        }
        self.stage.scribe.tell("strike", detail=detail)
        return number

    def _standing_by(self) -> int:
        """Return how many beats beside the leader are there and have come as far as to say so."""
        return sum(
            beat.alive
            and not beat.leaving
            and beat.process is not None
            and beat.process.pid not in {self.watch.leader, *self.frozen}
            and _SAID.search(beat.process.output()[:_BEGINNING]) is not None
            for beat in self.stage.beats
        )

    def over(self, number: int) -> None:
        self.stage.scribe.tell("over", detail={"id": number})

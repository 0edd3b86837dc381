"""Claim, publish, confirm: what a leader does with its agenda.

What the broker does not take stays claimed, and is published again with the same id: by this
leader later, or by the next one first of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from celery_pglock import agenda, beat_events, leadership, publishing, schedule_store

_CHUNK: Final = 500
_CONFIRM_EVERY: Final = 100
_CONFIRM_WITHIN: Final = 0.5
_BACK_OFF: Final = 0.5
_LONGEST_BACK_OFF: Final = 5.0
_LONGEST_HELD_BACK: Final = 60.0
_BROKER: Final = ""  # the broker's own back-off; no entry has an empty name


class Dispatcher:
    """Sends what is due, over one leadership.

    Args:
        candidate: who leads; everything is written over its session.
        plan: what is due when.
        store: where claims are kept.
        publisher: the connection to the broker.
        publish: hands one message to the broker and returns what went wrong, or None.
    """

    def __init__(
        self,
        candidate: leadership.Leadership,
        plan: agenda.Agenda,
        store: schedule_store.ScheduleStore,
        publisher: publishing.Publisher,
        publish: Callable[[schedule_store.Occurrence], BaseException | None],
    ) -> None:
        self._candidate = candidate
        self._agenda = plan
        self._store = store
        self._publisher = publisher
        self._publish = publish
        # While the broker does not answer nothing is sent; an entry whose own message is at
        # fault is held back alone. Both by the monotonic clock.
        self._broken_until = 0.0
        self._held_back: dict[str, float] = {}
        self._back_off: dict[str, float] = {}

    def begin(self) -> None:
        """Send what was claimed before and perhaps never sent.

        Raises:
            LeadershipLost: in the middle; the next leader publishes the rest.
        """
        self._broken_until = 0.0
        self._held_back, self._back_off = {}, {}
        self._send(self._ready())

    def work(self, at_most: float) -> float:
        """Send what is due; return for how many seconds nothing will be, ``at_most`` these.

        Raises:
            LeadershipLost: the session is gone or the lease has run out.
        """
        candidate = self._candidate
        if not candidate.held:
            # It was frozen, or a statement took too long: the server decides, not this clock.
            candidate.confirm()
        if time.monotonic() >= self._broken_until:
            if unsent := self._ready():
                self._send(unsent)
            else:
                due = self._agenda.pop(candidate.now(), _CHUNK)
                self._pass_over()
                if due:
                    self._claim(due)
                    self._send(due)
        if candidate.feed_in <= 0:
            candidate.confirm()
        return self._rest(at_most)

    def _claim(self, due: list[schedule_store.Occurrence]) -> None:
        candidate = self._candidate
        claimed = self._store.claim(due, candidate.term or 0)
        self._agenda.unsent.update({occurrence.entry: occurrence for occurrence in due})
        if len(claimed) < len(due):
            # The rows say something else than this process believes: another term reads them.
            raise candidate.lose("its entries were changed by somebody else")
        for occurrence in due:
            if occurrence.missed:
                beat_events.missed(occurrence)

    def _pass_over(self) -> None:
        passed, self._agenda.passed_over = self._agenda.passed_over, []
        if passed:
            self._store.pass_over(passed, self._candidate.term or 0)
            for entry in passed:
                beat_events.missed(entry)

    def _ready(self) -> list[schedule_store.Occurrence]:
        now = time.monotonic()
        return [
            occurrence
            for entry, occurrence in self._agenda.unsent.items()
            if self._held_back.get(entry, 0.0) <= now
        ]

    def _send(self, claimed: list[schedule_store.Occurrence]) -> None:
        """Publish claimed occurrences in their order and confirm them.

        What is not sent stays claimed and is published again later: by the next tick, when a
        slow broker has taken up this one's time.

        Raises:
            LeadershipLost: in the middle; the next leader publishes the rest.
        """
        candidate = self._candidate
        sent: list[schedule_store.Occurrence] = []
        started = time.monotonic()
        confirm_at = started + _CONFIRM_WITHIN
        try:
            for occurrence in claimed:
                if not candidate.held or candidate.feed_in <= 0:
                    candidate.confirm()
                failure = self._publish(occurrence)
                if failure is None:
                    sent.append(occurrence)
                elif self._put_off(occurrence, failure):
                    break
                now = time.monotonic()
                if len(sent) >= _CONFIRM_EVERY or (sent and now >= confirm_at):
                    batch, sent = sent, []
                    self._confirm(batch)
                    confirm_at = time.monotonic() + _CONFIRM_WITHIN
                if now >= started + candidate.lease / 4:
                    break
        finally:
            # Also when a signal ends this process in the middle of the next publication.
            if sent and candidate.leading:
                self._confirm(sent)

    def _confirm(self, sent: list[schedule_store.Occurrence]) -> None:
        self._store.confirm(sent)
        for occurrence in sent:
            self._agenda.sent(occurrence)
            for name in (_BROKER, occurrence.entry):
                self._back_off.pop(name, None)
                self._held_back.pop(name, None)
            beat_events.sent(occurrence)

    def _put_off(self, occurrence: schedule_store.Occurrence, failure: BaseException) -> bool:
        """Keep an occurrence for later; return whether the broker is at fault, for all."""
        broken = self._publisher.broke(failure)
        self._publisher.forget()
        name, longest = (
            (_BROKER, _LONGEST_BACK_OFF) if broken else (occurrence.entry, _LONGEST_HELD_BACK)
        )
        again_in = min(longest, max(_BACK_OFF, self._back_off.get(name, 0.0) * 2))
        self._back_off[name] = again_in
        if broken:
            self._broken_until = time.monotonic() + again_in
        else:
            self._held_back[name] = time.monotonic() + again_in
        beat_events.not_sent(occurrence, f"{type(failure).__name__}: {failure}", again_in)
        return broken

    def _rest(self, at_most: float) -> float:
        candidate = self._candidate
        rest = [candidate.feed_in, at_most]
        now = time.monotonic()
        next_due_at = self._agenda.next_due_at
        if now < self._broken_until:
            rest.append(self._broken_until - now)
        else:
            rest += [self._held_back.get(entry, 0.0) - now for entry in self._agenda.unsent]
            if next_due_at is not None:
                rest.append((next_due_at - candidate.now()).total_seconds())
        return max(0.0, min(rest))

"""Claim, publish, confirm: what a leader does with its agenda.

Where messages are kept until they are handed over together, none of these waits for the one before:
meanwhile the server records the messages before them, and claims what comes after them.

What the broker does not take stays claimed, and is published again with the same id: by this
leader later, or by the next one first of all.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable
from typing import Final

from celery_pglock import (
    agenda,
    answers,
    beat_events,
    beat_rows,
    leadership,
    publishing,
    schedule_store,
    stop_signals,
)

_CHUNK: Final = 500
_CONFIRM_EVERY: Final = 250
_CONFIRM_WITHIN: Final = 0.5
# For so many seconds more is claimed before a tick ends, in which others may tell the leader something.
_CLAIM_AHEAD: Final = 0.5
_BACK_OFF: Final = 0.5
_LONGEST_BACK_OFF: Final = 5.0
_LONGEST_HELD_BACK: Final = 60.0
_BROKER: Final = ""  # the broker's own back-off; no entry has an empty name


_Failed = tuple[beat_rows.Occurrence, BaseException]
_Recording = tuple[list[beat_rows.Occurrence], answers.Answer]


class Dispatcher:
    """Sends what is due, over one leadership.

    Args:
        candidate: who leads; everything is written over its session.
        plan: what is due when.
        store: where claims are kept.
        publisher: the connection to the broker.
        publish: hands one message to the broker and returns what went wrong, or None.
        sent: called for each occurrence whose message is confirmed.
    """

    def __init__(
        self,
        candidate: leadership.Leadership,
        plan: agenda.Agenda,
        store: schedule_store.ScheduleStore,
        publisher: publishing.Publisher,
        publish: Callable[[beat_rows.Occurrence], BaseException | None],
        *,
        sent: Callable[[beat_rows.Occurrence], None],
    ) -> None:
        self._candidate = candidate
        self._agenda = plan
        self._store = store
        self._publisher = publisher
        self._publish = publish
        self._sent = sent
        # While the broker does not answer nothing is sent; an entry whose own message is at
        # fault is held back alone. Both by the monotonic clock.
        self._broken_until = 0.0
        #: How many messages in a row the broker did not take.
        self.failures = 0
        self._held_back: dict[str, float] = {}
        self._back_off: dict[str, float] = {}
        # What was handed over, and what the server says to the record of it.
        self._recording: _Recording | None = None

    def begin(self) -> None:
        """Send what was claimed before and perhaps never sent.

        Raises:
            LeadershipLost: in the middle; the next leader publishes the rest.
        """
        self._broken_until = 0.0
        self.failures = 0
        self._held_back, self._back_off = {}, {}
        self._recording = None
        self._send(self._ready(), ahead=False)

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
            unsent = self._ready()
            if not unsent and (claim := self._begin_claim()) is not None:
                unsent = claim()
            self._send(unsent, ahead=True)
        candidate.feed()
        return self._rest(at_most)

    def learn_of_pauses(self) -> None:
        """Read which entries are paused or resumed, because somebody has told of a change.

        Raises:
            LeadershipLost: as ``work`` does.
        """
        self._agenda.pause(self._store.paused(), self._candidate.now())
        self._pass_over()

    def forget(self, name: str) -> None:
        """Hold an entry back no longer whose message was at fault: it is edited, or gone."""
        self._held_back.pop(name, None)
        self._back_off.pop(name, None)

    def _begin_claim(self) -> Callable[[], list[beat_rows.Occurrence]] | None:
        """Begin to claim what is due, if anything is; return what waits for that and returns it."""
        due = self._agenda.pop(self._candidate.now(), _CHUNK)
        self._pass_over()
        if not due:
            return None
        claim = self._store.begin_claim(due, self._candidate.term or 0)
        return lambda: self._claimed(due, claim())

    def _claimed(
        self, due: list[beat_rows.Occurrence], entries: set[str]
    ) -> list[beat_rows.Occurrence]:
        claimed = [occurrence for occurrence in due if occurrence.entry in entries]
        self._agenda.unsent.update({occurrence.entry: occurrence for occurrence in claimed})
        if len(claimed) < len(due):
            self._put_back([occurrence for occurrence in due if occurrence.entry not in entries])
        for occurrence in claimed:
            if occurrence.missed:
                beat_events.missed(occurrence)
        return claimed

    def _put_back(self, refused: list[beat_rows.Occurrence]) -> None:
        """Plan anew what could not be claimed, because its entry was paused or edited meanwhile."""
        stored = self._store.load([occurrence.entry for occurrence in refused])
        paused = {}
        for occurrence in refused:
            row = stored.get(occurrence.entry)
            if occurrence.revision is not None and (
                row is None or row.revision != occurrence.revision
            ):
                # Somebody has told of it, but that is not here yet.
                self._candidate.edited.add(occurrence.entry)
            elif row is None or row.paused_until is None or row.paused_until <= occurrence.due_at:
                # The rows say something else than this process believes: another term
                # reads them.
                raise self._candidate.lose("its entries were changed by somebody else")
            else:
                paused[occurrence.entry] = row.paused_until
            self._agenda.put_back(occurrence)
        self._agenda.pause(paused, self._candidate.now())

    def _pass_over(self) -> None:
        passed, self._agenda.passed_over = self._agenda.passed_over, []
        if passed:
            self._store.pass_over(passed, self._candidate.term or 0)
            for entry in passed:
                if entry.missed:
                    beat_events.missed(entry)
                else:
                    beat_events.paused(entry)

    def _ready(self) -> list[beat_rows.Occurrence]:
        now = time.monotonic()
        return [
            occurrence
            for entry, occurrence in self._agenda.unsent.items()
            if self._held_back.get(entry, 0.0) <= now
        ]

    def _send(self, claimed: Iterable[beat_rows.Occurrence], *, ahead: bool) -> None:
        """Publish claimed occurrences in their order and confirm them.

        What is not sent stays claimed and is published again later: by the next tick, when a
        slow broker has taken up this one's time.

        Args:
            claimed: these, and
            ahead: whatever else is due, for a while.

        Raises:
            LeadershipLost: in the middle; the next leader publishes the rest.
        """
        now = time.monotonic()
        until = now + self._candidate.lease / 4
        claim_until = min(until, now + _CLAIM_AHEAD) if ahead else now
        waiting = collections.deque(claimed)
        going_on = True
        try:
            while going_on and waiting and (now := time.monotonic()) < until:
                going_on = self._send_batch(waiting, until, ahead=now < claim_until)
            self._settle()
        except BaseException:
            # A signal that ends this process, for instance. What is recorded is told, also when
            # the leadership has ended since; and for a claim nobody waits any more.
            if self._recording and (self._candidate.leading or self._recording[1].arrived):
                self._tell()
            raise

    def _send_batch(
        self, waiting: collections.deque[beat_rows.Occurrence], until: float, *, ahead: bool
    ) -> bool:
        """Publish the first of those that wait, and confirm them; return whether to go on.

        Where the transport can, they are handed over together, at the end of the batch. If
        that fails, or if it is not reached, each of them is in doubt, which is the same as
        unsent: it stays claimed. And what comes after the last ones is claimed meanwhile, if
        more is to be claimed ``ahead``.
        """
        candidate = self._candidate
        batch = self._publisher.batch()
        try:
            batch.begin()
        except Exception as error:  # noqa: BLE001 - each transport raises its own
            return not self._put_off(waiting[0], error)
        until = min(until, time.monotonic() + _CONFIRM_WITHIN)
        sent: list[beat_rows.Occurrence] = []
        claim = None
        with batch:
            try:
                if not batch.gives_up:
                    # Each message is out at once, and its record must not depend on what else
                    # the server is doing: a statement that fails ends the session.
                    self._settle()
                elif ahead and len(waiting) <= _CONFIRM_EVERY and not self.failures:
                    claim = self._begin_claim()
                failed = self._fill(sent, waiting, until)
                # What the server still has to say may be that this beat does not lead any more.
                self._settle()
                # It is handed over now, and this process may have been frozen since it was asked.
                candidate.ensure()
            except BaseException:
                # A signal that ends this process in the middle of a publication, for instance.
                if candidate.leading and not batch.gives_up:
                    self._finish(batch, sent)
                raise
            lost = self._finish(batch, sent)
        if claim is not None:
            waiting.extend(claim())
        if lost is not None and not self._publisher.broke(lost):
            # Also when publishing one of them has failed: the broker may have meant another.
            self._publisher.one_by_one()
            return True
        if lost is not None and failed is None:
            failed = sent[0], lost
        return failed is None or not self._put_off(*failed)

    def _finish(
        self, batch: publishing.Batch, sent: list[beat_rows.Occurrence]
    ) -> Exception | None:
        """Hand over a batch and confirm it; return what went wrong with it, or None."""
        with stop_signals.held_back():
            try:
                batch.hand_over()
            except Exception as error:  # noqa: BLE001 - each transport raises its own
                return error
            if sent:
                self._record(sent)
        return None

    def _fill(
        self,
        sent: list[beat_rows.Occurrence],
        waiting: collections.deque[beat_rows.Occurrence],
        until: float,
    ) -> _Failed | None:
        """Publish some of those that wait; return the one that could not be, and why."""
        candidate = self._candidate
        while waiting and len(sent) < _CONFIRM_EVERY:
            if sent and time.monotonic() >= until:
                break
            candidate.ensure()
            occurrence = waiting.popleft()
            if (failure := self._publish(occurrence)) is not None:
                return occurrence, failure
            sent.append(occurrence)
        return None

    def _record(self, sent: list[beat_rows.Occurrence]) -> None:
        """Have it recorded that these were handed over, for which ``_settle`` waits."""
        self._settle()
        self._recording = sent, self._store.begin_confirm(sent)
        self.failures = 0
        self._back_off.pop(_BROKER, None)

    def _settle(self) -> None:
        """Wait for what the server has still to say, and tell what was handed over."""
        self._candidate.settle()
        self._tell()

    def _tell(self) -> None:
        """Wait until what was handed over is recorded; plan on, and tell of it."""
        if self._recording is None:
            return
        with stop_signals.held_back():
            sent, answer = self._recording
            answer.rows()
            self._recording = None
            for occurrence in sent:
                self._agenda.sent(occurrence)
                self._back_off.pop(occurrence.entry, None)
                self._held_back.pop(occurrence.entry, None)
                self._sent(occurrence)
                beat_events.sent(occurrence)

    def _put_off(self, occurrence: beat_rows.Occurrence, failure: BaseException) -> bool:
        """Keep an occurrence for later; return whether the broker is at fault, for all."""
        broken = self._publisher.broke(failure)
        self._publisher.forget()
        name, longest = (
            (_BROKER, _LONGEST_BACK_OFF) if broken else (occurrence.entry, _LONGEST_HELD_BACK)
        )
        again_in = min(longest, max(_BACK_OFF, self._back_off.get(name, 0.0) * 2))
        self._back_off[name] = again_in
        if broken:
            self.failures += 1
            self._broken_until = time.monotonic() + again_in
        else:
            self._held_back[name] = time.monotonic() + again_in
        beat_events.not_sent(occurrence, publishing.told(failure), again_in)
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

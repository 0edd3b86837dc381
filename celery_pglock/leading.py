"""What a beat does while it leads: take over, send what is due, rescue, clean up, listen."""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import celery.beat
from celery import Celery

from celery_pglock import (
    agenda,
    beat_events,
    beat_rows,
    bounds,
    clocks,
    dispatch,
    elections,
    entry_sources,
    headers,
    leadership,
    options,
    plans,
    publishing,
    rescue,
    retention,
    schedule_store,
    settings,
)

# A leader that has nothing to do looks at its socket this often, for what others tell it: no
# statement, and no more than that.
_LISTEN_EVERY: Final = 0.5
# So many edits are read at once, so that what is due need not wait for all of them.
_MOST_EDITS: Final = 1000
# After so many messages in a row that the broker did not take, another beat may try.
_MOST_FAILURES: Final = 3

HandOver = Callable[[celery.beat.ScheduleEntry, str, Mapping[str, Any]], BaseException | None]


class Leading:
    """One beat's leaderships, one after the other.

    Args:
        app: whose entries.
        config: its settings.
        candidate: the leadership.
        schedule: the entries by their names, as the scheduler has them now; see ``take_up``.
        hand_over: hands the message of an entry to the broker, with a task id and headers, and
            returns what went wrong, or None.
        publisher: the connection to the broker.
        sent: called for each occurrence after it was recorded that its message has been handed
            over; has to be quick, and must not raise.
        ended: returns an entry that has ended by being sent, by its name, or None: what was
            sent of it may have to be sent again.
    """

    def __init__(
        self,
        *,
        app: Celery,
        config: settings.Settings,
        candidate: leadership.Leadership,
        schedule: Mapping[str, celery.beat.ScheduleEntry],
        hand_over: HandOver,
        publisher: publishing.Publisher,
        sent: Callable[[beat_rows.Occurrence], None],
        ended: Callable[[str], celery.beat.ScheduleEntry | None],
    ) -> None:
        self._app = app
        self._config = config
        self._candidate = candidate
        self._sources = entry_sources.Sources(app, schedule)
        # Of each entry that was planned, the task and the schedule it was planned with: what is
        # the same object needs no second look.
        self._looked_at: dict[str, tuple[str, object]] = {}
        self._hand_over = hand_over
        self._ended = ended
        self._publisher = publisher
        self._agenda = agenda.Agenda(config.namespace, config.catchup_window)
        self._missed_until: dt.datetime | None = None
        self._began = False
        self._sent_before: set[str] = set()
        self.store = schedule_store.ScheduleStore(config.namespace, config.schema, candidate)
        self._dispatcher = dispatch.Dispatcher(
            candidate, self._agenda, self.store, publisher, self._publish, sent=sent
        )
        self._rescuer = rescue.Rescuer(
            execute=candidate.execute,
            schema=config.schema,
            namespace=config.namespace,
            # Without locks nobody settles a row: each would be sent again and again.
            sent_after=config.rescue_sent_after if config.enabled else None,
            lost_after=config.rescue_lost_after if config.enabled else None,
            unwanted=self._unwanted,
            send=self._send_again,
            closed=beat_events.given_up,
        )
        candidate.clock.host_differs = functools.partial(beat_events.host_differs, candidate)
        self._upkeep = retention.Upkeep(
            candidate.execute,
            config.schema,
            config.namespace,
            config.retention,
            lambda removed: beat_events.pruned(candidate, removed),
        )

    def begin(self, elected: elections.Elected) -> None:
        """Plan all entries, and send what was claimed before and perhaps never sent.

        Raises:
            LeadershipLost: it took too long, or the session ended.
        """
        # What it saw of the clock while it stood by is in what is stored too.
        self._candidate.clock.step()
        before = elected.before
        self.store.why_missed = schedule_store.NOBODY_LED
        self._missed_until = elected.missed_until
        self._take_over(elected.at, clock_was=elected.at if before is None else before.last_tick_at)
        if self._agenda.set_back > clocks.TOLERATED:
            beat_events.clock_set(self._candidate, -self._agenda.set_back)
        self._began = True
        self._dispatcher.begin()
        self._upkeep.begin()
        self._rescuer.begin()

    def take_up(self, schedule: Mapping[str, celery.beat.ScheduleEntry]) -> None:
        """Go on with a schedule that has changed: entries are new, edited or gone.

        What did not change stays planned as it is. Before ``begin`` nothing is written; this beat
        takes over with this schedule then. The mapping is not looked at later on,
        its entries are.

        The fingerprint stays: it tells apart what two beats were started with.

        Raises:
            LeadershipLost: as ``work`` does.
        """
        before = self._sources.configured
        self._sources.configured = after = dict(schedule)
        if not (self._began and self._candidate.leading):
            return
        changed = [
            name
            for name, entry in after.items()
            if before.get(name) is not entry or not self._was_looked_at(name, entry)
        ]
        # Under the name of one that is gone there may be one in the database.
        self._plan_changes([*changed, *(before.keys() - after.keys())])

    def work(self, at_most: float) -> float:
        """Do what is to be done now; return for how many seconds nothing will be.

        Raises:
            LeadershipLost: the session is gone or the lease has run out.
        """
        candidate = self._candidate
        candidate.listen()
        if candidate.entries_changed:
            candidate.entries_changed = False
            self._dispatcher.learn_of_pauses()
        if candidate.edited:
            self._learn_of_edits()
        step = candidate.clock.step()
        again_at = self._agenda.look_again_at
        look_again = again_at is not None and candidate.now() >= again_at
        if step is not None or self._agenda.outdated or look_again:
            self._plan_anew(step or dt.timedelta(0))
        rest = self._dispatcher.work(at_most)
        self._tell_failures()
        if rest > 0:
            # What is due goes first.
            rest = self._upkeep.work(self._rescuer.work(rest))
        # Of edits there may be more than were read, or a claim has just come upon one.
        return 0.0 if candidate.edited else min(rest, _LISTEN_EVERY)

    def end(self) -> None:
        """Forget what was planned: this beat does not lead any more."""
        self._began = False
        self._agenda.clear()

    def exhausted(self) -> list[str]:
        """Return the names of entries that were sent before, and are not due any more.

        Whoever sent them may have died before it could tell them so.
        """
        return [name for name in self._agenda.exhausted() if name in self._sent_before]

    def wants_to_resign(self) -> str | None:
        """Return why another beat should lead instead of this one, or None.

        Raises:
            LeadershipLost: as ``work`` does.
        """
        if self._candidate.asked_to_resign:
            self._candidate.asked_to_resign = False
            return "it was asked to"
        if self._dispatcher.failures >= _MOST_FAILURES and self._candidate.has_standby():
            return f"the broker did not take {self._dispatcher.failures} messages in a row"
        return None

    def fingerprint(self) -> str:
        """Return a text that two beats have in common if they have the same configuration."""
        return bounds.fingerprint(self._sources.configured, self._config.zone)

    def _plan_anew(self, step: dt.timedelta) -> None:
        """Take over from oneself, because the server's clock was set.

        Over a time for which it was set forward nobody led, as over a downtime.
        """
        candidate = self._candidate
        # Whoever leads next is not to find the sign of life from before.
        candidate.confirm()
        now = candidate.now()
        if step:
            beat_events.clock_set(candidate, step)
        if step > candidate.longest_take_over:
            self._missed_until = now
            self.store.why_missed = schedule_store.CLOCK_SET_FORWARD
        elif self._missed_until is not None and self._missed_until > now:
            self._missed_until = None
        self._take_over(now, clock_was=now - step)
        self._dispatcher.begin()

    def _tell_failures(self) -> None:
        failed, self._agenda.failed = self._agenda.failed, []
        for entry, error in failed:
            beat_events.schedule_failed(entry, error)

    def _learn_of_edits(self) -> None:
        """Read the definitions in the database that somebody has told of, and plan them."""
        candidate = self._candidate
        names = [*itertools.islice(candidate.edited, _MOST_EDITS)]
        # Before they are read: what is told from now on is perhaps not in it.
        candidate.edited.difference_update(names)
        stored = self.store.load(names)
        self._sources.learn(names, stored, candidate.feed)
        self._plan_changes(names, stored)

    def _plan_changes(
        self,
        names: Iterable[str],
        stored: Mapping[str, beat_rows.Stored] | None = None,
    ) -> None:
        """Plan those of these entries anew that are not what they were; the others stay."""
        candidate = self._candidate
        edited, removed = [], []
        for name in names:
            candidate.feed()
            # What is at fault with its message may be repaired now.
            self._dispatcher.forget(name)
            entry = self._sources.get(name)
            if entry is None:
                if self._looked_at.pop(name, None) is not None:
                    removed.append(name)
                continue
            planned = self._look_at(name, entry)
            if not self._agenda.knows(planned):
                edited.append(planned)
        if not edited and not removed:
            return
        if stored is None and edited:
            stored = self.store.load([planned.name for planned in edited])
        now = candidate.now()
        self._record(
            self._agenda.take_up(
                edited, removed, stored or {}, now=now, missed_until=self._missed_until
            )
        )
        if removed:
            self.store.leave(removed, candidate.term or 0)

    def _look_at(self, name: str, entry: celery.beat.ScheduleEntry) -> plans.Planned:
        self._looked_at[name] = (str(entry.task), entry.schedule)
        return self._plan(name, entry)

    def _was_looked_at(self, name: str, entry: celery.beat.ScheduleEntry) -> bool:
        task, schedule = self._looked_at.get(name, (None, None))
        return str(entry.task) == task and entry.schedule is schedule

    def _take_over(self, now: dt.datetime, *, clock_was: dt.datetime) -> None:
        candidate = self._candidate
        self._looked_at = {}
        candidate.edited.clear()
        stored = self.store.load()
        self._sent_before = {name for name, before in stored.items() if before.sent}
        self._sources.read(stored, candidate.feed)
        registrations = self._agenda.take_over(
            (self._look_at(name, entry) for name, entry in self._sources.items()),
            stored,
            now=now,
            missed_until=self._missed_until,
            between=candidate.feed,
            clock_was=clock_was,
        )
        self._record(registrations)

    def _record(self, registrations: Sequence[beat_rows.Registration]) -> None:
        if registrations:
            self.store.register(registrations)
        resets, self._agenda.resets = self._agenda.resets, []
        if resets:
            self.store.reset(resets, self._candidate.term or 0)

    def _plan(self, name: str, entry: celery.beat.ScheduleEntry) -> plans.Planned:
        zone = self._config.zone
        defaults = self._config.options
        chosen = options.locked(self._app.tasks.get(str(entry.task)))
        kept = self._sources.kept(name)
        return plans.Planned(
            name=name,
            task=str(entry.task),
            text=bounds.canonical(entry, zone),
            schedule=lambda anchor: bounds.read(entry, zone, anchor),
            recorded=chosen is not None and chosen.recorded(defaults),
            catchup=defaults["catchup"] if chosen is None else chosen.value("catchup", defaults),
            revision=None if kept is None else kept.revision,
            edited_at=None if kept is None else kept.edited_at,
            added=None if kept is None else kept.added,
        )

    def _publish(self, occurrence: beat_rows.Occurrence) -> BaseException | None:
        candidate = self._candidate
        given = headers.of_occurrence(candidate.namespace, candidate.term, occurrence)
        entry = self._sources.get(occurrence.entry)
        assert entry is not None  # noqa: S101 - what is planned is known
        return self._hand_over(entry, occurrence.task_id, given)

    def _send_again(self, lost: rescue.Copy) -> bool:
        candidate = self._candidate
        candidate.ensure()
        given = headers.of_rescue(candidate.namespace, candidate.term, lost, candidate.now())
        entry = self._sent_entry(lost.row.entry)
        if entry is None:
            return False
        failure = self._hand_over(entry, lost.row.task_id or str(uuid.uuid4()), given)
        if failure is not None:
            self._publisher.forget()
        beat_events.rescued(lost, None if failure is None else publishing.told(failure))
        return failure is None

    def _sent_entry(self, name: str) -> celery.beat.ScheduleEntry | None:
        return self._sources.get(name) or self._ended(name)

    def _unwanted(self, row: rescue.Lost, now: dt.datetime) -> str | None:
        entry = self._sent_entry(row.entry)
        if entry is None and self._sources.kept(row.entry) is not None:
            return "its entry in the database cannot be read"
        if entry is None:
            return "its schedule entry was removed before it was started"
        expires = (entry.options or {}).get("expires")
        if not row.by_hand and headers.expired(expires, row.due_at, now, self._config.zone):
            return "it expired before it was started"
        if str(entry.task) in self._app.tasks and not self._plan(row.entry, entry).recorded:
            # Nobody would settle its row, and each copy would run.
            return "its entry's task keeps no record of its runs any more"
        return None

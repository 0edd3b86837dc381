"""``celery beat -S pglock``: any number of beats, of which one sends.

The scheduler keeps nothing in memory or in a file that another beat would need: what was
sent, and what is due next, is in PostgreSQL. ``tick`` never blocks for long: a standby waits
at most a poll, a leader at most a quarter of its lease, so ``celery inspect ping`` is
answered by both.
"""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import billiard.process
import celery.beat
from typing_extensions import override

from celery_pglock import (
    agenda,
    beat_events,
    dispatch,
    errors,
    leadership,
    options,
    publishing,
    schedule_store,
    schedules,
    settings,
    startup,
)


class LeaderScheduler(celery.beat.Scheduler):
    """A scheduler that sends only while it leads.

    Start as many as you like, on as many machines as you like: ``celery beat -S pglock``, or
    ``celery worker -B --scheduler pglock``. One of them leads. When it dies another leads
    within a poll (``pglock_standby_poll``, 0.5 s); when it is stopped, at once; when it is
    frozen or cut off, within the lease (``pglock_leader_lease``, 10 s) and a poll.

    Every occurrence carries the instant at which it was due, which is the period under which
    a ``LockedTask`` is recorded. When the broker does not take a message it is kept and sent
    later; when the database is gone nothing is sent, and the process stays.
    """

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self._leadership: leadership.Leadership | None = None
        self._failure: BaseException | None = None
        self._busy = False
        self._closing = False
        self._standing = False
        self._complaint = ""
        self._complain_at = self._complain_every = 0.0
        # An embedded beat (worker -B) that outlives its worker would go on for ever.
        embedded = billiard.process.current_process().name == "Beat"
        self._parent = os.getppid() if embedded else None
        super().__init__(app, *args, **kwargs)

    @override
    def setup_schedule(self) -> None:
        """Read the schedule and check the set-up; nothing shared is written.

        Raises:
            SystemExit: with the sentence that says what to do.
        """
        # In this order: Celery's own drops backend_cleanup again when there are other entries.
        self.merge_inplace(self.app.conf.beat_schedule)
        self.install_default_entries(self.schedule)
        try:
            for name, entry in self.schedule.items():
                schedules.check(name, entry.schedule)
            startup.check_beat(self.app)
            startup.warn_of_shared_periods(
                self.app, {name: str(entry.task) for name, entry in self.schedule.items()}
            )
            config = settings.of(self.app)
            self._leadership = leadership.Leadership(
                config.target(),
                namespace=config.namespace,
                node=f"{socket.gethostname()}:{os.getpid()}",
                schema_name=config.schema,
                poll=config.standby_poll,
                lease=config.leader_lease,
            )
        except errors.PGLockError as error:
            raise SystemExit(f"celery-pglock: {error}") from None
        self._config = config
        self._publisher = publishing.Publisher(self.app, config.leader_lease / 4)
        self._agenda = agenda.Agenda(config.namespace)
        self._store = schedule_store.ScheduleStore(
            config.namespace, config.schema, self._leadership.execute
        )

        candidate = self._leadership
        self._dispatcher = dispatch.Dispatcher(
            candidate,
            self._agenda,
            self._store,
            self._publisher,
            lambda occurrence: self._publish(candidate, occurrence),
        )

    @property
    @override
    def info(self) -> str:
        """What the banner of ``celery beat`` says.

        Raises:
            SystemExit: a setting is wrong; the banner is the first to ask.
        """
        try:
            config = settings.of(self.app)
        except errors.ConfigurationError as error:
            raise SystemExit(f"celery-pglock: {error}") from None
        return f"    . namespace -> {config.namespace}, schema -> {config.schema}"

    @override
    def tick(self, *_: Any, **__: Any) -> float:
        """Do what is to be done now; return for how many seconds nothing will be.

        Raises:
            SystemExit: closing has begun, or the worker of an embedded beat has gone.
        """
        if self._closing or (self._parent is not None and os.getppid() != self._parent):
            raise SystemExit(0)
        assert self._leadership is not None  # noqa: S101 - only a lazy scheduler has none
        with self._working():
            if not self._leadership.leading:
                return self._stand(self._leadership)
            term = self._leadership.term or 0
            try:
                return self._dispatcher.work(float(self.max_interval or 300.0))
            except errors.LeadershipLost as lost:
                self._depose(self._leadership, term, lost.reason)
                return 0.0

    @override
    def close(self) -> None:
        """Resign, so that a standby leads at once; may be called twice, and is.

        Celery calls it inside the signal handler and again afterwards. When the signal struck
        in the middle of a statement or a publication, that one has to be left alone: then the
        first call only marks the end, and the second one, outside of it, resigns.
        """
        self._closing = True
        if self._busy:
            return
        # A second signal may strike while the first one's handler is resigning.
        with self._working():
            if self._leadership is not None:
                term = self._leadership.term
                if term is not None:
                    beat_events.resigned(self._leadership, term)
                self._leadership.resign()
            if self.__dict__.get("_publisher"):
                self._publisher.forget()

    @override
    def apply_async(
        self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any
    ) -> Any:
        """Send an entry's message; remember what went wrong, which ``apply_entry`` hides."""
        try:
            return super().apply_async(entry, producer=producer, advance=advance, **kwargs)
        except celery.beat.SchedulingError as error:
            self._failure = error.__context__ or error
            raise

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _stand(self, candidate: leadership.Leadership) -> float:
        try:
            elected = candidate.stand()
        except errors.PGLockError as error:
            self._complain(error)
            return 0.0
        self._complaint, self._complain_every = "", 0.0
        if elected is None:
            if not self._standing:
                self._standing = True
                beat_events.standing_by(candidate)
            return 0.0
        self._standing = False
        beat_events.gained(candidate, elected)
        try:
            self._take_over(candidate, elected)
        except errors.LeadershipLost as lost:
            self._depose(candidate, elected.term, lost.reason)
        return 0.0

    def _complain(self, error: errors.PGLockError) -> None:
        # It tries once a second; said again after 1, 2, 4 s, and then once a minute.
        now = time.monotonic()
        if str(error) != self._complaint or now >= self._complain_at:
            beat_events.unusable(error)
            self._complaint = str(error)
            self._complain_every = min(60.0, max(1.0, self._complain_every * 2))
            self._complain_at = now + self._complain_every

    def _depose(self, candidate: leadership.Leadership, term: int, reason: str) -> None:
        self._agenda.clear()
        beat_events.deposed(candidate, term, reason)

    def _take_over(self, candidate: leadership.Leadership, elected: leadership.Elected) -> None:
        """Plan all entries, send what was claimed before.

        Raises:
            LeadershipLost: it took too long, or the session ended.
        """

        def feed() -> None:
            if candidate.feed_in <= 0:
                candidate.confirm()

        registrations = self._agenda.take_over(
            (self._plan(name, entry) for name, entry in self.schedule.items()),
            self._store.load(),
            now=elected.at,
            after_downtime=self._was_down(elected),
            between=feed,
        )
        if registrations:
            self._store.register(registrations)
        self._dispatcher.begin()

    def _was_down(self, elected: leadership.Elected) -> bool:
        """Whether nobody led for longer than a take-over from a leader that hangs takes."""
        if elected.before is None:
            return False
        gap = elected.at - elected.before.last_tick_at
        # The last sign of life is up to a quarter of the lease older than the leader's end.
        take_over = 1.25 * self._config.leader_lease + 4 * self._config.standby_poll
        return gap.total_seconds() > take_over

    def _plan(self, name: str, entry: celery.beat.ScheduleEntry) -> agenda.Planned:
        zone = self._config.zone
        chosen = getattr(self.app.tasks.get(str(entry.task)), "_pglock_options", None)
        recorded, catchup = False, self._config.options["catchup"]
        if isinstance(chosen, options.Options):
            recorded = chosen.value("once_per", self._config.options) is not None
            catchup = chosen.value("catchup", self._config.options)
        return agenda.Planned(
            name=name,
            task=str(entry.task),
            text=schedules.canonical(entry.schedule, zone),
            schedule=lambda anchor: schedules.read(entry.schedule, zone, anchor),
            recorded=recorded,
            catchup=catchup,
        )

    def _publish(
        self, candidate: leadership.Leadership, occurrence: schedule_store.Occurrence
    ) -> BaseException | None:
        """Hand one message to the broker; return what went wrong, or None."""
        self._failure = None
        entry = copy.copy(self.schedule[occurrence.entry])
        given = entry.options or {}
        # A new dictionary each time: Celery writes into the headers that it is given, and
        # they belong to the configuration.
        entry.options = {
            **given,
            "task_id": occurrence.task_id,
            "retry": False,
            "headers": {
                **(given.get("headers") or {}),
                "pglock_job": f"{candidate.namespace}:{occurrence.entry}",
                "pglock_period": occurrence.period,
                "pglock_due": occurrence.period,
                "pglock_entry": occurrence.entry,
                "pglock_term": candidate.term,
                **({"pglock_late": True} if occurrence.late else {}),
            },
        }
        try:
            producer = self._publisher.producer()
        except Exception as error:  # noqa: BLE001 - each transport raises its own
            return error
        # As Sentry and OpenTelemetry expect it to be called.
        super().apply_entry(entry, producer=producer)
        return self._failure

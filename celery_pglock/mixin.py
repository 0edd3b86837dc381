"""The leader's gate over any scheduler of Celery beat.

::

    class S(LeaderMixin, DatabaseScheduler): ...

What the other scheduler is for stays its own: where entries come from, and what people see of
them. Whether and when a message is sent is decided here. A standby asks the scheduler for
nothing and has it write nothing; a leader computes due instants from the entries' schedules,
claims each occurrence, and tells the entry when its message has been handed over.

A scheduler whose own ``tick()`` finds what is due, in a store of its own, can only be gated:
see ``gated``.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import billiard.process
import celery.beat
from typing_extensions import override

from celery_pglock import (
    beat_events,
    beat_rows,
    checkins,
    elections,
    errors,
    gated,
    heartbeats,
    leadership,
    leading,
    publishing,
    schedules,
    settings,
    sources,
    standing,
    startup,
)

if TYPE_CHECKING:
    # The scheduler that comes after it in a class of the user's.
    _Scheduler = celery.beat.Scheduler
else:
    _Scheduler = object

# When a schedule that could not be read is asked for again, and after how many times in a row
# another beat may try.
_READ_AGAIN: Final = 1.0
_MOST_FAILURES: Final = 3


class LeaderMixin(_Scheduler):
    """Makes a scheduler send only while it leads; named before it among the bases.

    Start as many as you like, on as many machines as you like: one leads, the others stand by,
    and whoever takes over knows what was sent. Nothing of the scheduler is called in a standby;
    its ``setup_schedule()`` too is called by a leader only, at its first take-over.

    Attributes:
        own_tick: set it to True if the scheduler's own ``tick()`` is to find what is due. Then
            it is called while this beat leads, and that is all.
    """

    own_tick: ClassVar[bool | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._leadership: leadership.Leadership | None = None
        self._failure: BaseException | None = None
        self._busy = self._closing = False
        self._elected: elections.Elected | None = None
        self._gate: gated.Gate | None = None
        self._checkins = checkins.Opened()
        # An embedded beat (worker -B) that outlives its worker would go on for ever.
        embedded = billiard.process.current_process().name == "Beat"
        self._parent = os.getppid() if embedded else None
        super().__init__(*args, **kwargs)
        # redbeat's own lock would have a standby wait for its whole lease in `beat_init`.
        if getattr(self, "lock_key", None):
            self.lock_key = None

    @override
    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class in which another scheduler comes first, whose beats would all send.

        Raises:
            TypeError: it does.
        """
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[: cls.__mro__.index(LeaderMixin)]:
            if issubclass(base, celery.beat.Scheduler) and not issubclass(base, LeaderMixin):
                msg = (
                    f"LeaderMixin has to come before {base.__name__} among the bases of "
                    f"{cls.__name__}, or each beat would send"
                )
                raise TypeError(msg)

    def on_takeover(self) -> None:
        """Forget what the scheduler keeps in memory of its store; a hook.

        Another beat has led in the meantime. Called by a beat that has just been elected, before
        it reads the schedule; and after the schedule could not be read. What it raises is told,
        and all is tried again.
        """
        self._heap = self.old_schedulers = None

    @override
    def setup_schedule(self) -> None:
        """Check the set-up; nothing shared is written.

        Raises:
            SystemExit: with the sentence that says what to do.
        """
        configured = self._configured()
        try:
            own_tick = gated.has_own_tick(type(self), LeaderMixin, chosen=self.own_tick)
            for name, entry in configured.items():
                schedules.check(name, entry.schedule)
            startup.check_beat(self.app)
            startup.warn_of_shared_periods(
                self.app, {name: str(entry.task) for name, entry in configured.items()}
            )
            config = settings.of(self.app)
            candidate = self._leadership = leadership.Leadership(
                config.target(),
                namespace=config.namespace,
                node=f"{socket.gethostname()}:{os.getpid()}",
                schema_name=config.schema,
                poll=config.standby_poll,
                lease=config.leader_lease,
            )
        except errors.PGLockError as error:
            raise SystemExit(f"celery-pglock: {error}") from None
        self._publisher = publishing.Publisher(self.app, config.leader_lease / 4)
        self._publisher.load()
        self._leading = leading.Leading(
            app=self.app,
            config=config,
            candidate=candidate,
            schedule=configured,
            hand_over=self._hand_over,
            publisher=self._publisher,
            sent=self._sent,
            ended=self._find_ended,
        )
        candidate.fingerprint = self._leading.fingerprint()
        self._source = sources.Source(
            read=lambda: self.schedule,
            forget=self.on_takeover,
            set_up=self._set_up,
            reserve=self.reserve if self._notes_runs() else None,
            zone=config.zone,
        )
        self._gate = gated.Gate(candidate, config, super().tick) if own_tick else None
        self._heartbeat = heartbeats.Heartbeat(config.heartbeat_file)
        self._standing = standing.Standing(candidate, self._heartbeat)

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
        ours = f"    . namespace -> {config.namespace}, schema -> {config.schema}"
        return "\n".join(filter(None, (ours, super().info)))

    @override
    def tick(self, *_: Any, **__: Any) -> float:
        """Do what is to be done now; return for how many seconds nothing will be.

        Raises:
            SystemExit: closing has begun, or the worker of an embedded beat has gone.
        """
        if self._closing or (self._parent is not None and os.getppid() != self._parent):
            raise SystemExit(0)
        candidate = self._leadership
        assert candidate is not None  # noqa: S101 - only a lazy scheduler has none
        with self._working():
            if not candidate.leading and (elected := self._standing.stand()) is not None:
                self._elected = elected
            if not candidate.leading:
                return 0.0
            term = candidate.term or 0
            try:
                rest = self._lead(candidate)
                if (why := self._wants_to_resign(candidate)) is not None:
                    return self._hand_on(candidate, why)
            except errors.LeadershipLost as lost:
                self._depose(candidate, term, lost.reason)
                return 0.0
            self._heartbeat.beat()
            return rest

    @override
    def should_sync(self) -> bool:
        """Whether it is time to write back; not in the middle of a batch of messages."""
        return not self._busy and super().should_sync()

    @override
    def sync(self) -> None:
        """Have the scheduler write back what it keeps of its entries, if this beat leads."""
        candidate = self._leadership
        if candidate is None or not candidate.leading:
            return
        term = candidate.term or 0
        with self._working():
            try:
                self._write_back()
            except errors.LeadershipLost as lost:
                self._depose(candidate, term, lost.reason)
            except Exception as error:  # noqa: BLE001 - whatever its store raises
                self._source.trouble.of(error)

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
                if self._leadership.leading:
                    self._source.tell()
                    self.sync()
                if (term := self._leadership.term) is not None:
                    beat_events.resigned(self._leadership, term)
                self._leadership.resign()
            if self.__dict__.get("_publisher"):
                self._publisher.forget()
            super().close()

    @override
    def apply_async(
        self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any
    ) -> Any:
        """Send an entry's message; remember what went wrong, which ``apply_entry`` hides."""
        if self._gate is not None:
            self._gate.pass_through()
        try:
            return super().apply_async(entry, producer=producer, advance=advance, **kwargs)
        except celery.beat.SchedulingError as error:
            self._failure = error.__context__ or error
            raise

    def _configured(self) -> Mapping[str, celery.beat.ScheduleEntry]:
        """Return the entries of the configuration, by which two beats are compared."""
        return {
            name: celery.beat.ScheduleEntry(**{**fields, "name": name, "app": self.app})
            for name, fields in self.app.conf.beat_schedule.items()
        }

    def _set_up(self) -> None:
        """Have the scheduler set itself up, which may write what is shared."""
        super().setup_schedule()

    def _notes_runs(self) -> bool:
        """Whether the scheduler keeps somewhere when its entries were sent."""
        return True

    def _write_back(self) -> None:
        """Have the scheduler write back what it keeps of its entries."""
        super().sync()

    def _feed(self) -> None:
        """Feed the lease, in the middle of what takes long.

        Raises:
            LeadershipLost: this beat does not lead any more.
        """
        if self._leadership is not None:
            self._leadership.feed()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _lead(self, candidate: leadership.Leadership) -> float:
        if self._elected is not None:
            return self._take_over(candidate, self._elected)
        at_most = float(self.max_interval or 300.0)
        if self._gate is not None:
            return self._gate.work(at_most)
        if self._source.look(at_most):
            self._leading.take_up(self._source.entries)
            self._source.settle(self._leading.exhausted())
        rest = self._leading.work(at_most)
        self._source.tell()
        return rest

    def _take_over(self, candidate: leadership.Leadership, elected: elections.Elected) -> float:
        if not self._source.take_over(reads=self._gate is None):
            candidate.listen()
            candidate.feed()
            return _READ_AGAIN
        self._elected = None
        if self._gate is not None:
            self._gate.begin()
            return 0.0
        self._leading.take_up(self._source.entries)
        self._leading.begin(elected)
        self._source.settle(self._leading.exhausted())
        return 0.0

    def _sent(self, occurrence: beat_rows.Occurrence) -> None:
        self._checkins.forget(occurrence.task_id)
        self._source.sent(occurrence.entry)

    def _find_ended(self, name: str) -> celery.beat.ScheduleEntry | None:
        try:
            return self._ended_entry(name)
        except Exception as error:  # noqa: BLE001 - whatever its store raises
            self._source.trouble.of(error)
            assert self._leadership is not None  # noqa: S101 - a leader asks
            # Nobody knows what is to become of its row. The next leader asks again.
            raise self._leadership.lose("an entry of its scheduler could not be read") from None

    def _ended_entry(self, name: str) -> celery.beat.ScheduleEntry | None:
        """Return an entry that is not in the schedule any more because it was sent, or None."""
        del name
        return None

    def _wants_to_resign(self, candidate: leadership.Leadership) -> str | None:
        unread = self._source.unread
        if unread >= _MOST_FAILURES and candidate.has_standby():
            return f"the schedule could not be read {unread} times in a row"
        return self._leading.wants_to_resign()

    def _hand_on(self, candidate: leadership.Leadership, why: str) -> float:
        self.sync()
        beat_events.handed_on(candidate, candidate.term or 0, why)
        candidate.stand_back()
        self._end()
        return 0.0

    def _depose(self, candidate: leadership.Leadership, term: int, reason: str) -> None:
        self._end()
        beat_events.deposed(candidate, term, reason)

    def _end(self) -> None:
        self._elected = None
        self._leading.end()
        self._source.end()
        self._checkins.clear()

    def _hand_over(
        self, scheduled: celery.beat.ScheduleEntry, task_id: str, ours: Mapping[str, Any]
    ) -> BaseException | None:
        """Hand the message of an entry to the broker; return what went wrong, or None."""
        self._failure = None
        # Not by `copy.copy`: an entry of another scheduler is not made of what Celery's is.
        entry: Any = object.__new__(type(scheduled))
        vars(entry).update(vars(scheduled))
        given = entry.options or {}
        # A new dictionary each time: Celery writes into the headers that it is given, and
        # they belong to the configuration.
        entry.options = {
            **given,
            "task_id": task_id,
            "retry": False,
            "headers": {**(given.get("headers") or {}), **ours},
        }
        try:
            producer = self._publisher.producer()
        except Exception as error:  # noqa: BLE001 - each transport raises its own
            return error
        # As Sentry and OpenTelemetry expect it to be called. OpenTelemetry leaves the span of a
        # message that is not taken behind, and what comes after it would be a part of that.
        contextvars.copy_context().run(super().apply_entry, entry, producer=producer)
        self._checkins.opened(task_id, entry.options["headers"])
        return self._failure

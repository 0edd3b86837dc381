"""The schedulers that are compared, each driven in a process of its own.

All of them have the same entries, each due once a day, and a burst is that all of them fall due
at one instant. What is needed to make them due is not measured.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import datetime as dt
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

import celery
import celery.beat
import psycopg
from typing_extensions import override

from celery_pglock import LockedTask, beat
from tests.benchmarks.measuring import memory

TASK: Final = "bench.job"
# A broker may be one that others use too.
QUEUE: Final = f"pglock-bench-{os.getpid()}"
DAY: Final = 86400.0
# Between the election and the instant at which all entries are due, so that they are planned.
TAKE_OVER: Final = 2.0
MARGIN: Final = 0.05


class TooLongError(BaseException):
    """The time for it is over; not an Exception, which schedulers catch."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End what is done in here, after so many seconds, with `TooLongError`."""

    def end(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a scheduler keeps its entries and sends its messages."""

    database: str
    broker: str
    entries: int


class Subject(abc.ABC):
    """A scheduler over so many entries."""

    def __init__(self, place: Place) -> None:
        logging.disable(logging.WARNING)
        self.place = place
        app: Any = celery.Celery("bench", broker=place.broker, set_as_current=False)
        app.conf.update(
            pglock_database_url=place.database,
            pglock_retention=None,
            pglock_rescue_sent_after=None,
            pglock_rescue_lost_after=None,
            redbeat_redis_url=place.broker,
            task_default_queue=QUEUE,
            result_expires=None,
            beat_schedule=self.configured(),
        )
        app.task(base=LockedTask, name=TASK, shared=False)(_job)
        app.finalize()
        self.app = app
        self.scheduler: Any = None

    def configured(self) -> dict[str, Any]:
        """Return the entries, by name."""
        return {
            f"entry-{number}": {"task": TASK, "schedule": DAY, "args": [number]}
            for number in range(self.place.entries)
        }

    def start(self, limit: float) -> float | None:
        """Start and be ready to send; return how many seconds that took, None: too many."""
        self.close()
        begun = time.perf_counter()
        with contextlib.suppress(TooLongError), at_most(limit):
            self.make()
            return time.perf_counter() - begun
        return None

    def idle(self, ticks: int, limit: float) -> list[float]:
        """Return how long each of so many ticks takes that have nothing to do."""
        times: list[float] = []
        until = time.perf_counter() + limit
        while len(times) < ticks and (begun := time.perf_counter()) < until:
            self.scheduler.tick()
            times.append(time.perf_counter() - begun)
        return times

    def burst(self, limit: float) -> tuple[int, float]:
        """Have everything fall due, and send it for so long; how many messages, and seconds."""
        self.purge()
        self.make_due()
        begun = time.perf_counter()
        with contextlib.suppress(TooLongError), at_most(limit):
            self.send()
        seconds = time.perf_counter() - begun
        return self.purge(), seconds

    def memory(self) -> int:
        """Return how many KiB this process has."""
        return memory()

    def purge(self) -> int:
        """Empty the queue; return how many messages were in it."""
        with self.app.connection_for_write() as connection:
            queue = self.app.amqp.queues[QUEUE](connection.default_channel)
            queue.declare()
            return int(queue.purge() or 0)

    def leave(self) -> None:
        """Close, and leave nothing at the broker."""
        self.close()
        with self.app.connection_for_write() as connection:
            self.app.amqp.queues[QUEUE](connection.default_channel).delete()

    def close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
            self.scheduler = None

    @abc.abstractmethod
    def make(self) -> None:
        """Make the scheduler, up to where it would sleep until something is due."""

    @abc.abstractmethod
    def make_due(self) -> None:
        """Make everything due."""

    def send(self) -> None:
        """Send what is due."""
        for _ in range(self.place.entries):
            self.scheduler.tick()


class Leader(Subject):
    """`-S pglock`."""

    @override
    def make(self) -> None:
        self.scheduler = beat.LeaderScheduler(self.app)
        while not self.scheduler._leadership.leading:  # noqa: SLF001
            self.scheduler.tick()
        self.scheduler.tick()

    @override
    def make_due(self) -> None:
        self.close()
        wait = TAKE_OVER + self.place.entries / 5000
        with psycopg.connect(self.place.database, autocommit=True) as connection:
            connection.execute(
                "update pglock.beat_entries set next_due_at = statement_timestamp()"
                " + make_interval(secs => %s)",
                [wait],
            )
        due = time.monotonic() + wait + MARGIN
        self.make()
        while time.monotonic() < due - 1:
            self.scheduler.tick()
            time.sleep(0.1)
        # No tick just before, which would begin to send.
        time.sleep(max(0.0, due - time.monotonic()))

    @override
    def send(self) -> None:
        while self.scheduler.tick() == 0:
            pass


class Stock(Subject):
    """Celery's own, which keeps its entries in a file."""

    _store: tempfile.TemporaryDirectory[str] | None = None

    @override
    def make(self) -> None:
        if self._store is None:
            self._store = tempfile.TemporaryDirectory(prefix="pglock-bench-")
        name = str(Path(self._store.name) / "schedule")
        self.scheduler = celery.beat.PersistentScheduler(self.app, schedule_filename=name)
        self.scheduler.tick()

    @override
    def make_due(self) -> None:
        past = self.app.now() - dt.timedelta(days=2)
        for entry in self.scheduler.schedule.values():
            entry.last_run_at = past
        # The first tick sees that the entries have changed, and would take the time.
        self.scheduler.old_schedulers = dict(self.scheduler.schedule)
        self.scheduler.populate_heap()


class Redbeat(Subject):
    """celery-redbeat, with its lock and its defaults."""

    @override
    def make(self) -> None:
        import redbeat.schedulers  # type: ignore[import-untyped]

        module: Any = redbeat.schedulers
        module.get_redis(self.app).delete("redbeat::lock")
        self.scheduler = module.RedBeatScheduler(self.app)
        module.acquire_distributed_beat_lock(sender=SimpleNamespace(scheduler=self.scheduler))
        self._date(module, self.app.now())
        self.scheduler.tick()

    @override
    def make_due(self) -> None:
        import redbeat.schedulers

        self._date(redbeat.schedulers, self.app.now() - dt.timedelta(days=2))

    @override
    def send(self) -> None:
        # It sends whatever is due in one tick.
        self.scheduler.tick()

    def _date(self, module: Any, moment: dt.datetime) -> None:
        """Write when all entries ran last: one that has never run would be due at once."""
        with module.get_redis(self.app).pipeline() as pipe:
            meta = module.json.dumps({"last_run_at": moment}, cls=module.RedBeatJSONEncoder)
            for name in self.app.conf.beat_schedule:
                key = self.app.redbeat_conf.key_prefix + name
                pipe.hset(key, "meta", meta)
                pipe.zadd(self.app.redbeat_conf.schedule_key, {key: moment.timestamp() + DAY})
            pipe.execute()


class DjangoBeat(Subject):
    """django-celery-beat, with its entries made beforehand, as an administrator makes them."""

    @override
    def configured(self) -> dict[str, Any]:
        import django
        from django.conf import settings

        where = urlsplit(self.place.database)
        settings.configure(
            INSTALLED_APPS=["django_celery_beat"],
            DATABASES={
                "default": {
                    "ENGINE": "django.db.backends.postgresql",
                    "NAME": where.path.removeprefix("/"),
                    "USER": where.username,
                    "HOST": where.hostname,
                    "PORT": where.port,
                }
            },
            USE_TZ=True,
            DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        )
        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        from django_celery_beat import models  # type: ignore[import-untyped]

        tables: Any = models
        every = tables.IntervalSchedule.objects.create(every=1, period="days")
        tables.PeriodicTask.objects.bulk_create(
            [
                tables.PeriodicTask(
                    name=f"entry-{number}",
                    task=TASK,
                    args=f"[{number}]",
                    interval=every,
                    last_run_at=dt.datetime.now(dt.UTC),
                )
                for number in range(self.place.entries)
            ]
        )
        tables.PeriodicTasks.update_changed()
        return {}

    @override
    def make(self) -> None:
        from django_celery_beat.schedulers import (  # type: ignore[import-untyped]
            DatabaseScheduler,
        )

        self.scheduler = DatabaseScheduler(self.app)
        self.scheduler.tick()

    @override
    def make_due(self) -> None:
        from django_celery_beat import models

        tables: Any = models
        past = dt.datetime.now(dt.UTC) - dt.timedelta(days=2)
        tables.PeriodicTask.objects.update(last_run_at=past)
        tables.PeriodicTasks.update_changed()
        # What it has in memory would be written over that.
        self.scheduler._dirty.clear()  # noqa: SLF001
        self.scheduler.old_schedulers = dict(self.scheduler.schedule)
        self.scheduler.populate_heap()


class Loop(Subject):
    """No scheduler: `send_task` in a bare loop over one producer."""

    @override
    def configured(self) -> dict[str, Any]:
        return {}

    @override
    def make(self) -> None:
        pass

    @override
    def make_due(self) -> None:
        pass

    @override
    def send(self) -> None:
        with self.app.amqp.Producer(self.app.connection_for_write()) as producer:
            for number in range(self.place.entries):
                self.app.send_task(TASK, args=[number], producer=producer)


KINDS: Final[dict[str, type[Subject]]] = {
    "celery-pglock": Leader,
    "stock": Stock,
    "redbeat": Redbeat,
    "django-celery-beat": DjangoBeat,
    "send_task in a loop": Loop,
}


class Child:
    """The subject of this process, as it is told what to do from another one."""

    subject: ClassVar[Subject]

    @classmethod
    def make(cls, kind: str, place: Place) -> None:
        cls.subject = KINDS[kind](place)

    @classmethod
    def call(cls, method: str, *args: Any) -> Any:
        act: Callable[..., Any] = getattr(cls.subject, method)
        return act(*args)


def _job(_: int) -> None:
    """Never run here."""

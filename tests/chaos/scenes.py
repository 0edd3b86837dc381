"""A scene: a few actors, a few messages, one thing that happens at a certain moment."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import psycopg
import redis

from celery_pglock.demo.servers import children
from tests.chaos import gathering
from tests.chaos.evidence import EPOCH, Evidence, Limits, Period
from tests.chaos.history import Event
from tests.chaos.sender import Sender
from tests.chaos.stage import Actor, Stage, until
from tests.chaos.strikes import Harm
from tests.chaos.watch import Watch

_PATIENCE: Final = 60.0
_CONSTRAINT: Final = b"job_runs_job_period_key"


class Scene:
    """One scene on a stage whose servers run; the traces of the one before are removed.

    Args:
        stage: with no actors.
        connection: to the history.
        without: the rule that the workers lack; nothing, for how it should be.
        limits: for the checker.

    Attributes:
        without: as given.
        limits: as given.
    """

    def __init__(
        self,
        stage: Stage,
        connection: psycopg.Connection[Any],
        without: str,
        limits: Limits | None = None,
    ) -> None:
        self.without = without
        self.limits = limits or Limits()
        self._stage = stage
        self._reset(connection)
        self._watch = Watch(connection)
        self._sender = Sender(stage, self._watch)
        self._sent: set[Period] = set()
        self._numbers = itertools.count(1)
        self._anchors: Mapping[str, dt.datetime] = {}
        self._resigned = EPOCH

    def _reset(self, connection: psycopg.Connection[Any]) -> None:
        stage = self._stage
        connection.execute("TRUNCATE history, effects, counters RESTART IDENTITY")
        with gathering.connect(stage) as database:
            database.execute(
                "TRUNCATE pglock.job_runs, pglock.beat_entries, pglock.beat_terms, effects, counters"
            )
            database.execute(
                b"ALTER TABLE pglock.job_runs DROP CONSTRAINT IF EXISTS " + _CONSTRAINT
            )
            if self.without != "unique":
                database.execute(
                    b"ALTER TABLE pglock.job_runs ADD CONSTRAINT "
                    + _CONSTRAINT
                    + b" UNIQUE (job, period)"
                )
        with redis.Redis.from_url(stage.broker.url()) as broker:
            broker.flushall()
        for file in stage.events.iterdir():
            file.unlink()

    def close(self) -> None:
        """End everybody."""
        for actor in self._stage.actors:
            if actor.process is not None:
                actor.process.kill(group=True)
        self._stage.actors.clear()
        self._sender.close()

    # --- actors and messages --------------------------------------------------------------------

    def worker(self, *arguments: str, version: int = 1) -> Actor:
        """Start a worker with two children, and wait until it takes messages."""
        worker = self._stage.worker(
            *arguments, concurrency=2, version=version, without=self.without
        )
        self._stage.start(worker)
        self._stage.wait_until_ready([worker], _PATIENCE)
        return worker

    def beat(self, scheduler: str) -> Actor:
        """Start a beat."""
        beat = self._stage.beat(scheduler)
        self._stage.start(beat)
        return beat

    def send(
        self, job: str, task: str = "own", *, to: Actor | None = None, **kwargs: Any
    ) -> Period:
        """Send a message for the next period of a job."""
        period = Period(f"chaos:{job}", str(next(self._numbers)))
        self.send_again(period, task, to=to, **kwargs)
        return period

    def send_again(
        self, period: Period, task: str = "own", *, to: Actor | None = None, **kwargs: Any
    ) -> None:
        """Send another message for a period."""
        self._sent.add(period)
        headers = {"pglock_job": period.job, "pglock_period": period.label, "pglock_fixed": True}
        queue = None if to is None else to.name
        assert self._sender.send(task, headers, kwargs=kwargs, queue=queue)

    def open(self, gate: str) -> None:
        """Let the bodies go on that wait at a gate."""
        (self._stage.events / gate).touch()

    # --- waiting ----------------------------------------------------------------------------------

    def wait(
        self, kind: str, count: int = 1, patience: float = _PATIENCE, **fields: object
    ) -> list[Event]:
        """Wait until there are so many events of a kind; return those that there are then."""

        def found() -> list[Event]:
            return [
                event
                for event in self._watch.events
                if event.kind == kind
                and all(getattr(event, name) == value for name, value in fields.items())
            ]

        self.come(lambda: len(found()) >= count, patience)
        return found()

    def come(self, condition: Any, patience: float = _PATIENCE) -> bool:
        """Wait for something; return whether it came."""

        def looked() -> Any:
            self._watch.look()
            return condition()

        return until(looked, patience, 0.02)

    def quiet(self, patience: float = _PATIENCE) -> bool:
        """Wait until no message is left and nobody works."""
        return self.come(
            lambda: not gathering.messages(self._stage) and not self._watch.working, patience
        )

    # --- what happens -----------------------------------------------------------------------------

    def kill(self, pid: int) -> None:
        """Kill a process."""
        with self._struck("kill", "death", [pid]):
            children.send(pid, signal.SIGKILL)
            until(lambda: not children.alive(pid), 5.0)
        self._watch.forget({pid})

    def end_session(self, pid: int) -> None:
        """End the session of a run in a process."""
        with (
            self._struck("end session", "session", [pid]),
            gathering.connect(self._stage) as database,
        ):
            ended = database.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE %s AND application_name NOT LIKE 'pglock:idle%%'",
                [f"pglock:%:{pid}"],
            ).fetchall()
            assert ended == [(True,)], ended

    @contextlib.contextmanager
    def _struck(self, fault: str, harm: Harm, victims: Collection[int]) -> Iterator[None]:
        number = next(self._numbers)
        detail = {"id": number, "fault": fault, "harm": harm, "victims": list(victims)}
        self._stage.scribe.tell("strike", detail=detail)
        yield
        self._stage.scribe.tell("over", detail={"id": number})

    # --- the end ------------------------------------------------------------------------------------

    def remember_anchors(self) -> None:
        """Take what falls due from now on for what has to be run."""
        self.come(lambda: gathering.anchors(self._stage))
        self._anchors = gathering.anchors(self._stage)

    def stop_beats(self) -> None:
        """Stop the beats."""
        self._stage.stop(self._stage.beats)
        self._resigned = gathering.resigned_at(self._stage) or EPOCH

    def evidence(self, patience: float = _PATIENCE) -> Evidence:
        """Wait until it is quiet, for so long at most; stop everybody and gather."""
        self.quiet(patience)
        self._stage.stop(self._stage.actors)
        time.sleep(0.05)
        return gathering.gather(
            self._stage,
            anchors=self._anchors,
            until_due=self._resigned - dt.timedelta(seconds=1) if self._anchors else EPOCH,
            by_hand=self._sent,
            limits=self.limits,
        )


@contextlib.contextmanager
def on(stage: Stage, without: str, limits: Limits | None = None) -> Iterator[Scene]:
    """Set a scene."""
    with psycopg.connect(stage.witness.url(), autocommit=True) as connection:
        scene = Scene(stage, connection, without, limits)
        try:
            yield scene
        finally:
            scene.close()

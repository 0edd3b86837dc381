"""One run: start everybody, hurt them by the plan, heal, wait for the books, gather the evidence."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import time
from collections.abc import Callable
from typing import Any, Final

import psycopg
import redis

from tests.chaos import gathering, plan
from tests.chaos.deeds import Deeds
from tests.chaos.evidence import Evidence, Limits
from tests.chaos.sender import Sender
from tests.chaos.stage import Actor, Stage, until
from tests.chaos.watch import Watch

_STEP: Final = 0.03
# A message that was lost with four of its copies is sent again after 15 s, doubled four times.
_SETTLE: Final = 300.0
_FAR: Final = 2
_NEVER: Final = 86400.0

#: Entries of the schedule: name to task, seconds and arguments.
ENTRIES: Final[dict[str, dict[str, Any]]] = {
    **{f"own{number}": {"task": "own", "schedule": 1.0} for number in range(3)},
    **{f"atomic{number}": {"task": "atomic", "schedule": 1.0} for number in range(2)},
    **{f"early{number}": {"task": "early", "schedule": 1.0} for number in range(2)},
    **{
        f"shared{number}": {
            "task": "own",
            "schedule": 1.0,
            "kwargs": {"share": "chaos:shared", "seconds": 0.1},
        }
        for number in range(2)
    },
    "fragile": {"task": "fragile", "schedule": 1.0},
    "checking": {"task": "own", "schedule": 1.0, "kwargs": {"check": True}},
    "twice a second": {"task": "own", "schedule": 0.5, "kwargs": {"seconds": 0.05}},
}

_OPEN: Final = b"""
SELECT count(*) FROM pglock.job_runs
WHERE status IN ('sent', 'running', 'retrying')
"""
_UNSETTLED: Final = b"""
SELECT row_to_json(r)::text FROM pglock.job_runs r
WHERE status IN ('sent', 'running', 'retrying') ORDER BY due_at
"""

#: Beside what is promised, a busy machine has some seconds.
LIMITS: Final = Limits(window=plan.LOST_AFTER + 2.0, takeover=plan.LEASE + 5.0)


def people(stage: Stage, without: str = "") -> list[plan.Kind]:
    """Put three beats and three workers on a stage; return what cannot be done to them here.

    Args:
        stage: with its servers running.
        without: a rule of the package that the workers lack (``without``).
    """
    for number in range(3):
        stage.beat(far=number == _FAR)
    for number in range(3):
        stage.worker(far=number == _FAR).without = without
    impossible: list[plan.Kind] = []
    if stage.namespace is None:
        impossible.append("drop packets")
    if stage.clock is None:
        impossible.append("step clock")
    return impossible


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """What a run was, beside its evidence.

    Attributes:
        done: how many faults were done.
        dropped: those that found no occasion.
        fallen: who has ended without being hurt.
        settled: whether all that was open ended in time.
        seconds: how long it took.
    """

    evidence: Evidence
    done: int
    dropped: list[plan.Fault]
    fallen: list[str]
    settled: bool
    seconds: float


class Conductor:
    """Plays a plan on a stage.

    Args:
        stage: with its servers running, and its actors not yet.
        say: told of each phase, in a sentence.
        limits: for the checker.
    """

    def __init__(self, stage: Stage, say: Callable[[str], None], limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._stage = stage
        self._say = say
        self._began = time.monotonic()

    def perform(self, faults: list[plan.Fault], seconds: float) -> Performance:
        """Play it, and return what is left of it."""
        with (
            psycopg.connect(self._stage.witness.url(), autocommit=True) as connection,
            contextlib.closing(Sender(self._stage, watch := Watch(connection))) as sender,
        ):
            self._watch, self._sender = watch, sender
            self._deeds = Deeds(self._stage, watch, sender)
            self._start()
            self._hurt(faults, seconds)
            self._heal()
            resigned = self._resign()
            settled = self._settle()
            evidence = gathering.gather(
                self._stage,
                anchors=self._anchors,
                # What fell due in the last second may not have been sent by the last leader.
                until_due=resigned - dt.timedelta(seconds=1),
                by_hand=sender.sent,
                limits=self._limits,
            )
        return Performance(
            evidence=evidence,
            done=self._deeds.done,
            dropped=self._deeds.dropped,
            fallen=self._deeds.fallen,
            settled=settled,
            seconds=time.monotonic() - self._began,
        )

    def _start(self) -> None:
        stage = self._stage
        stage.start(*stage.actors)
        stage.wait_until_ready(stage.actors)
        self._look(lambda: self._watch.leader and gathering.anchors(stage), 60.0)
        # Those of the beginning: they must not move.
        self._anchors = gathering.anchors(stage)
        self._look(lambda: self._watch.done, 30.0)
        self._say(f"{len(stage.beats)} beats and {len(stage.workers)} workers are at work")

    def _hurt(self, faults: list[plan.Fault], seconds: float) -> None:
        planned = list(faults)
        began = time.monotonic()
        minute = 60.0
        while (elapsed := time.monotonic() - began) < seconds:
            due = [fault for fault in planned if fault.at <= elapsed]
            planned = planned[len(due) :]
            self._watch.look()
            self._sender.step()
            self._deeds.step(due)
            if elapsed > minute:
                self._say(f"{self._deeds.done} faults, {self._watch.done} runs done")
                minute += 60.0
            time.sleep(_STEP)
        self._deeds.step(planned)

    def _heal(self) -> None:
        self._deeds.heal()
        dropped = ", ".join(sorted({fault.kind for fault in self._deeds.dropped}))
        self._say(
            f"{self._deeds.done} faults done, {len(self._deeds.dropped)} found no occasion"
            f"{f': {dropped}' if dropped else ''}"
        )

    def _resign(self) -> dt.datetime:
        """Stop the beats, the one that leads at last; return up to when it did."""
        stage = self._stage
        if not self._look(lambda: gathering.caught_up(stage), _SETTLE):
            self._say("the beats have not caught up")
        for _ in range(3):
            stage.stop([beat for beat in stage.beats if not self._leads(beat)])
            stage.stop(stage.beats)
            if (resigned := gathering.resigned_at(stage)) is not None:
                return resigned
            # The one that led could not say so any more.
            stage.start(stage.beats[0])
            self._look(lambda: self._leads(stage.beats[0]), _SETTLE)
        raise AssertionError("no beat has resigned")

    def _leads(self, beat: Actor) -> bool:
        return beat.process is not None and beat.process.pid == self._watch.leader

    def _settle(self) -> bool:
        """Have a beat that sends again what was lost, and nothing new, until all is settled."""
        stage = self._stage
        beat = stage.beats[0]
        stage.start_with(
            beat, {name: {**entry, "schedule": _NEVER} for name, entry in stage.entries.items()}
        )
        settled = self._look(lambda: not self._open(), _SETTLE)
        stage.stop([beat])
        settled = (
            self._look(lambda: not gathering.messages(stage) and not self._open(), 60.0) and settled
        )
        stopped = stage.stop(stage.workers)
        self._say("what was due is settled" if settled else f"not settled: {self._unsettled()}")
        if not stopped:
            self._say("some workers did not stop in time")
        return settled

    # --- looking ------------------------------------------------------------------------------

    def _look(self, condition: Callable[[], object], patience: float) -> bool:
        def met() -> object:
            self._watch.look()
            self._sender.repeat()
            try:
                return condition()
            except (psycopg.Error, redis.RedisError):
                return False

        return until(met, patience, 0.1)

    def _open(self) -> int:
        with gathering.connect(self._stage) as connection:
            ((count,),) = connection.execute(_OPEN).fetchall()
        return int(count) + len(self._sender.open)

    def _unsettled(self) -> str:
        with gathering.connect(self._stage) as connection:
            rows = [str(row) for (row,) in connection.execute(_UNSETTLED)]
        by_hand = [f"{period.job} {period.label}" for period in self._sender.open]
        return "\n".join([*rows[:10], *by_hand[:10]])

"""The story: carries the plot out on the cast, a step at a time, and remembers what it did."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final

import celery

from celery_pglock.demo import app as application
from celery_pglock.demo import books, cast, observer, plot

# Longer than two steps are apart, so that no moment is passed over.
_NEAR: Final = 0.2


@dataclasses.dataclass(slots=True)
class Deeds:
    """What was done to the cast.

    Attributes:
        leader_kills: when a leader was killed, by the server's clock.
        beats: how many beats were killed, leaders or not.
        workers: how many workers were killed with their pools.
        processes: how many processes of a pool were killed.
        doubles: how many messages were sent a second time.
    """

    leader_kills: list[dt.datetime] = dataclasses.field(default_factory=list)
    beats: int = 0
    workers: int = 0
    processes: int = 0
    doubles: int = 0


@dataclasses.dataclass(slots=True)
class _Pending:
    """A fault whose time has come; that of a worker waits until somebody begins to write."""

    fault: plot.Fault
    victim: observer.Attempt | None = None
    strike_at: float = 0.0


class Story:
    """Does what is due of the plot whenever ``step`` is called.

    Args:
        faults: the plot.
        company: the cast.
        eyes: what the story knows of the cast's doings.
        say: told what was just done, in a sentence.

    Attributes:
        deeds: what was done so far.
    """

    def __init__(
        self,
        faults: Sequence[plot.Fault],
        company: cast.Cast,
        eyes: observer.Observer,
        say: Callable[[str], None],
    ) -> None:
        self.deeds = Deeds()
        self._planned = list(faults)
        self._pending: list[_Pending] = []
        self._absent: list[tuple[float, cast.Actor]] = []
        self._company = company
        self._eyes = eyes
        self._say = say
        self._sender = celery.Celery("sender", broker=company.broker_url, set_as_current=False)
        self._seen = max((attempt.id for attempt in eyes.attempts()), default=0)
        self._began = time.monotonic()

    def close(self) -> None:
        """Close the connection to the broker."""
        self._sender.close()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def step(self) -> None:
        """Start again who has been away for long enough, and let happen what is due."""
        self._bring_back(time.monotonic())
        begun = self._eyes.attempts(self._seen)
        if begun:
            self._seen = begun[-1].id
        while self._planned and self._planned[0].at <= self.elapsed:
            self._pending.append(_Pending(self._planned.pop(0)))
        self._pending = [pending for pending in self._pending if not self._happens(pending, begun)]

    def end(self) -> None:
        """Drop what has found no occasion, and start everybody who is away."""
        self._planned, self._pending = [], []
        self._bring_back(float("inf"))

    def _bring_back(self, now: float) -> None:
        for back_at, actor in list(self._absent):
            if back_at <= now:
                self._absent.remove((back_at, actor))
                actor.start()

    def _happens(self, pending: _Pending, begun: Sequence[observer.Attempt]) -> bool:
        match pending.fault.kind:
            case "leader":
                return self._kill_beat(pending.fault)
            case "leader at work":
                return self._catch_sending(pending.fault) and self._kill_beat(pending.fault)
            case "double afterwards":
                return self._send_again("done")
            case "double while it runs":
                return bool(begun) and self._send_again("running")
            case "worker" | "process":
                return self._strike(pending, begun)

    def _catch_sending(self, fault: plot.Fault) -> bool:
        """Wait for the moment if it is near: an occurrence is due, and on its way."""
        scheduled = self._eyes.scheduled()
        if scheduled is None:
            return True
        since_due = (self._eyes.now() - scheduled.anchor).total_seconds() % books.EVERY
        left = fault.into + books.EVERY - since_due
        if left > _NEAR:
            return False
        time.sleep(left)
        return True

    def _kill_beat(self, fault: plot.Fault) -> bool:
        if self._company.guarded:
            leader = self._eyes.leader()
            beat = leader and next(
                (beat for beat in self._company.beats if beat.alive and beat.pid == leader.pid),
                None,
            )
            if not leader or not beat:
                return False
            which = f"{beat.name}, which leads in term {leader.term}"
            if fault.kind == "leader at work":
                which += f", {fault.into * 1000:.0f} ms after an occurrence was due"
            self.deeds.leader_kills.append(self._eyes.now())
        else:
            alive = [beat for beat in self._company.beats if beat.alive]
            if not alive:
                return False
            beat = alive[int(fault.choice * len(alive))]
            which = beat.name
        beat.kill()
        self.deeds.beats += 1
        self._say(f"kill -9 {which}; back in {fault.absent:.1f} s")
        self._leave(beat, fault)
        return True

    def _strike(self, pending: _Pending, begun: Sequence[observer.Attempt]) -> bool:
        """Kill a writer in the middle; False when that is still to come."""
        fault = pending.fault
        if pending.victim is None:
            if begun:
                pending.victim = begun[int(fault.choice * len(begun))]
                pending.strike_at = time.monotonic() + fault.into - pending.victim.age
            return False
        if time.monotonic() < pending.strike_at:
            return False
        victim, pending.victim = pending.victim, None
        worker = self._company.owner(victim.pid)
        if worker is None:  # it was killed by another fault
            return False
        what = f"{victim.period:%H:%M:%S} being written since {fault.into:.2f} s"
        if fault.kind == "worker":
            worker.kill()
            self.deeds.workers += 1
            self._say(f"kill -9 {worker.name} with its pool, {what}; back in {fault.absent:.1f} s")
            self._leave(worker, fault)
        else:
            os.kill(victim.pid, signal.SIGKILL)
            self.deeds.processes += 1
            self._say(f"kill -9 process {victim.pid} of {worker.name}'s pool, {what}")
        return True

    def _leave(self, actor: cast.Actor, fault: plot.Fault) -> None:
        self._absent.append((time.monotonic() + fault.absent, actor))

    def _send_again(self, status: str) -> bool:
        """Send an occurrence a second time: the same headers, another task id."""
        headers: dict[str, str | int] = {}
        which = "the message of this moment"
        if self._company.guarded:
            occurrence = self._eyes.occurrence(status)
            if occurrence is None:
                return False
            headers = {
                "pglock_job": occurrence.job,
                "pglock_period": occurrence.period,
                "pglock_due": occurrence.period,
                "pglock_entry": occurrence.entry,
                "pglock_term": occurrence.term,
            }
            which = f"{occurrence.due:%H:%M:%S}, which is {status},"
        task_id = str(uuid.uuid4())
        self._sender.send_task(application.TASK, task_id=task_id, headers=headers, retry=False)
        self.deeds.doubles += 1
        self._say(f"send {which} a second time, as task {task_id[:8]}")
        return True

"""What is done to beats and workers: killed, stopped, frozen, and started again."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable
from typing import Final

from typing_extensions import override

from celery_pglock.demo.servers import children
from tests.chaos import plan
from tests.chaos.hurting import Hurting
from tests.chaos.stage import Actor, until

# Seconds: a worker that is asked to stop does so in this time, or is killed.
_STOPPED: Final = 10.0


class HurtsProcesses(Hurting):
    """Does it to the actors of the stage."""

    @override
    def _revive(self) -> None:
        """Start again, as a service manager does, who has ended for a reason of his own."""
        for actor in self.stage.actors:
            if actor.process is None or actor.leaving or actor.alive:
                continue
            # Its children may have ended with it, before anybody looked.
            pids = {
                event.pid
                for event in self.watch.events
                if event.who == actor.name and event.mono >= actor.since
            } | {actor.process.pid, *actor.pids()}
            fault = plan.Fault(0.0, "kill worker", 0, 0.0, 0.0)
            number = self.strike(fault, "death", pids, late=True)
            for pid in actor.pids():
                children.send(pid, signal.SIGKILL)
            self.fallen.append(f"{actor.name}: {children.tail(actor.process.output_file, 1)}")
            self.watch.forget(pids)
            self.over(number)
            self.stage.start(actor)

    def _kill(self, fault: plan.Fault, pids: Collection[int], *, leader: bool = False) -> None:
        number = self.strike(fault, "death", pids, leader=leader)
        for pid in pids:
            children.send(pid, signal.SIGKILL)
        until(lambda: not any(children.alive(pid) for pid in pids), 5.0, 0.005)
        self.watch.forget(set(pids))
        self.over(number)

    def kill_child(self, fault: plan.Fault) -> bool:
        pid = self._child(fault)
        if pid:
            self._kill(fault, [pid])
        return bool(pid)

    def kill_parent(self, fault: plan.Fault) -> bool:
        """The children live on for a while: they are dead when the last of them is."""
        actor = self._pick(self.stage.workers, fault)
        if actor is None or actor.process is None:
            return False
        pids = actor.pids()
        number = self.strike(fault, "death", pids)
        actor.process.kill()

        def buried() -> bool:
            if left := actor.pids():
                for pid in left:
                    # Those that are frozen cannot see that their parent has gone.
                    children.send(pid, signal.SIGKILL if pid in self.frozen else signal.SIGCONT)
                return False
            self.watch.forget(set(pids))
            self.over(number)
            self.stage.start(actor)
            return True

        actor.leaving = True
        self.after(fault.lasts, buried)
        return True

    def kill_worker(self, fault: plan.Fault) -> bool:
        return self._kill_actor(fault, self._pick(self.stage.workers, fault))

    def kill_leader(self, fault: plan.Fault) -> bool:
        return self._kill_actor(fault, self._leader(), leader=True)

    def kill_standby(self, fault: plan.Fault) -> bool:
        return self._kill_actor(fault, self._pick(self._standbys(), fault))

    def _kill_actor(self, fault: plan.Fault, actor: Actor | None, *, leader: bool = False) -> bool:
        if actor is None or not (pids := actor.pids()):
            return False
        self._kill(fault, pids, leader=leader)
        actor.leaving = True
        self.after(fault.lasts, lambda: self.stage.start(actor))
        return True

    def stop_worker(self, fault: plan.Fault) -> bool:
        """A rolling deploy: stopped in the friendly way, and started with other lock names."""
        actor = self._pick(self.stage.workers, fault)
        if actor is not None:
            actor.version = 3 - actor.version
        return self._stop_actor(fault, actor)

    def stop_leader(self, fault: plan.Fault) -> bool:
        return self._stop_actor(fault, self._leader())

    def _stop_actor(self, fault: plan.Fault, actor: Actor | None) -> bool:
        if actor is None or actor.process is None:
            return False
        process = actor.process
        number = self.strike(fault, "none", [process.pid])
        process.terminate()
        actor.leaving = True
        deadline = time.monotonic() + _STOPPED

        def stopped() -> bool:
            if process.running() and time.monotonic() < deadline:
                return False
            if left := actor.pids():
                self._kill(fault, left)
            process.wait()
            self.over(number)
            self.stage.start(actor)
            return True

        self.after(0.05, stopped)
        return True

    def freeze_child(self, fault: plan.Fault) -> bool:
        pid = self._child(fault)
        return bool(pid) and self._freeze(fault, [pid])

    def freeze_worker(self, fault: plan.Fault) -> bool:
        actor = self._pick(self.stage.workers, fault)
        return actor is not None and self._freeze(fault, actor.pids())

    def freeze_leader(self, fault: plan.Fault) -> bool:
        actor = self._leader()
        return actor is not None and self._freeze(fault, actor.pids(), leader=True)

    def freeze_standby(self, fault: plan.Fault) -> bool:
        actor = self._pick(self._standbys(), fault)
        return actor is not None and self._freeze(fault, actor.pids())

    def _freeze(self, fault: plan.Fault, pids: Collection[int], *, leader: bool = False) -> bool:
        if not pids or self.frozen & set(pids):
            return False
        number = self.strike(fault, "freeze", pids, leader=leader)
        self.frozen |= set(pids)
        for pid in pids:
            children.send(pid, signal.SIGSTOP)

        def thaw() -> None:
            for pid in pids:
                children.send(pid, signal.SIGCONT)
            self.frozen -= set(pids)
            self.over(number)

        self.after(fault.lasts, thaw)
        return True

    def _pick(self, actors: Iterable[Actor], fault: plan.Fault) -> Actor | None:
        fit = [
            actor
            for actor in actors
            if actor.alive and not actor.leaving and not self.frozen & set(actor.pids())
        ]
        return fit[fault.index % len(fit)] if fit else None

    def _leader(self) -> Actor | None:
        leading = [
            beat
            for beat in self.stage.beats
            if beat.process is not None and beat.process.pid == self.watch.leader
        ]
        return self._pick(leading, plan.Fault(0.0, "kill leader", 0, 0.0, 0.0))

    def _standbys(self) -> list[Actor]:
        return [
            beat
            for beat in self.stage.beats
            if beat.process is not None and beat.process.pid != self.watch.leader
        ]

    def _child(self, fault: plan.Fault) -> int:
        """Return a child that is at work; when nobody is, wait for the moment."""
        mine = {pid for actor in self.stage.workers if not actor.leaving for pid in actor.pids()}
        fit = [
            begin.pid
            for begin in self.watch.at_work(fault.into)
            if begin.pid in mine and begin.pid not in self.frozen
        ]
        return fit[fault.index % len(fit)] if fit else 0

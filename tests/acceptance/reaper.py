"""Kills the processes of runs at random moments, until every period has an end."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence

from tests.acceptance.bench import NAMESPACE, Bench
from tests.support.processes import Process, eventually

PROCESSES = 4
# "failed" without "exhausted" is open to the next delivery.
_ENDED = "status = 'done' OR status = 'failed' AND reason = 'exhausted'"


class Reaper:
    """Kills the processes of runs, each at a random moment, and now and then a whole worker."""

    def __init__(self, bench: Bench, rng: random.Random, app: str = "tests.apps.tasks") -> None:
        self._bench = bench
        self._rng = rng
        self._app = app
        self.workers: list[Process] = [self._start_worker() for _ in range(2)]
        bench.expect(*self.workers)
        # When the process of a claim is to be killed.
        self._due: dict[tuple[str, int], tuple[float, int]] = {}
        self.killed: list[tuple[str, int]] = []
        self.workers_killed = 0

    def _start_worker(self) -> Process:
        return self._bench.start_worker(concurrency=PROCESSES, app=self._app)

    def look(self) -> None:
        """Give each run that has begun a moment to be killed at; kill whose moment it is."""
        now = time.monotonic()
        query = "SELECT job, attempts, node FROM pglock.job_runs WHERE status = 'running'"
        for job, attempts, node in self._bench.database.rows(query):
            claim = (job, attempts)
            if claim in self._due:
                continue
            pid = int(re.fullmatch(r".*:(\d+)", node)[1])  # type: ignore[index]
            # The first attempt of each period, and some of the later ones.
            wanted = attempts == 1 or self._rng.random() < 0.5
            delay = self._rng.uniform(0, 0.25) if wanted else float("inf")
            self._due[claim] = (now + delay, pid)
        for claim, (moment, pid) in list(self._due.items()):
            if moment <= now:
                self._due[claim] = (float("inf"), pid)
                self._kill(claim, pid)

    def _kill(self, claim: tuple[str, int], pid: int) -> None:
        for number, worker in enumerate(self.workers):
            if pid in worker.children():
                if len(self.killed) % 30 == 20:
                    worker.kill(group=True)
                    self.workers_killed += 1
                    self.workers[number] = self._start_worker()
                else:
                    self._bench.kill(pid)
                self.killed.append(claim)
                return

    def work(
        self, keys: Sequence[str], send: Callable[[str], object], *, patience: float, told: str
    ) -> list[str]:
        """Send a message for each key, and reap until each has an end; return who was sent again.

        kombu takes a message out of Redis before it notes that it has it: a worker that is killed
        in between takes it along. A leader would send it again; here there is none.
        """
        for key in keys:
            send(key)
        sent_again: list[str] = []
        quiet_since = time.monotonic()

        def settled() -> bool:
            nonlocal quiet_since
            self.look()
            query = f"SELECT job FROM pglock.job_runs WHERE {_ENDED}"  # noqa: S608
            ends = {job for (job,) in self._bench.database.rows(query)}
            if self._bench.messages() or self._bench.locks():
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > 5 and len(ends) < len(keys):
                for key in keys:
                    if f"{NAMESPACE}:{key}" not in ends:
                        sent_again.append(key)
                        send(key)
                quiet_since = time.monotonic()
            return len(ends) == len(keys)

        eventually(settled, patience, f"every period has an end ({told})", interval=0.005)
        # At most one for each worker: it takes them out one by one.
        assert len(sent_again) <= self.workers_killed, sent_again
        return sent_again

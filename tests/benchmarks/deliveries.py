"""(a) From the sender and back: a message through Redis, a worker, its guard, and the result.

Each message is sent when the result of the one before has come, to a worker with one process.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

from celery_pglock import migrating
from tests.benchmarks import tasks
from tests.benchmarks.measuring import Figures, Ground, in_turn, own_database, summary
from tests.benchmarks.processes import celery

PATIENCE = 30.0


def measure(ground: Ground) -> Figures:
    samples = ground.few(300, 10)
    ground.say(f"(a) end to end, {samples} messages of each")
    broker, locks = ground.redis_database(4), ground.redis_database(5)
    with own_database(ground.server) as url, celery() as start:
        migrating.migrate(url)
        env = {tasks.DATABASE: url, tasks.BROKER: broker, tasks.LOCKS: locks}
        arguments = ("worker", "-c", "1", "-n", "bench@here", "-l", "INFO", "--without-gossip")
        worker = start("-A", "tests.benchmarks.worker", *arguments, env=env)
        bench = tasks.application(url, broker, locks)
        worker.wait_for("ready.")
        acts = {name: _sent(task) for name, task in bench.tasks.items()}
        times = in_turn(acts, samples, ground.random, warm_up=5, at_once=5)
        bench.app.close()
        worker.stop()
    return {name: summary(taken) for name, taken in times.items()}


def _sent(task: Any) -> Callable[[int], None]:
    def call(number: int) -> None:
        due = dt.datetime.now(dt.UTC).isoformat()
        headers = {"pglock_job": f"bench:{task.name}", "pglock_due": due, "pglock_entry": task.name}
        result = task.apply_async((number,), headers=headers)
        if result.get(timeout=PATIENCE, interval=0.001) != number:
            raise RuntimeError(result)

    return call

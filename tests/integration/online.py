"""The processes of `test_online_migration`: claimers of this release, and a migrator of the next.

What the next release brings is made up: two steps behind those that there are. Only the migrator
knows of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import sys
import threading
import time
import uuid
from typing import Final

from celery_pglock import (
    attempts,
    claims,
    execution,
    keys,
    ledger,
    migrating,
    schema,
    sessions,
    stacks,
)

COLUMN: Final = schema.Migration(
    9001,
    "9001_urgency",
    "ALTER TABLE {schema}.job_runs ADD COLUMN urgency integer NOT NULL DEFAULT 7,\n"
    " ADD CONSTRAINT job_runs_urgency_check CHECK (urgency >= 0) NOT VALID;\n",
)
INDEX: Final = schema.Migration(
    9002,
    "9002_task_idx",
    "-- concurrently\n"
    "DROP INDEX CONCURRENTLY IF EXISTS {schema}.job_runs_task_idx;\n"
    "CREATE INDEX CONCURRENTLY job_runs_task_idx ON {schema}.job_runs (task, started_at);\n",
)
STEPS: Final = {step.name: step for step in (COLUMN, INDEX)}
_PAUSE: Final = 0.005  # between two claims: not to measure how busy the processors are


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claiming:
    """What a claimer is to do."""

    url: str
    level: sessions.Level
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Migrating:
    """What a migrator is to do."""

    url: str
    steps: list[str]
    lock_timeout: str = "50ms"


def work(node: str, number: int) -> claims.Work:
    period = f"{node}-{number:06}"
    return claims.Work(
        job="online:job",
        period=period,
        name=node,
        name_key=keys.from_name("online", "task", node),
        run_key=keys.of_run("online", "online:job", period),
        task="online",
        node=node,
    )


def executor(url: str, level: sessions.Level) -> execution.Executor:
    plan = sessions.Plan(target=url, level=level, application="pglock:claimer")
    return execution.Executor(
        stack=stacks.Stack(plan),
        records=ledger.Ledger(),
        terms=attempts.Terms(
            classify=lambda error: claims.Verdict(status="failed", reason=repr(error))
        ),
    )


def claim(orders: Claiming) -> list[float]:
    """Run one period after the other until SIGTERM, and return how long each claim took.

    At transaction level: each run, whose body does nothing.
    """
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    runner, records = executor(orders.url, orders.level), ledger.Ledger()
    session = runner.stack.take() if orders.level == "session" else None
    times = []
    print("claiming", flush=True)
    for number in itertools.count():
        if stop.wait(_PAUSE):
            break
        wanted = work(orders.node, number)
        begun = time.perf_counter()
        if session is None:
            answer: object = runner.execute(wanted, lambda _: None)
            times.append(time.perf_counter() - begun)
            done = isinstance(answer, attempts.Ran)
        else:
            fence = uuid.uuid4()
            answer = records.claim(session, wanted, claim=fence)
            times.append(time.perf_counter() - begun)
            done = records.settle(session, wanted, fence, "done")
        if not done:
            raise AssertionError(answer)
    # What this release checks at its start, it finds in the tables of the next one.
    schema.verify(orders.url)
    return times


def migrate(orders: Migrating) -> list[str]:
    steps = (*schema.migrations(), *(STEPS[name] for name in orders.steps))
    schema.migrations = lambda: steps  # type: ignore[assignment] # without its cache
    migrating._LOCK_TIMEOUT = orders.lock_timeout  # type: ignore[misc] # noqa: SLF001 - the control's
    return migrating.migrate(orders.url)


if __name__ == "__main__":
    what, given = sys.argv[1], json.loads(sys.argv[2])
    result: object = claim(Claiming(**given)) if what == "claim" else migrate(Migrating(**given))
    print(f"result: {json.dumps(result)}", flush=True)

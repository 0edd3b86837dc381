"""(c) How late an occurrence is sent that falls due after the leader was killed.

Two beats, an entry that is due each second, and SIGKILL for the one that leads, at a random moment.
All are measured alike, at the broker: when the next message comes, minus when it should have come,
a second after the last one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from collections.abc import Callable
from typing import Any, Final

import redis

from celery_pglock import migrating
from tests.benchmarks.measuring import Figures, Ground, own_database, summary
from tests.benchmarks.processes import Process, celery

EVERY: Final = 1.0
QUEUE: Final = "bench"
LOCK: Final = f"{QUEUE}::lock"


@dataclasses.dataclass(frozen=True)
class Contender:
    """A scheduler whose leader is killed.

    Attributes:
        module: the application's.
        scheduler: what `-S` is given.
        leads: what a beat writes when it has begun to lead.
        stands_by: what it writes before, or instead.
        settings: of the application.
    """

    module: str
    scheduler: str
    leads: str
    stands_by: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


OURS: Final = "celery-pglock, defaults"
FAST: Final = "redbeat, fastest"
DEFAULT: Final = "redbeat, defaults"
_REDBEAT: Final = Contender(
    "tests.apps.redbeat_app", "redbeat.RedBeatScheduler", "Acquired lock", "beat: Starting"
)
CONTENDERS: Final = {
    OURS: Contender("tests.apps.beat_app", "pglock", "leadership gained", "standby: "),
    # Its lock is taken for five times its longest sleep, which is one second at the least for an
    # entry that is due each second: less, and a tick that takes its time loses a lock that is held.
    FAST: dataclasses.replace(
        _REDBEAT, settings={"beat_max_loop_interval": 1, "redbeat_lock_timeout": 5}
    ),
    DEFAULT: _REDBEAT,
}


def measure(ground: Ground) -> Figures:
    trials = {OURS: ground.few(20, 1), FAST: ground.few(6, 1), DEFAULT: ground.few(1, 0)}
    found: Figures = {}
    for name, count in trials.items():
        ground.say(f"(c) {name}: {count} kills")
        patience = ground.few(60, 10)
        found[name] = _kills(ground, CONTENDERS[name], count, patience)
    return found


def _kills(ground: Ground, contender: Contender, count: int, patience: float) -> Figures:
    late: list[float] = []
    waited: list[float] = []
    expiries: list[float] = []
    broker = ground.redis_database(12)
    # Its own limit would end a wait that is meant to be longer.
    client = redis.Redis.from_url(broker, socket_timeout=None)
    client.flushdb()
    with own_database(ground.server) as url, celery() as start:
        migrating.migrate(url)

        def beat() -> Process:
            return start(
                *("-A", contender.module, "beat", "-S", contender.scheduler, "-l", "INFO"),
                *("--pidfile=", "-s", os.devnull),
                env=_environment(url, broker, contender.settings),
            )

        leader = beat()
        leader.wait_for(contender.leads)
        for _ in range(count):
            standby = beat()
            standby.wait_for(contender.stands_by)
            silence = _silence(client, leader, ground.random, patience)
            if silence is None:
                waited.append(patience)
                expiries.append(client.pttl(LOCK) / 1000)
                break
            late.append(max(0.0, silence - EVERY))
            standby.wait_for(contender.leads)
            leader = standby
    client.flushdb()
    client.close()
    return {
        "lateness": {**summary(late), "all": [round(each, 3) for each in late]} if late else None,
        "waited in vain": waited,
        "lock still held for": expiries,
    }


def _silence(
    client: redis.Redis, leader: Process, order: random.Random, patience: float
) -> float | None:
    """Kill the leader; return for how many seconds nothing was sent, None: for too many."""
    next_message: Callable[[float], float | None] = lambda limit: _message(client, limit)  # noqa: E731
    while next_message(0.01) is not None:
        pass
    if (last := next_message(30)) is None:
        raise TimeoutError("the leader sends nothing")
    pause = time.monotonic() + order.uniform(0.0, EVERY)
    while (left := pause - time.monotonic()) > 0:
        last = next_message(left) or last
    leader.kill()
    # What it had sent, and nobody has taken out yet.
    while (sent := next_message(0.005)) is not None:
        last = sent
    come = next_message(patience)
    return None if come is None else come - last


def _message(client: redis.Redis, limit: float) -> float | None:
    """Take a message out; return when it came, None: none did."""
    # Redis takes 0 for: without a limit.
    answer: Any = client.blpop([QUEUE], timeout=max(0.005, limit))
    return None if answer is None else time.monotonic()


def _environment(url: str, broker: str, settings: dict[str, Any]) -> dict[str, str]:
    return {
        "APP_DATABASE_URL": url,
        "APP_BROKER_URL": broker,
        "APP_NAMESPACE": "bench",
        "APP_QUEUE": QUEUE,
        "APP_ENTRIES": json.dumps({"each second": EVERY}),
        "APP_SETTINGS": json.dumps(settings),
    }

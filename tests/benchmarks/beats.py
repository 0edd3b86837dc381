"""(b) Schedulers with few and with many entries: start, idle ticks, a burst, memory.

Each has a process of its own and waits while another has its turn: so whatever else the machine
does strikes them alike.
"""

from __future__ import annotations

import contextlib
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

import kombu

from celery_pglock import migrating
from tests.benchmarks import schedulers
from tests.benchmarks.measuring import Figures, Ground, apart, own_database, summary

OURS: Final = "celery-pglock"
STOCK: Final = "stock"
REDBEAT: Final = "redbeat"
DJANGO: Final = "django-celery-beat"
LOOP: Final = "send_task in a loop"

# The size at which bursts are compared, in rounds.
COMPARED: Final = 10_000
# Entries, and who gets them: with 100,000 the others do not start in the time there is.
SIZES: Final = (100, 1_000, COMPARED, 100_000)
LARGEST_OF_PEERS: Final = {STOCK: 100_000, REDBEAT: 10_000, DJANGO: 10_000, LOOP: 100_000}

# Measured too where it is there.
RABBITMQ: Final = "amqp://guest:guest@127.0.0.1:5672//"

# Seconds that a start, the idle ticks of a turn, and a burst may take. The burst of a scheduler that
# sends one message after the other, at one rate, may be cut short; redbeat first loads all of it.
START: Final = 45.0
IDLE: Final = 1.0
BURST: Final = 30.0
CUT: Final = {STOCK: 6.0, DJANGO: 6.0}


def measure(ground: Ground) -> Figures:
    """Return the figures by number of entries and scheduler."""
    sizes = (20, 100) if ground.quick else SIZES
    compared = 100 if ground.quick else COMPARED
    found: Figures = {"compared": compared, "sizes": {}, "cut": CUT}
    for size in sizes:
        kinds = [kind for kind in schedulers.KINDS if size <= LARGEST_OF_PEERS.get(kind, size)]
        ground.say(f"(b) {size:,} entries: {', '.join(kinds)}")
        rounds = ground.few(1 if size > compared else 3 if size == compared else 2, 1)
        found["sizes"][str(size)] = _of_size(ground, size, kinds, rounds)
    if not ground.quick and _answers(RABBITMQ):
        ground.say(f"(b) {compared:,} entries, on RabbitMQ: {OURS}, {LOOP}")
        found["rabbitmq"] = _of_size(ground, compared, [OURS, LOOP], 3, RABBITMQ)
    return found


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), kombu.Connection(url, connect_timeout=2) as connection:
        connection.connect()
        return True
    return False


def _of_size(
    ground: Ground, size: int, kinds: list[str], rounds: int, broker: str | None = None
) -> Figures:
    with contextlib.ExitStack() as stack:
        children: dict[str, ProcessPoolExecutor] = {}
        found: Figures = {}
        for number, kind in enumerate(kinds):
            url = stack.enter_context(own_database(ground.server))
            migrating.migrate(url)
            place = schedulers.Place(url, broker or ground.redis_database(6 + number), size)
            children[kind] = stack.enter_context(apart())
            children[kind].submit(schedulers.Child.make, kind, place).result()
            before = _told(children[kind], "memory")
            first = _told(children[kind], "start", START)
            found[kind] = {
                "first start": first,
                "memory": _told(children[kind], "memory") - before,
                "starts": [],
                "idle": [],
                "bursts": [],
            }
        for _ in range(rounds):
            for kind in ground.random.sample(kinds, len(kinds)):
                if found[kind]["first start"] is not None:
                    _turn(children[kind], found[kind], kind, ground)
        for child in children.values():
            _told(child, "leave")
    return {kind: _figures(of_kind) for kind, of_kind in found.items()}


def _turn(child: ProcessPoolExecutor, found: Figures, kind: str, ground: Ground) -> None:
    if kind != LOOP:
        found["starts"].append(_told(child, "start", START))
        found["idle"] += _told(child, "idle", ground.few(2000, 20), IDLE)
    found["bursts"].append(_told(child, "burst", CUT.get(kind, BURST)))


def _told(child: ProcessPoolExecutor, method: str, *args: Any) -> Any:
    return child.submit(schedulers.Child.call, method, *args).result()


def _figures(found: Figures) -> Figures:
    starts = [seconds for seconds in found["starts"] if seconds is not None]
    rates = [messages / seconds for messages, seconds in found["bursts"]]
    return {
        "first start": found["first start"],
        "start": summary(starts) if starts else None,
        "memory": found["memory"],
        "idle": summary(found["idle"]) if found["idle"] else None,
        "sent": [messages for messages, _ in found["bursts"]],
        "rates": [float(f"{rate:.4g}") for rate in rates],
        "rate": float(f"{statistics.median(rates):.4g}") if rates else None,
    }

"""What the parts share: where they measure, in turn, in processes of their own, and quantiles."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

SERVER: Final = os.environ.get("PGLOCK_TEST_URL", "postgresql://postgres@127.0.0.1:5432/postgres")

P = ParamSpec("P")
T = TypeVar("T")

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the parts are measured on.

    Attributes:
        server: a PostgreSQL; the URL of a role that may create databases.
        redis: a server that speaks Redis's protocol; the URL without a database number.
        quick: everything small and few: it shows that it works, not how fast.
        random: from which the order of turns is drawn.
        say: tells what is being done.
    """

    server: str
    redis: str
    quick: bool
    random: random.Random
    say: Callable[[str], None]

    def redis_database(self, number: int) -> str:
        return f"{self.redis}/{number}"

    def few(self, many: int, quick: int) -> int:
        """Return how many of something are made: what counts, or what shows that it works."""
        return quick if self.quick else many


def quantile(times: Sequence[float], percent: int) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[percent - 1]


def summary(times: Sequence[float]) -> Figures:
    """Return n, median, 99 % and the longest, rounded to what can be told apart."""
    if len(times) < 2:
        times = [*times, *times]
        return {"n": len(times) // 2, **dict.fromkeys(("p50", "p99", "max"), times[0])}
    return {
        "n": len(times),
        "p50": float(f"{quantile(times, 50):.4g}"),
        "p99": float(f"{quantile(times, 99):.4g}"),
        "max": float(f"{max(times):.4g}"),
    }


def in_turn(
    acts: Mapping[str, Callable[[int], object]],
    samples: int,
    order: random.Random,
    *,
    warm_up: int = 50,
    at_once: int = 10,
) -> dict[str, list[float]]:
    """Return how long each act took, each time.

    They take turns of a few calls each, in another order each time, so that whatever else the
    machine does strikes them alike.

    Args:
        acts: what is done, by name; given a number that no other call of it is given.
        samples: how many times each.
        order: from which the order of the turns is drawn.
        warm_up: how many calls of each are made before.
        at_once: how many calls make a turn.
    """
    times: dict[str, list[float]] = {name: [] for name in acts}
    for act in acts.values():
        for number in range(warm_up):
            act(number)
    clock = time.perf_counter
    for first in range(warm_up, warm_up + samples, at_once):
        for name in order.sample(list(acts), len(acts)):
            act, taken = acts[name], times[name]
            for number in range(first, min(first + at_once, warm_up + samples)):
                begun = clock()
                act(number)
                taken.append(clock() - begun)
    return times


@contextlib.contextmanager
def apart() -> Iterator[ProcessPoolExecutor]:
    """Start a process with nothing of this one in it; what is given to it is done there."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        yield process


def alone(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a process of its own."""
    with apart() as process:
        return process.submit(act, *args, **kwargs).result()


def memory(pid: int | str = "self", kind: str = "Rss") -> int:
    """Return how many KiB of memory a process has."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:  # noqa: PTH123 - not a file
        return sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


@contextlib.contextmanager
def own_database(server: str) -> Iterator[str]:
    """Make a database and return its URL; it is dropped at the end."""
    name = f"pglock_bench_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    try:
        yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
    finally:
        with psycopg.connect(server, autocommit=True) as admin:
            drop = sql.SQL("drop database {} with (force)")
            admin.execute(drop.format(sql.Identifier(name)))

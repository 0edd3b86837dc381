"""How fast a leader sends what is due at once, and what it costs when nothing is.

`python -m tests.benchmarks.bursts` lets a leader send an occurrence of each of 10,000 entries,
and in turn with it sends as many messages with `send_task` in a bare loop over one producer: so
whatever else the machine does strikes both. The rates are compared, never taken for themselves.
Then it compares what a tick with nothing to do costs with few and with many entries.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import statistics
import time
import uuid
from collections.abc import Iterator
from typing import Any, Final

import celery
import psycopg

from celery_pglock import LockedTask, beat, schema
from celery_pglock.demo.servers import ValkeyServer
from tests.benchmarks.measuring import SERVER, own_database, quantile

RABBITMQ: Final = "amqp://guest:guest@127.0.0.1:5672//"
TASK: Final = "bench.job"
# From the election until all entries are planned.
TAKE_OVER: Final = 2.0


def job(_: int) -> None:
    """Never run here."""


class Subject:
    """A leader over so many entries, driven tick by tick in this process."""

    def __init__(self, url: str, broker: str, entries: int) -> None:
        self.url = url
        self.entries = entries
        self.queue = f"bench-{uuid.uuid4()}"
        app: Any = celery.Celery(f"bench{entries}", broker=broker, set_as_current=False)
        self.app = app
        self.app.conf.update(
            pglock_database_url=url,
            pglock_retention=None,
            pglock_rescue_sent_after=None,
            pglock_rescue_lost_after=None,
            task_default_queue=self.queue,
            result_expires=None,
            beat_schedule={
                f"entry-{number}": {"task": TASK, "schedule": 86400.0, "args": [number]}
                for number in range(entries)
            },
        )
        self.app.task(base=LockedTask, name=TASK, shared=False)(job)
        self.app.finalize()
        self.scheduler: Any = None

    def lead(self) -> float:
        """Take over; return how long it took from the election on."""
        self.scheduler = beat.LeaderScheduler(self.app)
        begun = time.perf_counter()
        while not self.scheduler._leadership.leading:  # noqa: SLF001
            begun = time.perf_counter()
            self.scheduler.tick()
        return time.perf_counter() - begun

    def burst(self) -> float:
        """Have all entries fall due at one instant; return how many are sent in a second."""
        self.close()
        wait = TAKE_OVER + self.entries / 5000
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(
                "update pglock.beat_entries set next_due_at = clock_timestamp()"
                " + make_interval(secs => %s) where namespace = %s",
                [wait, self.app.main],
            )
        self.lead()
        while (rest := self.scheduler.tick()) > 0:
            time.sleep(min(rest, 0.01))
        begun = time.perf_counter()
        while self.scheduler.tick() == 0:
            pass
        seconds = time.perf_counter() - begun
        with psycopg.connect(self.url) as connection:
            row = connection.execute(
                "select count(*) from pglock.beat_entries where namespace = %s"
                " and due_at is not null and published_at is not null",
                [self.app.main],
            ).fetchone()
        if row is None or row[0] != self.entries:
            raise RuntimeError(row)
        return self.entries / seconds

    def bare(self) -> float:
        """Send as many messages in a loop; return how many are sent in a second."""
        with self.app.amqp.Producer(self.app.connection_for_write()) as producer:
            self.app.send_task(TASK, args=[0], producer=producer)
            begun = time.perf_counter()
            for number in range(self.entries):
                self.app.send_task(TASK, args=[number], producer=producer)
            return self.entries / (time.perf_counter() - begun)

    def messages(self) -> int:
        with self.app.connection_for_write() as connection:
            return int(connection.default_channel.queue_purge(self.queue) or 0)

    def idle(self, ticks: int) -> list[float]:
        """Return how long each of so many ticks takes that have nothing to do, in seconds."""
        times: list[float] = []
        for _ in range(ticks):
            begun = time.perf_counter()
            self.scheduler.tick()
            times.append(time.perf_counter() - begun)
        return times

    def close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
            self.scheduler = None


def bursts(url: str, broker: str, entries: int, rounds: int) -> None:
    subject = Subject(url, broker, entries)
    subject.lead()
    print(f"\n{broker.partition(':')[0]}: {entries:,} messages, {rounds} rounds in turn (1/s)")
    print(f"{'leader':>10}{'send_task':>12}{'ratio':>8}")
    ratios = []
    for _ in range(rounds):
        led = subject.burst()
        sent = subject.messages()
        bare = subject.bare()
        looped = subject.messages()
        if (sent, looped) != (entries, entries + 1):
            raise RuntimeError(sent, looped)
        ratios.append(led / bare)
        print(f"{led:>10,.0f}{bare:>12,.0f}{led / bare:>8.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}")
    subject.close()


def idle(url: str, broker: str, sizes: list[int], ticks: int) -> None:
    subjects = [Subject(url, broker, size) for size in sizes]
    took = [subject.lead() for subject in subjects]
    for subject in subjects:
        subject.idle(1)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(100):
        for subject in subjects:
            times[subject.entries] += subject.idle(ticks // 100)
    print(f"\na tick with nothing to do, {ticks} each, in turn (µs)")
    print(f"{'entries':>10}{'p50':>8}{'p99':>8}{'p50 ratio':>11}{'take-over s':>13}")
    base = quantile(times[sizes[0]], 50)
    for subject, seconds in zip(subjects, took, strict=True):
        p50, p99 = (quantile(times[subject.entries], percent) * 1e6 for percent in (50, 99))
        print(
            f"{subject.entries:>10,}{p50:>8.1f}{p99:>8.1f}{p50 / base / 1e6:>11.2f}{seconds:>13.2f}"
        )
        subject.close()


@contextlib.contextmanager
def migrated(server: str) -> Iterator[str]:
    with own_database(server) as url:
        schema.migrate(url)
        yield url


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bursts")
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--ticks", type=int, default=20_000)
    parser.add_argument("--broker", choices=["redis", "rabbitmq"], nargs="*", default=["redis"])
    parser.add_argument("--url", default=SERVER, help="of a role that may create a database")
    orders = parser.parse_args()
    logging.getLogger("celery_pglock").setLevel(logging.WARNING)
    with ValkeyServer() as valkey:
        for broker in orders.broker:
            with migrated(orders.url) as url:
                place = RABBITMQ if broker == "rabbitmq" else valkey.url()
                bursts(url, place, orders.entries, orders.rounds)
        if orders.idle:
            with migrated(orders.url) as url:
                idle(url, valkey.url(), orders.idle, orders.ticks)


if __name__ == "__main__":
    main()

"""What a claim costs beside a long history, what many claimers get done, how fast history goes.

`python -m tests.benchmarks.claims --rows 10000 10000000` makes a database of its own on a server
and drops it at the end. In it are as many schemas as there are sizes, each with so many settled
rows; a claim in one is measured right after a claim in the other, so that whatever else the
machine does strikes both. 10,000,000 rows need about 5 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from typing import Final
from urllib.parse import quote

import psycopg
from psycopg import sql

from celery_pglock import attempts, claims, execution, keys, ledger, retention, schema, stacks
from celery_pglock import sessions as lock_sessions
from tests.benchmarks.measuring import SERVER, own_database, quantile

JOBS: Final = 100
CHUNK: Final = 1_000_000
WARM_UP: Final = 200

# Each job once a minute, the newest a minute ago, written in the order of time: as a beat does.
FILL: Final = """
insert into {runs} (job, period, due_at, status, attempts, claim, name_key, task, task_id, entry,
 node, backend_pid, term, sent_at, started_at, finished_at)
select 'bench:job-' || pg_catalog.lpad(job::text, 3, '0'),
 pg_catalog.to_char(due at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), due, 'done', 1,
 pg_catalog.gen_random_uuid(), job, 'bench.task', pg_catalog.gen_random_uuid()::text, 'entry',
 'worker@host:1', 4242, 1, due, due, due + interval '1 s'
from (
 select n %% %(jobs)s as job,
  pg_catalog.date_trunc('minute', %(now)s::timestamptz)
   - ((%(rows)s - n - 1) / %(jobs)s + 1) * interval '1 min' as due
 from pg_catalog.generate_series(%(first)s::bigint, %(last)s::bigint) as n
) as t
"""


@dataclasses.dataclass(frozen=True)
class Table:
    """A history of so many rows."""

    url: str
    rows: int

    @property
    def schema(self) -> str:
        return f"rows_{self.rows}"

    def make(self) -> None:
        schema.migrate(self.url, self.schema)
        query = sql.SQL(FILL).format(runs=sql.Identifier(self.schema, "job_runs"))
        with psycopg.connect(self.url, autocommit=True) as connection:
            row = connection.execute("select pg_catalog.clock_timestamp()").fetchone()
            for first in range(0, self.rows, CHUNK):
                last = min(first + CHUNK, self.rows) - 1
                more = {"first": first, "last": last, "rows": self.rows, "jobs": JOBS}
                connection.execute(query, {**more, "now": row and row[0]})
            name = sql.Identifier(self.schema, "job_runs")
            connection.execute(sql.SQL("vacuum (analyze) {}").format(name))
            connection.execute("checkpoint")

    def size(self) -> int:
        query = "select pg_catalog.pg_total_relation_size(%s)"
        name = sql.Identifier(self.schema, "job_runs").as_string()
        with psycopg.connect(self.url) as connection:
            row = connection.execute(query, [name]).fetchone()
        return int(row[0]) if row else 0


def fresh(number: int, node: str = "bench") -> claims.Work:
    """Return work that nobody has claimed before, of a period that sorts behind all others."""
    job = f"bench:job-{number % JOBS:03}"
    period = f"2999-01-01T00:00:00.{number:09}-{node}"
    name = f"name-{node}-{number % JOBS}"
    return claims.Work(
        job=job,
        period=period,
        name=name,
        name_key=keys.from_name("bench", "task", name),
        run_key=keys.of_run("bench", job, period),
        task="bench.task",
        task_id=str(uuid.uuid4()),
        node=node,
    )


class Subject:
    """Claims and settles in one table, and notes how long that takes."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.ledger = ledger.Ledger(table.schema)
        self.session = stacks.open_session(plan(table.url, "session"))
        self._stack = stacks.Stack(plan(table.url, "transaction"))
        self._executor = execution.Executor(
            stack=self._stack,
            records=self.ledger,
            terms=attempts.Terms(
                classify=lambda error: claims.Verdict(status="failed", reason=str(error))
            ),
        )
        self.times: dict[str, list[float]] = {
            "claim": [],
            "settle": [],
            "run at transaction level": [],
        }

    def once(self, number: int) -> None:
        work, claim = fresh(number), uuid.uuid4()
        begun = time.perf_counter()
        answer = self.ledger.claim(self.session, work, claim=claim)
        claimed = time.perf_counter()
        settled = self.ledger.settle(self.session, work, claim, "done")
        ended = time.perf_counter()
        if not (isinstance(answer, claims.Claimed) and settled):
            raise AssertionError(answer)
        self.times["claim"].append(claimed - begun)
        self.times["settle"].append(ended - claimed)
        begun = time.perf_counter()
        ran = self._executor.execute(fresh(number, "transaction"), lambda _: None)
        self.times["run at transaction level"].append(time.perf_counter() - begun)
        if not isinstance(ran, attempts.Ran):
            raise TypeError(ran)

    def close(self) -> None:
        self.session.close()
        self._stack.close()


def plan(url: str, level: lock_sessions.Level) -> lock_sessions.Plan:
    return lock_sessions.Plan(target=url, level=level, application="pglock:bench")


def measure(tables: list[Table], samples: int) -> None:
    """Print how long claims and settlements take in each table, measured in turn."""
    subjects = [Subject(table) for table in tables]
    for number in range(WARM_UP + samples):
        if number == WARM_UP:
            for subject in subjects:
                for times in subject.times.values():
                    times.clear()
        # Each goes first as often as any other.
        turn = number % len(subjects)
        for subject in subjects[turn:] + subjects[:turn]:
            subject.once(number)
    base = subjects[0]
    print(f"\n{samples} claims each, in turn (ms); ratio to {base.table.rows:,} rows")
    print(f"{'':<26}{'rows':>12}{'p50':>9}{'p99':>9}{'max':>9}{'p50 ratio':>11}{'p99 ratio':>11}")
    for what, first in base.times.items():
        for subject in subjects:
            times = subject.times[what]
            p50, p99 = quantile(times, 50), quantile(times, 99)
            print(
                f"{what:<26}{subject.table.rows:>12,}{p50 * 1e3:>9.3f}{p99 * 1e3:>9.3f}"
                f"{max(times) * 1e3:>9.1f}{p50 / quantile(first, 50):>11.2f}"
                f"{p99 / quantile(first, 99):>11.2f}"
            )
    for subject in subjects:
        subject.close()


def claim_for(table: Table, node: str, seconds: float) -> list[float]:
    """Claim and settle for so long, as one process of many; return how long each run took."""
    session = stacks.open_session(plan(table.url, "session"))
    records = ledger.Ledger(table.schema)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        work, claim = fresh(len(times), node), uuid.uuid4()
        answer = records.claim(session, work, claim=claim)
        if not isinstance(answer, claims.Claimed):
            raise TypeError(answer)
        records.settle(session, work, claim, "done")
        times.append(time.perf_counter() - begun)
    session.close()
    return times


def throughput(tables: list[Table], claimers: int, seconds: float) -> None:
    """Print how many runs a number of processes claim and settle in a second."""
    spawn = multiprocessing.get_context("spawn")
    print(f"\n{claimers} processes, each over a session of its own, {seconds:g} s")
    print(f"{'rows':>12}{'runs/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}")
    with ProcessPoolExecutor(claimers, mp_context=spawn) as pool:
        list(pool.map(time.sleep, [0.2] * claimers))  # all have started
        for table in tables:
            futures = [
                pool.submit(claim_for, table, f"claimer-{number}", seconds)
                for number in range(claimers)
            ]
            times = [each for future in futures for each in future.result()]
            print(
                f"{table.rows:>12,}{len(times) / seconds:>9,.0f}{quantile(times, 50) * 1e3:>9.2f}"
                f"{quantile(times, 99) * 1e3:>9.2f}{max(times) * 1e3:>9.1f}"
            )


def prune(tables: list[Table], batches: int) -> None:
    """Print how fast the older half of each history is deleted, at most so many batches."""
    print(f"\npruning, batches of {retention.BATCH:,} rows without a pause between them")
    print(f"{'rows':>12}{'deleted':>10}{'rows/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}")
    for table in tables:
        session = stacks.open_session(plan(table.url, "session"))
        walk = retention.Pass(
            execute=session.rows,
            schema=table.schema,
            namespace="bench",
            keep=table.rows / JOBS / 2 * 60,
        )
        times: list[float] = []
        while not walk.ended and len(times) < batches:
            begun = time.perf_counter()
            walk.step()
            times.append(time.perf_counter() - begun)
        session.close()
        print(
            f"{table.rows:>12,}{walk.removed:>10,}{walk.removed / sum(times):>9,.0f}"
            f"{quantile(times, 50) * 1e3:>9.1f}{quantile(times, 99) * 1e3:>9.1f}"
            f"{max(times) * 1e3:>9.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.claims")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--samples", type=int, default=5_000)
    parser.add_argument("--claimers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="of claiming at once")
    parser.add_argument("--batches", type=int, default=200, help="of pruning, at most")
    parser.add_argument(
        "--sync",
        choices=["on", "off"],
        default="off",
        help="synchronous_commit; with on, what a claim waits for is the disk above all, which "
        "hides a difference between the tables",
    )
    parser.add_argument(
        "--url",
        default=SERVER,
        help="of a role that may create a database, without a query part",
    )
    orders = parser.parse_args()
    with own_database(orders.url) as url:
        with_sync = f"{url}?options={quote(f'-c synchronous_commit={orders.sync}')}"
        tables = [Table(with_sync, rows) for rows in orders.rows]
        with psycopg.connect(url) as connection:
            version = connection.info.parameter_status("server_version")
        print(f"PostgreSQL {version}, {os.cpu_count()} CPUs, synchronous_commit {orders.sync}")
        for table in tables:
            begun = time.monotonic()
            table.make()
            print(
                f"{table.rows:,} rows written in {time.monotonic() - begun:.0f} s,"
                f" {table.size() / 1024**2:,.0f} MiB with indexes",
                flush=True,
            )
        measure(tables, orders.samples)
        throughput(tables, orders.claimers, orders.seconds)
        prune(tables, orders.batches)


if __name__ == "__main__":
    main()

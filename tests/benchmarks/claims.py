"""(d) What a claim costs beside a long history, what many claimers get done, how fast history goes.

Each size has a table of its own in one database; a claim in one is measured right after a claim in
the other, so that whatever else the machine does strikes both. 10,000,000 rows need about 5 GB.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final
from urllib.parse import quote

import psycopg
from psycopg import sql

from celery_pglock import (
    attempts,
    claims,
    execution,
    keys,
    ledger,
    migrating,
    retention,
    stacks,
)
from celery_pglock import sessions as lock_sessions
from tests.benchmarks.measuring import Figures, Ground, alone, own_database, summary

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
        migrating.migrate(self.url, self.schema)
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


def beside(tables: Sequence[Table], samples: int) -> Figures:
    """Return how long claims and settlements take in each table, measured in turn."""
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
    for subject in subjects:
        subject.close()
    return {
        str(subject.table.rows): {what: summary(times) for what, times in subject.times.items()}
        for subject in subjects
    }


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


def throughput(
    tables: Sequence[Table], claimers: Sequence[int], seconds: float, order: random.Random
) -> Figures:
    """Return how many runs so many processes claim and settle in a second."""
    spawn = multiprocessing.get_context("spawn")
    found: Figures = {str(table.rows): {} for table in tables}
    most = max(claimers)
    turns = [(table, number) for table in tables for number in claimers]
    with ProcessPoolExecutor(most, mp_context=spawn) as pool:
        list(pool.map(time.sleep, [0.2] * most))  # all have started
        for table, number in order.sample(turns, len(turns)):
            futures = [
                pool.submit(claim_for, table, f"{uuid.uuid4().hex[:8]}-{claimer}", seconds)
                for claimer in range(number)
            ]
            times = [each for future in futures for each in future.result()]
            found[str(table.rows)][str(number)] = {
                **summary(times),
                "rate": round(len(times) / seconds),
            }
    # Not in the order of the turns, which is another one in each run.
    return {
        rows: {str(number): row[str(number)] for number in claimers} for rows, row in found.items()
    }


def prune(tables: Sequence[Table], batches: int) -> Figures:
    """Return how fast the older half of each history is deleted, at most so many batches."""
    found: Figures = {}
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
        found[str(table.rows)] = {
            "deleted": walk.removed,
            "rate": round(walk.removed / sum(times)),
            "batches": summary(times),
        }
    return found


def measure(ground: Ground) -> Figures:
    sizes = (2_000, 10_000) if ground.quick else (10_000, 1_000_000, 10_000_000)
    claimers = (1, 2) if ground.quick else (1, 2, 4, 8)
    with own_database(ground.server) as url:
        # What a claim waits for is the disk above all, which would hide what the rows cost.
        patient = f"{url}?options={quote('-c synchronous_commit=on')}"
        hasty = f"{url}?options={quote('-c synchronous_commit=off')}"
        tables = [Table(hasty, rows) for rows in sizes]
        sizes_on_disk: Figures = {}
        for table in tables:
            ground.say(f"(d) {table.rows:,} rows are written")
            table.make()
            sizes_on_disk[str(table.rows)] = table.size()
        ground.say("(d) claims in turn")
        # A process of its own: after a crash nothing of it is left in this one.
        claims_beside = alone(beside, tables, ground.few(3000, 50))
        ground.say(f"(d) claims of {', '.join(map(str, claimers))} processes")
        seconds = 0.3 if ground.quick else 4.0
        many = throughput(tables, claimers, seconds, ground.random)
        durable = throughput([Table(patient, sizes[0])], claimers, seconds, ground.random)
        ground.say("(d) pruning")
        pruned = prune(tables, ground.few(100, 3))
    return {
        "sizes": sizes_on_disk,
        "claims": claims_beside,
        "throughput": many,
        "durable": durable,
        "pruning": pruned,
    }

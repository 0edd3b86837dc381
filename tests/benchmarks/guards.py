"""(a) What a guarded run costs in its worker, beside bare statements and guards in Redis.

A task is called as a worker's child calls it, and its message goes through no broker: `Here`
executes it at once. A guard that takes its lock where the message is sent, as celery-once and
celery-singleton do, takes it there too. What a guard costs is the difference to the task without
one (that of a refusal, to a task that ends its message without a result), so that what Celery itself
does is in none of the figures.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import statistics
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import psycopg
from celery.app import trace
from celery_once import AlreadyQueued  # type: ignore[import-untyped]
from psycopg import sql

from celery_pglock import (
    claims,
    idle_sessions,
    keys,
    ledger,
    migrating,
    sessions,
    settings,
    stacks,
)
from tests.benchmarks import delays, tasks
from tests.benchmarks.measuring import Figures, Ground, alone, in_turn, own_database, summary

ROUND_TRIP: Final = 0.002

SELECT: Final = "one SELECT 1"
SELECTS: Final = "two SELECT 1"
LOCK_AND_UNLOCK: Final = "bare lock and unlock"
WRITES: Final = "two bare writes"
SAME_WRITES: Final = "two bare writes of the same row"
IGNORED: Final = "no guard, ended by Ignore"
REFUSED: Final = "refused: done before"
OVERLAP: Final = "refused: another run has the lock"
ONCE_REFUSED: Final = "celery-once, refused"
SINGLETON_REFUSED: Final = "celery-singleton, refused"

# What is called without a broker around it, and so has no task to be compared with.
BARE: Final = (SELECT, SELECTS, LOCK_AND_UNLOCK, WRITES, SAME_WRITES)
JOB: Final = "bench:entry"
KEY: Final = 424242

_Acts = dict[str, Callable[[int], object]]


def measure(ground: Ground) -> Figures:
    samples = ground.few(2000, 20)
    far = ground.few(300, 5)
    seed = ground.random.randrange(1 << 30)
    found: Figures = {"round_trip": ROUND_TRIP}
    with own_database(ground.server) as url:
        migrating.migrate(url)
        ground.say(f"(a) guards, {samples} calls of each")
        found["near"] = alone(_calls, url, ground.redis_database(1), samples, seed)
        _set_synchronous_commit(url, "off")
        ground.say("(a) the same without waiting for the disk")
        found["no disk"] = alone(_calls, url, ground.redis_database(2), samples, seed)
        _set_synchronous_commit(url, "on")
        ground.say(f"(a) the same {1000 * ROUND_TRIP:g} ms away, {far} calls of each")
        with (
            delays.delayed(url, ROUND_TRIP) as far_url,
            delays.delayed(ground.redis_database(3), ROUND_TRIP) as far_redis,
        ):
            found["far"] = alone(_calls, far_url, far_redis, far, seed)
    return found


def _set_synchronous_commit(url: str, value: str) -> None:
    """Have commits wait for the disk, or not: with a slow one nothing else is to be seen."""
    with psycopg.connect(url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        change = sql.SQL("alter database {} set synchronous_commit = {}")
        connection.execute(change.format(name, sql.Literal(value)))


def _calls(url: str, redis: str, samples: int, seed: int) -> Figures:
    """Measure in a process of its own, with the optimizations that a worker makes."""
    bench = tasks.application(url, "memory://", redis, tasks.Here)
    trace.setup_worker_optimizations(bench.app, tasks.HOST)
    warm_up = min(50, samples)
    with acts(bench, url) as of_all:
        before = bench.calls[0]
        order = random.Random(seed)  # noqa: S311 - not for secrets
        times = in_turn(of_all, samples, order, warm_up=warm_up)
        ran = bench.calls[0] - before
    if ran != (wanted := len(bench.tasks) * (samples + warm_up)):
        raise RuntimeError(f"{ran} bodies ran, and not {wanted}")
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        name: {**summary(taken), "guard": _share(name, medians)} for name, taken in times.items()
    }


def _share(name: str, medians: Mapping[str, float]) -> float | None:
    """Return what of a call is its guard."""
    if name in (*BARE, IGNORED):
        return None
    # A peer refuses where the message would be sent, so there is nothing to take off. Otherwise
    # a refusal ends as a body does that raises Ignore, which costs Celery more than a result.
    sender = name in (ONCE_REFUSED, SINGLETON_REFUSED)
    like = IGNORED if name in (REFUSED, OVERLAP) else tasks.PLAIN
    return float(f"{medians[name] - (0.0 if sender else medians[like]):.4g}")


@contextlib.contextmanager
def acts(bench: tasks.Application, url: str) -> Iterator[_Acts]:
    """Yield what is measured, by name, on one database."""
    guarded = {name: _guarded(task) for name, task in bench.tasks.items()}
    # It opens the session whose connection the bare statements use too.
    guarded[tasks.LOCK_ONLY](-2)
    idle, _ = idle_sessions.source(settings.of(bench.app), "session", "bench")
    with idle.lent() as session:
        connection = session.connection
    plan = sessions.Plan(target=url, level="session", application="pglock:holder@bench")
    with contextlib.closing(stacks.open_session(plan)) as holder:
        yield {**_bare(connection), **guarded, **_refusals(bench, holder)}
    idle_sessions.close_idle()


def _guarded(task: Any) -> Callable[[int], object]:
    def call(number: int) -> object:
        return task.apply_async((number,), headers=_occurrence())

    return call


def _occurrence() -> dict[str, Any]:
    due = dt.datetime.now(dt.UTC)
    return {"pglock_job": JOB, "pglock_due": due.isoformat(), "pglock_entry": "entry"}


def _bare(connection: psycopg.Connection[Any]) -> _Acts:
    """Statements on the connection of the guard, all prepared, each in its own transaction."""
    connection.execute(
        "create table if not exists bench_writes (job text, period text, status text,"
        " finished_at timestamptz, primary key (job, period))"
    )
    connection.execute("create table if not exists bench_rows (like pglock.job_runs including all)")
    cursor = connection.cursor()

    def select(_: int) -> None:
        cursor.execute(b"select 1")
        cursor.fetchall()

    def selects(number: int) -> None:
        select(number)
        select(number)

    def lock_and_unlock(_: int) -> None:
        cursor.execute(b"select pg_catalog.pg_try_advisory_lock(%s::bigint)", [KEY])
        cursor.fetchall()
        cursor.execute(b"select pg_catalog.pg_advisory_unlock(%s::bigint)", [KEY])
        cursor.fetchall()

    def writes(_: int) -> None:
        period = str(uuid.uuid4())
        cursor.execute(
            b"insert into bench_writes values (%s::text, %s::text, 'running')", [JOB, period]
        )
        cursor.execute(
            b"update bench_writes set status = 'done', finished_at = clock_timestamp()"
            b" where job = %s::text and period = %s::text",
            [JOB, period],
        )

    def same_writes(_: int) -> None:
        claim = uuid.uuid4()
        period = str(claim)
        cursor.execute(
            b"insert into bench_rows (job, period, due_at, status, attempts, claim, name_key,"
            b" task, task_id, entry, node, backend_pid, started_at) values (%s::text, %s::text,"
            b" clock_timestamp(), 'running', 1, %s::uuid, %s::bigint, 'with_ledger', %s::text,"
            b" 'entry', 'bench@here:4242', pg_backend_pid(), clock_timestamp())",
            [JOB, period, claim, KEY, period],
        )
        cursor.execute(
            b"update bench_rows set status = 'done', finished_at = clock_timestamp()"
            b" where job = %s::text and period = %s::text and claim = %s::uuid",
            [JOB, period, claim],
        )

    return {
        SELECT: select,
        SELECTS: selects,
        LOCK_AND_UNLOCK: lock_and_unlock,
        WRITES: writes,
        SAME_WRITES: same_writes,
    }


def _refusals(bench: tasks.Application, holder: sessions.Session) -> _Acts:
    done = _occurrence()
    bench.tasks[tasks.LEDGER].apply_async((0,), headers=done)
    # An earlier run of the job, for as long as all this takes.
    earlier = claims.Work(
        job=JOB,
        period="earlier",
        name=tasks.HELD,
        name_key=keys.from_name("bench", "task", tasks.HELD),
        run_key=keys.of_run("bench", JOB, "earlier"),
        task=tasks.HELD,
        task_id="earlier",
        node="bench@there:1",
    )
    answer = ledger.Ledger().claim(holder, earlier, claim=uuid.uuid4())
    if not isinstance(answer, claims.Claimed):
        raise TypeError(answer)
    once, singleton = bench.tasks[tasks.ONCE], bench.tasks[tasks.SINGLETON]
    once.once_backend.raise_or_lock(once.get_key([-7], {}), timeout=3600)
    singleton.aquire_lock(singleton.generate_lock(singleton.name, [-7], {}), "somebody")

    def done_before(number: int) -> None:
        bench.tasks[tasks.LEDGER].apply_async((number,), headers=done)

    def overlap(number: int) -> None:
        bench.held.apply_async((number,), headers=_occurrence())

    def once_refused(_: int) -> None:
        with contextlib.suppress(AlreadyQueued):
            once.apply_async((-7,))
            raise RuntimeError("celery-once did not refuse")

    def singleton_refused(_: int) -> None:
        if singleton.apply_async((-7,)).id != "somebody":
            raise RuntimeError("celery-singleton did not refuse")

    def ignored(number: int) -> None:
        bench.ignoring.apply_async((number,))

    return {
        IGNORED: ignored,
        REFUSED: done_before,
        OVERLAP: overlap,
        ONCE_REFUSED: once_refused,
        SINGLETON_REFUSED: singleton_refused,
    }

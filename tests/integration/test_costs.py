"""What a guarded run costs: round trips, statements, WAL and connections, counted exactly.

Round trips and statements are counted in libpq's own trace of the session: a round trip is a
run of messages to the server that is followed by messages from it. The first use of each
statement on a session costs one more, in which it is prepared, so each is used once beforehand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.pq import Trace

from celery_pglock import attempts, claims, execution, ledger, locks, migrating, sessions
from celery_pglock.demo.servers import PostgresServer
from tests.integration.workbench import Sessions, terminate, work
from tests.support.databases import Database
from tests.support.servers import CRASH_SAFE

LEDGER = ledger.Ledger()
NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Cost:
    round_trips: int
    statements: int


@dataclasses.dataclass
class Meter:
    """Counts what one session says to its server."""

    connection: psycopg.Connection[Any]
    directory: Path

    def measure(self, act: Callable[[], object]) -> Cost:
        file = self.directory / f"{next(NUMBERS)}.trace"
        with file.open("w") as stream:
            self.connection.pgconn.trace(stream.fileno())
            self.connection.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
            try:
                act()
            finally:
                self.connection.pgconn.untrace()
        messages = re.findall(r"^([FB])\t\d+\t(\w+)", file.read_text(), re.MULTILINE)
        directions = [direction for direction, _ in itertools.groupby(messages, lambda m: m[0])]
        return Cost(
            round_trips=directions.count("F"),
            statements=sum(
                direction == "F" and kind in ("Execute", "Query") for direction, kind in messages
            ),
        )


@dataclasses.dataclass
class Bench:
    """An executor whose only session is watched."""

    executor: execution.Executor
    meter: Meter

    def run(self, wanted: claims.Work) -> Any:
        return self.executor.execute(wanted, lambda _: None)

    def cost(self, wanted: claims.Work, expected: str) -> Cost:
        """Return what a run costs, and hold that it ends as expected."""
        answers: list[Any] = []
        cost = self.meter.measure(lambda: answers.append(self.run(wanted)))
        kind = answers[0].kind if isinstance(answers[0], claims.Refused) else "ran"
        assert kind == expected
        return cost


@pytest.fixture
def bench(database: Database, lock_sessions: Sessions, tmp_path: Path) -> Callable[..., Bench]:
    def make(level: sessions.Level, records: Any = LEDGER) -> Bench:
        stack = lock_sessions.stack(database.url, level)
        session = stack.take()
        stack.give(session)
        executor = execution.Executor(
            stack=stack,
            records=records,
            terms=attempts.Terms(
                classify=lambda error: claims.Verdict(status="failed", reason=str(error))
            ),
        )
        meter = Meter(session.connection, tmp_path)
        return Bench(executor, meter)

    return make


def fresh(**more: Any) -> claims.Work:
    """Return work of a new period, under a lock name of its own."""
    return work(f"period-{next(NUMBERS)}", name=f"name-{next(NUMBERS)}", **more)


def test_the_meter_counts_what_is_said(database: Database, tmp_path: Path) -> None:
    connection = database.connect(prepare_threshold=None)
    meter = Meter(connection, tmp_path)

    def three() -> None:
        with connection.pipeline():
            for _ in range(3):
                connection.execute("select %s", [1])

    assert meter.measure(lambda: connection.execute("select 1")) == Cost(1, 1)
    assert meter.measure(lambda: [connection.execute("select 1") for _ in range(5)]) == Cost(5, 5)
    assert meter.measure(three) == Cost(1, 3)
    assert meter.measure(lambda: None) == Cost(0, 0)


def test_a_run_at_session_level_is_one_statement_in_and_one_out(
    bench: Callable[..., Bench],
) -> None:
    subject = bench("session")
    subject.run(fresh())
    assert [subject.cost(fresh(), "ran") for _ in range(20)] == [Cost(2, 2)] * 20


def test_a_failure_costs_no_more(bench: Callable[..., Bench]) -> None:
    subject = bench("session")

    def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            subject.executor.execute(fresh(), lambda _: 1 / 0)

    fail()
    assert subject.meter.measure(fail) == Cost(2, 2)


def test_a_run_with_the_name_lock_only_costs_the_same(bench: Callable[..., Bench]) -> None:
    subject = bench("session", locks.NameLockOnly())
    subject.run(work(None))
    assert subject.cost(work(None), "ran") == Cost(2, 2)


def test_a_run_at_transaction_level(bench: Callable[..., Bench]) -> None:
    """Claim; BEGIN, locks and question together; SAVEPOINT; RELEASE; outcome; COMMIT."""
    subject = bench("transaction")
    subject.run(fresh())
    assert [subject.cost(fresh(), "ran") for _ in range(20)] == [Cost(6, 8)] * 20


@pytest.mark.parametrize("level", ["session", "transaction"])
def test_a_refusal_because_of_this_period_is_one_statement(
    bench: Callable[..., Bench],
    database: Database,
    lock_sessions: Sessions,
    level: sessions.Level,
) -> None:
    subject = bench(level)
    done, running = fresh(), fresh()
    subject.run(done)
    holder = lock_sessions.open(database.url)
    assert isinstance(LEDGER.claim(holder, running, claim=uuid.uuid4()), claims.Claimed)
    assert subject.cost(done, "closed") == Cost(1, 1)
    assert subject.cost(running, "running") == Cost(1, 1)


@pytest.mark.parametrize("level", ["session", "transaction"])
def test_a_refusal_because_of_the_lock_name_asks_who_has_it(
    bench: Callable[..., Bench],
    database: Database,
    lock_sessions: Sessions,
    level: sessions.Level,
) -> None:
    subject = bench(level)
    held = fresh()
    holder = lock_sessions.open(database.url)
    other_period = dataclasses.replace(held, period="x", run_key=1)
    assert isinstance(LEDGER.claim(holder, other_period, claim=uuid.uuid4()), claims.Claimed)
    subject.run(held)
    assert subject.cost(held, "held") == Cost(2, 2)

    def skip() -> None:
        subject.executor.tell(lambda session: LEDGER.skip(session, held, "overlap"))

    skip()
    assert subject.meter.measure(skip) == Cost(1, 1)


def test_taking_over_and_giving_up_is_one_statement(
    bench: Callable[..., Bench], database: Database, lock_sessions: Sessions
) -> None:
    subject = bench("session")
    subject.run(fresh())
    dead = [fresh(max_lost=max_lost) for max_lost in (3, 0)]
    for wanted in dead:
        session = lock_sessions.open(database.url)
        assert isinstance(LEDGER.claim(session, wanted, claim=uuid.uuid4()), claims.Claimed)
        terminate(database, session.pid)
    assert subject.cost(dead[0], "ran") == Cost(2, 2)
    assert subject.cost(dead[1], "exhausted") == Cost(1, 1)


@pytest.mark.parametrize("level", ["session", "transaction"])
def test_no_connection_is_opened_after_the_first(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> None:
    executor = execution.Executor(
        stack=lock_sessions.stack(database.url, level),
        records=LEDGER,
        terms=attempts.Terms(classify=lambda _: claims.Verdict(status="failed")),
    )
    ours = (
        "select pid from pg_stat_activity where datname = current_database()"
        " and application_name like 'pglock%%'"
    )
    seen: set[int] = set()
    for number in range(50):
        done = fresh()
        assert isinstance(executor.execute(done, lambda _: None), attempts.Ran)
        assert isinstance(executor.execute(done, lambda _: None), claims.Refused)
        if number % 10 == 0:
            with pytest.raises(ZeroDivisionError):
                executor.execute(fresh(), lambda _: 1 / 0)
        seen.update(pid for (pid,) in database.rows(ours))
    assert len(seen) == 1


# --- WAL ------------------------------------------------------------------------------------


@pytest.fixture
def quiet_postgres() -> Iterator[PostgresServer]:
    """A server that writes nothing unless it is told to."""
    with PostgresServer({**CRASH_SAFE, "autovacuum": "off"}) as server:
        yield server


def wal_of(url: str, act: Callable[[], object], times: int = 50) -> int:
    """Return how many bytes of WAL are written while something is done that many times.

    The server adds a record of its own now and then, but it never takes one away: so the least
    of three measurements is what was written for us.
    """
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:

        def position() -> int:
            row = connection.execute(
                "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint"
            ).fetchone()
            assert row is not None
            return int(row[0])

        found = []
        for _ in range(3):
            before = position()
            for _ in range(times):
                act()
            found.append(position() - before)
        return min(found)


@pytest.mark.parametrize("level", ["session", "transaction"])
def test_a_refusal_writes_no_wal(
    quiet_postgres: PostgresServer, lock_sessions: Sessions, level: sessions.Level
) -> None:
    url = quiet_postgres.url()
    migrating.migrate(url)
    session = lock_sessions.open(url, level)
    done, running, free = (work(period, name=period) for period in ("done", "running", "free"))
    first, holder = (lock_sessions.open(url) for _ in range(2))
    settled = LEDGER.claim(first, done, claim=uuid.uuid4())
    assert isinstance(settled, claims.Claimed)
    assert LEDGER.settle(first, done, settled.claim, "done")
    assert isinstance(LEDGER.claim(holder, running, claim=uuid.uuid4()), claims.Claimed)
    held = work("other", name="running")

    def refused(wanted: claims.Work, kind: str) -> Callable[[], None]:
        def claim() -> None:
            answer = LEDGER.claim(session, wanted, claim=uuid.uuid4())
            assert isinstance(answer, claims.Refused)
            assert answer.kind == kind

        return claim

    assert wal_of(url, refused(done, "closed")) == 0
    assert wal_of(url, refused(running, "running")) == 0
    assert wal_of(url, refused(held, "held")) == 0

    # The control: what is not refused is seen by this measurement.
    def claim_and_settle() -> None:
        claim = uuid.uuid4()
        assert isinstance(LEDGER.claim(first, free, claim=claim), claims.Claimed)
        assert LEDGER.settle(first, free, claim, "failed")

    assert wal_of(url, claim_and_settle, times=1) > 0

"""What these tests share: work to claim, texts that stop half-way, and what the server holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from celery_pglock import (
    answers,
    claims,
    connections,
    keys,
    schedule_store,
    sessions,
    stacks,
    testing,
)
from tests.support.databases import Database
from tests.support.processes import eventually

T = TypeVar("T")

PERIOD = "2026-11-29"

# A strike in the middle of connecting, or in psycopg's pipeline: what was half done is dropped.
may_leave_an_idle_connection = pytest.mark.filterwarnings(
    "ignore:.*was deleted while still open:ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def work(
    period: str | None = PERIOD, *, job: str = "app:report", name: str = "report", **more: Any
) -> claims.Work:
    """Return work of the application `app`, with the keys that its tasks would use."""
    return claims.Work(
        job=job,
        period=period,
        name=name,
        name_key=keys.from_name("app", "task", name),
        run_key=None if period is None else keys.of_run("app", job, period),
        **{"task": "report", "task_id": "m-1", "node": "w1:1", **more},
    )


def plan(url: connections.Target, level: sessions.Level = "session", **more: Any) -> sessions.Plan:
    return sessions.Plan(
        target=url, level=level, **{"application": "pglock:idle@w1:1", "lost_after": 10.0, **more}
    )


class Sessions:
    """Opens lock sessions and stacks, and closes them at the end of the test."""

    def __init__(self) -> None:
        self._opened: list[sessions.Session] = []
        self._stacks: list[stacks.Stack] = []

    def open(
        self, url: connections.Target, level: sessions.Level = "session", **more: Any
    ) -> sessions.Session:
        session = stacks.open_session(plan(url, level, **more))
        self._opened.append(session)
        return session

    def stack(
        self, url: connections.Target, level: sessions.Level = "session", **more: Any
    ) -> stacks.Stack:
        stack = stacks.Stack(plan(url, level, **more))
        self._stacks.append(stack)
        return stack

    def close(self) -> None:
        for session in self._opened:
            session.close()
        for stack in self._stacks:
            stack.close()


class Overheard:
    """A leader whose statements are noted, by their first words.

    Args:
        leader: who runs them; None: nobody does, and each returns no rows.
    """

    def __init__(self, leader: schedule_store.Leader | None = None) -> None:
        self._leader = leader
        self.asked: list[tuple[bytes, Any]] = []

    @property
    def said(self) -> list[str]:
        return [query.split()[0].decode() for query, _ in self.asked]

    def execute(self, query: bytes, parameters: Any) -> list[Any]:
        self.asked.append((query, parameters))
        return [] if self._leader is None else self._leader.execute(query, parameters)

    def send(self, query: bytes, parameters: Any, *, uninterrupted: bool = False) -> answers.Answer:
        self.asked.append((query, parameters))
        if self._leader is None:
            return answers.Answer(list)
        return self._leader.send(query, parameters, uninterrupted=uninterrupted)


class Gate:
    """A place inside a statement where it waits until the test lets it go on.

    It is a lock that the test holds: unlike a sleep it cannot be too short, and `pg_locks`
    shows when somebody has arrived.
    """

    def __init__(self, database: Database, key: int = 424242) -> None:
        self.key = key
        self._database = database
        self._connection = database.connect(application_name="gate")
        self._connection.execute("select pg_advisory_lock(%s)", [key])

    def before(self, text: bytes, call: bytes) -> bytes:
        """Return the statement, which now waits at the gate before the (only) `call` in it."""
        wait = b"case when pg_catalog.pg_advisory_xact_lock_shared(%d) is not null then " % self.key
        return replaced(text, call, wait + call + b" end")

    def wait_for_arrival(self) -> None:
        query = (
            "select 1 from pg_locks where locktype = 'advisory' and not granted and objid = %s"
            " and database = (select oid from pg_database where datname = current_database())"
        )
        eventually(lambda: self._database.rows(query, self.key), what="a statement at the gate")

    def open(self) -> None:
        self._connection.execute("select pg_advisory_unlock_all()")


def replaced(text: bytes, old: bytes, new: bytes) -> bytes:
    """Return `text` with its only `old` replaced: a statement that was reworded fails here."""
    assert text.count(old) == 1, (old, text)
    return text.replace(old, new)


@contextmanager
def in_thread(function: Callable[[], T], *gates: Gate) -> Iterator[Future[T]]:
    """Run a function in a thread; on leaving, open the gates and wait for its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            future.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield future
    finally:
        for gate in gates:
            gate.open()
        thread.join(30)


def advisory_locks(database: Database) -> list[tuple[int, int]]:
    """Return (key, pid) of the advisory locks that are held in this database."""
    return [
        (key, pid)
        for key, pid in database.ask(
            "select (classid::bigint << 32) | objid::bigint, pid from pg_locks"
            " where locktype = 'advisory' and granted and database ="
            " (select oid from pg_database where datname = current_database()) order by 1, 2"
        )
    ]


def row(database: Database, *columns: str, period: str = PERIOD, job: str = "app:report") -> Any:
    """Return these columns of a period's row, one value if it is one, None without a row."""
    found = database.ask(
        f"select {', '.join(columns)} from pglock.job_runs where job = %s and period = %s",  # noqa: S608
        job,
        period,
    )
    if not found:
        return None
    return found[0] if len(columns) > 1 else found[0][0]


def age(database: Database, seconds: float = 3.0) -> None:
    """Make all claims that much older: as if the time had passed."""
    database.ask(
        "update pglock.job_runs set started_at = started_at - make_interval(secs => %s)", seconds
    )


def terminate(database: Database | testing.Database, *pids: int) -> None:
    """End server processes, and wait until they have ended."""
    ask = database.ask if isinstance(database, Database) else database.rows
    for pid in pids:
        ask("select pg_terminate_backend(%s)", pid)
    query = "select 1 from pg_stat_activity where pid = any(%s)"
    eventually(lambda: not ask(query, list(pids)), what="the server processes end")

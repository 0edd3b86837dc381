"""The tasks of the cases about what a body does with connections, tenants and outages."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import celery.signals
import psycopg
import sqlalchemy as sa

from celery_pglock import LockedTask, current_run
from tests.apps import configured, recording

app = configured.application()
register: Any = app.task

if app.conf.get("cases_quiet"):
    # A note of each record would need the database that is down.
    logging.getLogger("celery_pglock").handlers.clear()


def division(self: LockedTask, key: str, *, fail: bool, end_session: bool = False) -> None:
    """Divide by zero in SQL, at transaction level on the connection of the lock."""
    run = current_run()
    recording.note_run("start", self.request.id, key=key)
    if end_session:
        end_lock_session(run.key)
    query = f"SELECT 1 / {0 if fail else 1}"
    if run.level == "transaction":
        run.connection.execute(sa.text(query))
    else:
        with psycopg.connect(recording.url()) as connection:
            connection.execute(query.encode())


def end_lock_session(key: int) -> None:
    """End the session that holds a key, and wait until it has gone."""
    with psycopg.connect(recording.url(), autocommit=True) as connection:
        query = (
            "SELECT pid, pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory'"
            " AND (classid::bigint << 32) | objid::bigint = %s"
        )
        assert connection.execute(query, (key,)).rowcount


register(base=LockedTask, bind=True, name="division", lock_by=("key",))(division)
register(
    base=LockedTask, bind=True, name="division_inside", lock_by=("key",), lock_level="transaction"
)(division)
register(base=LockedTask, bind=True, name="division_warned", lock_by=("key",), lock_lost="warn")(
    division
)


def tenant(arguments: Mapping[str, Any], request: Any) -> str:
    """Return a lock name with the tenant, whom only a header names."""
    schema = (request.headers or {})["_schema_name"]
    return f"report of {schema}: {arguments['key']}"


def work(self: LockedTask, key: str, *, gate: str = "", **_: Any) -> None:
    """Hold the lock until the gate is open."""
    recording.note_run("start", self.request.id, key=key)
    if gate:
        recording.wait_for_gate(gate)
    recording.note_run("end", self.request.id, key=key)


def work_for(self: LockedTask, schema: str, key: str, *, gate: str = "") -> None:
    """Hold the lock of a tenant who is a parameter."""
    work(self, key, gate=gate, schema=schema)


register(base=LockedTask, bind=True, name="job", lock_by=("key",))(work)
register(base=LockedTask, bind=True, name="by_header", lock_name=tenant)(work)
register(base=LockedTask, bind=True, name="by_header_daily", lock_name=tenant, once_per="day")(work)
register(base=LockedTask, bind=True, name="by_parameter", lock_by=("schema", "key"))(work_for)


@functools.cache
def pool() -> sa.Engine:
    """Return the application's own engine, with one connection for everything."""
    url = sa.make_url(recording.url()).set(drivername="postgresql+psycopg")
    return sa.create_engine(url, pool_size=1, max_overflow=0, pool_timeout=5)


@app.task(base=LockedTask, bind=True, name="committing_twice", lock_by=("key",))
def committing_twice(self: LockedTask, key: str, number: int) -> None:
    """Commit twice on the application's connection, then fail."""
    run = current_run()
    with pool().connect() as connection:
        backends = []
        for _ in range(2):
            backends.append(connection.execute(sa.text("SELECT pg_backend_pid()")).scalar_one())
            connection.commit()
    run.check()
    recording.note_run("start", self.request.id, key=key, backends=backends)
    raise ValueError(number)


@app.task(
    base=LockedTask, bind=True, name="committing_inside", lock_by=("key",), lock_level="transaction"
)
def committing_inside(self: LockedTask, key: str, how: str, gate: str) -> None:
    """Commit half-way in the transaction that is the lock."""
    connection = current_run().connection
    recording.note_run("start", self.request.id, key=key)
    recording.wait_for_gate(gate)
    insert = sa.text("INSERT INTO written (job, number) VALUES (:key, :number)")
    connection.execute(insert, {"key": key, "number": 1})
    if how == "commit()":
        connection.commit()
    else:
        connection.exec_driver_sql("COMMIT")
    connection.execute(insert, {"key": key, "number": 2})


UNAVAILABLE: dict[str, Any] = {
    "base": LockedTask,
    "bind": True,
    "lock_by": ("key",),
    "autoretry_for": (psycopg.OperationalError, sa.exc.OperationalError),
    "retry_backoff": False,
    "default_retry_delay": 0,
    "max_retries": 3,
}


def unavailable(self: LockedTask, key: str, *, break_once: bool = False) -> int:
    """Meet a database error of the body's own in the first try, if told to."""
    recording.note_run("start", self.request.id, key=key)
    if break_once and self.request.retries == 0:
        raise psycopg.OperationalError(key)
    return self.request.retries


for _lock_unavailable in ("postpone", "raise"):
    register(
        name=f"unavailable_{_lock_unavailable}", lock_unavailable=_lock_unavailable, **UNAVAILABLE
    )(unavailable)


class Ticking:
    """A thread, or greenlet, that wants to be woken every 50 ms."""

    longest = 0.0
    ticks = 0

    def run(self) -> None:
        """Tick, and remember the longest time between two ticks."""
        before = time.monotonic()
        while True:
            time.sleep(0.05)
            now = time.monotonic()
            Ticking.longest = max(Ticking.longest, now - before)
            Ticking.ticks += 1
            before = now


@celery.signals.worker_ready.connect
def tick(**_: object) -> None:
    """Begin to tick when the worker is ready."""
    threading.Thread(target=Ticking().run, daemon=True).start()


@app.task(name="ticks")
def ticks(*, anew: bool = False) -> tuple[float, int]:
    """Return the longest pause so far and the number of ticks; begin anew, if told to."""
    told = Ticking.longest, Ticking.ticks
    if anew:
        Ticking.longest, Ticking.ticks = 0.0, 0
    return told

"""What workers under test leave behind for the test: rows, written at once on their own.

Bodies call `note`; log records and signals of celery-pglock are noted as well. Each note is
committed on its own, so that a process that is killed has still told it. With `APP_KEEPS_NOTHING`
each is a connection of its own, for who looks at all that a process leaves in the server.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Any

import psycopg
from typing_extensions import override

import celery_pglock
from celery_pglock import runs
from tests.support.kept import KeptConnection

TABLES = """
CREATE TABLE notes (
    id bigserial PRIMARY KEY,
    what text NOT NULL,
    detail jsonb NOT NULL,
    pid integer NOT NULL,
    at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
CREATE TABLE gates (name text PRIMARY KEY, value text NOT NULL DEFAULT '');
CREATE TABLE written (job text NOT NULL, number integer NOT NULL);
"""
GATE_PATIENCE = 100.0

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "data"}


# The connection for notes of each thread: none waits for another's.
_notes = threading.local()


def url() -> str:
    """Return the database of this test."""
    return os.environ["APP_DATABASE_URL"]


def note(what: str, **detail: object) -> None:
    """Leave a row for the test."""
    notes = _kept()
    notes.rows(
        "INSERT INTO notes (what, detail, pid) VALUES (%s, %s, %s)",
        what,
        json.dumps(detail, default=str),
        os.getpid(),
    )
    if "APP_KEEPS_NOTHING" in os.environ:
        notes.close()


def _kept() -> KeptConnection:
    found: KeptConnection | None = getattr(_notes, "kept", None)
    if found is None:
        found = _notes.kept = KeptConnection(url())
    return found


def note_run(what: str, task_id: str | None, **detail: object) -> None:
    """Leave a row that says which run is in progress."""
    run = runs.in_progress()
    if run is not None:
        detail = {
            **detail,
            "job": run.job,
            "period": run.period,
            "attempt": run.attempt,
            "lost_attempts": run.lost_attempts,
            "name": run.name,
        }
    note(what, task_id=task_id, **detail)


def wait_for_gate(name: str) -> None:
    """Wait until the test opens a gate.

    Raises:
        TimeoutError: it never did.
    """
    deadline = time.monotonic() + GATE_PATIENCE
    with psycopg.connect(url(), autocommit=True) as connection:
        while not connection.execute("SELECT FROM gates WHERE name = %s", (name,)).rowcount:
            if time.monotonic() > deadline:
                raise TimeoutError(name)
            time.sleep(0.02)


def open_gate(name: str) -> None:
    """Open a gate, as the test does."""
    with psycopg.connect(url(), autocommit=True) as connection:
        connection.execute("INSERT INTO gates VALUES (%s) ON CONFLICT DO NOTHING", (name,))


def gate_value(name: str) -> str:
    """Return what the test has written at a gate."""
    with psycopg.connect(url(), autocommit=True) as connection:
        row = connection.execute("SELECT value FROM gates WHERE name = %s", (name,)).fetchone()
    return str(row[0]) if row else ""


class NotingHandler(logging.Handler):
    """Notes the log records that have an event name, with their fields."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "event"):
            return
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        note("log", level=record.levelname, message=record.getMessage(), **fields)


def start() -> None:
    """Have this process and its children note log records and signals."""
    logging.getLogger("celery_pglock").addHandler(NotingHandler())
    for name in ("run_skipped", "run_postponed", "lock_lost", "run_started", "run_finished"):
        getattr(celery_pglock, name).connect(_receiver(name), weak=False)


def _receiver(name: str) -> Any:
    def receive(sender: Any, **arguments: Any) -> None:
        # What Celery's own dispatcher adds is left out.
        arguments.pop("signal", None)
        run = arguments.pop("run", None)
        if run is not None:
            arguments.update(job=run.job, period=run.period)
        note("signal", name=name, task=sender.name, **arguments)

    return receive

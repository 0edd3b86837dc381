"""Many entries that are due at the same instant."""

from __future__ import annotations

import datetime as dt

import psycopg
from celery.schedules import schedule

from celery_pglock import schedules
from tests.support.processes import Process, eventually
from tests.support.stage import Stage

# So that each has one occurrence while a test lasts.
SELDOM = 86400.0


def names(count: int) -> dict[str, float]:
    """Return the entries of a burst, for a stage."""
    return {f"entry{number:04}": SELDOM for number in range(count)}


def due_at_once(stage: Stage, in_seconds: float) -> None:
    """Leave all entries of a stage as a leader would that has planned them all for one instant."""
    with psycopg.connect(stage.url, autocommit=True) as connection, connection.cursor() as cursor:
        row = cursor.execute("SELECT clock_timestamp()").fetchone()
        assert row is not None
        due = row[0] + dt.timedelta(seconds=in_seconds)
        cursor.executemany(
            "INSERT INTO pglock.beat_entries (namespace, entry, task, schedule, anchor,"
            " next_due_at) VALUES (%s, %s, 'tests.apps.beat_app.job', %s, %s, %s)",
            [
                (
                    stage.namespace,
                    name,
                    schedules.canonical(schedule(every), dt.UTC),
                    due - dt.timedelta(seconds=every),
                    due,
                )
                for name, every in stage.entries.items()
            ],
        )


def confirmed(stage: Stage) -> int:
    """Return how many messages were recorded as handed over."""
    return int(stage.rows("SELECT count(*) FROM pglock.job_runs WHERE sent_at IS NOT NULL")[0][0])


def done(stage: Stage) -> int:
    """Return how many periods are done."""
    return int(stage.rows("SELECT count(*) FROM pglock.job_runs WHERE status = 'done'")[0][0])


def wait_until_confirmed(stage: Stage, count: int, timeout: float = 60.0) -> None:
    """Wait until so many messages were recorded as handed over."""
    eventually(lambda: confirmed(stage) >= count, timeout, f"{count} messages are confirmed")


def standing(beat: Process) -> Process:
    """Wait until a beat leads or stands by, and return it."""
    beat.wait_for_line("standby: |leadership gained: ")
    return beat


def end(beats: list[Process]) -> None:
    """Stop beats as a service manager does; each has to end cleanly."""
    for beat in beats:
        beat.terminate()
    for beat in beats:
        assert beat.wait() == 0

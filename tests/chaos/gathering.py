"""Gathering what a run left behind, once everybody has stopped."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any, Final

import psycopg
import redis

from tests.chaos import history
from tests.chaos.evidence import Effect, Entry, Evidence, Limits, Period, Row
from tests.chaos.stage import Stage, until

# A row of beat's that was never confirmed is of an occurrence that the next leader will send.
_ROWS: Final = b"""
SELECT job, period, status, attempts, lost_attempts, reason, extract(epoch FROM due_at)::float8,
 extract(epoch FROM sent_at)::float8, extract(epoch FROM started_at)::float8,
 extract(epoch FROM finished_at)::float8
FROM pglock.job_runs WHERE status <> 'sent' OR sent_at IS NOT NULL
"""
_ANCHORS: Final = b"SELECT entry, anchor FROM pglock.beat_entries WHERE namespace = 'chaos'"
_RESIGNED: Final = b"SELECT resigned_at FROM pglock.beat_terms WHERE namespace = 'chaos'"
_BEHIND: Final = b"""
SELECT count(*) FROM pglock.beat_entries WHERE namespace = 'chaos'
 AND (published_at IS NULL OR due_at IS NULL OR due_at < clock_timestamp() - interval '3 s')
"""
_LOCKS: Final = b"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"


def gather(
    stage: Stage,
    *,
    anchors: Mapping[str, dt.datetime],
    until_due: dt.datetime,
    by_hand: Iterable[Period],
    limits: Limits,
) -> Evidence:
    """Return the evidence; what is left of the actors is killed after the locks were counted.

    Args:
        stage: whose actors were asked to stop.
        anchors: from which the intervals of the entries are counted.
        until_due: up to when what fell due has to be accounted for.
        by_hand: what was sent by hand.
        limits: for the checker.
    """
    with connect(stage) as connection:
        until(lambda: connection.execute(_LOCKS).fetchall() == [(0,)], 5.0)
        ((locks,),) = connection.execute(_LOCKS).fetchall()
        for actor in stage.actors:
            if actor.process is not None:
                actor.process.kill(group=True)
        rows = [_row(row) for row in connection.execute(_ROWS)]
        committed, committed_counters = _left(connection)
    with psycopg.connect(stage.witness.url(), autocommit=True) as connection:
        effects, counters = _left(connection)
        events = history.read(connection)
    return Evidence(
        events=events,
        local=history.read_files(stage.events),
        rows=rows,
        entries=[
            Entry(
                f"chaos:{name}",
                anchors[name],
                dt.timedelta(seconds=stage.entries[name]["schedule"]),
            )
            for name in anchors
        ],
        until=until_due,
        by_hand=frozenset(by_hand),
        fragile=frozenset({"chaos:fragile"}),
        effects=effects,
        committed=committed,
        counters=counters,
        committed_counters=committed_counters,
        locks=locks,
        limits=limits,
    )


def connect(stage: Stage) -> psycopg.Connection[Any]:
    """Return a connection to the database of the locks, whichever server has it now."""
    return psycopg.connect(stage.server.url(), autocommit=True, connect_timeout=5)


def anchors(stage: Stage) -> dict[str, dt.datetime]:
    """Return the anchors of the entries that a leader has stored."""
    with connect(stage) as connection:
        return dict(connection.execute(_ANCHORS).fetchall())


def resigned_at(stage: Stage) -> dt.datetime | None:
    """Return when the last leader resigned; None if it has not."""
    with connect(stage) as connection:
        rows: list[tuple[dt.datetime | None]] = connection.execute(_RESIGNED).fetchall()
    return rows[0][0] if rows else None


def caught_up(stage: Stage) -> bool:
    """Whether the leader has sent all that is due but the newest."""
    with connect(stage) as connection:
        ((behind,),) = connection.execute(_BEHIND).fetchall()
    return not behind


def messages(stage: Stage) -> int:
    """Return how many messages the broker has: waiting and not acknowledged."""
    with redis.Redis.from_url(stage.broker.url()) as broker:
        waiting: Any = [broker.llen(queue) for queue in ["chaos", *(a.name for a in stage.workers)]]
        unacked: Any = broker.hlen("unacked")
        return sum(map(int, waiting)) + int(unacked)


def _row(values: tuple[Any, ...]) -> Row:
    names = [field.name for field in dataclasses.fields(Row)]
    return Row(**dict(zip(names, values, strict=True)))


def _left(connection: psycopg.Connection[Any]) -> tuple[list[Effect], dict[str, int]]:
    effects = connection.execute("SELECT job, period, name, attempt FROM effects").fetchall()
    counters = connection.execute("SELECT name, sum(value) FROM counters GROUP BY name").fetchall()
    return [Effect(*row) for row in effects], {name: int(value) for name, value in counters}

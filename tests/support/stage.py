"""Beats and workers of one application on one database, and what they did, by the schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psycopg
import pytest

from tests.support.databases import Database
from tests.support.kept import KeptConnection
from tests.support.processes import Process, Processes, eventually

APP = "tests.apps.beat_app"
_TABLE = """
CREATE TABLE IF NOT EXISTS ran (
    entry text NOT NULL, due timestamptz NOT NULL, attempt integer NOT NULL,
    at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
)
"""


class Witness:
    """Sees what is sent when, over one connection that stays open."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def now(self) -> dt.datetime:
        """Return the server's clock."""
        ((now,),) = self._connection.execute("SELECT pg_catalog.clock_timestamp()").fetchall()
        assert isinstance(now, dt.datetime)
        return now

    def lateness_after(self, moment: dt.datetime, timeout: float = 20.0) -> float:
        """Wait until what falls due first after a moment is sent; return how late that was."""

        def sent() -> list[Any]:
            return self._connection.execute(
                "SELECT max(sent_at - due_at) FROM pglock.job_runs WHERE due_at ="
                " (SELECT min(due_at) FROM pglock.job_runs WHERE due_at > %s)"
                " HAVING count(*) > 0 AND count(*) = count(sent_at)",
                (moment,),
            ).fetchall()

        ((late,),) = eventually(sent, timeout, f"what is due first after {moment} is sent")
        assert isinstance(late, dt.timedelta)
        return late.total_seconds()

    def unconfirmed(self) -> frozenset[str]:
        """Return the ids of the messages that are claimed and not confirmed."""
        rows = self._connection.execute(
            "SELECT task_id FROM pglock.beat_entries"
            " WHERE published_at IS NULL AND due_at IS NOT NULL"
        )
        return frozenset(task_id for (task_id,) in rows)


@dataclasses.dataclass(kw_only=True)
class Stage:
    """Where beats and workers are started.

    Attributes:
        url: the database.
        broker: the broker's URL.
        processes: starts and ends them.
        namespace: of the application.
        queue: its queue.
        entries: entry name to seconds.
        settings: further settings of the application.
        extra: further variables of the environment.
        app: the module of the application.
        kept: asks the database.
    """

    url: str
    broker: str
    processes: Processes
    namespace: str
    queue: str
    entries: dict[str, float]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: dict[str, str] = dataclasses.field(default_factory=dict)
    app: str = APP
    kept: KeptConnection

    def env(self) -> Mapping[str, str]:
        return {
            "APP_DATABASE_URL": self.url,
            "APP_BROKER_URL": self.broker,
            "APP_NAMESPACE": self.namespace,
            "APP_QUEUE": self.queue,
            "APP_ENTRIES": json.dumps(self.entries),
            "APP_SETTINGS": json.dumps(self.settings),
            **self.extra,
        }

    def beat(self, *arguments: str, scheduler: str = "pglock", name: str = "beat") -> Process:
        return self.processes.celery(
            self.app, "beat", "-S", scheduler, "-l", "INFO", *arguments, env=self.env(), name=name
        )

    def worker(self, *arguments: str, name: str = "worker") -> Process:
        unique = f"{name}{uuid.uuid4().hex[:6]}@test"
        worker = self.processes.celery(
            self.app, "worker", "-c", "2", "-n", unique, "-l", "INFO", *arguments,
            env=self.env(), name=name,
        )  # fmt: skip
        worker.wait_for_line(r"ready\.")
        return worker

    def rows(self, query: str, *parameters: object) -> list[Any]:
        return self.kept.rows(query, *parameters)

    @contextlib.contextmanager
    def witness(self) -> Iterator[Witness]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            yield Witness(connection)

    def leader(self, among: list[Process], *, not_before_term: int = 1) -> Process:
        """Wait until one of these beats leads, and return it."""

        def found() -> Process | None:
            rows = self.rows(
                "SELECT node FROM pglock.beat_terms t WHERE namespace = %s AND term >= %s"
                " AND resigned_at IS NULL AND EXISTS (SELECT FROM pg_stat_activity a"
                " WHERE a.pid = t.backend_pid AND a.application_name LIKE 'pglock:leader:%%')",
                self.namespace,
                not_before_term,
            )
            pids = {int(node.rpartition(":")[2]) for (node,) in rows}
            return next((beat for beat in among if beat.pid in pids), None)

        beat = eventually(found, 20, "one of the beats leads")
        assert beat is not None
        return beat

    def term(self) -> int:
        rows = self.rows("SELECT term FROM pglock.beat_terms WHERE namespace = %s", self.namespace)
        return int(rows[0][0]) if rows else 0

    def wait_for_runs(self, count: int, timeout: float = 30.0) -> None:
        eventually(lambda: self.rows("SELECT count(*) FROM ran")[0][0] >= count, timeout, "runs")

    def account(self, entry: str) -> tuple[list[dt.datetime], list[dt.datetime]]:
        """Return what was due, computed from the schedule, and what ran, both in order.

        What is due is counted up to the last occurrence that was claimed; without it, if the
        last leader was stopped between claiming and sending it: then the next one sends it.
        Waits until the ledger has nothing else open.
        """
        eventually(
            lambda: self._unsettled() == "none", 30, "all periods are settled", told=self._unsettled
        )
        ((anchor, last, published_at),) = self.rows(
            "SELECT anchor, due_at, published_at FROM pglock.beat_entries"
            " WHERE namespace = %s AND entry = %s",
            self.namespace,
            entry,
        )
        every = dt.timedelta(seconds=self.entries[entry])
        due = [anchor + every * k for k in range(1, (last - anchor) // every + 1)]
        ran = self.rows("SELECT due FROM ran WHERE entry = %s ORDER BY due", entry)
        moments = [moment for (moment,) in ran]
        if published_at is None and due and due[-1] not in moments:
            due.pop()
        return due, moments

    def _unsettled(self) -> str:
        rows = self.rows(
            "SELECT to_jsonb(r)::text FROM pglock.job_runs r"
            " WHERE status NOT IN ('done', 'skipped', 'missed')"
            " AND NOT (status = 'sent' AND sent_at IS NULL)"
        )
        return "\n".join(row for (row,) in rows) or "none"

    def expect_each_once(self) -> int:
        """Fail unless each due occurrence of each entry ran exactly once; return their number."""
        count = 0
        for entry in self.entries:
            due, ran = self.account(entry)
            assert ran == due, f"entry {entry}: {len(due)} due, {len(ran)} ran"
            count += len(due)
        return count


MakeStage = Callable[..., Stage]


@pytest.fixture
def make_stage(
    database: Database, processes: Processes, fresh_redis_url: str, queue_name: str
) -> Iterator[MakeStage]:
    """Makes a stage on a database of its own, or on the one that is given as `url`."""
    asking: list[KeptConnection] = []

    def make(entries: dict[str, float], **given: Any) -> Stage:
        asking.append(KeptConnection(given.get("url", database.url)))
        stage = Stage(
            **{
                "url": database.url,
                "broker": fresh_redis_url,
                "processes": processes,
                "namespace": "stage",
                "queue": queue_name,
                "entries": entries,
                "kept": asking[-1],
                **given,
            }
        )
        stage.rows(_TABLE)
        return stage

    yield make
    for connection in asking:
        connection.close()

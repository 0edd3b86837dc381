"""Rows as workers and beats leave them, for what only reads them."""

from __future__ import annotations

import datetime as dt
from typing import Any

import psycopg

from celery_pglock import keys, periods

_ROW = """
insert into pglock.job_runs (job, period, due_at, status, attempts, lost_attempts, claim, name_key,
 task, task_id, entry, node, backend_pid, sent_at, started_at, finished_at, reason, error)
values (%(job)s, %(period)s, %(due_at)s, %(status)s, %(attempts)s, %(lost_attempts)s,
 gen_random_uuid(), %(name_key)s, %(task)s, %(task_id)s, %(entry)s, %(node)s, %(backend_pid)s,
 %(sent_at)s, %(started_at)s, %(finished_at)s, %(reason)s, %(error)s)
"""
_ENTRY = """
insert into pglock.beat_entries (namespace, entry, task, schedule, anchor, due_at, published_at,
 next_due_at, paused_until, paused_reason)
values (%(namespace)s, %(entry)s, %(task)s, %(schedule)s, now(), %(due_at)s, %(published_at)s,
 %(next_due_at)s, %(paused_until)s, %(paused_reason)s)
"""
_SETTLED = ("done", "failed", "skipped", "missed")


class History:
    """Writes the rows of one namespace into a database with tables.

    Attributes:
        now: the moment from which all is counted.
    """

    def __init__(self, url: str, namespace: str) -> None:
        self.url = url
        self.namespace = namespace
        self.now = dt.datetime.now(dt.UTC).replace(microsecond=0)

    def entry(self, name: str, schedule: str = "every 60.000000 s", **given: Any) -> None:
        """Write a schedule entry, due in half a minute."""
        due = self.now - dt.timedelta(seconds=30)
        row = {
            "task": "proj.job",
            "due_at": due,
            "published_at": due,
            "next_due_at": self.now + dt.timedelta(seconds=30),
            "paused_until": None,
            "paused_reason": None,
        }
        self._write(
            _ENTRY,
            {**row, **given, "namespace": self.namespace, "entry": name, "schedule": schedule},
        )

    def row(self, name: str, status: str, ago: float = 30.0, **given: Any) -> dict[str, Any]:
        """Write the row of an occurrence that was due some seconds ago, and return it."""
        due = self.now - dt.timedelta(seconds=ago)
        begun = None if status in ("sent", "missed", "skipped") else due
        row = {
            "job": f"{self.namespace}:{name}",
            "period": periods.occurrence(due),
            "due_at": due,
            "status": status,
            "attempts": 0 if begun is None else 1,
            "lost_attempts": 0,
            "name_key": self.key("proj.job"),
            "task": "proj.job",
            "task_id": f"task-{ago:g}",
            "entry": name,
            "node": "celery@web1:4711",
            "backend_pid": None if begun is None else 4242,
            "sent_at": due,
            "started_at": begun,
            "finished_at": due + dt.timedelta(seconds=2) if status in _SETTLED else None,
            "reason": None,
            "error": None,
            **given,
        }
        self._write(_ROW, row)
        return row

    def key(self, name: str) -> int:
        """Return the key of a lock name."""
        return keys.from_name(self.namespace, "task", name)

    def _write(self, query: str, row: dict[str, Any]) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(query.encode(), row)

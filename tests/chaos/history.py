"""The history: what every process says it does, written down twice while it does it.

First a line in a file of its own, with the monotonic clock; then a row on a server that nothing
hurts, numbered by one sequence. An event whose row was there before another's was sent has the
lower number, so the order is certain, whatever any clock says. A process that is killed between
the two leaves the line alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg

TABLES: Final = b"""
CREATE TABLE history (
    seq bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    at double precision NOT NULL DEFAULT extract(epoch FROM pg_catalog.clock_timestamp()),
    uid text NOT NULL, mono bigint NOT NULL, who text NOT NULL, pid integer NOT NULL,
    kind text NOT NULL, run text, job text, period text, name text, level text,
    attempt integer, term bigint, task_id text, detail jsonb NOT NULL
);
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: `begin`, `effect`, `end` by a body; `finished`, `lost` by the package's signals;
            `delivered`, `answered` around a message in a worker; `gained`, `publish` by a beat;
            `strike`, `over` by whoever plays the faults.
        seq: its number; 0 where only the file has it.
        at: seconds since 1970 by the history's server; 0 where only the file has it.
        mono: nanoseconds of the machine's monotonic clock, taken before the row was sent.
        run: joins the events of one body, or of one delivery.
        name: the lock name.
        detail: whatever else there is to say.
    """

    kind: str
    who: str
    pid: int
    mono: int = 0
    seq: int = 0
    at: float = 0.0
    uid: str = ""
    run: str | None = None
    job: str | None = None
    period: str | None = None
    name: str | None = None
    level: str | None = None
    attempt: int | None = None
    term: int | None = None
    task_id: str | None = None
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(Event))
_WRITTEN: Final = tuple(name for name in _FIELDS if name not in ("seq", "at"))
_INSERT: Final = (
    f"INSERT INTO history ({', '.join(_WRITTEN)})"  # noqa: S608 - names of our own fields
    f" VALUES ({', '.join(f'%({name})s' for name in _WRITTEN)}) RETURNING seq, at"
)


class Scribe:
    """Writes the events of one process; of a fork of it too, over connections of its own.

    Args:
        url: the history's server.
        directory: where each process has its file.
        who: the name of the actor, such as `worker2`.
    """

    def __init__(self, url: str, directory: Path, who: str) -> None:
        self._url = url
        self._directory = directory
        self.who = who
        # Signals are sent by other threads too, and a body may be struck at any bytecode: so a
        # connection is of one thread, and closed when anything is raised while it is in use.
        self._local = threading.local()

    def tell(self, kind: str, **fields: Any) -> Event:
        """Write an event down, and return it as it was written."""
        return self.execute(kind, fields)

    def execute(
        self,
        kind: str,
        fields: Mapping[str, Any],
        statement: bytes = b"",
        values: Mapping[str, Any] | None = None,
    ) -> Event:
        """Write an event down together with something else, in one transaction."""
        event = Event(
            kind=kind,
            who=self.who,
            pid=os.getpid(),
            mono=time.monotonic_ns(),
            uid=uuid.uuid4().hex,
            **fields,
        )
        known = {name: getattr(event, name) for name in _WRITTEN}
        self._note(known)
        parameters = {**known, "detail": json.dumps(event.detail, default=str)}
        with self._connected() as connection, connection.transaction():
            if statement:
                connection.execute(statement, values)
            ((seq, at),) = connection.execute(_INSERT.encode(), parameters).fetchall()
        return dataclasses.replace(event, seq=seq, at=at)

    def rows(self, statement: bytes, *values: object) -> list[Any]:
        """Return the rows of a query on the history's server."""
        with self._connected() as connection:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() if cursor.rownumber is not None else []

    def close(self) -> None:
        """Close this thread's connection."""
        if getattr(self._local, "pid", None) == os.getpid():
            self._local.connection.close()
            self._local.pid = None

    def _note(self, known: Mapping[str, Any]) -> None:
        file = self._directory / f"{self.who}-{os.getpid()}.jsonl"
        line = json.dumps(known, default=str) + "\n"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        if getattr(self._local, "pid", None) != os.getpid():
            # What a forked child has inherited is its parent's: kept, and never touched again.
            self._local.inherited = getattr(self._local, "connection", None)
            self._local.connection = psycopg.connect(
                self._url, autocommit=True, connect_timeout=10, application_name="history"
            )
            self._local.pid = os.getpid()
        try:
            yield self._local.connection
        except BaseException:
            self._local.pid = None
            self._local.connection.close()
            raise


def read(connection: psycopg.Connection[Any], after: int = 0) -> list[Event]:
    """Return the rows of the history with higher numbers, in their order."""
    rows = connection.execute(
        f"SELECT {', '.join(_FIELDS)} FROM history WHERE seq > %s ORDER BY seq".encode(),  # noqa: S608
        (after,),
    ).fetchall()
    return [Event(**dict(zip(_FIELDS, row, strict=True))) for row in rows]


def read_files(directory: Path) -> list[Event]:
    """Return what the files say, in the order of the monotonic clock."""
    events = [event for file in directory.glob("*.jsonl") for event in _events(file)]
    return sorted(events, key=lambda event: event.mono)


def unwritten(local: Iterable[Event], rows: Iterable[Event]) -> list[Event]:
    """Return the events of the files that have no row."""
    written = {event.uid for event in rows}
    return [event for event in local if event.uid not in written]


def _events(file: Path) -> Iterator[Event]:
    for line in file.read_text(errors="replace").splitlines():
        # The last line of a process that was killed may be half a line.
        with contextlib.suppress(json.JSONDecodeError):
            yield Event(**json.loads(line))

"""The feed: what the processes of the demonstration say, one JSON line each, in one file.

The workers and beats are other processes, so their log records are written by a handler on
the package's loggers and read back from the file. A line is one ``write`` to a file opened
for appending: lines of several processes do not mix, and a kill leaves no half of one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_UUID: Final = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
_INSTANT: Final = re.compile(r"\b\d{4}-\d\d-\d\d[T ](\d\d:\d\d:\d\d(?:\.\d\d?\d?)?)\d*\+00:00")


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """Something that a process has said.

    Attributes:
        who: the name of the process in the demonstration.
        pid: its process id.
        event: the stable name of the event.
        fields: what the log record says beside it.
        text: the log record's sentence.
    """

    who: str
    pid: int
    event: str
    fields: dict[str, Any]
    text: str

    @property
    def sentence(self) -> str:
        """What is shown: short, with times for instants and the beginnings of ids."""
        return _shortened(f"{self.who} {self._words()}")

    def _words(self) -> str:
        period, reason = self.fields.get("period"), self.fields.get("reason")
        match self.event:
            case "leadership_gained":
                past = self.text.partition("; ")[2]
                return f"leads now, term {self.fields.get('term')}; {past}"
            case "leadership_resigned":
                return f"resigns from term {self.fields.get('term')}"
            case "leadership_lost":
                return f"leads no longer: {reason}"
            case "standby":
                return "stands by"
            case "run_rescued":
                return f"sends {period} again: {self.fields.get('status')}, and nobody works on it"
            case "run_taken_over":
                return f"takes {period} over, attempt {self.fields.get('attempt')}"
            case "run_skipped":
                return f"skips {period}: {reason}"
            case "run_postponed":
                return f"postpones {period} for {self.fields.get('countdown'):.2g} s: {reason}"
            case "copy_dropped":
                return f"drops a copy of {period}: {reason}"
            case _:
                return self.text


class Writer(logging.Handler):
    """Writes the log records that have an event name."""

    def __init__(self, path: Path, who: str) -> None:
        super().__init__()
        self._path = path
        self._who = who

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "event"):
            return
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        self.write(record.getMessage(), **fields)

    def write(self, text: str, *, event: str, **fields: Any) -> None:
        """Write a line that does not come from a log record."""
        told = Told(self._who, os.getpid(), event, fields, text)
        line = json.dumps(dataclasses.asdict(told), default=str) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


class Reader:
    """Reads what was written since it was last asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        path.touch(0o600)

    def read(self) -> list[Told]:
        """Return what is new, in the order in which it was written."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            lines = file.read()
        whole = lines.rpartition(b"\n")[0]
        if not whole:
            return []
        self._position += len(whole) + 1
        return [Told(**json.loads(line)) for line in whole.splitlines()]


def _shortened(text: str) -> str:
    return _INSTANT.sub(r"\1", _UUID.sub(r"\1", " ".join(text.split())))

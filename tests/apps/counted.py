"""Work of entries that are kept in the database: each run notes by which edit it was sent.

`python -m tests.apps.counted NUMBER` edits such entries: reads one, adds one to the number that
it is sent with, and saves it, from two threads, until the file `APP_MARKER` is there and at least
`APP_EDITS` edits are made. It prints how many of each entry it has saved. `APP_STEADY` and
`APP_MOVED` are lists of their names; the latter get another schedule each time.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
import threading
from pathlib import Path

import psycopg

from celery_pglock import Entry, LockedTask, current_run, errors
from tests.apps.beat_app import app

EVERY = (0.7, 1.0, 1.3)
PASSING = 0.2


@app.task(
    base=LockedTask,
    lock_name=lambda _, request: request.headers["pglock_job"],
    lock_conflict="postpone",
)
def counted(edits: int) -> None:
    """Leave a row that says how many edits its entry has had."""
    run = current_run()
    with psycopg.connect(os.environ["APP_DATABASE_URL"], autocommit=True) as connection:
        connection.execute(
            "INSERT INTO counted (entry, due, edits) VALUES (%s, %s, %s)",
            (run.job.partition(":")[2], run.due, edits),
        )


class Editor:
    """Edits entries at a leisurely pace, and counts what it has saved.

    Args:
        number: of the process.
        share: how many edits at least.
        marker: the file that ends it.
    """

    def __init__(self, number: int, share: int, marker: Path) -> None:
        self.number = number
        self.share = share
        self.marker = marker
        self.steady: list[str] = json.loads(os.environ["APP_STEADY"])
        self.moved: list[str] = json.loads(os.environ["APP_MOVED"])
        self.saved: collections.Counter[str] = collections.Counter()
        self.refused = 0
        self._lock = threading.Lock()

    def run(self, thread: int) -> None:
        """Edit until it is enough."""
        pace = random.Random(f"{self.number} {thread}")  # noqa: S311 - not for secrets
        own = Entry(f"passing {self.number} {thread}", 1.0, "tests.apps.counted.counted", [0])
        done = 0
        while done < self.share or not self.marker.exists():
            if pace.random() < PASSING:
                own.save(app=app)
                own.delete(app=app)
                done += 2
            else:
                self._edit(pace.choice(self.steady + self.moved), pace)
                done += 1
            self.wait(pace.uniform(0.0, float(os.environ["APP_PACE"])))
        with self._lock:
            self.saved["passing"] += done

    def wait(self, seconds: float) -> None:
        """Let some time pass, but not when it is time to end."""
        if not self.marker.exists():
            threading.Event().wait(seconds)

    def _edit(self, name: str, pace: random.Random) -> None:
        while True:
            entry = Entry.get(name, app=app)
            assert entry is not None
            entry.args = [entry.args[0] + 1]
            if name in self.moved:
                entry.schedule = pace.choice(EVERY)
            try:
                entry.save(app=app)
            except errors.EntryChanged:
                with self._lock:
                    self.refused += 1
                continue
            with self._lock:
                self.saved[name] += 1
            return


def main() -> None:
    """Edit from two threads."""
    number, share = int(sys.argv[1]), int(os.environ["APP_EDITS"])
    editor = Editor(number, share, Path(os.environ["APP_MARKER"]))
    threads = [threading.Thread(target=editor.run, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del editor.saved["passing"]
    print(json.dumps({"saved": editor.saved, "refused": editor.refused}))


if __name__ == "__main__":
    main()

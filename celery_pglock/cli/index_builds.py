"""How far the building of an index is, as the server tells it: on a big table it takes its time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

import psycopg

from celery_pglock import connections, errors, patience
from celery_pglock.cli import progress

_EVERY: Final = 1.0
_BUILD: Final = """
select phase, blocks_done, blocks_total, current_locker_pid
from pg_catalog.pg_stat_progress_create_index
where datname = pg_catalog.current_database() and relid in (
 select c.oid from pg_catalog.pg_class c
 join pg_catalog.pg_namespace n on n.oid = c.relnamespace where n.nspname = %s)
limit 1
"""


class Builds:
    """Tells of them over a connection of its own.

    Args:
        target: the database.
        schema: where the tables are.
        tell: what is told.

    Attributes:
        step: the step that is being applied.
    """

    def __init__(self, target: connections.Target, schema: str, tell: progress.Tell) -> None:
        self.step = ""
        self._target = target
        self._schema = schema
        self._tell = tell
        self._over = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Tell of them once a second while the block lasts; of nothing if it cannot be asked."""
        watching = threading.Thread(target=self._watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            self._over.set()
            watching.join()

    def _watch(self) -> None:
        # Most steps are over before anything could be told of them.
        if self._over.wait(_EVERY):
            return
        # Whatever is wrong with the database, the migration itself says.
        with (
            contextlib.suppress(errors.PGLockError, psycopg.Error),
            contextlib.closing(
                connections.connect(
                    self._target,
                    application="pglock migrate, progress",
                    factory=patience.Patient,
                )
            ) as connection,
        ):
            while not self._over.wait(_EVERY):
                row = connection.execute(_BUILD, [self._schema]).fetchone()
                if row is not None:
                    self._tell(f"applying {self.step}: {_told(row)}")


def _told(row: tuple[Any, ...]) -> str:
    phase, done, total, locker = row
    if locker:
        return f"{phase}, for backend {locker}"
    return f"{phase}, {100 * done // total} %" if total else str(phase)

"""A file whose age says how long ago a beat last did its work, for whoever watches processes."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final

_log: Final = logging.getLogger("celery_pglock.beat")

_EVERY: Final = 1.0


class Heartbeat:
    """Touches a file, at most once a second, while the beat leads or stands by.

    It is not touched while the database cannot be used, nor by a beat that hangs. So a probe
    that finds it older than, say, a minute may restart the process.

    Args:
        path: of the file, or None for none.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._next_at = 0.0
        self._failed = False

    def beat(self) -> None:
        """Touch the file; that it cannot be touched is said once, and changes nothing else."""
        now = time.monotonic()
        if self._path is None or now < self._next_at:
            return
        self._next_at = now + _EVERY
        try:
            self._path.touch()
        except OSError as error:
            if not self._failed:
                _log.warning(
                    "the heartbeat file %s cannot be touched: %s",
                    self._path,
                    error.strerror,
                    extra={"event": "heartbeat_failed", "path": str(self._path)},
                )
            self._failed = True
        else:
            self._failed = False

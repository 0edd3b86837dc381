"""A scheduler that cleans up soon after its election; otherwise it is the one of the package."""

from __future__ import annotations

from celery_pglock import beat, retention

retention._FIRST_AFTER = 0.5  # type: ignore[misc]  # noqa: SLF001 - half a minute is long for a test
retention._BETWEEN_WALKS = 1.0  # type: ignore[misc]  # noqa: SLF001


class CleansUpSoon(beat.LeaderScheduler):
    """Begins with the clean-up half a second after its election."""

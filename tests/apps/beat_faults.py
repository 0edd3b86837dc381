"""Schedulers that kill their own process at one step of an occurrence, once per marker file."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from celery_pglock import beat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_pglock import leadership, schedule_store


def _die_once() -> None:
    marker = Path(os.environ["APP_MARKER"])
    # The third occurrence, so that there is a history on both sides.
    count = int(marker.read_text() or "0") if marker.exists() else 0
    marker.write_text(str(count + 1))
    if count == 2:
        os.kill(os.getpid(), signal.SIGKILL)


class DiesBeforePublishing(beat.LeaderScheduler):
    """Killed after the claim was committed and before its message was handed over."""

    @override
    def _publish(
        self, candidate: leadership.Leadership, occurrence: schedule_store.Occurrence
    ) -> BaseException | None:
        _die_once()
        return super()._publish(candidate, occurrence)


class DiesBeforeConfirming(beat.LeaderScheduler):
    """Killed after the message was handed over and before that was recorded."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        confirm = self._store.confirm

        def die_or_confirm(sent: Sequence[schedule_store.Occurrence]) -> None:
            _die_once()
            confirm(sent)

        self._store.confirm = die_or_confirm  # type: ignore[method-assign, assignment]

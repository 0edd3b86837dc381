"""Schedulers that freeze their own process in the middle of a burst, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from celery_pglock import beat
from tests.apps import beat_trusting

if TYPE_CHECKING:
    from collections.abc import Mapping


class FreezesInHand(beat.LeaderScheduler):
    """Stopped after it has asked itself whether it leads, with the message in its hand.

    That is the second message of a burst, as soon as there is a file at `APP_MARKER`.
    """

    _period: Any = None

    @override
    def _hand_over(self, entry: Any, task_id: str, ours: Mapping[str, Any]) -> BaseException | None:
        marker = Path(os.environ["APP_MARKER"])
        if self._period == ours["pglock_period"] and marker.exists():
            marker.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        self._period = ours["pglock_period"]
        return super()._hand_over(entry, task_id, ours)


class TrustsAfterFreezing(FreezesInHand, beat_trusting.Trusting):
    """The same without the question."""

"""Sentry's check-ins, of messages that do not end as Sentry expects.

With ``monitor_beat_tasks`` Sentry opens a check-in for each message that beat sends, and closes
it when the task succeeds, fails or is retried. A run that is skipped does none of these, and a
message that the broker did not take is handed over again, with a check-in of its own. Left
open, each would end as a time-out: an alarm for nothing.

Sentry is not imported here. Where nobody else has, nobody has opened a check-in either.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import celery

_SLUG: Final = "sentry-monitor-slug"
_CONFIG: Final = "sentry-monitor-config"
_ID: Final = "sentry-monitor-check-in-id"


class Opened:
    """The check-ins of messages that have been handed over, and are not confirmed yet."""

    def __init__(self) -> None:
        self._headers: dict[str, Mapping[str, Any]] = {}

    def opened(self, task_id: str, headers: Mapping[str, Any]) -> None:
        """Remember the check-in of a message; close that of the same message handed over before."""
        if _ID not in headers:
            return
        before = self._headers.pop(task_id, None)
        if before is not None:
            _close(before, "error")
        self._headers[task_id] = headers

    def forget(self, task_id: str) -> None:
        """Leave a check-in to the worker that gets its message."""
        self._headers.pop(task_id, None)

    def clear(self) -> None:
        """Leave all to whoever leads next; these messages may have arrived."""
        self._headers.clear()


def end(task: celery.Task[..., Any], *, settled: bool) -> None:
    """Close the check-in of a message whose run does not happen, and of which no copy follows.

    Args:
        task: its task, while it has the request.
        settled: the period was run, or is being run by another, which tells its own outcome;
            else it failed, or nobody knows.
    """
    headers = dict(task.request.get("headers") or {})
    headers.update(headers.get("headers") or {})
    if _ID in headers:
        _close(headers, "ok" if settled else "error")


def _close(headers: Mapping[str, Any], status: str) -> None:
    sentry: Any = sys.modules.get("sentry_sdk.crons")
    if sentry is None:
        return
    # What watches over a run must not change what becomes of it.
    with contextlib.suppress(Exception):
        sentry.capture_checkin(
            monitor_slug=headers[_SLUG],
            monitor_config=headers.get(_CONFIG),
            check_in_id=headers[_ID],
            status=status,
        )

"""What the leader writes into the messages that it sends; ``messages`` reads it."""

from __future__ import annotations

import datetime as dt
from typing import Any

from celery_pglock import beat_rows, periods, rescue


def of_occurrence(
    namespace: str, term: int | None, occurrence: beat_rows.Occurrence
) -> dict[str, Any]:
    """Return the headers of an occurrence."""
    headers = {
        "pglock_job": f"{namespace}:{occurrence.entry}",
        "pglock_period": occurrence.period,
        "pglock_due": occurrence.period,
        "pglock_entry": occurrence.entry,
        "pglock_term": term,
    }
    return {**headers, "pglock_late": True} if occurrence.late else headers


def of_rescue(
    namespace: str, term: int | None, copy: rescue.Copy, now: dt.datetime
) -> dict[str, Any]:
    """Return the headers of a rescue copy, which takes the place of any postponed one."""
    row = copy.row
    headers = {
        "pglock_job": row.job,
        "pglock_period": row.period,
        "pglock_entry": row.entry,
        "pglock_term": term,
        "pglock_late": True,
        "pglock_seen": row.attempts,
        "pglock_postponed": copy.number,
        "pglock_postponed_since": now.isoformat(),
    }
    own = None
    if row.due_at is not None:
        headers["pglock_due"] = row.due_at.isoformat()
        own = (f"{namespace}:{row.entry}", periods.occurrence(row.due_at))
    if (row.job, row.period) != own:
        # Under a calendar rule the run has another job or period than the beat's own row.
        headers["pglock_fixed"] = True
    return headers


def by_hand(
    job: str, period: str, due: dt.datetime | None, entry: str | None, *, fixed: bool
) -> dict[str, Any]:
    """Return the headers of a message that an operator sends; ``fixed``: for this very period."""
    headers: dict[str, Any] = {"pglock_job": job, "pglock_period": period}
    if due is not None:
        headers["pglock_due"] = due.isoformat()
    if entry is not None:
        headers["pglock_entry"] = entry
    return {**headers, "pglock_fixed": True} if fixed else headers


def expired(expires: object, due: dt.datetime | None, now: dt.datetime, zone: dt.tzinfo) -> bool:
    """Whether the ``expires`` of an entry's options is over: seconds after due, or a moment."""
    if isinstance(expires, dt.timedelta):
        expires = expires.total_seconds()
    if isinstance(expires, int | float) and due is not None:
        expires = due + dt.timedelta(seconds=expires)
    if not isinstance(expires, dt.datetime):
        return False
    return now >= (expires if expires.tzinfo else expires.replace(tzinfo=zone))

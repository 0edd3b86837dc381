"""Jobs by periods: which state each cell shows, and what is said of it; pure.

A state has a sign and a name beside its colour. Columns are not instants: each job has periods
of its own length, of which the newest stands on the right.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from celery_pglock import overview
from celery_pglock.page import words

# Due for longer than that, and not claimed by any leader.
OVERDUE_AFTER: Final = dt.timedelta(seconds=5)

# In the order of the legend: the sign, and what it says.
STATES: Final[Mapping[str, tuple[str, str]]] = {
    "done": ("✓", "done"),
    "retried": ("↻", "done at a later attempt"),
    "running": ("▶", "running"),
    "retrying": ("↺", "waiting for its retry"),
    "sent": ("…", "sent, not started"),
    "skipped": ("»", "skipped"),
    "failed": ("✕", "failed"),
    "missed": ("!", "missed"),
    "lost": ("†", "running for nobody: its session is gone"),
    "overdue": ("?", "due, and not sent"),
    "next": ("", "not due yet"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One period of a job.

    Attributes:
        state: one of ``STATES``.
        sign: its sign.
        details: lines: which period it is, then what became of it.
    """

    state: str
    sign: str
    details: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One job as it is shown.

    Attributes:
        name: without the namespace.
        task: its task, where that has another name.
        schedule: in words.
        next_due: when it is due next, or why it is not; a few words.
        last_success: when it was last done.
        holder: who holds its lock name, in a few words.
        holder_details: who exactly.
        skips: how many periods in a row were skipped since one was run.
        cells: its periods, the oldest first.
        states: the states among them.
    """

    name: str
    task: str
    schedule: str
    next_due: str
    last_success: str
    holder: str
    holder_details: str
    skips: int
    cells: Sequence[Cell]
    states: str


def lines(seen: overview.Overview, zone: dt.tzinfo) -> list[Line]:
    """Return the jobs of a namespace as they are shown."""
    return [_line(job, seen, zone) for job in seen.jobs]


def state(row: overview.Row, job: overview.Job) -> str:
    """Return which state the cell of a row shows."""
    if row.status == "running" and row.period in job.dead:
        return "lost"
    if row.status == "done" and row.attempts > 1:
        return "retried"
    return row.status


def overdue(job: overview.Job, now: dt.datetime) -> dt.datetime | None:
    """Return the instant for which an entry is due and has not been sent, or None."""
    due = job.unconfirmed or job.next_due_at
    return due if due is not None and due < now - OVERDUE_AFTER else None


def holder(seen: overview.Holder, zone: dt.tzinfo) -> str:
    """Return who holds a lock, with all that is known."""
    who = seen.application or "a session without application_name"
    if seen.run is not None:
        who = f"{seen.run.node} for {seen.run.period}"
    since = seen.since
    when = "" if since is None else words.instant(since, zone)
    known = "since" if seen.run is not None else "not before"
    return "\n".join(
        [f"held by {who}", f"backend {seen.pid}", *([f"{known} {when}"] if when else []),
         f"key {seen.key}"]
    )  # fmt: skip


def _line(job: overview.Job, seen: overview.Overview, zone: dt.tzinfo) -> Line:
    name = _short(job.name, seen.namespace)
    cells = [*_cells(job, seen.now, zone)]
    holding = job.holder
    return Line(
        name=name,
        task="" if job.task in (None, name) else str(job.task),
        schedule="" if job.schedule is None else words.of_schedule(job.schedule),
        next_due=_next_due(job, seen.now, zone),
        last_success=""
        if job.last_done_at is None
        else words.briefly(seen.now, job.last_done_at, zone),
        holder="" if holding is None else _briefly(holding),
        holder_details="" if holding is None else holder(holding, zone),
        skips=job.skips,
        cells=cells,
        states=" ".join(sorted({cell.state for cell in cells})),
    )  # fmt: skip


def _cells(job: overview.Job, now: dt.datetime, zone: dt.tzinfo) -> Iterator[Cell]:
    for row in reversed(job.rows):
        shown = state(row, job)
        yield Cell(shown, STATES[shown][0], "\n".join(_details(row, shown, zone)))
    due = overdue(job, now)
    if due is not None:
        yield Cell(
            "overdue", STATES["overdue"][0], f"{words.instant(due, zone)}\ndue, not sent yet"
        )
    elif job.next_due_at is not None:
        yield Cell("next", "", f"{words.instant(job.next_due_at, zone)}\nnot due yet")


def _details(row: overview.Row, shown: str, zone: dt.tzinfo) -> Iterator[str]:
    yield row.period if row.due_at is None else words.instant(row.due_at, zone)
    took = ""
    if row.started_at is not None and row.finished_at is not None and row.attempts:
        took = f" in {words.span((row.finished_at - row.started_at).total_seconds())}"
    error = f" ({row.error})" if row.error else ""
    yield f"{STATES[shown][1]}{took}{error}"
    if row.reason:
        yield row.reason
    if row.started_at is not None:
        yield f"attempt {row.attempts} on {row.node}, started {words.instant(row.started_at, zone)}"
    elif row.sent_at is not None:
        yield f"sent {words.instant(row.sent_at, zone)}"
    if row.lost_attempts:
        yield f"attempts that died: {row.lost_attempts}"
    if row.status == "retrying" and row.retry_at is not None:
        yield f"retry at {words.instant(row.retry_at, zone)}"


def _next_due(job: overview.Job, now: dt.datetime, zone: dt.tzinfo) -> str:
    if job.paused_until is not None and job.paused_until > now:
        # A pause without an end is stored as one until the year 9999.
        far = job.paused_until.year == dt.MAXYEAR
        moment = words.briefly(now, job.paused_until, zone)
        until = "until it is resumed" if far else f"until {moment}"
        return f"paused {until}"
    if job.next_due_at is None:
        return "" if job.schedule is None else "never due"
    return f"next {words.briefly(now, job.next_due_at, zone)}"


def _briefly(seen: overview.Holder) -> str:
    if seen.run is not None and seen.run.node:
        return seen.run.node
    return seen.application or f"backend {seen.pid}"


def _short(job: str, namespace: str) -> str:
    return job.removeprefix(f"{namespace}:")


def skips(seen: overview.Overview, zone: dt.tzinfo) -> list[tuple[str, str, str, str]]:
    """Return the latest skips: when, which job, which period, and why."""
    return [
        (
            "" if row.finished_at is None else words.instant(row.finished_at, zone),
            _short(row.job, seen.namespace),
            row.period if row.due_at is None else words.instant(row.due_at, zone),
            row.reason or "",
        )
        for row in seen.skips
    ]

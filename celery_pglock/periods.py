"""The label under which a run is recorded: at most one run per (job, period); pure.

Three kinds of labels:

- an *occurrence* of a schedule: its due instant in UTC, ISO 8601 with microseconds;
- a *calendar* bucket in the application's time zone: ``2026-11-03`` (day),
  ``2026-11-03T14+01:00`` (hour), ``2026-11-03T14:05+01:00`` (minute), ``2026-W45`` (ISO week),
  ``2026-11`` (month). Hours and minutes carry the UTC offset, so both passes of a repeated
  hour have labels of their own;
- ``id:<task id>`` for a message that belongs to no occurrence: it runs once, however often
  it is delivered.
"""

from __future__ import annotations

import datetime as dt
from typing import Final, Literal, get_args

Calendar = Literal["minute", "hour", "day", "week", "month"]

CALENDARS: Final[tuple[str, ...]] = get_args(Calendar)

_FLOORS: Final[dict[str, dict[str, int]]] = {
    "minute": {"second": 0, "microsecond": 0},
    "hour": {"minute": 0, "second": 0, "microsecond": 0},
    "day": {"hour": 0, "minute": 0, "second": 0, "microsecond": 0},
    "week": {"hour": 0, "minute": 0, "second": 0, "microsecond": 0},
    "month": {"day": 1, "hour": 0, "minute": 0, "second": 0, "microsecond": 0},
}


def occurrence(due: dt.datetime) -> str:
    """Return the label of the occurrence that is due at this instant.

    Raises:
        ValueError: ``due`` has no time zone, so it is no instant.
    """
    return _aware(due).astimezone(dt.UTC).isoformat(timespec="microseconds")


def message(task_id: str) -> str:
    """Return the label of a message that belongs to no occurrence."""
    return f"id:{task_id}"


def calendar(rule: Calendar, moment: dt.datetime, zone: dt.tzinfo) -> str:
    """Return the label of the bucket that holds ``moment`` in the time zone.

    Raises:
        ValueError: ``moment`` has no time zone.
    """
    local = _aware(moment).astimezone(zone)
    match rule:
        case "minute":
            return f"{local:%Y-%m-%dT%H:%M}{_offset(local)}"
        case "hour":
            return f"{local:%Y-%m-%dT%H}{_offset(local)}"
        case "day":
            return local.date().isoformat()
        case "week":
            year, week, _ = local.isocalendar()
            return f"{year:04}-W{week:02}"
        case "month":
            return f"{local:%Y-%m}"


def window(
    rule: Calendar, moment: dt.datetime, zone: dt.tzinfo
) -> tuple[dt.datetime, dt.datetime] | None:
    """Return ``[since, until)``, instants around ``moment`` that all have its label.

    None when the zone's offset changes inside the bucket: then only the very moment is sure.
    With it, a claim lets the server compare its own clock in the same statement, instead of
    asking for the time first.
    """
    local = _aware(moment).astimezone(zone)
    # Arithmetic on a fixed offset: an aware datetime in a zone adds wall-clock time.
    fixed = local.replace(tzinfo=dt.timezone(_utcoffset(local)))
    since = fixed.replace(**_FLOORS[rule])  # type: ignore[arg-type]
    match rule:
        case "minute":
            until = since + dt.timedelta(minutes=1)
        case "hour":
            until = since + dt.timedelta(hours=1)
        case "day":
            until = since + dt.timedelta(days=1)
        case "week":
            since -= dt.timedelta(days=since.weekday())
            until = since + dt.timedelta(days=7)
        case _:
            until = (since + dt.timedelta(days=31)).replace(day=1)
    # A zone may change its offset and change it back inside one bucket (Egypt did in September
    # 2010), so each day is looked at, not only the two ends.
    probe = since
    while probe < until:
        if _utcoffset(probe.astimezone(zone)) != _utcoffset(local):
            return None
        probe += dt.timedelta(days=1)
    last = until - dt.timedelta(microseconds=1)
    if _utcoffset(last.astimezone(zone)) != _utcoffset(local):
        return None
    return since.astimezone(dt.UTC), until.astimezone(dt.UTC)


def _aware(moment: dt.datetime) -> dt.datetime:
    if moment.utcoffset() is None:
        msg = f"{moment!r} has no time zone; a period is computed from an instant"
        raise ValueError(msg)
    return moment


def _utcoffset(local: dt.datetime) -> dt.timedelta:
    offset = local.utcoffset()
    if offset is None:
        msg = f"{local.tzinfo!r} gives no UTC offset"
        raise ValueError(msg)
    return offset


def _offset(local: dt.datetime) -> str:
    # isoformat writes seconds of an offset too, which strftime("%z") writes without colons.
    return local.isoformat(timespec="seconds")[19:]

"""Moments as people read them, in the application's zone and with the offset; and as they type them."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

import click

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST: Final = 36500 * 86400


def zone(ctx: click.Context, *, utc: bool) -> dt.tzinfo:
    """Return the zone that moments are shown in."""
    found: dt.tzinfo = dt.UTC if utc else ctx.obj.settings.zone
    return found


def told(moment: dt.datetime, zone: dt.tzinfo) -> str:
    """Return a moment for people, to the second."""
    return moment.astimezone(zone).isoformat(sep=" ", timespec="seconds")


def ago(now: dt.datetime, moment: dt.datetime | None) -> str:
    """Return how long ago a moment was."""
    if moment is None:
        return "never"
    seconds = max(0.0, (now - moment).total_seconds())
    for unit in ("d", "h"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.1f} {unit} ago"
    return f"{seconds:.1f} s ago"


def duration(_: click.Context, __: click.Parameter, value: str | None) -> dt.timedelta | None:
    """Return a length of time that was typed like 90s, 30m, 2h or 7d."""
    if value is None:
        return None
    match = _DURATION.fullmatch(value)
    if match is None:
        msg = f"must be a number and a unit, like 90s, 30m, 2h or 7d; got {value!r}"
        raise click.BadParameter(msg)
    length = float(match[1]) * _SECONDS[match[2]]
    if not 0 < length <= _LONGEST:
        msg = f"must be more than nothing and at most 36500d; got {value!r}"
        raise click.BadParameter(msg)
    return dt.timedelta(seconds=length)


def since(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> dt.datetime | dt.timedelta | None:
    """Return a moment that was typed in ISO 8601, or how long ago it was."""
    if value is None or _DURATION.fullmatch(value):
        return duration(ctx, parameter, value)
    try:
        return dt.datetime.fromisoformat(value)
    except ValueError:
        msg = (
            "must be how long ago, like 90s, 30m, 2h or 7d, or a moment, like 2026-11-30 or "
            f"2026-11-30T14:00+01:00; got {value!r}"
        )
        raise click.BadParameter(msg) from None

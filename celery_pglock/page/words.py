"""Schedules, moments and lengths of time in words; pure."""

from __future__ import annotations

import datetime as dt
import functools
import re
from typing import Final

import cron_descriptor  # type: ignore[import-untyped]  # its hints are not marked as such

_CRONTAB: Final = re.compile(r"crontab (\S+) (\S+) (\S+) (\S+) (\S+) (\S+)(.*)")
_INTERVAL: Final = re.compile(r"every (\d+\.\d+) s(.*)")
_SOLAR: Final = re.compile(r"celery\.schedules\.solar \('(\w+)', ([-\d.]+), ([-\d.]+)\) \S+(.*)")
_UNITS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
# From here on a number is easier to read in its next unit.
_TWICE: Final = 2


@functools.lru_cache(maxsize=4096)
def of_schedule(text: str) -> str:
    """Return the words for a schedule as ``beat_entries`` has it; what is not known, as it is."""
    if match := _CRONTAB.fullmatch(text):
        *fields, zone, bounds = match.groups()
        words = _of_crontab(" ".join(map(_ranges, fields)))
        return text if words is None else f"{words} ({zone}){bounds}"
    if match := _INTERVAL.fullmatch(text):
        return f"Every {span(float(match[1]))}{match[2]}"
    if match := _SOLAR.fullmatch(text):
        event, latitude, longitude, bounds = match.groups()
        return f"{event.replace('_', ' ').capitalize()} at {latitude}, {longitude}{bounds}"
    return text


def span(seconds: float) -> str:
    """Return a length of time in its largest unit of which there are two, or one exactly."""
    for length, unit in _UNITS:
        if seconds >= _TWICE * length or seconds == length:
            return f"{round(seconds / length, 1):g} {unit}"
    return f"{round(seconds, 1 if seconds >= 1 else 3):g} s"


def ago(now: dt.datetime, moment: dt.datetime) -> str:
    """Return how long ago something was."""
    return f"{span(round(max(0.0, (now - moment).total_seconds()), 1))} ago"


def instant(moment: dt.datetime, zone: dt.tzinfo) -> str:
    """Return a moment in a time zone, to the second, with its offset."""
    return moment.astimezone(zone).isoformat(" ", "seconds")


def briefly(now: dt.datetime, moment: dt.datetime, zone: dt.tzinfo) -> str:
    """Return a moment of today by its time, any other by its date and time."""
    here, today = moment.astimezone(zone), now.astimezone(zone).date()
    return f"{here:%H:%M:%S}" if here.date() == today else f"{here:%Y-%m-%d %H:%M}"


def _of_crontab(expression: str) -> str | None:
    options = cron_descriptor.Options()
    options.use_24hour_time_format = True
    options.locale_code = "en_US"  # not that of the process
    options.throw_exception_on_parse_error = True
    try:
        return str(cron_descriptor.get_description(expression, options))
    except Exception:  # noqa: BLE001 - its parser raises several, and there is the text itself
        return None


def _ranges(field: str) -> str:
    """Return a field with ``1,2,3,4`` as ``1-4``, as people write and read it."""
    parts = field.split(",")
    if not all(part.isdecimal() for part in parts):
        return field
    groups: list[list[int]] = []
    for number in map(int, parts):
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ",".join(
        f"{group[0]}-{group[-1]}" if len(group) > _TWICE else ",".join(map(str, group))
        for group in groups
    )

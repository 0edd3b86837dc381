"""A schedule as JSON, and as Celery has it.

Three kinds::

    {"type": "interval", "seconds": 60}

    {
        "type": "crontab",
        "minute": "0",
        "hour": "7",
        "day_of_month": "*",
        "month_of_year": "*",
        "day_of_week": "mon-fri",
        "zone": "Europe/Berlin",
    }

    {"type": "solar", "event": "sunset", "latitude": 52.5, "longitude": 13.4}

A field of a crontab that is left out is ``*``; without a zone it goes by the application's.
"""

from __future__ import annotations

import datetime as dt
import functools
import zoneinfo
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from celery import schedules as celery_schedules

from celery_pglock import json_fields

CRONTAB: Final = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
LONGEST: Final = 36500 * 86400.0
_SHORTEST: Final = dt.timedelta.resolution.total_seconds()
PLACE: Final = ("event", "latitude", "longitude")


def checked(entry: str, value: object) -> dict[str, Any]:
    """Check the JSON of a schedule.

    Raises:
        ConfigurationError: with the field that is wrong, and what it has to be.
    """
    given = json_fields.obj(entry, "schedule", value)
    kinds: dict[str, Callable[[str, dict[str, Any]], None]] = {
        "interval": _check_interval,
        "crontab": _check_crontab,
        "solar": _check_solar,
    }
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        known = ", ".join(map(repr, kinds))
        raise json_fields.wrong(
            entry, f"schedule.type must be one of {known}; got {json_fields.shown(kind)}"
        )
    kinds[kind](entry, given)
    return given


def made(entry: str, schedule: Mapping[str, Any], app: Any) -> celery_schedules.BaseSchedule:
    """Return Celery's schedule of a definition that has been checked.

    Raises:
        ConfigurationError: Celery cannot make it; a solar schedule needs the library ephem.
    """
    try:
        return _made(schedule, app)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise json_fields.wrong(entry, f"its schedule cannot be made: {reason}") from error


def _made(schedule: Mapping[str, Any], app: Any) -> celery_schedules.BaseSchedule:
    if schedule["type"] == "interval":
        every = dt.timedelta(seconds=schedule["seconds"])
        return celery_schedules.schedule(every, app=app)
    if schedule["type"] == "solar":
        return celery_schedules.solar(*(schedule[field] for field in PLACE), app=app)
    crontab = celery_schedules.crontab(
        **{field: schedule[field] for field in CRONTAB if field in schedule}, app=app
    )
    if schedule.get("zone") is not None:
        # To the stubs it is a text, and read-only.
        vars(crontab)["tz"] = zoneinfo.ZoneInfo(schedule["zone"])
    return crontab


def written(entry: str, schedule: object, zone: str | None) -> dict[str, Any]:
    """Return the JSON of a schedule as it is given in Python.

    Raises:
        ConfigurationError: it cannot be kept as JSON.
    """
    kind = type(schedule)
    found: dict[str, Any]
    if isinstance(schedule, int | float | dt.timedelta) and not isinstance(schedule, bool):
        found = {"type": "interval", "seconds": _seconds(schedule)}
    elif kind is celery_schedules.schedule and not getattr(schedule, "relative", False):
        found = {"type": "interval", "seconds": _seconds(getattr(schedule, "run_every", 0))}
    elif kind is celery_schedules.crontab:
        found = {"type": "crontab"}
        found |= {field: _crontab_text(getattr(schedule, f"_orig_{field}")) for field in CRONTAB}
    elif isinstance(schedule, celery_schedules.solar):
        given: Any = schedule
        found = {
            "type": "solar",
            "event": given.event,
            "latitude": given.lat,
            "longitude": given.lon,
        }
    else:
        what = (
            f"its schedule must be a number of seconds, a timedelta, or Celery's schedule, crontab "
            f"or solar; got {json_fields.shown(schedule)}, which belongs into beat_schedule"
        )
        raise json_fields.wrong(entry, what)
    if getattr(schedule, "nowfun", None) is not None:
        raise json_fields.wrong(
            entry, "its schedule has a nowfun, which cannot be kept in the database"
        )
    own = zone or _own_zone(entry, schedule)
    return {**found, "zone": own} if own is not None else found


def _check_interval(entry: str, given: dict[str, Any]) -> None:
    json_fields.only(entry, "schedule.", given, ("type", "seconds"))
    seconds = given.get("seconds")
    if not json_fields.is_number(seconds, _SHORTEST, LONGEST):
        got = json_fields.shown(seconds)
        what = f"schedule.seconds must be a number above 0, at most {LONGEST:.0f}; got {got}"
        raise json_fields.wrong(entry, what)


def _check_crontab(entry: str, given: dict[str, Any]) -> None:
    json_fields.only(entry, "schedule.", given, ("type", *CRONTAB, "zone"))
    for field in CRONTAB:
        value = given.get(field, "*")
        if not isinstance(value, str | int) or not _is_crontab_field(field, str(value)):
            got = json_fields.shown(value)
            what = f"schedule.{field} must be a field of a crontab, such as '*/5'; got {got}"
            raise json_fields.wrong(entry, what)
    zone = given.get("zone")
    if zone is None:
        return
    try:
        zoneinfo.ZoneInfo(zone)
    except Exception:  # noqa: BLE001 - also what the file system says of a strange name
        got = json_fields.shown(zone)
        what = f"schedule.zone must be the name of a time zone, such as 'UTC'; got {got}"
        raise json_fields.wrong(entry, what) from None


@functools.lru_cache(maxsize=4096)
def _is_crontab_field(field: str, value: str) -> bool:
    # Thousands of entries share a few of them.
    try:
        celery_schedules.crontab(**{field: value})
    except Exception:  # noqa: BLE001 - its parser raises several
        return False
    return True


def _check_solar(entry: str, given: dict[str, Any]) -> None:
    json_fields.only(entry, "schedule.", given, ("type", *PLACE))
    known: Any = celery_schedules.solar
    events = sorted(known._all_events)  # noqa: SLF001 - said nowhere else
    event = given.get("event")
    if not isinstance(event, str) or event not in events:
        what = f"schedule.event must be one of {', '.join(events)}; got {json_fields.shown(event)}"
        raise json_fields.wrong(entry, what)
    for field, most in (("latitude", 90), ("longitude", 180)):
        value = given.get(field)
        if not json_fields.is_number(value, -most, most):
            got = json_fields.shown(value)
            what = f"schedule.{field} must be a number from -{most} to {most}; got {got}"
            raise json_fields.wrong(entry, what)


def _seconds(every: float | dt.timedelta) -> float:
    return every.total_seconds() if isinstance(every, dt.timedelta) else every


def _crontab_text(value: object) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(str(each) for each in sorted(value))
    return str(value)


def _own_zone(entry: str, schedule: object) -> str | None:
    """Return the zone that a crontab was given, other than its application's."""
    if not isinstance(schedule, celery_schedules.crontab):
        return None
    # Celery keeps its application's there, too, once it was asked for it.
    own = vars(schedule).get("tz")
    if own is None or own == schedule.app.timezone:
        return None
    key = getattr(own, "key", None)
    if key is None:
        got = json_fields.shown(own)
        what = f"the time zone of its schedule must have a name, as in zoneinfo; got {got}"
        raise json_fields.wrong(entry, what)
    return str(key)

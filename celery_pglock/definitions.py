"""The definition of a schedule entry as JSON: how it is written, read and checked.

Version 1 is one object::

    {
        "version": 1,
        "task": "proj.report",
        "args": [],
        "kwargs": {},
        "options": {},
        "schedule": {"type": "interval", "seconds": 60},
    }

``version``, ``task`` and ``schedule`` have to be there. Anybody may write into the table by hand,
so whoever reads a definition checks it, and says of each wrong field what it has to be.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from celery_pglock import errors, json_fields, schedule_json

VERSION: Final = 1
_FIELDS: Final = ("version", "task", "schedule", "args", "kwargs", "options")
_LONGEST: Final = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Definition:
    """What an entry sends and when.

    Attributes:
        task: the name of its task.
        schedule: as in the JSON.
        args: positional arguments.
        kwargs: keyword arguments.
        options: further options of ``apply_async``.
    """

    task: str
    schedule: Mapping[str, Any]
    args: list[Any]
    kwargs: dict[str, Any]
    options: dict[str, Any]

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})


def read(entry: str, text: str) -> Definition:
    """Read and check a definition.

    Raises:
        ConfigurationError: with the field that is wrong, and what it has to be.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise json_fields.wrong(entry, "its definition is no JSON that can be read") from None
    return _checked(entry, value)


def checked(entry: str, value: Mapping[str, Any]) -> Definition:
    """Check a definition before it is written.

    Raises:
        ConfigurationError: as ``read`` does; also because JSON or PostgreSQL cannot hold it.
    """
    name(entry)
    for field in ("args", "kwargs", "options"):
        _check_json(entry, field, value.get(field))
    return _checked(entry, value)


def _checked(entry: str, value: object) -> Definition:
    given = json_fields.obj(entry, "its definition", value)
    version = given.get("version")
    if version != VERSION or isinstance(version, bool):
        what = f"version must be {VERSION}; got {json_fields.shown(version)}"
        if isinstance(version, int) and version > VERSION:
            what += ", which a newer release has written"
        raise json_fields.wrong(entry, what)
    json_fields.only(entry, "", given, _FIELDS)
    task = given.get("task")
    if not json_fields.is_text(task):
        got = json_fields.shown(task)
        what = f"task must be the name of a task, a text that is not empty; got {got}"
        raise json_fields.wrong(entry, what)
    args = given.get("args", [])
    if not isinstance(args, list | tuple):
        raise json_fields.wrong(entry, f"args must be a list; got {json_fields.shown(args)}")
    kwargs = json_fields.obj(entry, "kwargs", given.get("kwargs", {}))
    options = json_fields.obj(entry, "options", given.get("options", {}))
    _check_options(entry, options)
    return Definition(
        task=str(task),
        schedule=schedule_json.checked(entry, given.get("schedule")),
        args=list(args),
        kwargs=kwargs,
        options=options,
    )


def name(entry: object) -> str:
    """Check the name of an entry.

    Raises:
        ConfigurationError: it cannot be one.
    """
    if (
        not isinstance(entry, str)
        or not 0 < len(entry) <= _LONGEST
        or not json_fields.storable(entry)
    ):
        msg = (
            f"the name of an entry must be a text of 1 to {_LONGEST} characters without NUL; "
            f"got {json_fields.shown(entry)}"
        )
        raise errors.ConfigurationError(msg)
    return entry


def _is_seconds(value: object) -> bool:
    return json_fields.is_number(value, 0, schedule_json.LONGEST)


_A_TEXT: Final = ("a text", json_fields.is_text)
_SECONDS: Final = ("a number of seconds, 0 or more", _is_seconds)
_OPTIONS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "queue": _A_TEXT,
    "exchange": ("a text", lambda value: isinstance(value, str)),
    "routing_key": _A_TEXT,
    "serializer": _A_TEXT,
    "compression": _A_TEXT,
    "shadow": _A_TEXT,
    "expires": _SECONDS,
    "countdown": _SECONDS,
    "time_limit": _SECONDS,
    "soft_time_limit": _SECONDS,
    "priority": (
        "a whole number from 0 to 255",
        lambda value: isinstance(value, int) and json_fields.is_number(value, 0, 255),
    ),
    "ignore_result": ("true or false", lambda value: isinstance(value, bool)),
    "headers": ("an object", lambda value: isinstance(value, dict)),
}
_NOT_HERE: Final = {
    "task_id": "each occurrence has its own",
    "retry": "what the broker does not take is sent again by the beat",
    "eta": "it names one instant, and an entry has many; use countdown",
}


def _check_options(entry: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if option in _NOT_HERE:
            raise json_fields.wrong(entry, f"options.{option} cannot be set: {_NOT_HERE[option]}")
        if option in _OPTIONS:
            wanted, fits = _OPTIONS[option]
            if not fits(value):
                raise json_fields.wrong(
                    entry, f"options.{option} must be {wanted}; got {json_fields.shown(value)}"
                )
            continue
        # What else there is goes to the broker as it is. But a slip of the pen would go unseen.
        if near := difflib.get_close_matches(option, _OPTIONS, n=1, cutoff=0.8):
            raise json_fields.wrong(
                entry, f"options.{option} is not known; did you mean {near[0]!r}?"
            )


def _check_json(entry: str, field: str, value: object) -> None:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        what = f"{field} must be what JSON can hold, texts, numbers, lists and the like: {reason}"
        raise json_fields.wrong(entry, what) from None
    # Escaped there, other than a backslash itself.
    if not json_fields.storable(text.replace("\\\\", "").replace("\\u0000", "\0")):
        raise json_fields.wrong(entry, f"{field} must hold no NUL and no half of a surrogate pair")

"""One field of a JSON object that people write: what it has to be, in one sentence."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from celery_pglock import errors

_SHOWN: Final = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80


def wrong(entry: str, what: str) -> errors.ConfigurationError:
    """Return the error of an entry whose definition is wrong."""
    return errors.ConfigurationError(f"entry {entry!r}: {what}")


def shown(value: object) -> str:
    """Return a value as it is told, however much it holds."""
    return _SHOWN.repr(value)


def obj(entry: str, what: str, value: object) -> dict[str, Any]:
    """Return an object as a new dictionary.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise wrong(entry, f"{what} must be an object with texts as keys; got {shown(value)}")
    return dict(value)


def only(entry: str, prefix: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a field that is not known.

    Raises:
        ConfigurationError: with the nearest that is.
    """
    for field in given:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise wrong(entry, f"{prefix}{field} is not known; {hint}")


def is_number(value: Any, least: float, most: float) -> bool:
    """Whether it is a number between two others; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def is_text(value: object) -> bool:
    """Whether it is a text that is not empty and that PostgreSQL can hold."""
    return isinstance(value, str) and bool(value.strip()) and storable(value)


def storable(text: str) -> bool:
    """Whether PostgreSQL can hold a text: no NUL, no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text

"""What a setting or an option may be: a function for each kind, which names it where it is wrong."""

from __future__ import annotations

import datetime as dt
import difflib
import math
from collections.abc import Callable
from typing import Any

from celery_pglock import errors, periods


def seconds(value: object, name: str, *, least: float = 0.0) -> float:
    """Return a duration in seconds, given as a number or a timedelta.

    Raises:
        ConfigurationError: it is neither, below ``least`` or not finite.
    """
    given = value
    if isinstance(value, dt.timedelta):
        value = value.total_seconds()
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value < math.inf
    ):
        msg = (
            f"{name} must be a number of seconds or a timedelta, at least {least:g}; got {given!r}"
        )
        raise errors.ConfigurationError(msg)
    return float(value)


def one_of(*values: str) -> Callable[[object, str], Any]:
    """Return a validator that accepts just these texts."""

    def validate(value: object, name: str) -> str:
        if not isinstance(value, str) or value not in values:
            nearest = difflib.get_close_matches(str(value), values, n=1)
            msg = (
                f"{name} must be one of {', '.join(map(repr, values))}; got {value!r}"
                f"{f' (did you mean {nearest[0]!r}?)' if nearest else ''}"
            )
            raise errors.ConfigurationError(msg)
        return value

    return validate


def whole(value: object, name: str) -> int:
    """Return a whole number that is not negative.

    Raises:
        ConfigurationError: it is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        msg = f"{name} must be a whole number, 0 or more; got {value!r}"
        raise errors.ConfigurationError(msg)
    return value


def once_per(value: object, name: str) -> Any:
    """Return a rule for the period: ``"occurrence"``, a calendar rule, a function, or None.

    Raises:
        ConfigurationError: it is none of these.
    """
    if value is None or callable(value):
        return value
    return one_of("occurrence", *periods.CALENDARS)(value, name)

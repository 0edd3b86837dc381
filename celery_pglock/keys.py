"""Names and the 64-bit keys of their locks; pure.

PostgreSQL knows an advisory lock by a signed 64-bit number, and all users of a database
share that space (PostgreSQL manual, "Explicit Locking: Advisory Locks"). The number is the
first eight bytes, big-endian and signed, of the SHA-256 of
``celery_pglock:v1:<namespace>:<kind>:<name>``. SHA-256 and not the server's hashtext():
that one is undocumented, differs between machine types and follows the collation. Two
live names among a million meet with a probability of 3e-8.

The derivation is pinned by golden values: two releases that derive different keys do not
exclude each other, so changing it breaks every rolling deploy.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import hashlib
import json
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any, Final, Literal

from celery_pglock import errors

Kind = Literal["task", "run", "beat", "migrate"]

SMALLEST: Final = -(2**63)
LARGEST: Final = 2**63 - 1

# The free-form name comes last, and neither of the fields before it can hold a colon: so no
# two different triples give the same text.
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.-]+")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


def check_namespace(namespace: str) -> str:
    """Return ``namespace`` if it can be one.

    Raises:
        ConfigurationError: it is empty, holds other characters than letters, digits,
            ``_ . -``, or is ``__main__``, which is another name in each process that
            imports the same application.
    """
    if namespace == "__main__":
        msg = (
            'the namespace would be "__main__", which the worker and the beat would not share; '
            'give the application a name, Celery("proj"), or set pglock_namespace'
        )
        raise errors.ConfigurationError(msg)
    if not _NAMESPACE.fullmatch(namespace):
        msg = (
            f"pglock_namespace {namespace!r} must be one or more of the characters "
            f"A-Z a-z 0-9 _ . -"
        )
        raise errors.ConfigurationError(msg)
    return namespace


def check_name(name: str, what: str) -> str:
    """Return ``name`` if PostgreSQL can store it.

    Raises:
        ConfigurationError: it is empty, or holds a NUL or half a surrogate pair.
    """
    if not name or "\0" in name or _has_surrogate(name):
        msg = f"{what} {name!r} must not be empty nor hold a NUL character or a lone surrogate"
        raise errors.ConfigurationError(msg)
    return name


def from_name(namespace: str, kind: Kind, name: str) -> int:
    """Return the lock key of a name: the same in every process, Python and machine."""
    text = f"celery_pglock:v1:{namespace}:{kind}:{name}"
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def of_run(namespace: str, job: str, period: str) -> int:
    """Return the key of the run lock, which proves that this very period is being run."""
    return from_name(namespace, "run", f"{job}\0{period}")


def check_key(key: int, what: str) -> int:
    """Return ``key`` if it is a signed 64-bit number.

    Raises:
        ConfigurationError: PostgreSQL would take it for ``numeric`` and know no such lock.
    """
    if not SMALLEST <= key <= LARGEST:
        msg = f"{what} {key} is not a signed 64-bit number; use a text instead"
        raise errors.ConfigurationError(msg)
    return key


def with_arguments(name: str, chosen: Mapping[str, Any]) -> str:
    """Return the lock name for chosen arguments: ``name`` followed by their canonical JSON.

    The order of ``chosen`` does not matter. ``1``, ``"1"``, ``1.0`` and ``True`` differ; a
    tuple is a list and an enum member its value, because that is what a JSON message makes
    of them, and a direct call must take the same lock as a message.

    Raises:
        TypeError: a value has no canonical form; the message names the parameter.
    """
    parts = {key: _canonical(value, key) for key, value in chosen.items()}
    return name + json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _canonical(value: object, parameter: str) -> object:  # noqa: C901, PLR0912 - one line per type
    match value:
        case enum.Enum():
            return _canonical(value.value, parameter)
        case str() if _has_surrogate(value):
            # It has no UTF-8, so neither a hash nor a place in PostgreSQL.
            msg = f"lock_by parameter {parameter!r} holds a lone surrogate, which is no character"
            raise TypeError(msg)
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float() if math.isfinite(value):
            return value
        case dt.datetime() if value.utcoffset() is not None:
            return {"$datetime": value.astimezone(dt.UTC).isoformat()}
        case dt.datetime():
            return {"$datetime": value.isoformat()}
        case dt.date():
            return {"$date": value.isoformat()}
        case dt.time():
            return {"$time": value.isoformat()}
        case uuid.UUID():
            return {"$uuid": str(value)}
        case decimal.Decimal() if value.is_finite():
            return {"$decimal": str(value)}
        case bytes():
            return {"$bytes": value.hex()}
        case list() | tuple():
            return [_canonical(item, parameter) for item in value]
        case Mapping() if all(isinstance(key, str) for key in value):
            # "$" is doubled so that no dictionary looks like one of the tagged types above.
            return {
                (f"${key}" if key.startswith("$") else key): _canonical(item, parameter)
                for key, item in value.items()
            }
        case _:
            msg = (
                f"lock_by parameter {parameter!r} has a value of type "
                f"{type(value).__qualname__} without a canonical form (JSON types, date and "
                f"time, UUID, Decimal, bytes and enum have one); use lock_name with a function "
                f"that makes a text of it"
            )
            raise TypeError(msg)


def _has_surrogate(name: str) -> bool:
    return _SURROGATE.search(name) is not None

"""The messages that wait in a queue of Redis, as nobody has fetched them yet."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from typing import Any, NamedTuple

import redis


class Message(NamedTuple):
    """One of them.

    Attributes:
        entry: the schedule entry that it is of.
        due: when that was due.
        task_id: its id.
        headers: all that it carries.
    """

    entry: str
    due: dt.datetime
    task_id: str
    headers: dict[str, Any]


def count(broker: str, queue: str) -> int:
    """Return how many messages wait in a queue."""
    with contextlib.closing(redis.Redis.from_url(broker)) as client:
        length: Any = client.llen(queue)
    return int(length)


def queued(broker: str, queue: str) -> list[Message]:
    """Return the messages of occurrences in a queue, in the order in which they were sent."""
    with contextlib.closing(redis.Redis.from_url(broker)) as client:
        raw: Any = client.lrange(queue, 0, -1)
    all_headers = [json.loads(message)["headers"] for message in reversed(raw)]
    return [
        Message(
            headers["pglock_entry"],
            dt.datetime.fromisoformat(headers["pglock_due"]),
            headers["id"],
            headers,
        )
        for headers in all_headers
    ]

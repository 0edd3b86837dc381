"""What was handed to a broker, by whom and in which order, as the broker itself shows it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import redis


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A message that was put into the queue.

    Attributes:
        at: when, by the broker's clock.
        sender: the process that made it.
        term: of the leader that sent it, or None.
        task_id: its id.
        period: of its occurrence, or None.
    """

    at: dt.datetime
    sender: int
    term: int | None
    task_id: str
    period: str | None


class BrokerLog:
    """The messages of one queue of a Redis, from now on: none can come by unseen.

    Without those that workers put back or postpone.
    """

    def __init__(self, client: redis.Redis, monitor: Any, queue: str) -> None:
        self._client = client
        self._monitor = monitor
        self._queue = queue
        self._messages: list[Message] = []

    def messages(self) -> list[Message]:
        """Return all messages up to now, in the broker's order."""
        mark = uuid.uuid4().hex
        self._client.echo(mark)
        while True:
            seen = self._monitor.next_command()
            words = seen["command"].split(" ", 2)
            if words[-1] == mark:
                return list(self._messages)
            if words[:2] == ["LPUSH", self._queue]:
                self._read(words[2], dt.datetime.fromtimestamp(seen["time"], dt.UTC))

    def of_term(self, term: int, after: dt.datetime) -> list[Message]:
        """Return what was sent in a term, and came after a moment."""
        return [it for it in self.messages() if it.term == term and it.at > after]

    def expect_silence(
        self, term: int, after: dt.datetime, in_hand: Collection[str] = ()
    ) -> list[Message]:
        """Fail if anything of a term came after a moment.

        Args:
            term: of a leader.
            after: from when on it had to be silent.
            in_hand: the ids of messages of which it may have been handing over one.

        Returns:
            That one, if it came.
        """
        late = self.of_term(term, after)
        allowed = [it for it in late if it.task_id in in_hand][:1]
        assert late == allowed, f"term {term} was over at {after}, and there came {late}"
        return allowed

    def expect_one_leader_after_the_other(self, in_hand: Collection[str] = ()) -> None:
        """Fail if a term had two senders, or a leader sent after its successor had.

        Args:
            in_hand: the ids of messages that frozen leaders were handing over.
        """
        messages = [it for it in self.messages() if it.task_id not in in_hand]
        terms = [it.term for it in messages if it.term is not None]
        assert terms == sorted(terms), terms
        senders = {(it.term, it.sender) for it in messages}
        assert len(senders) == len(set(terms)), senders

    def _read(self, text: str, at: dt.datetime) -> None:
        headers = json.loads(text)["headers"]
        if "pglock_postponed" in headers:
            return
        # Celery names the sender's process: gen1234@host.
        sender = re.fullmatch(r"gen(\d+)@.*", headers["origin"])
        assert sender is not None, headers
        self._messages.append(
            Message(
                at=at,
                sender=int(sender[1]),
                term=headers.get("pglock_term"),
                task_id=headers["id"],
                period=headers.get("pglock_period"),
            )
        )


@contextmanager
def watched(url: str, queue: str) -> Iterator[BrokerLog]:
    """Watch a queue of the Redis at a URL for the length of a block."""
    with redis.Redis.from_url(url, socket_timeout=20) as client, client.monitor() as monitor:
        yield BrokerLog(client, monitor, queue)

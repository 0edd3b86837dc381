"""A batch of messages for Redis, with a kombu that has no batches (before 5.7).

It would send each message when it is published and wait for Redis in between. Here they are kept, and
go out together at the end of the batch: in one pipeline, so with one round trip. And a batch that is
given up before has sent nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

_PUTS: Final = ("_put", "_put_fanout")


class Pipeline:
    """What one channel has still to send of the messages that were published over it.

    Used by one thread.

    Args:
        channel: one of kombu's for Redis.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        # redis-py's; None outside of a batch.
        self._open: Any = None
        # What kombu calls when it has found the queues of a message, or who listens.
        for name in _PUTS:
            setattr(channel, name, self._into(getattr(channel, name)))

    @staticmethod
    def fits(channel: Any) -> bool:
        """Whether a channel is one for Redis, over which nothing is sent a second time by itself.

        redis-py repeats a whole pipeline whose answer did not come in time where that is wanted
        of a single command.
        """
        if not all(hasattr(channel, name) for name in (*_PUTS, "conn_or_acquire", "pool")):
            return False
        options = channel.pool.connection_kwargs
        return not any(
            options.get(each) for each in ("retry_on_timeout", "retry_on_error", "retry")
        )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Keep the messages of a block until its end; give them up if it ends with an exception.

        Raises:
            Exception: whatever redis-py raises. Nobody knows then which of the messages Redis
                has.
        """
        with self._channel.conn_or_acquire() as client:
            self._open = client.pipeline(transaction=False)
        try:
            yield
            # Not what redis-py would raise itself: that has the message in it.
            answers = self._open.execute(raise_on_error=False)
        finally:
            self._open.reset()
            self._open = None
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer

    def _into(self, put: Callable[..., None]) -> Callable[..., None]:
        channel = self._channel

        def keep(*args: Any, **kwargs: Any) -> None:
            pipeline = self._open
            if pipeline is None:
                put(*args, **kwargs)
                return
            # It asks the channel for a client to send by.
            channel.conn_or_acquire = lambda: contextlib.nullcontext(pipeline)
            try:
                put(*args, **kwargs)
            finally:
                del channel.conn_or_acquire

        return keep

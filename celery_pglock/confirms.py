"""Publisher confirms of an AMQP broker, for several messages at a time.

py-amqp waits for the broker's answer to each message before it sends the next. That is a round
trip each, and for a message that survives a restart the broker answers only once it is on disk.
Here the messages of a batch go out one after the other, and then all answers are waited for
(RabbitMQ documentation, "Consumer Acknowledgements and Publisher Confirms").
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from amqp.exceptions import ChannelError, MessageNacked


class Confirms:
    """What the broker has still to confirm of the messages that one channel has sent.

    From now on each publication over the channel waits until it is confirmed, but within
    ``together``. Used by one thread.

    Args:
        channel: a channel of py-amqp that has not published anything yet.
        timeout: seconds for the broker to confirm.
    """

    def __init__(self, channel: Any, timeout: float) -> None:
        self._channel = channel
        self._timeout = timeout
        self._later = False
        # The broker counts the messages of a channel from 1 on.
        self._published = 0
        self._open: set[int] = set()
        self._refused = False
        self._closed: Exception | None = None
        self._write = channel.basic_publish
        channel.confirm_select()
        channel.events["basic_ack"].add(self._acked)
        channel.events["basic_nack"].add(self._nacked)
        channel.basic_publish = self._publish

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Wait at the end of the block, instead of after each message in it.

        Raises:
            Exception: whatever the transport raises, or ``TimeoutError``, or ``MessageNacked``.
                Nobody knows then which of the messages the broker has.
        """
        self._later = True
        try:
            yield
            self._wait()
        finally:
            self._later = False

    def _publish(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("confirm_timeout", None)
        try:
            result = self._write(*args, **kwargs)
        except ChannelError as error:
            # Said of one of those before, which were not confirmed yet and never will be now.
            self._closed = error
            raise
        self._published += 1
        self._open.add(self._published)
        if not self._later:
            self._wait()
        return result

    def _wait(self) -> None:
        deadline = time.monotonic() + self._timeout
        while self._open:
            if self._closed is not None:
                raise self._closed
            left = deadline - time.monotonic()
            if left <= 0:
                msg = f"the broker did not confirm {len(self._open)} messages in time"
                raise TimeoutError(msg)
            self._channel.connection.drain_events(timeout=left)
        if self._refused:
            self._refused = False
            raise MessageNacked

    def _acked(self, tag: int, multiple: bool) -> None:  # noqa: FBT001 - called by py-amqp
        if multiple:
            self._open = {each for each in self._open if each > tag}
        else:
            self._open.discard(tag)

    def _nacked(self, tag: int, multiple: bool) -> None:  # noqa: FBT001 - called by py-amqp
        self._refused = True
        self._acked(tag, multiple)

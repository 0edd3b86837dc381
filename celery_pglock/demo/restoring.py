"""A transport for Redis that looks once a second for messages that nobody has acknowledged."""

from __future__ import annotations

from typing import Any

from kombu.transport import redis
from typing_extensions import override


class _QoS(redis.QoS):
    @override
    def restore_visible(self, start: int = 0, num: int = 10, interval: int = 1) -> None:
        super().restore_visible(start, num, interval)


class _Channel(redis.Channel):
    QoS = _QoS


class Transport(redis.Transport):
    """Looks once a second."""

    Channel = _Channel

    @override
    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        super().register_with_event_loop(connection, loop)
        cycle: Any = self.cycle
        loop.call_repeatedly(1, cycle.maybe_restore_messages)

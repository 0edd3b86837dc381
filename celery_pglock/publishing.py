"""The leader's own connection to the broker: bounded in time, and sure of what it handed over.

A leader must not hang in the broker: while it does, its lease runs out and another leads. So
every socket operation has a time-out, nothing is retried inside kombu (the claim is kept and
published again), and a connection that failed is thrown away. On AMQP the broker is asked to
confirm each message: without it a RabbitMQ that is killed loses messages whose publication
had already returned.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import kombu
import kombu.exceptions

if TYPE_CHECKING:
    from celery import Celery


class Publisher:
    """Opens a producer when it is needed and forgets it when it failed.

    Args:
        app: whose broker.
        timeout: seconds for each operation on the socket.
    """

    def __init__(self, app: Celery, timeout: float) -> None:
        self._app = app
        self._timeout = timeout
        self._connection: kombu.Connection | None = None
        self._producer: Any = None

    def producer(self) -> Any:
        """Return the producer, connected.

        Raises:
            Exception: whatever the transport raises when the broker does not answer in time.
        """
        if self._producer is None:
            connection = self._app.connection_for_write()
            connection.connect_timeout = min(connection.connect_timeout or 4, self._timeout)
            connection.transport_options = {
                **(connection.transport_options or {}),
                **_options(connection.transport.driver_type, self._timeout),
                # kombu would otherwise go on connecting for ever.
                "max_retries": 1,
                "interval_start": 0,
            }
            self._connection = connection
            # connect() tries once; Producer(connection) alone would do so for ever.
            connection.connect()
            self._producer = self._app.amqp.Producer(connection.channel(), auto_declare=False)
        return self._producer

    def broke(self, error: BaseException) -> bool:
        """Whether an error means that the broker does not answer, for any message.

        Others concern one message alone: arguments that cannot be serialized, a queue that the
        broker refuses.
        """
        kinds: tuple[type[BaseException], ...] = (OSError, kombu.exceptions.OperationalError)
        if self._connection is not None:
            kinds += tuple(self._connection.connection_errors)
        return self._producer is None or isinstance(error, kinds)

    def forget(self) -> None:
        """Close the connection, whatever state it is in; the next message opens another."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            # A transport may raise anything while a broken connection is given up.
            with contextlib.suppress(Exception):
                connection.collect()


def _options(driver: str, timeout: float) -> dict[str, Any]:
    if driver == "amqp":
        return {"confirm_publish": True, "read_timeout": timeout, "write_timeout": timeout}
    if driver == "redis":
        return {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    return {}

"""The leader's own connection to the broker: bounded in time, and sure of what it handed over.

A leader must not hang in the broker: while it does, its lease runs out and another leads. So
every socket operation has a time-out, nothing is retried inside kombu (the claim is kept and
published again), and a connection that failed is thrown away. On AMQP the broker is asked to
confirm each message: without it a RabbitMQ that is killed loses messages whose publication
had already returned (``confirms``).
"""

from __future__ import annotations

import contextlib
import functools
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import kombu
import kombu.exceptions

from celery_pglock import confirms, pipelines

if TYPE_CHECKING:
    from celery import Celery

# So many that kombu does not hand over a part of a batch in its middle.
_MOST_COMMANDS: Final = 10_000
# For how long messages are handed over one by one after one of a batch was at fault, in seconds.
_ONE_BY_ONE: Final = 60.0
# Older kombu has no batches.
_BatchError: Final[type[Exception]] = getattr(
    kombu.exceptions, "BatchPublishError", kombu.exceptions.OperationalError
)


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
        self._confirms: confirms.Confirms | None = None
        self._pipeline: pipelines.Pipeline | None = None
        self._one_by_one_until = float("-inf")

    def load(self) -> None:
        """Load the transport's modules, so that a new leader's first message need not wait; no I/O."""
        # What is wrong with the URL is told when it is used.
        with contextlib.suppress(Exception):
            _ = self._app.connection_for_write().transport

    def producer(self) -> Any:
        """Return the producer, connected.

        Raises:
            Exception: whatever the transport raises when the broker does not answer in time.
        """
        if self._producer is None:
            connection = self._app.connection_for_write()
            # With several hosts each gets its share of the time.
            hosts = max(1, len(connection.alt or ()))
            timeout = self._timeout / hosts
            connection.connect_timeout = min(connection.connect_timeout or 4, timeout)
            connection.transport_options = {
                **(connection.transport_options or {}),
                **_options(connection.transport.driver_type, timeout),
                # kombu would otherwise go on connecting for ever.
                "max_retries": 1,
                "interval_start": 0,
            }
            self._connection = connection
            # Each host once. connect() would try twice and sleep two seconds in between;
            # Producer(connection) alone would do so for ever.
            connection.ensure_connection(max_retries=hosts - 1, interval_start=0)
            channel = connection.channel()
            if hasattr(channel, "confirm_select"):
                self._confirms = confirms.Confirms(channel, timeout)
            self._producer = self._app.amqp.Producer(channel, auto_declare=False)
            if not hasattr(self._producer, "batch") and pipelines.Pipeline.fits(channel):
                self._pipeline = pipelines.Pipeline(channel)
            self._producer.maybe_declare = functools.partial(_declare_once, self._producer)
        return self._producer

    @property
    def buffers(self) -> bool:
        """Whether the messages of a batch are kept until its end."""
        # Kombu can since 5.7, for transports that would not send a batch twice by themselves.
        kombu_does = getattr(self._producer, "supports_batch_publish", False)
        return bool(kombu_does) or self._pipeline is not None

    def batch(self) -> Batch:
        """Return a context in which messages are handed over together, where that can be done."""
        return Batch(self)

    def together(self) -> contextlib.AbstractContextManager[object] | None:
        """Connect, and return the context in which the transport hands messages over together.

        None if it cannot, or should not for a while.

        Raises:
            Exception: as ``producer`` does.
        """
        producer = self.producer()
        if time.monotonic() < self._one_by_one_until:
            return None
        if self._pipeline is not None:
            return self._pipeline.together()
        if self.buffers:
            batch: contextlib.AbstractContextManager[object] = producer.batch(_MOST_COMMANDS)
            return batch
        return None if self._confirms is None else self._confirms.together()

    def one_by_one(self) -> None:
        """Hand over each message by itself for a while.

        One of those that were handed over together is at fault, and has taken the others with
        it: nobody knows which.
        """
        self._one_by_one_until = time.monotonic() + _ONE_BY_ONE
        self.forget()

    def broke(self, error: BaseException) -> bool:
        """Whether an error means that the broker does not answer, for any message.

        Others concern one message alone: arguments that cannot be serialized, a queue that the
        broker refuses.
        """
        kinds: tuple[type[BaseException], ...] = (
            OSError,
            kombu.exceptions.OperationalError,
            _BatchError,
        )
        if self._connection is not None:
            kinds += tuple(self._connection.connection_errors)
        return self._producer is None or isinstance(error, kinds)

    def forget(self) -> None:
        """Close the connection, whatever state it is in; the next message opens another."""
        connection, self._connection = self._connection, None
        self._producer = self._confirms = self._pipeline = None
        if connection is not None:
            # A transport may raise anything while a broken connection is given up.
            with contextlib.suppress(Exception):
                connection.collect()


class Batch:
    """Messages that are handed over together, where the transport can do that.

    On Redis they are, with one round trip for all of them; on AMQP they are confirmed together.
    Elsewhere each message is handed over as it comes.

    Attributes:
        gives_up: nothing is handed over before ``hand_over``, and what a block that ends with
            an exception still has is given up.
    """

    def __init__(self, publisher: Publisher) -> None:
        self.gives_up = False
        self._publisher = publisher
        self._stack = contextlib.ExitStack()

    def begin(self) -> None:
        """Connect, if that is not so yet.

        Raises:
            Exception: whatever the transport raises when the broker does not answer in time.
        """
        together = self._publisher.together()
        if together is not None:
            self.gives_up = self._publisher.buffers
            self._stack.enter_context(together)

    def hand_over(self) -> None:
        """Hand over what has come so far, which is the end of the batch.

        Raises:
            Exception: whatever the transport raises. Nobody knows then which of the messages
                have arrived.
        """
        self._stack.pop_all().close()

    def __enter__(self) -> None:
        """Nothing is done here: ``begin`` comes first, and may fail."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


def told(error: BaseException) -> str:
    """Return what went wrong in the broker, in one line.

    What follows the first line may be a statement with a task's arguments, as may what redis-py
    puts before the error of a command in a pipeline; and what Python says of a URL that it cannot
    read may be a part of the password.
    """
    if isinstance(error, _BatchError) and error.__cause__ is not None:
        error = error.__cause__
    kind = type(error).__name__
    if isinstance(error, ValueError):
        return f"{kind} (is broker_url a URL, its password quoted?)"
    text = str(error).rpartition(" of pipeline caused error: ")[2]
    return f"{kind}: {next(iter(text.splitlines()), '')}"[:500]


def _declare_once(producer: Any, entity: Any, **retrying: Any) -> Any:
    """Declare a queue unless this connection has done so, which kombu's own would find out too.

    But first it binds a copy of the queue to the channel, for each message: an eighth of all that
    a message costs.
    """
    known = entity and entity.can_cache_declaration
    if known and hash(entity) in producer.connection.declared_entities:
        return False
    return type(producer).maybe_declare(producer, entity, **retrying)


def _options(driver: str, timeout: float) -> dict[str, Any]:
    if driver == "amqp":
        # Not by py-amqp itself: it waits for each message by itself.
        return {"confirm_publish": False, "read_timeout": timeout, "write_timeout": timeout}
    if driver == "redis":
        return {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    return {}

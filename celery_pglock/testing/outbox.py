"""What a run publishes while there is neither broker nor result backend.

It goes through Celery and kombu as ever, serialised and all, over a transport that keeps the
messages where another one would send them. Results are written nowhere. While a run is in
progress this holds for all that its application publishes in this process.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import celery
import kombu
from celery.backends.base import DisabledBackend
from celery.result import denied_join_result
from kombu.connection import ConnectionPool
from kombu.message import Message as Received
from kombu.pools import ProducerPool
from kombu.serialization import prepare_accept_content
from kombu.transport import memory, virtual
from typing_extensions import override


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """The message of a task, as a broker would have it.

    Attributes:
        task: the registered name of the task.
        task_id: the id of the message; retries, redeliveries and postponed copies keep it.
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.
        headers: all of the message's headers, Celery's and ours (``pglock_*``).
        app: the application that published it.
    """

    task: str
    task_id: str
    args: list[Any]
    kwargs: dict[str, Any]
    headers: Mapping[str, Any] = dataclasses.field(repr=False)
    app: celery.Celery = dataclasses.field(repr=False)
    _raw: Mapping[str, Any] = dataclasses.field(repr=False)

    def received(self, *, redelivered: bool) -> Received:
        """Return it as a consumer of kombu receives it."""
        return _received(self.app, self._raw, redelivered=redelivered)


def _received(app: celery.Celery, raw: Mapping[str, Any], *, redelivered: bool) -> Received:
    properties = raw["properties"]
    return Received(
        body=raw["body"],
        content_type=raw["content-type"],
        content_encoding=raw["content-encoding"],
        headers=dict(raw["headers"]),
        properties=properties,
        delivery_info={**properties.get("delivery_info", {}), "redelivered": redelivered},
        accept=prepare_accept_content(app.conf.accept_content),
    )


class Outbox:
    """The messages that one run has published.

    Attributes:
        app: the application.
        messages: in their order.
    """

    def __init__(self, app: celery.Celery) -> None:
        self.app = app
        self.messages: list[Message] = []

    def put(self, raw: Mapping[str, Any]) -> None:
        """Keep a message; what is none of a task, a monitor's event say, is dropped."""
        headers = raw["headers"]
        if "task" in headers:
            args, kwargs, _ = _received(self.app, raw, redelivered=False).payload
            self.messages.append(
                Message(headers["task"], headers["id"], args, kwargs, headers, self.app, raw)
            )


_current: contextvars.ContextVar[Outbox | None] = contextvars.ContextVar(
    "celery_pglock_outbox", default=None
)
# For threads that a body starts, which have no context.
_open: list[Outbox] = []


@contextlib.contextmanager
def opened(task: celery.Task[..., Any]) -> Iterator[list[Message]]:
    """Keep what is published by a run of this task, for the length of a block."""
    outbox = Outbox(task.app)
    before = _current.get()
    with _in_place(_Broker(task.app)), _in_place(_Backend(task)), _in_place(_Worker()):
        _open.append(outbox)
        _current.set(outbox)
        try:
            yield outbox.messages
        finally:
            _current.set(before)
            _open.remove(outbox)


class _Channel(memory.Channel):
    """Keeps what is published; its queues are none of the application's own in-memory ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queues = {}

    @override
    def basic_publish(self, message: Any, exchange: Any, routing_key: Any, **_: Any) -> None:
        outbox = _current.get() or _open[-1]
        outbox.put(message)


class _Transport(memory.Transport):
    Channel = _Channel
    global_state = virtual.BrokerState()


class _Broker:
    """Nothing that an application publishes leaves this process, nor is it executed at once."""

    def __init__(self, app: celery.Celery) -> None:
        self.key = (id(app), "broker")
        self._app = app

    def place(self) -> Callable[[], None]:
        amqp: Any = self._app.amqp
        conf = self._app.conf
        before = (amqp._producer_pool, conf.task_always_eager)  # noqa: SLF001 - no other way in
        connections = ConnectionPool(kombu.Connection(transport=_Transport), limit=None)
        amqp._producer_pool = ProducerPool(connections, limit=None)  # noqa: SLF001
        conf.task_always_eager = False

        def restore() -> None:
            amqp._producer_pool, conf.task_always_eager = before  # noqa: SLF001

        return restore


class _Backend:
    """The results of a task are written nowhere."""

    def __init__(self, task: celery.Task[..., Any]) -> None:
        self.key = (id(task), "backend")
        self._task = task

    def place(self) -> Callable[[], None]:
        task: Any = self._task
        before = task._backend  # noqa: SLF001 - the property would open the application's
        task.backend = DisabledBackend(task.app)

        def restore() -> None:
            task.backend = before

        return restore


class _Worker:
    """As in a worker nobody waits for a result, nor gets ready to, at the result backend."""

    key = (0, "worker")

    def place(self) -> Callable[[], None]:
        stack = contextlib.ExitStack()
        stack.enter_context(denied_join_result())
        return stack.close


_mutex = threading.Lock()
_placed: dict[tuple[int, str], tuple[int, Callable[[], None]]] = {}


@contextlib.contextmanager
def _in_place(thing: _Broker | _Backend | _Worker) -> Iterator[None]:
    """Put something in place for as long as any run needs it: runs may overlap, in threads."""
    with _mutex:
        users, restore = _placed.get(thing.key) or (0, thing.place())
        _placed[thing.key] = (users + 1, restore)
    try:
        yield
    finally:
        with _mutex:
            users, restore = _placed.pop(thing.key)
            if users > 1:
                _placed[thing.key] = (users - 1, restore)
            else:
                restore()

"""The same task under each guard: none, ours in each form, and those that keep locks in Redis."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable
from typing import Any, Final

import celery
from celery.app import trace
from celery.exceptions import Ignore
from celery_once import QueueOnce  # type: ignore[import-untyped]
from celery_singleton import Singleton  # type: ignore[import-untyped]
from typing_extensions import override

from celery_pglock import LockedTask

DATABASE: Final = "BENCH_DATABASE_URL"
BROKER: Final = "BENCH_BROKER_URL"
LOCKS: Final = "BENCH_LOCKS_URL"
HOST: Final = "bench@here"

# The name of a task, and what it is called where figures are shown.
PLAIN: Final = "no guard"
LOCK_ONLY: Final = "lock only"
LEDGER: Final = "with ledger"
TRANSACTION: Final = "transaction level"
ONCE: Final = "celery-once"
SINGLETON: Final = "celery-singleton"
HELD: Final = "held"
NAMES: Final = (PLAIN, LOCK_ONLY, LEDGER, TRANSACTION, ONCE, SINGLETON)


class Here(celery.Task):  # type: ignore[type-arg]
    """A task whose messages are executed at once, in this process, as a worker's child does it."""

    abstract = True

    @override
    def apply_async(self, args: Any = None, kwargs: Any = None, *_: Any, **options: Any) -> Any:
        identity = options.get("task_id") or str(uuid.uuid4())
        request = {
            "id": identity,
            "args": args or (),
            "kwargs": kwargs or {},
            "headers": options.get("headers") or {},
            "delivery_info": {},
            "hostname": HOST,
            "is_eager": False,
            "retries": 0,
        }
        return trace.trace_task(self, identity, args or (), kwargs or {}, request, app=self.app)


@dataclasses.dataclass(frozen=True)
class Application:
    """An application with one task under each guard.

    Attributes:
        app: the application.
        tasks: by the name of the guard.
        held: one with a ledger whose lock is called `HELD`.
        ignoring: one without a guard that ends its message without a result.
        calls: how many bodies have run in this process.
    """

    app: celery.Celery
    tasks: dict[str, Any]
    held: Any
    ignoring: Any
    calls: list[int]


def application(database: str, broker: str, locks: str, *base: type) -> Application:
    """Make the application; the tasks are of these classes too."""
    app: Any = celery.Celery("bench", broker=broker, backend=None if base else broker)
    app.conf.update(
        pglock_database_url=database,
        pglock_warn_after_skips=None,  # what is skipped here is skipped on purpose
        ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": locks}},
        singleton_backend_url=locks,
        task_default_queue="bench",
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        task_ignore_result=bool(base),
        result_expires=None,
    )
    calls = [0]

    def body(number: int) -> int:
        calls[0] += 1
        return number

    guards: dict[str, tuple[tuple[type, ...], dict[str, Any]]] = {
        PLAIN: (base or (celery.Task,), {}),
        LOCK_ONLY: ((LockedTask, *base), {"once_per": None}),
        LEDGER: ((LockedTask, *base), {}),
        TRANSACTION: ((LockedTask, *base), {"lock_level": "transaction"}),
        ONCE: ((QueueOnce, *base), {}),
        SINGLETON: ((Singleton, *base), {"lock_expiry": 3600}),
    }

    def make(name: str, bases: tuple[type, ...], **options: Any) -> Any:
        guard = type("Guarded", bases, {"abstract": True})
        task = app.task(base=guard, name=name.replace(" ", "_"), shared=False, **options)
        return task(_copied(body))

    tasks = {name: make(name, bases, **options) for name, (bases, options) in guards.items()}
    held = make(HELD, (LockedTask, *base), lock_name=HELD)

    def ignore(_: int) -> None:
        raise Ignore

    ignoring = app.task(base=(base or (celery.Task,))[0], name="ignoring", shared=False)(ignore)
    app.finalize()
    return Application(app, tasks, held, ignoring, calls)


def _copied(body: Callable[[int], int]) -> Callable[[int], int]:
    # Celery writes on the function that it is given.
    def copy(number: int) -> int:
        return body(number)

    return copy


def from_environment() -> celery.Celery:
    """Return what the workers of the benchmarks run; results are kept, so that they can be awaited."""
    return application(os.environ[DATABASE], os.environ[BROKER], os.environ[LOCKS]).app

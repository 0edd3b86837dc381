"""Benches for the tests with real workers."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from celery_pglock.demo.servers import ValkeyServer
from tests.acceptance.bench import Bench, redis_database
from tests.support.databases import Database, _database
from tests.support.processes import Processes
from tests.support.servers import TestedPostgres


class MakeBench(Protocol):
    """Makes a bench, which lasts as long as the fixture."""

    def __call__(
        self,
        broker: str = "redis",
        backend: str | None = "redis",
        database: Database | None = None,
        **transport_options: Any,
    ) -> Bench: ...


@contextlib.contextmanager
def _making(
    request: pytest.FixtureRequest,
    postgres_server: TestedPostgres,
    template_database: str,
    valkey_server: ValkeyServer,
    processes: Processes,
) -> Iterator[MakeBench]:
    with contextlib.ExitStack() as stack:
        # The processes end first, then the sender closes, then the databases are dropped.
        redis = valkey_server.url(next(redis_database))

        def url(kind: str) -> str:
            if kind == "redis":
                return redis
            return str(request.getfixturevalue("rabbitmq_url")) if kind == "rabbitmq" else kind

        def make(
            broker: str = "redis",
            backend: str | None = "redis",
            database: Database | None = None,
            **transport_options: Any,
        ) -> Bench:
            if database is None:
                database = stack.enter_context(
                    _database(postgres_server, template=template_database)
                )
            bench = Bench(
                database,
                processes,
                broker=url(broker),
                backend=None if backend is None else url(backend),
                transport_options=transport_options,
            )
            stack.callback(bench.close)
            return bench

        yield make
        processes.end()


@pytest.fixture(scope="module")
def shared_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Starts processes that last as long as the module's tests."""
    started = Processes(tmp_path_factory.mktemp("shared"))
    yield started
    started.end()


@pytest.fixture(scope="module")
def make_shared_bench(
    request: pytest.FixtureRequest,
    postgres_server: TestedPostgres,
    template_database: str,
    valkey_server: ValkeyServer,
    shared_processes: Processes,
) -> Iterator[Callable[..., Bench]]:
    """Make benches that last as long as the module's tests."""
    with _making(
        request, postgres_server, template_database, valkey_server, shared_processes
    ) as make:
        yield make


@pytest.fixture
def make_bench(
    request: pytest.FixtureRequest,
    postgres_server: TestedPostgres,
    template_database: str,
    valkey_server: ValkeyServer,
    processes: Processes,
) -> Iterator[MakeBench]:
    """Make benches of this test's own: `make_bench("rabbitmq", backend=None)`."""
    with _making(request, postgres_server, template_database, valkey_server, processes) as make:
        yield make


@pytest.fixture
def key() -> str:
    """A key of this test's own."""
    return f"key-{uuid.uuid4()}"


@pytest.fixture
def taken(bench: Bench, key: str) -> Iterator[str]:
    """A key whose lock a run of `job` holds, on the bench of the module."""
    with bench.held(key):
        yield key

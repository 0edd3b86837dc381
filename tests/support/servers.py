"""The servers that tests talk to: started once, or named by the environment.

`PGLOCK_TEST_URL` names a PostgreSQL as a libpq URL of a superuser, `PGLOCK_TEST_BROKER_URL` a
broker; without them the tests start their own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import kombu
import pytest

from celery_pglock.demo.servers import PostgresServer, ValkeyServer
from tests.support.requirements import require

POSTGRES_SETTINGS: dict[str, str | int] = {
    "fsync": "off",
    "full_page_writes": "off",
    "log_line_prefix": "%m [%p] %q%a %u@%d ",
    "max_connections": 200,
    "max_wal_size": "256MB",
    "synchronous_commit": "off",
}
# What was committed has to outlive a crash of the server. It does without fsync, which is only
# for a crash of the machine.
CRASH_SAFE: dict[str, str | int] = {**POSTGRES_SETTINGS, "synchronous_commit": "on"}

# A database for each test is seven megabytes of new files: on some disks a quarter of a second.
MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes what is put there
ROOM = 4 << 30


def in_memory() -> Path | None:
    """Return where files are kept in memory, if there is room for several servers; else None."""
    with contextlib.suppress(OSError):
        status = os.statvfs(MEMORY)
        if status.f_bavail * status.f_frsize >= ROOM and os.access(MEMORY, os.W_OK):
            return MEMORY
    return None


RABBITMQ_URL = "amqp://guest:guest@127.0.0.1:5672//"
REDIS_DATABASES = 4096


@dataclass(frozen=True)
class TestedPostgres:
    """The PostgreSQL that tests share.

    Attributes:
        base_url: A superuser's libpq URL.
        embedded: The server, if it was started for the tests; it must not be stopped by any.
    """

    __test__ = False

    base_url: str
    embedded: PostgresServer | None = None

    def url(self, dbname: str = "postgres") -> str:
        """Return the libpq URL of a database."""
        return urlunsplit(urlsplit(self.base_url)._replace(path=f"/{dbname}"))

    def log(self) -> str:
        """Return what the server has logged; skips the test where the log is out of reach."""
        require(self.embedded, "a server with a readable log (unset PGLOCK_TEST_URL)")
        assert self.embedded is not None
        return self.embedded.log_file.read_text(errors="replace")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[TestedPostgres]:
    """The PostgreSQL of this run, shared by its tests."""
    if url := os.environ.get("PGLOCK_TEST_URL"):
        yield TestedPostgres(url)
        return
    with PostgresServer(POSTGRES_SETTINGS, place=in_memory()) as server:
        yield TestedPostgres(server.url(), server)


@pytest.fixture(scope="session")
def pglock_server_url(postgres_server: TestedPostgres) -> str:
    """Where `celery_pglock.testing` makes its databases: on the server that all tests share."""
    return postgres_server.url()


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL of this test's own, which it may stop, kill and copy."""
    with PostgresServer(CRASH_SAFE, place=in_memory()) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    """The Valkey of this run, shared by its tests."""
    with ValkeyServer({"databases": REDIS_DATABASES}) as server:
        yield server


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """A Valkey of this test's own, which it may stop and kill."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_url(valkey_server: ValkeyServer) -> str:
    """The URL of the shared Valkey, database 0."""
    return valkey_server.url()


_numbers = itertools.count(1)


@pytest.fixture
def fresh_redis_url(valkey_server: ValkeyServer) -> str:
    """The URL of a numbered database that no other test uses."""
    return valkey_server.url(1 + next(_numbers) % (REDIS_DATABASES - 1))


@pytest.fixture(scope="session")
def broker_url(request: pytest.FixtureRequest) -> str:
    """The broker of this run, shared by its tests: use a `queue_name` of your own."""
    if url := os.environ.get("PGLOCK_TEST_BROKER_URL"):
        return url
    url = request.getfixturevalue("redis_url")
    assert isinstance(url, str)
    return url


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """A RabbitMQ: use a `queue_name` of your own."""
    require(
        _answers("127.0.0.1", 5672), "a RabbitMQ at 127.0.0.1:5672 (apt install rabbitmq-server)"
    )
    return RABBITMQ_URL


@pytest.fixture
def queue_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a queue that no other test uses; deleted afterwards where that is needed."""
    name = f"pglock-test-{uuid.uuid4().hex[:12]}"
    yield name
    for fixture in ("broker_url", "rabbitmq_url"):
        if fixture in request.fixturenames:
            url = request.getfixturevalue(fixture)
            if url.startswith("amqp"):
                with kombu.Connection(url) as connection:
                    channel: Any = connection.default_channel  # the AMQP one, with more methods
                    channel.queue_delete(name)
                    channel.exchange_delete(name)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False

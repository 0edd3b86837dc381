"""A pgbouncer in front of a test's database."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import unquote, urlsplit

import psycopg
import pytest

from celery_pglock.demo.servers import children
from tests.support.databases import Database
from tests.support.processes import Process, Processes, eventually
from tests.support.requirements import require

PoolMode = Literal["session", "transaction", "statement"]


@dataclass(frozen=True)
class PgBouncer:
    """A running pgbouncer.

    Attributes:
        url: The libpq URL of the database through it.
        process: The process, which a test may freeze or kill.
    """

    url: str
    process: Process


class StartPgBouncer(Protocol):
    """Starts a pgbouncer before a database."""

    def __call__(
        self, database: Database, pool_mode: PoolMode = "transaction", **settings: str | int
    ) -> PgBouncer: ...


@pytest.fixture
def pgbouncer(processes: Processes) -> Iterator[StartPgBouncer]:
    """Start Debian's pgbouncer: `pgbouncer(database, "transaction", default_pool_size=2).url`."""
    with starting(processes) as start:
        yield start


@contextmanager
def starting(processes: Processes) -> Iterator[StartPgBouncer]:
    """Start pgbouncers that last as long as `processes`: for fixtures of another scope."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    require(program, "pgbouncer (apt install pgbouncer)")
    account = children.Account.unprivileged()  # pgbouncer too refuses to be run by root
    # Not in pytest's own directories: they are closed to that account.
    directory = Path(tempfile.mkdtemp(prefix="pglock-pgbouncer-"))
    directory.chmod(0o755)

    def start(
        database: Database, pool_mode: PoolMode = "transaction", **settings: str | int
    ) -> PgBouncer:
        port = children.free_port()
        server = urlsplit(database.url)
        user = unquote(server.username or "postgres")
        password = f" password={unquote(server.password)}" if server.password else ""
        options = {
            "listen_addr": "127.0.0.1",
            "listen_port": port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": pool_mode,
            **settings,
        }
        lines = [
            "[databases]",
            f"* = host={server.hostname} port={server.port or 5432} user={user}{password}",
            "[pgbouncer]",
            *(f"{name} = {value}" for name, value in options.items()),
        ]
        config = directory / f"{port}.ini"
        config.write_text("\n".join(lines) + "\n")
        if account is not None:
            os.chown(config, account.uid, account.gid)
        config.chmod(0o400)
        process = processes.start(str(program), config, cwd=directory, account=account)
        url = f"postgresql://{user}@127.0.0.1:{port}/{database.name}"
        eventually(lambda: _answers(url, process), what="pgbouncer answers")
        return PgBouncer(url, process)

    try:
        yield start
    finally:
        shutil.rmtree(directory)


def _answers(url: str, process: Process) -> bool:
    if not process.running():
        pytest.fail(f"pgbouncer ended:\n{process.output()}")
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True

"""What the benchmarks share: a database of their own, and quantiles."""

from __future__ import annotations

import contextlib
import os
import statistics
import uuid
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

SERVER: Final = os.environ.get("PGLOCK_TEST_URL", "postgresql://postgres@127.0.0.1:5432/postgres")


def quantile(times: list[float], percent: int) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[percent - 1]


@contextlib.contextmanager
def own_database(server: str) -> Iterator[str]:
    """Make a database and return its URL; it is dropped at the end."""
    name = f"pglock_bench_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    try:
        yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
    finally:
        with psycopg.connect(server, autocommit=True) as admin:
            drop = sql.SQL("drop database {} with (force)")
            admin.execute(drop.format(sql.Identifier(name)))

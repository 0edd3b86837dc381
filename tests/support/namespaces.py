"""Network namespaces: processes behind wires of their own, on which packets are really dropped."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit, urlunsplit

import psycopg

from celery_pglock import migrating
from celery_pglock.demo.servers import PostgresServer
from tests.support.requirements import require
from tests.support.servers import CRASH_SAFE, in_memory

IP: Final = shutil.which("ip") or "/usr/sbin/ip"

Hole = Literal["both ways", "to server", "to client"]
HOLES: list[Hole] = ["both ways", "to server", "to client"]

_numbers = itertools.count(1)


class Wire:
    """Two network cards: one here, and one in a namespace.

    Packets vanish when the sender believes the other end to be another network card: no error,
    no reset, and no module of the kernel's that a machine may lack.

    Attributes:
        server: the address of this end.
    """

    def __init__(self, namespace: str) -> None:
        number = next(_numbers)
        self._namespace = namespace
        self._here, self._there = (f"{end}{os.getpid()}n{number}" for end in "ht")
        # From 198.18.0.0/15, which is for tests of networks.
        network = f"198.18.{os.getpid() % 250}"
        first = 4 * (number % 60)
        self.server, self._client = f"{network}.{first + 1}", f"{network}.{first + 2}"

    def lay(self) -> None:
        peer = ["peer", "name", self._there, "netns", self._namespace]
        _ip("link", "add", self._here, "type", "veth", *peer)
        _ip("addr", "add", f"{self.server}/30", "dev", self._here)
        _ip("link", "set", self._here, "up")
        self._inside("addr", "add", f"{self._client}/30", "dev", self._there)
        self._inside("link", "set", self._there, "up")

    def remove(self) -> None:
        # One end of the wire goes with the other, in whichever it is.
        _ip("link", "del", self._here, check=False)

    def block(self, hole: Hole) -> None:
        nobody = "02:00:00:00:00:01"
        if hole != "to server":
            _ip(*self._neighbour(self._client, nobody, self._here))
        if hole != "to client":
            self._inside(*self._neighbour(self.server, nobody, self._there))

    def heal(self) -> None:
        # Where it is not there, that way was never blocked.
        _ip("neigh", "del", self._client, "dev", self._here, check=False)
        self._inside("neigh", "del", self.server, "dev", self._there, check=False)

    @staticmethod
    def _neighbour(address: str, card: str, device: str) -> list[str]:
        return ["neigh", "replace", address, "lladdr", card, "dev", device, "nud", "permanent"]

    def _inside(self, *words: str, check: bool = True) -> None:
        _ip("-n", self._namespace, *words, check=check)


class Namespace:
    """A network namespace, joined to ours by two wires.

    Attributes:
        name: of the namespace.
        server: our address on the wire that can be blocked.
        elsewhere: our address on the other one, which stays as it is.
    """

    def __init__(self) -> None:
        self.name = f"pglock{os.getpid()}n{next(_numbers)}"
        self._wire, self._other = Wire(self.name), Wire(self.name)
        self.server, self.elsewhere = self._wire.server, self._other.server

    def __enter__(self) -> Self:
        self._remove_leftovers()
        _ip("netns", "add", self.name)
        try:
            self._wire.lay()
            self._other.lay()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.remove()
        self._other.remove()
        _ip("netns", "del", self.name)

    @staticmethod
    def _remove_leftovers() -> None:
        """Remove the namespaces of test processes that were killed, their wires with them."""
        listed = subprocess.run([IP, "netns", "list"], capture_output=True, text=True, check=True)
        for name, pid in re.findall(r"^(pglock(\d+)n\d+)\b", listed.stdout, re.MULTILINE):
            if not Path(f"/proc/{pid}").exists():
                _ip("netns", "del", name, check=False)

    def block(self, hole: Hole) -> None:
        self._wire.block(hole)

    def heal(self) -> None:
        self._wire.heal()

    def command(self, *words: str | Path) -> list[str | Path]:
        return [IP, "netns", "exec", self.name, *words]


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run([IP, *words], check=check, capture_output=True)


def _can_make_namespaces() -> bool:
    if os.geteuid() != 0 or not Path(IP).exists():
        return False
    try:
        with Namespace():
            return True
    except (subprocess.CalledProcessError, OSError):
        return False


def require_namespaces() -> None:
    """Skip the test where they cannot be made."""
    require(_can_make_namespaces(), "root, iproute2 and network namespaces")


@contextlib.contextmanager
def far_postgres(*namespaces: Namespace) -> Iterator[PostgresServer]:
    """A PostgreSQL with our tables, at 127.0.0.1 and on the wires of the namespaces."""
    addresses = ",".join(["127.0.0.1", *(namespace.server for namespace in namespaces)])
    with PostgresServer({**CRASH_SAFE, "listen_addresses": addresses}, place=in_memory()) as server:
        with (server.data_dir / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 198.18.0.0/15 trust\n")
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("select pg_reload_conf()")
        migrating.migrate(server.url())
        yield server


def seen_at(address: str, url: str) -> str:
    """Return the URL of a server, at another of its addresses."""
    parts = urlsplit(url)
    user = f"{parts.username}@" if parts.username else ""
    return urlunsplit(parts._replace(netloc=f"{user}{address}:{parts.port}"))

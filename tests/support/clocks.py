"""Wrong clocks for real processes: a beat, or PostgreSQL, with a library that is preloaded.

Only the wall clock is off, and by what a file says at each look at it: so it can be set while
the process runs, and processes that read the same file agree. (libfaketime would do, but two
things of its version 0.9.10: Python's sleep fails where the monotonic clock is to be left alone,
and a signal that strikes in a wait is handled by the right clock, so that PostgreSQL's time-outs
come too early or never.)
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from celery_pglock import migrating
from celery_pglock.demo.servers import PostgresServer, binaries
from tests.support.requirements import require
from tests.support.servers import CRASH_SAFE, in_memory

_SOURCE = Path(__file__).with_name("wall_clock.c")


class Clock:
    """A wall clock that is off by some seconds.

    Attributes:
        env: for the environment of a process that is to have this clock.
        off: by how many seconds it is off; negative: behind.
    """

    def __init__(self, file: Path, preloaded: Path) -> None:
        self._file = file
        file.touch()
        file.chmod(0o644)
        self.off = 0.0
        self.env: Mapping[str, str] = {
            "LD_PRELOAD": str(preloaded),
            "PGLOCK_TEST_CLOCK": str(file),
        }
        self.set(0.0)

    def set(self, off: float) -> None:
        """Have the clock be off by so many seconds, at once, wherever it is in use."""
        with self._file.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), struct.pack("q", round(off * 1e9)), 0)
        self.off = off

    def set_to(self, moment: dt.datetime) -> None:
        """Set the clock to a moment."""
        self.set((moment - dt.datetime.now(dt.UTC)).total_seconds())

    def now(self) -> dt.datetime:
        """Return what the clock says."""
        return dt.datetime.now(dt.UTC) + dt.timedelta(seconds=self.off)


MakeClock = Callable[[], Clock]


@pytest.fixture(scope="session")
def clock_place() -> Iterator[Path]:
    """A directory with the library, which the account that PostgreSQL runs as can read."""
    compiler = shutil.which("cc")
    require(compiler, "a C compiler (apt install gcc libc6-dev)")
    place = Path(tempfile.mkdtemp(prefix="pglock-clocks-", dir=binaries.place_for(others=True)))
    place.chmod(0o755)
    library = place / "wall_clock.so"
    command = [str(compiler), "-shared", "-fPIC", "-O2", "-Wall", "-o", str(library), str(_SOURCE)]
    subprocess.run(command, check=True)
    library.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def make_clock(clock_place: Path) -> MakeClock:
    """Makes clocks; skips the test where they cannot be had."""

    def make() -> Clock:
        number = len(list(clock_place.iterdir()))
        return Clock(clock_place / f"clock{number}", clock_place / "wall_clock.so")

    return make


class ClockedServer:
    """A PostgreSQL with a clock of its own, and our tables.

    Attributes:
        url: its database.
        clock: its clock.
    """

    def __init__(self, server: PostgresServer, clock: Clock) -> None:
        self.url = server.url()
        self.clock = clock


@pytest.fixture
def clocked_server(make_clock: MakeClock) -> Iterator[ClockedServer]:
    """A PostgreSQL of this test's own whose clock the test may set."""
    clock = make_clock()
    server = PostgresServer(CRASH_SAFE, place=in_memory())
    server.env = dict(clock.env)
    with server:
        migrating.migrate(server.url(), "pglock")
        yield ClockedServer(server, clock)

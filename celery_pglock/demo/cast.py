"""The cast: the servers, beats and workers, all of which end with this process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from celery_pglock.demo import app as application
from celery_pglock.demo import interruptions
from celery_pglock.demo.servers import PostgresServer, ServerError, ValkeyServer, children

Role = Literal["beat", "worker"]

_APP: Final = "celery_pglock.demo.app"
# Nothing in this database is worth a disk's time: it is thrown away at the end.
_POSTGRES: Final[dict[str, str | int]] = {"fsync": "off", "max_connections": 60}


class Actor:
    """A beat or a worker: a real ``celery`` command that can be killed and started again.

    Attributes:
        name: ``beat1``, ``worker2`` …
        role: which of the two it is.
        log: the file of its output, over all its lives.
    """

    def __init__(
        self, name: str, role: Role, arguments: list[str], environment: dict[str, str], place: Path
    ) -> None:
        self.name = name
        self.role = role
        self.log = place / f"{name}.log"
        self._command = _celery(role, *arguments)
        self._environment = {**environment, application.NAME: name}
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id, or that of its last life; 0 before the first."""
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, as a process that ends with this one."""
        with interruptions.held_back():
            self._process = children.spawn(
                self._command, log=self.log, cwd=self._place, env=self._environment
            )

    def terminate(self, patience: float) -> bool:
        """Ask it to stop, as a service manager does; return whether it did in time."""
        if self._process is None or self._process.poll() is not None:
            return True
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill it and the processes of its pool with SIGKILL, as a machine's end would."""
        # It leads a process group. Once it has been waited for, its number may be another's;
        # what was left of its pool then, the kernel has ended with it.
        if self._process is None or self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def owns(self, pid: int) -> bool:
        """Whether a process is this one or of its pool, and not merely has the same number."""
        try:
            return self.alive and os.getpgid(pid) == self.pid
        except ProcessLookupError:
            return False


class Cast:
    """Everything that runs. As a context manager it starts the servers, and ends everything.

    Args:
        guarded: with LockedTask and ``beat -S pglock``, or a plain task and stock beats.
        keep: where the logs are copied before they are removed, if anywhere.

    Attributes:
        place: the private directory of logs and of the feed.
        database_url: of the PostgreSQL server.
        broker_url: of the Valkey server.
        beats: two.
        workers: two.
    """

    def __init__(self, *, guarded: bool, keep: Path | None = None) -> None:
        self.guarded = guarded
        self._keep = keep
        self.place = Path()
        self.database_url = self.broker_url = ""
        self.beats: list[Actor] = []
        self.workers: list[Actor] = []
        self._environment: dict[str, str] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            with interruptions.held_back():
                self._enter()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _enter(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="pglock-demo-"))
        self._open.callback(self._remove)
        postgres = self._open.enter_context(PostgresServer(_POSTGRES))
        valkey = self._open.enter_context(ValkeyServer())
        self.database_url, self.broker_url = postgres.url(), valkey.url()
        self._environment = {
            **_clean_environment(),
            "PYTHONUNBUFFERED": "1",
            # A worker that is killed leaves a directory behind; it goes the way of this one.
            "TMPDIR": str(self.place),
            application.DATABASE: self.database_url,
            application.BROKER: self.broker_url,
            application.FEED: str(self.feed),
            application.UNGUARDED: "" if self.guarded else "1",
        }
        self.beats = [self._beat(f"beat{number}") for number in (1, 2)]
        self.workers = [self._worker(f"worker{number}") for number in (1, 2)]
        self._open.callback(self._kill_all)

    def _close(self) -> None:
        # It takes a second at most; interrupted once more it would leave things behind.
        with interruptions.ignored():
            self._open.close()

    @property
    def actors(self) -> list[Actor]:
        """The beats and the workers."""
        return [*self.beats, *self.workers]

    @property
    def feed(self) -> Path:
        """The file in which they write what they have to say."""
        return self.place / "feed.jsonl"

    def migrate(self) -> None:
        """Run the command that creates the tables.

        Raises:
            ServerError: it failed; the message ends with its output.
        """
        log = self.place / "migrate.log"
        command = _celery("pglock", "migrate")
        if children.run(command, log=log, cwd=self.place, env=self._environment):
            raise ServerError(f"pglock migrate failed:\n{children.tail(log)}")

    def owner(self, pid: int) -> Actor | None:
        """Return whose process this is; None when it is nobody's any more."""
        return next((actor for actor in self.actors if actor.owns(pid)), None)

    def expect_alive(self) -> None:
        """Make sure that nobody has ended who was not killed.

        Raises:
            ServerError: somebody has; the message ends with the output.
        """
        for actor in self.actors:
            if actor.pid and not actor.alive:
                raise ServerError(f"{actor.name} ended at its start:\n{children.tail(actor.log)}")

    def _beat(self, name: str) -> Actor:
        if self.guarded:
            arguments = ["-S", "pglock"]
        else:
            arguments = ["-s", str(self.place / f"{name}-schedule")]
        arguments += ["--loglevel=INFO", "--pidfile="]
        return Actor(name, "beat", arguments, self._environment, self.place)

    def _worker(self, name: str) -> Actor:
        arguments = [
            "-n", f"{name}@%h", "-c", "2", "--loglevel=INFO", "--without-gossip",
            "--without-mingle",
        ]  # fmt: skip
        return Actor(name, "worker", arguments, self._environment, self.place)

    def _remove(self) -> None:
        if self._keep is not None:
            with contextlib.suppress(OSError):
                shutil.copytree(self.place, self._keep, dirs_exist_ok=True)
        shutil.rmtree(self.place, ignore_errors=True)

    def _kill_all(self) -> None:
        for actor in self.actors:
            actor.kill()
        # Their pools' processes were killed with them; the directory is removed after them.
        deadline = time.monotonic() + 5.0
        for actor in self.actors:
            while children.session_members(actor.pid or -1) and time.monotonic() < deadline:
                time.sleep(0.01)


def _celery(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", _APP, *arguments]


def _clean_environment() -> dict[str, str]:
    # What the caller has set for his own Celery and PostgreSQL would redirect ours.
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("CELERY_", "PG"))
    }

"""The stage: the servers, the beats and the workers, all real, all ended with this process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import psycopg

from celery_pglock import migrating
from celery_pglock.demo.servers import PostgresServer, ValkeyServer, binaries, children
from tests.chaos import history, plan
from tests.support import clocks, namespaces
from tests.support.processes import Process, Processes
from tests.support.servers import CRASH_SAFE, POSTGRES_SETTINGS

Role = Literal["beat", "worker"]

APP: Final = "tests.chaos.app"
CHILDREN: Final = 3
SETTINGS: Final[dict[str, Any]] = {
    "pglock_leader_lease": plan.LEASE,
    "pglock_lost_after": plan.LOST_AFTER,
    "pglock_rescue_sent_after": 15.0,
    "pglock_rescue_lost_after": 6.0,
}
# A message that its worker does not acknowledge comes again after so many seconds; a worker that
# is killed while it looks for such messages keeps the others from it for one.
TRANSPORT: Final[dict[str, Any]] = {
    "visibility_timeout": 12,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 1,
}
EFFECTS: Final = b"""
CREATE TABLE effects (job text NOT NULL, period text NOT NULL, name text NOT NULL,
    attempt integer NOT NULL);
CREATE TABLE counters (name text NOT NULL, value integer NOT NULL);
CREATE INDEX ON counters (name);
"""


@dataclasses.dataclass(kw_only=True)
class Actor:
    """A beat or a worker, over all its lives.

    Attributes:
        name: `beat1`, `worker2` …
        far: it lives in the network namespace.
        version: of the lock names, which a deploy changes.
        process: its present or last life.
        leaving: it was asked to stop.
        since: when its present or last life began, by the monotonic clock in nanoseconds.
    """

    name: str
    role: Role
    arguments: list[str]
    far: bool = False
    version: int = 1
    without: str = ""
    process: Process | None = None
    leaving: bool = False
    since: int = 0

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.running()

    def pids(self) -> list[int]:
        """Return its processes, children and what these have forked among them."""
        return [] if self.process is None else children.session_members(self.process.pid)


class Stage:
    """Starts the servers on entering, and ends everything on leaving.

    Args:
        settings: of the application, beside `SETTINGS`.
        entries: of the schedule, as Celery takes them, by their names.
        far: make a network namespace for some of the actors, where the machine can.
        clocks_off: have a clock for the beats that can be set, where the machine can.
        keep: where the logs and the files of the history are copied at the end, if anywhere.
    """

    def __init__(
        self,
        entries: Mapping[str, Mapping[str, Any]],
        *,
        settings: Mapping[str, Any] | None = None,
        far: bool = True,
        clocks_off: bool = True,
        keep: Path | None = None,
    ) -> None:
        self.entries = entries
        self.settings = {**SETTINGS, **(settings or {})}
        self.actors: list[Actor] = []
        self.namespace: namespaces.Namespace | None = None
        self.clock: clocks.Clock | None = None
        self.keep = keep
        self._wants_far = far
        self._wants_clock = clocks_off
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._enter()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def _enter(self) -> None:
        self.place = Path(
            tempfile.mkdtemp(prefix="pglock-chaos-", dir=binaries.place_for(others=True))
        )
        self._open.callback(self._remove)
        self.place.chmod(0o755)
        self.events = self.place / "events"
        self.events.mkdir()
        if self._wants_far and os.geteuid() == 0:
            with contextlib.suppress(subprocess.CalledProcessError, OSError):
                self.namespace = self._open.enter_context(namespaces.Namespace())
        compiler = shutil.which("cc")
        if self._wants_clock and compiler is not None:
            self.clock = clocks.Clock(self.place / "clock", self._compiled(compiler))
        self.witness = self._open.enter_context(self._postgres(POSTGRES_SETTINGS))
        self.server = self._postgres({**CRASH_SAFE, "max_connections": 120})
        self._open.callback(self._close_server)
        self.server.start()
        # Where a standby server is made the primary, the next one has the port that is left.
        self.ports = [self.server.port, children.free_port()]
        self.broker = self._open.enter_context(
            ValkeyServer({"bind": " ".join(self._addresses()), "protected-mode": "no"})
        )
        for server in (self.witness, self.server):
            self.trust(server)
        migrating.migrate(self.server.url())
        with psycopg.connect(self.server.url(), autocommit=True) as connection:
            connection.execute(EFFECTS)
        with psycopg.connect(self.witness.url(), autocommit=True) as connection:
            connection.execute(history.TABLES + EFFECTS)
        self.scribe = history.Scribe(self.witness.url(), self.events, "harness")
        self._open.callback(self.scribe.close)
        self.processes = Processes(self.place)
        self._open.callback(self._end_all)

    def _compiled(self, compiler: str) -> Path:
        library = self.place / "wall_clock.so"
        source = Path(clocks.__file__).with_name("wall_clock.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
        return library

    def _addresses(self) -> list[str]:
        wires = [] if self.namespace is None else [self.namespace.server, self.namespace.elsewhere]
        return ["127.0.0.1", *wires]

    def _postgres(self, settings: Mapping[str, str | int]) -> PostgresServer:
        return PostgresServer({**settings, "listen_addresses": ",".join(self._addresses())})

    def trust(self, server: PostgresServer) -> None:
        """Let in who comes over the wires."""
        with (server.data_dir / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 198.18.0.0/15 trust\n")
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("select pg_reload_conf()")

    def _remove(self) -> None:
        if self.keep is not None:
            shutil.copytree(self.place, self.keep, dirs_exist_ok=True)
        shutil.rmtree(self.place, ignore_errors=True)

    def _close_server(self) -> None:
        # Which one it is has perhaps changed.
        self.server.close()

    def _end_all(self) -> None:
        for actor in self.actors:
            if actor.process is not None:
                actor.process.kill(group=True)
        self.processes.end(0.0)

    # --- actors -------------------------------------------------------------------------------

    @property
    def beats(self) -> list[Actor]:
        """The beats, dead or alive."""
        return [actor for actor in self.actors if actor.role == "beat"]

    @property
    def workers(self) -> list[Actor]:
        """The workers, dead or alive."""
        return [actor for actor in self.actors if actor.role == "worker"]

    @property
    def far(self) -> list[Actor]:
        """Those whose packets can be dropped."""
        return [actor for actor in self.actors if actor.far]

    def beat(self, scheduler: str = "pglock", **more: Any) -> Actor:
        """Add a beat; it is not started yet."""
        name = f"beat{len(self.beats) + 1}"
        arguments = ["-S", scheduler, "-l", "INFO", "--pidfile=", "-s", str(self.place / name)]
        return self._add(Actor(name=name, role="beat", arguments=arguments, **more))

    def worker(self, *arguments: str, concurrency: int = CHILDREN, **more: Any) -> Actor:
        """Add a worker; it is not started yet. It has a queue of its own beside the common one."""
        name = f"worker{len(self.workers) + 1}"
        words = [
            "-n", f"{name}@c", "-c", str(concurrency), "-l", "INFO", "-Q", f"chaos,{name}",
            "--without-gossip", "--without-mingle", *arguments,
        ]  # fmt: skip
        return self._add(Actor(name=name, role="worker", arguments=words, **more))

    def _add(self, actor: Actor) -> Actor:
        actor.far = actor.far and self.namespace is not None
        self.actors.append(actor)
        return actor

    def start(self, *actors: Actor) -> None:
        """Start actors, for the first time or again."""
        for actor in actors:
            command: list[str | Path] = [
                sys.executable, "-m", "celery", "-A", APP, actor.role, *actor.arguments,
            ]  # fmt: skip
            if actor.far and self.namespace is not None:
                command = self.namespace.command(*command)
            actor.leaving = False
            actor.since = time.monotonic_ns()
            actor.process = self.processes.start(
                *command, env=self._environment(actor), name=actor.name
            )

    def start_with(self, actor: Actor, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Start an actor with other entries, as after an edit."""
        given, self.entries = self.entries, entries
        try:
            self.start(actor)
        finally:
            self.entries = given

    def wait_until_ready(self, actors: Iterable[Actor], patience: float = 60.0) -> None:
        """Wait until workers take messages, and beats lead or stand by."""
        for actor in actors:
            assert actor.process is not None
            wanted = (
                r" ready\.$" if actor.role == "worker" else "standby: |leadership gained: |Starting"
            )
            actor.process.wait_for_line(wanted, patience)

    def _environment(self, actor: Actor) -> dict[str, str]:
        here = there = "127.0.0.1"
        if actor.far and self.namespace is not None:
            here, there = self.namespace.server, self.namespace.elsewhere
        hosts = ",".join(here for _ in self.ports)
        ports = ",".join(map(str, self.ports))
        clock = self.clock.env if self.clock is not None and actor.role == "beat" else {}
        return {
            "CHAOS_DATABASE": f"postgresql://postgres@/postgres?host={hosts}&port={ports}",
            "CHAOS_BROKER": namespaces.seen_at(there, self.broker.url()),
            "CHAOS_HISTORY": namespaces.seen_at(there, self.witness.url()),
            "CHAOS_DIRECTORY": str(self.events),
            "CHAOS_NAME": actor.name,
            "CHAOS_VERSION": str(actor.version),
            "CHAOS_ENTRIES": json.dumps(self.entries),
            "CHAOS_SETTINGS": json.dumps(self.settings),
            "CHAOS_TRANSPORT": json.dumps(TRANSPORT),
            "CHAOS_WITHOUT": actor.without,
            **clock,
        }

    def stop(self, actors: Iterable[Actor], patience: float = 20.0) -> bool:
        """Ask actors to stop, as a service manager does; return whether all did in time."""
        told = [actor.process for actor in actors if actor.process is not None and actor.alive]
        for process in told:
            process.send(signal.SIGTERM)
        return until(lambda: not any(process.running() for process in told), patience)


def until(condition: Callable[[], object], patience: float, interval: float = 0.02) -> bool:
    """Wait for a condition; return whether it came in time."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True

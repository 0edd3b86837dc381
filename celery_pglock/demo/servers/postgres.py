"""A PostgreSQL server of one's own, in a private directory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, Self

from typing_extensions import override

from celery_pglock.demo.servers import binaries, children, private

_READY_LINE: Final = 7  # of postmaster.pid, counted from 0
_STOP_SIGNALS: Final = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}

StopMode = Literal["smart", "fast", "immediate"]


class PostgresServer(private.PrivateServer):
    """A PostgreSQL server at 127.0.0.1 and on a unix socket, with the superuser `postgres`.

    Nothing is asked for a password. As root it is run by the account `nobody`, since PostgreSQL
    refuses to be run by root.

    Args:
        settings: Server settings by name. Change `settings` and `restart` to try others.
        place: Where its directory is made; by default where temporary files are.

    Raises:
        BinariesNotFoundError: There is no PostgreSQL on this machine.

    Attributes:
        settings: The server settings, read at each start.
        env: Added to the server's environment at each start.
        data_dir: The data directory.
        socket_dir: The directory of the unix socket.
    """

    name = "PostgreSQL"

    def __init__(
        self, settings: Mapping[str, str | int] | None = None, *, place: Path | None = None
    ) -> None:
        self._account = children.Account.unprivileged()
        self._bin = binaries.runnable(binaries.postgres_bin(), by_others=self._account is not None)
        super().__init__(
            "pglock-pg-", place or binaries.place_for(others=self._account is not None)
        )
        self.settings: dict[str, str | int] = dict(settings or {})
        self.env: dict[str, str] = {}
        self.data_dir = self._base / "data"
        self.socket_dir = self._base
        if self._account is not None:
            os.chown(self._base, self._account.uid, self._account.gid)

    def url(self, dbname: str = "postgres", *, socket: bool = False) -> str:
        """Return the libpq URL of a database, over TCP or over the unix socket."""
        if socket:
            return f"postgresql://postgres@/{dbname}?host={self.socket_dir}&port={self.port}"
        return f"postgresql://postgres@127.0.0.1:{self.port}/{dbname}"

    @override
    def start(self) -> Self:
        self._refuse_running()
        if not self.data_dir.exists():
            self._run(
                "initdb", "--pgdata", self.data_dir, "--username=postgres", "--auth=trust",
                "--encoding=UTF8", "--locale=C", "--no-sync",
            )  # fmt: skip
        options = {"listen_addresses": "127.0.0.1", **self.settings}
        command: list[str | Path] = [
            self._bin / "postgres", "-D", self.data_dir, "-p", str(self.port), "-k", self.socket_dir,
        ]  # fmt: skip
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        process = children.spawn(
            command,
            log=self.log_file,
            cwd=self._base,
            env=_clean_environment() | self.env,
            account=self._account,
            death_signal=signal.SIGQUIT,
        )
        self._process = process
        children.wait_until_ready(process, lambda: self._ready(process.pid), log=self.log_file)
        return self

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server if it runs: `fast` ends sessions properly, `immediate` crashes it.

        Raises:
            ServerError: It does not stop in time.
        """
        self._end_by(_STOP_SIGNALS[mode])

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server if it runs, and start it with the settings as they are now."""
        self.stop(mode)
        self.start()

    @override
    def kill(self) -> None:
        """Kill every process of the server with SIGKILL, as a loss of power would.

        Raises:
            ServerError: It is not running.
        """
        process = self._running()
        sessions = children.child_pids(process.pid)
        process.kill()
        process.wait()
        for pid in sessions:
            children.send(pid, signal.SIGKILL)
        # While one of them still has the shared memory, the server would refuse to start again.
        deadline = time.monotonic() + 10
        while any(children.alive(pid) for pid in sessions):
            if time.monotonic() > deadline:
                raise children.ServerError("A process of PostgreSQL survived SIGKILL for 10 s.")
            time.sleep(0.01)
        self._process = None

    def standby(self, settings: Mapping[str, str | int] | None = None) -> PostgresServer:
        """Make a streaming hot standby of this server; it is not started yet.

        Args:
            settings: What differs from this server's settings. `cluster_name` is the name under
                which it appears in pg_stat_replication and synchronous_standby_names.
        """
        self._running()
        copy = PostgresServer({**self.settings, **(settings or {})})
        try:
            copy._run(
                "pg_basebackup", "--pgdata", copy.data_dir, "--dbname", self.url(),
                "--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync",
            )  # fmt: skip
        except BaseException:
            copy.close()
            raise
        return copy

    def promote(self) -> None:
        """Make this standby a primary, and wait until it is one."""
        self._running()
        self._run("pg_ctl", "promote", "--wait", "--pgdata", self.data_dir)

    @override
    def _end(self) -> None:
        self.stop("immediate")

    def _ready(self, pid: int) -> bool:
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # The file may be one that a killed server left behind: look whose it is.
        return (
            len(lines) > _READY_LINE
            and lines[0].strip() == str(pid)
            and lines[_READY_LINE].strip() in {"ready", "standby"}
        )

    def _run(self, program: str, *arguments: str | Path) -> None:
        log = self._base / f"{program}.log"
        code = children.run(
            [self._bin / program, *arguments],
            log=log,
            cwd=self._base,
            env=_clean_environment(),
            account=self._account,
        )
        if code != 0:
            raise children.ServerError(f"{program} failed:\n{children.tail(log)}")


def _clean_environment() -> dict[str, str]:
    # PGHOST, PGDATA, PGOPTIONS … of the caller are meant for another server.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return kept | {"LC_ALL": "C", "TZ": "UTC"}

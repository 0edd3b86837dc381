"""What the servers of one's own have in common: a directory, a port, one process."""

from __future__ import annotations

import abc
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from celery_pglock.demo.servers import children


class PrivateServer(abc.ABC):
    """A server at 127.0.0.1, in a directory of its own.

    As a context manager it is started on entering; on leaving it is stopped and its directory
    removed. It ends at once when this process ends, even by SIGKILL.

    Args:
        prefix: What the name of its directory begins with.
        place: Where that is made; by default where temporary files are.

    Attributes:
        port: The TCP port, the same after each restart.
        log_file: What the server logs.
    """

    #: What it is called in messages.
    name: ClassVar[str]

    def __init__(self, prefix: str, place: Path | None = None) -> None:
        self.port = children.free_port()
        self._base = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
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

    @abc.abstractmethod
    def start(self) -> Self:
        """Start the server and wait until it answers.

        Raises:
            ServerError: It runs already, or does not start; the message ends with its log.
        """

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
            self._end()
        finally:
            shutil.rmtree(self._base, ignore_errors=True)

    @abc.abstractmethod
    def _end(self) -> None:
        """Stop what runs, in the quickest way."""

    def _end_by(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(number)
            children.wait_until_ended(self._process, log=self.log_file)
        self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise children.ServerError(f"{self.name} on port {self.port} is not running.")
        return self._process

    def _refuse_running(self) -> None:
        if self.running:
            raise children.ServerError(f"{self.name} on port {self.port} is already running.")

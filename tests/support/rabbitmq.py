"""A RabbitMQ node of a test's own, which may be killed and started again on the same data."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Self

from typing_extensions import override

from celery_pglock.demo.servers import children, private
from tests.support.requirements import require

# Erlang takes some seconds to start, and many on a busy machine.
_PATIENCE = 90.0


class RabbitMQNode(private.PrivateServer):
    """A RabbitMQ at 127.0.0.1 without plugins, with a cookie of its own.

    It has an epmd (Erlang's port mapper) of its own too: one that the first node of a machine
    starts would outlive the test. Skips the test where RabbitMQ is not installed. Its pid is that
    of Erlang's emulator, which is the whole node.
    """

    name = "RabbitMQ"

    def __init__(self) -> None:
        self._program = _program()
        epmd = shutil.which("epmd")
        require(epmd, "epmd, which comes with Erlang (apt install rabbitmq-server)")
        self._epmd_command = [str(epmd), "-address", "127.0.0.1"]
        super().__init__("pglock-rabbitmq-")
        (self._base / "plugins").write_text("[].\n")
        self._epmd_port = children.free_port()
        self._dist_port = children.free_port()
        self._epmd: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of its one virtual host."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    @override
    def start(self) -> Self:
        self._refuse_running()
        if self._epmd is None:
            command = [*self._epmd_command, "-port", str(self._epmd_port)]
            self._epmd = children.spawn(command, log=self._base / "epmd.log", cwd=self._base)
            children.wait_until_ready(
                self._epmd, lambda: _listens(self._epmd_port), log=self._base / "epmd.log"
            )
        self._process = children.spawn(
            [self._program], log=self.log_file, cwd=self._base, env=self._environment()
        )
        children.wait_until_ready(
            self._process, self._answers, log=self.log_file, patience=_PATIENCE
        )
        return self

    def wait(self) -> None:
        """Wait until the node has ended, which somebody else has killed."""
        assert self._process is not None
        self._process.wait(_PATIENCE)

    @override
    def _end(self) -> None:
        for process in (self._process, self._epmd):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    def _environment(self) -> dict[str, str]:
        # What is set for another node of this machine must not reach this one.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RABBITMQ_", "ERL_"))
        }
        return kept | {
            "HOME": str(self._base),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self._base / "advanced"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_CONFIG_FILE": str(self._base / "rabbitmq"),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._base / "plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self._base / "generated"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": str(self._base / "log"),
            "RABBITMQ_MNESIA_BASE": str(self._base / "mnesia"),
            "RABBITMQ_NODENAME": f"pglock{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_PID_FILE": str(self._base / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # Then the script becomes the emulator, instead of waiting for it.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"AMQP\0\0\x09\x01")
                return connection.recv(1) == b"\x01"  # the frame with connection.start
        except OSError:
            return False


def _program() -> Path:
    found = shutil.which("rabbitmq-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    require(found, "rabbitmq-server (apt install rabbitmq-server)")
    program = Path(str(found)).resolve()
    if program.name == "rabbitmq-script-wrapper":
        # Debian's, which changes the account and the directory; beside it is the real one.
        program = program.with_name("rabbitmq-server")
    return program


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True

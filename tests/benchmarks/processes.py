"""Real beats and workers, that end with the part that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.support.processes import REPOSITORY


class Process:
    """A `celery` command in a session of its own, with its output in a file."""

    def __init__(self, directory: Path, arguments: tuple[str, ...], env: Mapping[str, str]) -> None:
        descriptor, name = tempfile.mkstemp(suffix=".log", dir=directory)
        self.log = Path(name)
        with open(descriptor, "wb") as output:  # noqa: PTH123 - a descriptor
            self._process = subprocess.Popen(
                [sys.executable, "-m", "celery", *arguments],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def wait_for(self, text: str, seconds: float = 30.0) -> None:
        """Wait until it has written this."""
        wait_until(
            lambda: text in self.log.read_text(errors="replace"), seconds, f"{text!r} in {self.log}"
        )

    def kill(self) -> None:
        """End it and its children, however it is."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end, and wait for that; then whatever is left is killed."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.kill()


@contextlib.contextmanager
def celery() -> Iterator[Callable[..., Process]]:
    """Yield a function that starts a `celery` command, by its arguments and its environment."""
    started: list[Process] = []
    with tempfile.TemporaryDirectory(prefix="pglock-bench-") as place:

        def start(*arguments: str, env: Mapping[str, str]) -> Process:
            process = Process(Path(place), arguments, env)
            started.append(process)
            return process

        try:
            yield start
        finally:
            for process in started:
                process.kill()


def wait_until(asked: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a function returns something true.

    Raises:
        TimeoutError: it was not so in time.
    """
    deadline = time.monotonic() + seconds
    while not asked():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {seconds:g} s: {what}")
        time.sleep(0.02)

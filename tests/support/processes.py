"""Real processes: workers, beats and scripts that tests start, watch, freeze and kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest

from celery_pglock.demo.servers import children

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 30.0
# Killed, a process could not write down which lines of it were run.
MEASURED = bool({"COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"} & os.environ.keys())

T = TypeVar("T")


def eventually(
    fn: Callable[[], T],
    timeout: float = 10.0,
    what: str = "",
    *,
    interval: float = 0.02,
    told: Callable[[], object] = lambda: "",
) -> T:
    """Call a function until it returns something truthy, and return that.

    Args:
        fn: What to ask; its exceptions are not caught.
        timeout: For how many seconds.
        what: What is waited for, for the failure's message.
        interval: Seconds between two calls.
        told: Returns what else the failure's message is to say.

    Raises:
        pytest.fail.Exception: It was not so in time; the message tells the last answer.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = fn()
        if answer:
            return answer
        if time.monotonic() > deadline:
            name = what or getattr(fn, "__name__", "it")
            more = told()
            pytest.fail(
                f"not in {timeout:g} s: {name} (the last answer was {answer!r})"
                f"{f'; {more}' if more else ''}"
            )
        time.sleep(interval)


class Process:
    """A command that runs in a session of its own, its output in a file.

    Attributes:
        pid: Its process id, which is also the id of its process group and its session.
        output_file: Where its standard output and error go.
        graceful: Whether it may end by itself when the test is over.
    """

    def __init__(
        self,
        command: list[str],
        output_file: Path,
        env: Mapping[str, str],
        cwd: Path,
        account: children.Account | None,
        *,
        graceful: bool,
    ) -> None:
        self.command = command
        self.output_file = output_file
        self.graceful = graceful
        self._process = children.spawn(command, log=output_file, cwd=cwd, env=env, account=account)
        self.pid = self._process.pid

    def output(self) -> str:
        """Return what it has written so far."""
        return self.output_file.read_text(errors="replace")

    def wait_for_line(
        self, pattern: str, timeout: float = PATIENCE, *, count: int = 1
    ) -> re.Match[str]:
        """Wait until a regular expression is found in its output, and return the match.

        Args:
            pattern: Searched line by line (`re.MULTILINE`) from the beginning of the output.
            timeout: For how many seconds.
            count: Wait for this many matches and return the last of them.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = self._process.poll()  # asked before reading, so that the last words are read
            matches = list(re.finditer(pattern, self.output(), re.MULTILINE))
            if len(matches) >= count:
                return matches[count - 1]
            if ended is not None:
                self._fail(f"ended with {ended} before {pattern!r} was in its output")
            if time.monotonic() > deadline:
                self._fail(f"did not write {pattern!r} in {timeout:g} s")
            time.sleep(0.02)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait until it has ended, and return its return code (minus the signal if killed)."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._fail(f"did not end in {timeout:g} s")

    def running(self) -> bool:
        return self._process.poll() is None

    def children(self) -> list[int]:
        """Return the pids of the living rest of its session, also after it has ended itself."""
        return [pid for pid in children.session_members(self.pid) if pid != self.pid]

    def send(self, signum: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process, or to its children too."""
        self._process.poll()
        pids = children.session_members(self.pid) if group else [self.pid]
        for pid in pids:
            if pid != self.pid or self._process.returncode is None:
                children.send(pid, signum)

    def terminate(self) -> None:
        """Send SIGTERM to the process alone, as a service manager does at first."""
        self.send(signal.SIGTERM)

    def kill(self, *, group: bool = False) -> None:
        """Send SIGKILL, with `group` to its children too, and wait until it has ended."""
        self.send(signal.SIGKILL, group=group)
        self.wait()

    def stop(self, *, group: bool = True) -> None:
        """Freeze it with SIGSTOP, by default with its children."""
        self.send(signal.SIGSTOP, group=group)

    def cont(self, *, group: bool = True) -> None:
        """Let it go on with SIGCONT, by default with its children."""
        self.send(signal.SIGCONT, group=group)

    def _fail(self, what: str) -> NoReturn:
        pytest.fail(
            f"{' '.join(self.command)} {what}; its output ends:\n{children.tail(self.output_file)}"
        )


class Processes:
    """Starts processes, and ends them all with the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Process] = []

    def start(
        self,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        name: str = "",
        account: children.Account | None = None,
        graceful: bool = True,
    ) -> Process:
        """Start a command.

        Args:
            *command: The program and its arguments.
            env: Added to this process's environment.
            cwd: Where it runs; by default in the repository, so that `tests.apps` is found.
            name: The name of the output file, for people; by default the program's.
            account: Whom it runs as, if not as we do.
            graceful: Whether it may end by itself when the test is over.
        """
        words = [str(word) for word in command]
        number = len(self._started) + 1
        output_file = self._directory / f"{number:02}-{name or Path(words[0]).name}.log"
        # A prefork worker that is killed leaves directories behind; they go with the test's own.
        temporary = self._directory / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(temporary),
            **(env or {}),
        }
        process = Process(words, output_file, environment, cwd, account, graceful=graceful)
        self._started.append(process)
        return process

    def python(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        name: str = "python",
        graceful: bool = True,
    ) -> Process:
        """Start this Python with arguments, such as `-c` and code, or `-m` and a module."""
        return self.start(sys.executable, *arguments, env=env, name=name, graceful=graceful)

    def celery(
        self, app: str, *arguments: str, env: Mapping[str, str] | None = None, name: str = ""
    ) -> Process:
        """Start `celery -A app …`, e.g. `celery("tests.apps.x", "worker", "-c", "2")`."""
        name = name or (arguments[0] if arguments else "celery")
        return self.python(
            "-m", "celery", "-A", app, *arguments, env=env, name=name, graceful=MEASURED
        )

    def end(self, patience: float = 5.0) -> None:
        """End everything: SIGTERM to each process, later SIGKILL to what is left of each.

        Workers and beats get SIGKILL at once: a worker takes seconds to end, and how they end is
        seen by the tests that have them end.
        """
        for process in self._started:
            if process.graceful:
                process.cont()
                process.terminate()
            else:
                process.kill(group=True)
        deadline = time.monotonic() + patience
        while any(process.running() for process in self._started) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in self._started:
            process.kill(group=True)
        for process in self._started:
            self._expect_no_rest(process)

    @staticmethod
    def _expect_no_rest(process: Process) -> None:
        eventually(lambda: not process.children(), what=f"the children of {process.pid} end")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes; at the end of the test they and their children are gone."""
    started = Processes(tmp_path)
    yield started
    started.end()

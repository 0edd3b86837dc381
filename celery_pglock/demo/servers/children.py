"""Processes that end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import pwd
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_PR_SET_PDEATHSIG = 1


class ServerError(RuntimeError):
    """A server did not start, did not stop, or is not in the state that was asked for."""


@dataclass(frozen=True, slots=True)
class Account:
    """Whom a process runs as."""

    uid: int
    gid: int

    @classmethod
    def unprivileged(cls) -> Self | None:
        """Return the account `nobody` if we are root, whom PostgreSQL refuses; else None."""
        if os.geteuid() != 0:
            return None
        entry = pwd.getpwnam("nobody")
        return cls(entry.pw_uid, entry.pw_gid)


def spawn(
    command: Sequence[str | Path],
    *,
    log: Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    account: Account | None = None,
    death_signal: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output appended to a file.

    On Linux the command gets `death_signal` when this process ends, even by SIGKILL. (The kernel
    sends it when the *thread* that started the command ends; away from the main thread, the
    starting is therefore left to a thread that stays as long as the command does.)
    """
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    parent = os.getpid()

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
            if os.getppid() != parent:  # it ended before the line above took effect
                os.kill(os.getpid(), signal.SIGKILL)

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output, warnings.catch_warnings():
            # Python 3.12 warns of a fork beside other threads; between this fork and its exec
            # only the two calls above are made.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=env,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  # see the warning above
                **as_account(account),
            )

    if threading.current_thread() is threading.main_thread():
        return start()
    return _start_in_lasting_thread(start)


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    account: Account | None = None,
) -> int:
    """Run a command to its end and return its exit code; interrupted, it ends with its children.

    Killed alone, initdb leaves a server behind that goes on writing into the directory.
    """
    process = spawn(command, log=log, cwd=cwd, env=env, account=account)
    try:
        return process.wait()
    except BaseException:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        while session_members(process.pid):
            time.sleep(0.01)
        raise


def as_account(account: Account | None) -> dict[str, Any]:
    """Return the arguments with which subprocess runs a command as this account."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def session_members(session: int) -> list[int]:
    """Return the living processes of a session (Linux; elsewhere none), orphans among them."""
    return [pid for pid, _, its_session in _processes() if its_session == session]


def child_pids(parent: int) -> list[int]:
    """Return the living children of a process (Linux; elsewhere none)."""
    return [pid for pid, its_parent, _ in _processes() if its_parent == parent]


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended (one not yet waited for has ended; Linux)."""
    return _stat(Path(f"/proc/{pid}/stat")) is not None


def send(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def free_port() -> int:
    """Return a TCP port on which nobody listens at 127.0.0.1.

    It lies below the ports that kernels hand to outgoing connections: a client that retries
    while its server is down could be given the server's own port, and keep the server from
    coming back.
    """
    for _ in range(1000):
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError("No TCP port from 20000 to 31999 is free at 127.0.0.1.")


def wait_until_ready(
    process: subprocess.Popen[bytes], ready: Callable[[], bool], *, log: Path, patience: float = 30
) -> None:
    """Wait until a server that was just started answers.

    Raises:
        ServerError: It ended, or was not ready in time (then it is killed).
    """
    deadline = time.monotonic() + patience
    while not ready():
        if process.poll() is not None:
            raise ServerError(f"{_name(process)} ended at start:\n{tail(log)}")
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise ServerError(f"{_name(process)} was not ready in {patience} s:\n{tail(log)}")
        time.sleep(0.01)


def wait_until_ended(process: subprocess.Popen[bytes], *, log: Path, patience: float = 30) -> None:
    """Wait until a server that was asked to stop has stopped.

    Raises:
        ServerError: It was still there after that time (then it is killed).
    """
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise ServerError(
            f"{_name(process)} did not stop in {patience} s and was killed:\n{tail(log)}"
        ) from None


def tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _name(process: subprocess.Popen[bytes]) -> str:
    arguments = process.args
    return Path(str(arguments[0])).name if isinstance(arguments, list) else "server"


def _processes() -> list[tuple[int, int, int]]:
    found = (_stat(entry) for entry in Path("/proc").glob("[0-9]*/stat"))
    return [process for process in found if process is not None]


def _stat(entry: Path) -> tuple[int, int, int] | None:
    """Return the pid, parent and session of a living process, None for one that has ended."""
    try:
        fields = entry.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, parent, _, session = fields[:4]
    return None if state in "ZX" else (int(entry.parent.name), int(parent), int(session))


def _start_in_lasting_thread(
    start: Callable[[], subprocess.Popen[bytes]],
) -> subprocess.Popen[bytes]:
    outcome: list[subprocess.Popen[bytes] | BaseException] = []
    started = threading.Event()

    def start_and_stay() -> None:
        try:
            process = start()
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that asked
            outcome.append(error)
            started.set()
            return
        outcome.append(process)
        started.set()
        try:
            # WNOWAIT: the end is only seen here, and collected by whoever owns the process.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return

    threading.Thread(target=start_and_stay, name="pglock-server-keeper", daemon=True).start()
    started.wait()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]

"""Terminals, and pages that tell what to type into them and what is seen then."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pexpect
import pytest

from celery_pglock.demo.servers import children

_PROMPT: Final = "pglock-prompt> "
_CONTROLS: Final = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
# What is another with each reader. A number, an id and a name mean the same wherever they stand.
_VARIABLE: Final = re.compile(
    r"(?P<moment>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)"
    r"|(?P<time>\d\d:\d\d:\d\d)"
    r"|(?P<id>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
    r"|(?P<fraction>\d+\.\d+(?= s\b)|\d+\.\d{3}\b)"
    r"|(?P<host>\blaptop\b)"
    r"|(?P<process>(?<=ForkPoolWorker-)\d+|(?<=@laptop:)\d+)"  # which child it was
    r"|(?P<number>-?\b\d{3,}\b)"
    r"|(?P<rest>…)"
    r"|(?P<space> +)"
)
_PATTERNS: Final = {
    "moment": r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?",
    "time": r"\d\d:\d\d:\d\d",
    "fraction": r"\d+\.\d+",
    "process": r"\d+",
    "rest": r".*",
    "space": " +",
    "id": r"[0-9a-f-]{36}",
    "host": r"[^\s:@]+",
    "number": r"-?\d+",
}
_BOUND: Final = ("id", "host", "number")


class Examples:
    """What a page shows for what is another with each reader, and what it is here.

    The first line in which an example is seen says what it stands for; from then on it stands for
    that alone.
    """

    def __init__(self) -> None:
        self._here: dict[str, str] = {}

    def substituted(self, text: str) -> str:
        """Return a text with what is here in the place of the examples that are known."""
        return _VARIABLE.sub(lambda found: self._here.get(found[0], found[0]), text)

    def seen(self, shown: str, line: str) -> bool:
        """Whether a line is what a page shows; learns what its examples stand for."""
        new: dict[str, str] = {}
        pattern, position = "", 0
        for found in _VARIABLE.finditer(shown):
            pattern += re.escape(shown[position : found.start()])
            position = found.end()
            kind = str(found.lastgroup)
            if found[0] in self._here:
                pattern += re.escape(self._here[found[0]])
            elif found[0] in new:
                pattern += f"(?P={new[found[0]]})"
            elif kind in _BOUND:
                new[found[0]] = f"g{len(new)}"
                pattern += f"(?P<{new[found[0]]}>{_PATTERNS[kind]})"
            else:
                pattern += _PATTERNS[kind]
        match = re.fullmatch(pattern + re.escape(shown[position:]), line)
        if match is None:
            return False
        self._here |= {example: match[group] for example, group in new.items()}
        return True


class Terminal:
    """A shell at a terminal of its own.

    Args:
        directory: where it is opened.
        env: its environment.
        examples: of the page that is followed in it.
    """

    def __init__(self, directory: Path, env: Mapping[str, str], examples: Examples) -> None:
        self._examples = examples
        self._seen = 0
        self._log = ""
        self._shell = pexpect.spawn(
            "/bin/bash",
            ["--norc", "--noprofile", "--noediting", "-i"],
            cwd=str(directory),
            env={
                **env, "PS1": _PROMPT, "TERM": "dumb", "VIRTUAL_ENV_DISABLE_PROMPT": "1",
            },
            echo=False,
            encoding="utf-8",
            dimensions=(50, 400),
        )  # fmt: skip
        self._shell.expect_exact(_PROMPT, timeout=20)

    def follow(self, command: str, shown: list[str], patience: float, *, looks: int = 1) -> None:
        """Type a command, and see it end with what a page shows of it.

        Args:
            command: what is typed.
            shown: what it writes; `…` alone in a line is any lines.
            patience: for how many seconds.
            looks: how often it may be typed, a second apart, until that is seen.
        """
        wrong = None
        for look in range(looks):
            time.sleep(min(look, 1))
            wrong = self._wrong(shown, self.do(command, patience).splitlines())
            if wrong is None:
                return
        pytest.fail(f"{command}: {wrong}")

    def do(self, command: str, patience: float) -> str:
        """Type a command and return what it has written when it has ended."""
        self._shell.sendline(self._examples.substituted(command))
        try:
            self._shell.expect_exact(_PROMPT, timeout=patience)
        except pexpect.TIMEOUT:
            pytest.fail(f"not ended in {patience:g} s: {command}\n{self._shell.before}")
        return _plain(self._shell.before or "")

    def start(self, command: str, shown: list[str], patience: float) -> None:
        """Type a command that stays, and see what a page shows of its beginning."""
        self._shell.sendline(self._examples.substituted(command))
        self._log, self._seen = "", 0
        for line in shown:
            if line != "…":
                self.see(line, patience)

    def see(self, shown: str, patience: float) -> None:
        """Wait for a line, after those that were seen before."""
        deadline = time.monotonic() + patience
        while True:
            lines = _plain(self._log).split("\n")
            for number, line in enumerate(lines[:-1]):
                if number >= self._seen and self._examples.seen(shown, line):
                    self._seen = number + 1
                    return
            if time.monotonic() > deadline:
                pytest.fail(f"not seen in {patience:g} s: {shown}\n{_plain(self._log)}")
            try:
                self._log += self._shell.read_nonblocking(65536, timeout=1)
            except pexpect.TIMEOUT:
                continue

    def interrupt(self, patience: float) -> None:
        """Press Ctrl+C, and see the command end."""
        self._shell.sendintr()
        self._shell.expect_exact(_PROMPT, timeout=patience)
        self._log += self._shell.before or ""

    def close(self) -> None:
        """End the shell and all that was started in it."""
        for pid in children.session_members(int(self._shell.pid or 0)):
            children.send(pid, signal.SIGKILL)
        self._shell.close(force=True)

    def _wrong(self, shown: list[str], lines: list[str]) -> str | None:
        """Return what is not as shown, or None."""
        left = list(lines)
        for line, follower in zip(shown, [*shown, None][1:], strict=True):
            if line == "…":
                while left and (follower is None or not self._examples.seen(follower, left[0])):
                    left.pop(0)
            elif not left or not self._examples.seen(line, left.pop(0)):
                return f"{line!r} is not in its place in\n" + "\n".join(lines)
        return f"it has written too: {left}" if left else None


def fresh_environment(**more: str) -> dict[str, str]:
    """Return an environment in which nothing is known of this project or its own environment."""
    ours = ("PYTHON", "VIRTUAL_ENV", "PG", "COV", "DATABASE_URL", "BROKER_URL", "CELERY")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, **more}


def _plain(text: str) -> str:
    return _CONTROLS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")

"""The `pglock` commands in this process, in a pipe or on a terminal: what they print, how they end."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import inspect
import json
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Collection, Iterator
from importlib import resources
from typing import IO, Any, Final, Self
from unittest import mock

import celery
import celery._state
import celery.app.builtins
import click
import jsonschema
import pytest
from celery.bin.base import CLIContext
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner

from celery_pglock import cli

COLUMNS: Final = 80
BUILTINS: Final = "celery.app.builtins"
_MIXES: Final = "mix_stderr" in inspect.signature(CliRunner).parameters


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep out of new applications what others in this process share with all (`shared_task`)."""
    state: Any = celery._state  # noqa: SLF001
    finalizers = state._on_app_finalizers  # noqa: SLF001
    celerys = {each for each in finalizers if each.__module__ == BUILTINS}
    assert celerys
    monkeypatch.setattr(state, "_on_app_finalizers", celerys)


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code.
        output: what it printed.
        stdout: of that, to standard output alone; in a pipe only.
    """

    code: int
    output: str
    stdout: str = ""

    def fits(self, columns: int = COLUMNS) -> Ended:
        """Expect that no line is wider than a terminal."""
        assert max(map(len, self.output.splitlines())) <= columns, self.output
        return self

    def says(self, sentence: str, code: int) -> Ended:
        """Expect one sentence on standard error, nothing on standard output, and this exit code."""
        assert self.code == code, self.output
        assert self.stdout == ""
        assert "Traceback" not in self.output
        lines = self.output.splitlines()
        assert [line for line in lines if line.startswith("Error: ")] == lines[-1:], self.output
        assert sentence in lines[-1]
        return self


def pglock(app: celery.Celery, *arguments: str) -> Ended:
    """Run `celery -A … pglock …` in this process, its output in a pipe."""
    context = CLIContext(app, no_color=True, workdir=None)
    # Before click 8.2 what goes to standard error is mixed into both, or into neither.
    apart: dict[str, Any] = {"mix_stderr": False} if _MIXES else {}
    result = CliRunner(**apart).invoke(
        cli.pglock, list(arguments), obj=context, catch_exceptions=False
    )
    output = result.stdout + result.stderr if _MIXES else result.output
    return Ended(result.exit_code, output, result.stdout)


def on_terminal(
    app: celery.Celery,
    *arguments: str,
    columns: int = COLUMNS,
    typed: str | None = None,
    colours: bool = False,
    keep: Collection[str] = (),
) -> Ended:
    """Run `celery -A … pglock …` in this process, on a terminal.

    Args:
        app: The application.
        *arguments: Of the command.
        columns: How wide the terminal is.
        typed: What somebody types into it; None: standard input is no terminal.
        colours: Whether it has colours; else `NO_COLOR` says that none are wanted.
        keep: `COLUMNS`, if it is to count here too.
    """
    environment = {"TERM": "xterm-256color", "NO_COLOR": "" if colours else "1"}
    context = CLIContext(app, no_color=False, workdir=None)
    with _Terminal(columns) as terminal, mock.patch.dict(os.environ, environment):
        for name in {"COLUMNS"} - {*keep}:
            os.environ.pop(name, None)
        with terminal.instead(typed):
            try:
                cli.pglock.main([*arguments], prog_name="celery pglock", obj=context)
            except SystemExit as ended:
                code = int(ended.code or 0)
    return Ended(code, terminal.shown())


class _Terminal:
    """A pseudo-terminal, whose other end is read all the time."""

    def __init__(self, columns: int) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._output = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._slave)
        self._reader.join()
        os.close(self._master)

    @contextlib.contextmanager
    def instead(self, typed: str | None) -> Iterator[None]:
        """Have it in the place of this process's own input and output."""
        if typed is not None:
            os.write(self._master, typed.encode())
        with (
            self._opened("w") as out,
            self._opened("r") if typed is not None else open(os.devnull) as typing,  # noqa: PTH123
            mock.patch.object(sys, "stdin", typing),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            yield

    def shown(self) -> str:
        return self._output.decode().replace("\r\n", "\n")

    def _opened(self, mode: str) -> IO[str]:
        return os.fdopen(os.dup(self._slave), mode)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO, once nobody has the other end
            while data := os.read(self._master, 4096):
                self._output += data


def without_colours(output: str) -> str:
    """Return what is read on a terminal without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def schema_of(command: str) -> Any:
    """Return the JSON schema of what a command prints with `--json`."""
    return json.loads(resources.files(cli).joinpath(f"{command}.schema.json").read_text())


def told(app: celery.Celery, command: str, *arguments: str) -> tuple[int, Any]:
    """Return exit code and document of a command with `--json`, held against its schema."""
    ended = pglock(app, *command.split(), "--json", *arguments)
    found = json.loads(ended.stdout)
    schema = schema_of("-".join(word for word in command.split()))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(
        found, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    return ended.code, found


def expect_parsed(line: list[str]) -> None:
    """Expect that `celery -A … COMMAND` has all the options and arguments of a line.

    Raises:
        click.UsageError: it has not.
    """
    program, option, _, *words = line
    assert program.endswith("celery")
    assert option == "-A"
    command: click.Command = celery_command
    while isinstance(command, click.Group) and words:
        name = words.pop(0)
        found = command.get_command(click.Context(command), name)
        if found is None:
            raise click.UsageError(f"no command {name}")
        command = found
    obj = CLIContext(celery.Celery("proj"), no_color=True, workdir=None)
    command.make_context(command.name, words, obj=obj)

"""The `pglock` commands in this process, by click's runner: what they print and how they end."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import Any, Final

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
    """

    code: int
    output: str

    def fits(self) -> Ended:
        """Expect that no line is wider than a terminal."""
        assert max(map(len, self.output.splitlines())) <= COLUMNS, self.output
        return self


def pglock(app: celery.Celery, *arguments: str) -> Ended:
    """Run `celery -A … pglock …` in this process."""
    context = CLIContext(app, no_color=True, workdir=None)
    result = CliRunner().invoke(cli.pglock, list(arguments), obj=context, catch_exceptions=False)
    return Ended(result.exit_code, result.output)


def schema_of(command: str) -> Any:
    """Return the JSON schema of what a command prints with `--json`."""
    return json.loads(resources.files(cli).joinpath(f"{command}.schema.json").read_text())


def told(app: celery.Celery, command: str, *arguments: str) -> tuple[int, Any]:
    """Return exit code and object of a command with `--json`, held against its schema."""
    ended = pglock(app, command, "--json", *arguments)
    found = json.loads(ended.output)
    schema = schema_of(command)
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

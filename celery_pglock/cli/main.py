"""The command group, and how its commands end.

Every ``celery`` command loads this module, those that start workers and beats too. So a command
is imported when it is called or listed, and what the group itself needs when it is called.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import click
from typing_extensions import override

from celery_pglock.cli import groups

FAILED: Final = 1
USAGE: Final = 2
UNAVAILABLE: Final = 69


class _Ended(click.ClickException):
    """Shown as one line on standard error; the process ends with ``exit_code``."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance


class _Group(groups.Group):
    """Ends every command that raises one of our errors with a sentence and an exit code."""

    #: Where each command is: a module of this package, and a name in it.
    homes: ClassVar = {
        "doctor": ("doctor", "command"),
        "locks": ("locks", "command"),
        "entries": ("entries", "entries"),
        "migrate": ("migrate", "command"),
        "pause": ("pause", "pause"),
        "prune": ("prune", "command"),
        "rerun": ("rerun", "command"),
        "resign": ("resign", "command"),
        "resume": ("pause", "resume"),
        "runs": ("runs", "command"),
        "status": ("status", "command"),
        "trigger": ("trigger", "command"),
        "web": ("web", "command"),
    }

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.homes)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.homes:
            return None
        module, name = self.homes[cmd_name]
        command = getattr(importlib.import_module(f"celery_pglock.cli.{module}"), name)
        assert isinstance(command, click.Command)  # noqa: S101 - for the type checker
        return command

    @override
    def invoke(self, ctx: click.Context) -> Any:
        with _ending():
            return super().invoke(ctx)


@click.group(name="pglock", cls=_Group)
@click.pass_context
def pglock(ctx: click.Context) -> None:
    """Locked tasks: their tables, their runs, their locks."""
    app = ctx.obj.app
    # Without -A Celery hands over an application of its own, which has no settings of ours.
    if app.main == "default" and app.conf.get("pglock_database_url") is None:
        raise click.UsageError(
            "which application? Give it before the command: celery -A proj pglock …"
        )
    if ctx.invoked_subcommand == "doctor":  # which says itself what is wrong with the settings
        return
    from celery_pglock import settings

    ctx.obj.settings = config = settings.of(app)
    if config.django_alias is not None:
        # With its modules Celery sets Django up, which has to say where the database is.
        app.loader.import_default_modules()


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    from celery_pglock import errors

    try:
        yield
    except errors.PGLockError as error:
        code = FAILED
        if isinstance(error, errors.ConfigurationError):
            code = USAGE
        elif isinstance(
            error, errors.DatabaseUnavailable | errors.ServerInRecovery | errors.TransactionPooler
        ):
            code = UNAVAILABLE
        raise _Ended(str(error), code) from None

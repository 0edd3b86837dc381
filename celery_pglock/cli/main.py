"""The command group, and how its commands end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import click
from typing_extensions import override

from celery_pglock import errors, settings
from celery_pglock.cli import (
    doctor,
    entries,
    groups,
    locks,
    migrate,
    pause,
    prune,
    rerun,
    resign,
    runs,
    status,
    trigger,
)

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
    ctx.obj.settings = config = settings.of(app)
    if config.django_alias is not None:
        # With its modules Celery sets Django up, which has to say where the database is.
        app.loader.import_default_modules()


@contextlib.contextmanager
def _ending() -> Iterator[None]:
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


pglock.add_command(doctor.command)
pglock.add_command(locks.command)
pglock.add_command(entries.entries)
pglock.add_command(migrate.command)
pglock.add_command(pause.pause)
pglock.add_command(pause.resume)
pglock.add_command(prune.command)
pglock.add_command(rerun.command)
pglock.add_command(resign.command)
pglock.add_command(runs.command)
pglock.add_command(status.command)
pglock.add_command(trigger.command)

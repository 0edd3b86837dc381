"""``pglock prune``: delete the history that is older than the retention."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

import click
import psycopg
from psycopg.rows import namedtuple_row

from celery_pglock import retention, settings
from celery_pglock.cli import confirmation, documents, progress, session, switches, terminal


@click.command(name="prune")
@switches.dry_run
@switches.yes
@switches.verbose
@switches.as_json
@click.pass_context
def command(ctx: click.Context, *, dry_run: bool, yes: bool, verbose: bool, as_json: bool) -> None:
    """Delete settled runs that are older than pglock_retention.

    A leading beat does this by itself, all the time. The newest run of each job stays, and so
    does every one that is not settled. On a terminal it counts first, and asks.
    """
    config = ctx.obj.settings
    removed = 0
    if config.retention is not None:
        with session.connected(config, "prune") as connection:
            connection.execute("set jit = off")  # see guards
            asking = not dry_run and confirmation.needed(yes=yes)
            if dry_run or asking:
                removed = _walked(connection, config, verbose=verbose, dry=True)
            if asking and removed:
                confirmation.ask(f"{_told(removed, config.retention)} will be deleted")
            if not dry_run:
                removed = _walked(connection, config, verbose=verbose, dry=False)
    if as_json:
        document = {
            "namespace": config.namespace,
            "retention": config.retention,
            "runs": removed,
            "dry_run": dry_run,
        }
        documents.write(document, config.zone)
    elif config.retention is None:
        terminal.say("pglock_retention is None: history is kept for ever, nothing to delete")
    else:
        verb = "would be deleted" if dry_run else "deleted"
        terminal.say(f"{_told(removed, config.retention)} {verb}")


def _walked(
    connection: psycopg.Connection[Any], config: settings.Settings, *, verbose: bool, dry: bool
) -> int:
    def execute(query: bytes, parameters: Mapping[str, Any]) -> list[Any]:
        with connection.cursor(row_factory=namedtuple_row) as cursor:
            return cursor.execute(query, parameters).fetchall()

    walk = retention.Pass(
        execute=execute,
        schema=config.schema,
        namespace=config.namespace,
        keep=config.retention or 0.0,
        dry=dry,
    )
    with progress.shown(verbose=verbose) as tell:
        while not walk.ended:
            walk.step()
            verb = "to be deleted" if dry else "deleted"
            tell(f"looked at {walk.seen}, {walk.removed} {verb}")
    return walk.removed


def _told(removed: int, keep: float) -> str:
    return f"{removed} run{'' if removed == 1 else 's'} older than {dt.timedelta(seconds=keep)}"

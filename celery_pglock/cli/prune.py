"""``pglock prune``: delete the history that is older than the retention."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

import click
from psycopg.rows import namedtuple_row

from celery_pglock import retention
from celery_pglock.cli import session


@click.command(name="prune")
@click.option("--dry-run", is_flag=True, help="Say how many rows would go and delete nothing.")
@click.pass_context
def command(ctx: click.Context, *, dry_run: bool) -> None:
    """Delete settled runs that are older than pglock_retention.

    A leading beat does this by itself, all the time. The newest run of each job stays, and so
    does every one that is not settled.
    """
    config = ctx.obj.settings
    if config.retention is None:
        click.echo("pglock_retention is None: history is kept for ever, nothing to delete")
        return
    with session.connected(config, "prune") as connection:
        connection.execute("set jit = off")  # see guards

        def execute(query: bytes, parameters: Mapping[str, Any]) -> list[Any]:
            with connection.cursor(row_factory=namedtuple_row) as cursor:
                return cursor.execute(query, parameters).fetchall()

        walk = retention.Pass(
            execute=execute,
            schema=config.schema,
            namespace=config.namespace,
            keep=config.retention,
            dry=dry_run,
        )
        while not walk.ended:
            walk.step()
    age = str(dt.timedelta(seconds=config.retention))
    verb = "would be deleted" if dry_run else "deleted"
    click.echo(f"{walk.removed} run{'' if walk.removed == 1 else 's'} older than {age} {verb}")

"""``pglock trigger``: run a schedule entry now."""

from __future__ import annotations

import uuid
from typing import Any

import click

from celery_pglock import entries, entry_rows, errors, headers, options, periods, settings
from celery_pglock.cli import sending, session


@click.command(name="trigger")
@click.argument("entry")
@click.pass_context
def command(ctx: click.Context, *, entry: str) -> None:
    """Send the message of a schedule ENTRY now, as an occurrence of its own.

    Its schedule goes on as before, and a pause does not matter. Under a calendar rule it may
    find that its period has been run, and is skipped.
    """
    click.echo(send(ctx.obj.app, ctx.obj.settings, entry, session.who()))


def send(app: Any, config: settings.Settings, entry: str, who: str) -> str:
    """Send the message of a schedule entry now; return what was sent, for people.

    Raises:
        ConfigurationError: there is no such entry.
        ClickException: the broker does not take the message; nothing is left of it.
        DatabaseUnavailable, SchemaError: with the remedy.
    """
    task_id = uuid.uuid4()
    with session.connected(config, "trigger") as connection:
        rows = entry_rows.EntryRows(connection, config.schema, config.namespace)
        message = sending.of_entry(app, rows, entry)
        if message is None:
            names = [*sending.schedule(app), *(row.entry for row in rows.read())]
            hint = sending.nearest(entry, names)
            msg = (
                f"there is no schedule entry {entry!r} in the configuration, nor in the database; "
                f"{hint}"
            )
            raise errors.ConfigurationError(msg)
        known = entries.Entries(connection, config.schema, config.namespace)
        recorded = _is_recorded(app, message.task, config)
        reason = f"triggered by {who}"
        # First the row: should this process die before it has sent, the leader sends it.
        made = known.occur(entry, message.task, str(task_id), reason) if recorded else None
        due = known.now() if made is None else made.due
        job, period = f"{config.namespace}:{entry}", periods.occurrence(due)
        try:
            given = headers.by_hand(job, period, due, entry, fixed=False)
            message.send(app, task_id, given)
        except BaseException as error:
            if made is not None:
                known.withdraw(made)
            if not isinstance(error, Exception):
                raise
            msg = f"the message of entry {entry} could not be sent: {sending.told(error)}"
            raise click.ClickException(msg) from None
    return f"sent {message.task}[{task_id}] for {job} {period}"


def _is_recorded(app: Any, task: str, config: settings.Settings) -> bool:
    chosen = options.locked(app.tasks.get(task))
    return chosen is not None and chosen.recorded(config.options)

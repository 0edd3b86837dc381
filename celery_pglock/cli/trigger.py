"""``pglock trigger``: run a schedule entry now."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import click

from celery_pglock import entries, entry_rows, errors, headers, options, periods, settings
from celery_pglock.cli import completion, documents, names, sending, session, switches, terminal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What was sent.

    Attributes:
        entry: the schedule entry.
        task: the registered name of its task.
        task_id: of the message; None where none was sent.
        job: the job that it runs.
        period: the occurrence, due now.
        recorded: whether a row tells of it.
    """

    entry: str
    task: str
    task_id: str | None
    job: str
    period: str
    recorded: bool


@click.command(name="trigger")
@click.argument("entry", shell_complete=completion.entries)
@switches.dry_run
@switches.as_json
@click.pass_context
def command(ctx: click.Context, *, entry: str, dry_run: bool, as_json: bool) -> None:
    """Send the message of a schedule ENTRY now, as an occurrence of its own.

    Its schedule goes on as before, and a pause does not matter. Under a calendar rule it may
    find that its period has been run, and is skipped.
    """
    config = ctx.obj.settings
    sent = send(ctx.obj.app, config, entry, session.who(), dry_run=dry_run)
    if as_json:
        documents.write({**dataclasses.asdict(sent), "dry_run": dry_run}, config.zone)
    elif dry_run:
        terminal.say(f"would send {sent.task} for {sent.job}")
    else:
        terminal.say(f"sent {sent.task}[{sent.task_id}] for {sent.job} {sent.period}")


def send(
    app: Any, config: settings.Settings, entry: str, who: str, *, dry_run: bool = False
) -> Sent:
    """Send the message of a schedule entry now; return what was sent, or would be.

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
            there = [*sending.schedule(app), *(row.entry for row in rows.read())]
            hint = names.nearest(entry, there)
            msg = (
                f"there is no schedule entry {entry!r} in the configuration, nor in the database; "
                f"{hint}"
            )
            raise errors.ConfigurationError(msg)
        known = entries.Entries(connection, config.schema, config.namespace)
        recorded = _is_recorded(app, message.task, config)
        reason = f"triggered by {who}"
        made = None
        if recorded and not dry_run:
            # First the row: should this process die before it has sent, the leader sends it.
            made = known.occur(entry, message.task, str(task_id), reason)
        due = known.now() if made is None else made.due
        sent = Sent(
            entry=entry,
            task=message.task,
            task_id=None if dry_run else str(task_id),
            job=f"{config.namespace}:{entry}",
            period=periods.occurrence(due),
            recorded=recorded,
        )
        if dry_run:
            return sent
        try:
            given = headers.by_hand(sent.job, sent.period, due, entry, fixed=False)
            message.send(app, task_id, given)
        except BaseException as error:
            if made is not None:
                known.withdraw(made)
            if not isinstance(error, Exception):
                raise
            msg = f"the message of entry {entry} could not be sent: {sending.told(error)}"
            raise click.ClickException(msg) from None
    return sent


def _is_recorded(app: Any, task: str, config: settings.Settings) -> bool:
    chosen = options.locked(app.tasks.get(task))
    return chosen is not None and chosen.recorded(config.options)

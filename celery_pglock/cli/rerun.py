"""``pglock rerun``: run a period again that is settled."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import uuid
from typing import Any

import click

from celery_pglock import entry_rows, errors, headers, reruns
from celery_pglock.cli import (
    completion,
    confirmation,
    documents,
    sending,
    session,
    switches,
    terminal,
)


def _json(_: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    if value is None:
        return None
    kind, name = (list, "list") if parameter.name == "args" else (dict, "object")
    with contextlib.suppress(json.JSONDecodeError):
        found = json.loads(value)
        if isinstance(found, kind):
            return found
    msg = f"must be a JSON {name}; got {value!r}"
    raise click.BadParameter(msg)


@click.command(name="rerun")
@click.argument("job", shell_complete=completion.jobs)
@click.argument("period", shell_complete=completion.periods)
@click.option("--force", is_flag=True, help="Also when it is done, sent or retrying.")
@click.option("--args", callback=_json, help="A JSON list, where no schedule entry tells.")
@click.option("--kwargs", callback=_json, help="A JSON object, where no schedule entry tells.")
@switches.dry_run
@switches.yes
@switches.as_json
@click.pass_context
def command(
    ctx: click.Context,
    *,
    job: str,
    period: str,
    force: bool,
    args: list[Any] | None,
    kwargs: dict[str, Any] | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Send a new message for a PERIOD of a JOB that has failed, was skipped or missed.

    JOB and PERIOD are as "pglock runs" shows them. The attempts go on from where they were.
    Exits 1 when the period is being run, or would need --force.
    """
    config = ctx.obj.settings
    app = ctx.obj.app
    full = job if job.startswith(f"{config.namespace}:") else f"{config.namespace}:{job}"
    task_id = uuid.uuid4()
    with session.connected(config, "rerun") as connection:
        periods = reruns.Reruns(connection, config.schema, config.namespace, config.zone)
        rows = entry_rows.EntryRows(connection, config.schema, config.namespace)
        message = _message(app, rows, periods.find(full, period), args, kwargs)
        found, forced = periods.examine(full, period, force=force)
        if not dry_run:
            if forced and confirmation.needed(yes=yes):
                confirmation.ask(f"{full} {period} is {found.status}, and may be run twice")
            found = periods.reopen(full, period, task_id=task_id, who=session.who(), force=force)
            try:
                # After the row: a worker that is quicker than this process has to find it open.
                given = headers.by_hand(full, period, found.due, found.entry, fixed=True)
                message.send(app, task_id, given)
            except BaseException as error:
                # Each transport and each serializer raises its own. Left open, the row would wait
                # for a message that does not exist.
                periods.restore(found, task_id)
                if not isinstance(error, Exception):
                    raise
                reason = f"its message could not be sent: {sending.told(error)}"
                raise errors.RerunRefused(full, period, reason) from None
    if as_json:
        document = {
            "job": full,
            "period": period,
            "was": found.status,
            "forced": forced,
            "task": message.task,
            "task_id": None if dry_run else str(task_id),
            "dry_run": dry_run,
        }
        documents.write(document, config.zone)
        return
    sent = f"would send {message.task}" if dry_run else f"sent {message.task}[{task_id}]"
    terminal.say(f"{sent} for {full} {period}, which {'is' if dry_run else 'was'} {found.status}")


def _message(
    app: Any,
    rows: entry_rows.EntryRows,
    found: reruns.Recorded,
    args: list[Any] | None,
    kwargs: dict[str, Any] | None,
) -> sending.Message:
    message = sending.of_entry(app, rows, found.entry)
    if message is None:
        if args is None and kwargs is None:
            reason = (
                "no schedule entry tells with which arguments; give --args and --kwargs "
                "(--args '[]' for none)"
            )
            raise errors.RerunRefused(found.job, found.period, reason)
        if found.task is None:
            reason = "its row does not say which task it is"
            raise errors.RerunRefused(found.job, found.period, reason)
        message = sending.Message(task=found.task, args=[], kwargs={}, options={})
    return dataclasses.replace(
        message,
        args=message.args if args is None else args,
        kwargs=message.kwargs if kwargs is None else kwargs,
    )

"""``pglock entries add`` and ``pglock entries remove``: the entries that are kept in the database."""

from __future__ import annotations

import json
from typing import Any

import click

from celery_pglock import definitions, entry_rows, schedule_json, schedules, settings
from celery_pglock.cli import (
    completion,
    confirmation,
    documents,
    names,
    sending,
    session,
    switches,
    terminal,
)


def _loaded(_: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    if value is None:
        return None
    try:
        return json.loads(value)
    except ValueError:
        msg = f"{parameter.name} must be JSON; got {value!r}"
        raise click.BadParameter(msg) from None


@click.command(name="add")
@click.argument("entry", shell_complete=completion.stored_entries)
@click.argument("task", shell_complete=completion.tasks)
@click.option("--every", type=float, metavar="SECONDS", help="An interval.")
@click.option("--crontab", metavar="FIELDS", help='Five fields, like "0 7 * * mon-fri".')
@click.option(
    "--solar",
    nargs=3,
    type=(str, float, float),
    metavar="EVENT LATITUDE LONGITUDE",
    help="Like sunset 52.5 13.4.",
)
@click.option(
    "--zone",
    shell_complete=completion.zones,
    help="Of a crontab, like Europe/Berlin; else the application's.",
)
@click.option("--args", callback=_loaded, help="A JSON list.")
@click.option("--kwargs", callback=_loaded, help="A JSON object.")
@click.option("--options", callback=_loaded, help="A JSON object, of apply_async's options.")
@click.option("--replace", is_flag=True, help="Also when there is such an entry.")
@switches.dry_run
@switches.as_json
@click.pass_context
def add(
    ctx: click.Context,
    /,
    *,
    entry: str,
    task: str,
    every: float | None,
    crontab: str | None,
    solar: tuple[str, float, float] | None,
    zone: str | None,
    replace: bool,
    dry_run: bool,
    as_json: bool,
    **more: Any,
) -> None:
    """Keep an ENTRY in the database that sends TASK; the leading beat sees it within a second."""
    app, config = ctx.obj.app, ctx.obj.settings
    given = {
        "version": definitions.VERSION,
        "task": task,
        "schedule": _schedule(every, crontab, solar, zone),
        **{field: value for field, value in more.items() if value is not None},
    }
    found = definitions.checked(entry, given)
    schedule = told(app, config, entry, found)
    with session.connected(config, "entries") as connection:
        rows = entry_rows.EntryRows(connection, config.schema, config.namespace)
        revision = None
        if dry_run:
            refused = not replace and bool(rows.read([entry]))
        else:
            revision = rows.save(entry, task, found.text(), only_new=not replace)
            refused = revision is None
    if refused:
        msg = f"there is an entry {entry!r} in the database; give --replace to write over it"
        raise click.ClickException(msg)
    configured = entry in sending.schedule(app)
    if _wants_json(ctx, as_json=as_json):
        document = {
            "entry": entry,
            "task": task,
            "schedule": schedule,
            "revision": revision,
            "configured": configured,
            "dry_run": dry_run,
        }
        documents.write(document, config.zone)
        return
    kept = "would be kept" if dry_run else f"is kept, edit {revision}"
    terminal.say(f"{entry} {kept}: {schedule}")
    if configured:
        click.echo("it does not count, because the configuration has that name too", err=True)


@click.command(name="remove")
@click.argument("entry", shell_complete=completion.stored_entries)
@switches.dry_run
@switches.yes
@switches.as_json
@click.pass_context
def remove(ctx: click.Context, *, entry: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove an ENTRY from the database. Exits 1 when there is none. On a terminal it asks."""
    config = ctx.obj.settings
    with session.connected(config, "entries") as connection:
        rows = entry_rows.EntryRows(connection, config.schema, config.namespace)
        there = bool(rows.read([entry]))
        if there and not dry_run:
            if confirmation.needed(yes=yes):
                confirmation.ask(f"entry {entry} will be removed, with its arguments and options")
            there = rows.delete(entry)
        known = [row.entry for row in rows.read()]
    if not there:
        where = " it is in the configuration" if entry in sending.schedule(ctx.obj.app) else ""
        hint = where or f" {names.nearest(entry, known)}"
        msg = f"there is no entry {entry!r} in the database;{hint}"
        raise click.ClickException(msg)
    if _wants_json(ctx, as_json=as_json):
        documents.write({"entry": entry, "dry_run": dry_run}, config.zone)
    else:
        terminal.say(f"{entry} {'would be' if dry_run else 'is'} removed")


def told(app: Any, config: settings.Settings, entry: str, found: definitions.Definition) -> str:
    """Return the schedule of a definition in words.

    Raises:
        ConfigurationError: there is no such schedule.
    """
    return schedules.told(schedule_json.made(entry, found.schedule, app), config.zone)


def _wants_json(ctx: click.Context, *, as_json: bool) -> bool:
    # Before the subcommand's name it is the group's.
    return as_json or bool(ctx.parent is not None and ctx.parent.params.get("as_json"))


def _schedule(
    every: float | None,
    crontab: str | None,
    solar: tuple[str, float, float] | None,
    zone: str | None,
) -> dict[str, Any]:
    if sum(given is not None for given in (every, crontab, solar)) != 1:
        msg = "give one of --every, --crontab and --solar"
        raise click.UsageError(msg)
    own = {} if zone is None else {"zone": zone}
    if every is not None:
        return {"type": "interval", "seconds": every, **own}
    if solar is not None:
        return {"type": "solar", **dict(zip(schedule_json.PLACE, solar, strict=True)), **own}
    parts = (crontab or "").split()
    if len(parts) != len(schedule_json.CRONTAB):
        msg = f"--crontab must have five fields, like '0 7 * * mon-fri'; got {crontab!r}"
        raise click.UsageError(msg)
    return {"type": "crontab", **dict(zip(schedule_json.CRONTAB, parts, strict=True)), **own}

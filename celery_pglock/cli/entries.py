"""``pglock entries``: what is sent when, from which place; and those in the database."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from typing import Any, Final

import celery.beat
import click
from psycopg.rows import dict_row

from celery_pglock import (
    definitions,
    entry_rows,
    errors,
    plans,
    schedule_json,
    schedules,
    settings,
    table_names,
)
from celery_pglock.cli import sending, session

_STATES: Final = """
select entry, task, schedule, definition::text as definition, registered, due_at, next_due_at, paused_until,
 paused_reason, pg_catalog.clock_timestamp() as now
from {entries} where namespace = %(namespace)s::text
"""
_SHOWN: Final = ("entry", "task", "schedule", "next_due_at", "due_at", "paused", "source")


@click.group(name="entries", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
@click.pass_context
def entries(ctx: click.Context, *, as_json: bool) -> None:
    """Show all schedule entries: when each is due next, and whether it is paused.

    Of the configuration, of the database, and of a scheduler that reads them elsewhere.
    """
    if ctx.invoked_subcommand is not None:
        return
    rows = _read(ctx.obj.app, ctx.obj.settings)
    if as_json:
        click.echo(json.dumps(rows, default=_json))
        return
    if not rows:
        click.echo("no schedule entries")
        return
    lines = [_SHOWN, *(tuple(_text(row, name) for name in _SHOWN) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(map(str.ljust, line, widths)).rstrip())
    for row in rows:
        if row["fault"]:
            click.echo(row["fault"], err=True)


def _loaded(_: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    if value is None:
        return None
    try:
        return json.loads(value)
    except ValueError:
        msg = f"{parameter.name} must be JSON; got {value!r}"
        raise click.BadParameter(msg) from None


@entries.command(name="add")
@click.argument("entry")
@click.argument("task")
@click.option("--every", type=float, metavar="SECONDS", help="An interval.")
@click.option("--crontab", metavar="FIELDS", help='Five fields, like "0 7 * * mon-fri".')
@click.option(
    "--solar",
    nargs=3,
    type=(str, float, float),
    metavar="EVENT LATITUDE LONGITUDE",
    help="Like sunset 52.5 13.4.",
)
@click.option("--zone", help="Of a crontab, like Europe/Berlin; else the application's.")
@click.option("--args", callback=_loaded, help="A JSON list.")
@click.option("--kwargs", callback=_loaded, help="A JSON object.")
@click.option("--options", callback=_loaded, help="A JSON object, of apply_async's options.")
@click.option("--replace", is_flag=True, help="Also when there is such an entry.")
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
    **more: Any,
) -> None:
    """Keep an ENTRY in the database that sends TASK; the leading beat sees it within a second."""
    config = ctx.obj.settings
    given = {
        "version": definitions.VERSION,
        "task": task,
        "schedule": _schedule(every, crontab, solar, zone),
        **{field: value for field, value in more.items() if value is not None},
    }
    found = definitions.checked(entry, given)
    schedule_json.made(entry, found.schedule, ctx.obj.app)
    with session.connected(config, "entries") as connection:
        rows = entry_rows.EntryRows(connection, config.schema, config.namespace)
        revision = rows.save(entry, task, found.text(), only_new=not replace)
    if revision is None:
        msg = f"there is an entry {entry!r} in the database; give --replace to write over it"
        raise click.ClickException(msg)
    click.echo(f"{entry} is kept, edit {revision}: {_told(ctx.obj.app, config, entry, found)}")
    if entry in sending.schedule(ctx.obj.app):
        click.echo("it does not count, because the configuration has that name too", err=True)


@entries.command(name="remove")
@click.argument("entry")
@click.pass_context
def remove(ctx: click.Context, *, entry: str) -> None:
    """Remove an ENTRY from the database. Exits 1 when there is none."""
    config = ctx.obj.settings
    with session.connected(config, "entries") as connection:
        rows = entry_rows.EntryRows(connection, config.schema, config.namespace)
        if rows.delete(entry):
            click.echo(f"{entry} is removed")
            return
        known = [row.entry for row in rows.read()]
    where = " it is in the configuration" if entry in sending.schedule(ctx.obj.app) else ""
    hint = where or f" {sending.nearest(entry, known)}"
    msg = f"there is no entry {entry!r} in the database;{hint}"
    raise click.ClickException(msg)


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


def _read(app: Any, config: settings.Settings) -> list[dict[str, Any]]:
    configured = schedules.configured(app)
    with (
        session.connected(config, "entries") as connection,
        connection.cursor(row_factory=dict_row) as cursor,
    ):
        query = table_names.statement(_STATES, config.schema)
        cursor.execute(query, {"namespace": config.namespace})
        states = {str(row["entry"]): row for row in cursor.fetchall()}
    found = []
    for name in sorted(configured.keys() | states.keys()):
        state = states.get(name, {})
        row = _row(app, config, name, configured.get(name), state)
        if row is not None:
            paused = state.get("paused_until")
            row["paused_until"] = paused if paused and paused > state["now"] else None
            row["paused_reason"] = row["paused_until"] and state["paused_reason"]
            found.append(
                {**row, "next_due_at": state.get("next_due_at"), "due_at": state.get("due_at")}
            )
    return found


def _row(
    app: Any,
    config: settings.Settings,
    name: str,
    configured: celery.beat.ScheduleEntry | None,
    state: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return an entry as it counts; None for one that was removed."""
    definition, fault = state.get("definition"), None
    if configured is not None:
        task, schedule = str(configured.task), schedules.told(configured.schedule, config.zone)
        source = "configuration"
        if definition is not None:
            fault = f"entry {name!r} is in the database too; the configuration's counts"
    elif definition is not None:
        source = "database"
        try:
            found = definitions.read(name, definition)
            task, schedule = found.task, _told(app, config, name, found)
        except errors.ConfigurationError as error:
            task, schedule, fault = state["task"], "left out", str(error)
    elif state["next_due_at"] is not None and state["registered"] is None:
        # Of a scheduler that reads its entries elsewhere, or of another release.
        source, task, schedule = "elsewhere", state["task"], state["schedule"]
    else:
        return None
    return {"entry": name, "task": task, "schedule": schedule, "source": source, "fault": fault}


def _told(app: Any, config: settings.Settings, entry: str, found: definitions.Definition) -> str:
    return schedules.told(schedule_json.made(entry, found.schedule, app), config.zone)


def _text(row: dict[str, Any], name: str) -> str:
    if name == "paused":
        until = row["paused_until"]
        if until is None:
            return ""
        return "until resumed" if until.year >= plans.FOREVER.year else f"until {_moment(until)}"
    value = row[name]
    if isinstance(value, dt.datetime):
        return _moment(value)
    return "" if value is None else str(value)


def _moment(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(sep=" ", timespec="seconds")


def _json(value: object) -> str:
    return value.isoformat() if isinstance(value, dt.datetime) else str(value)

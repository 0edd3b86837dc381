"""``pglock entries``: what is sent when, and from which place it comes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

import celery.beat
import click
from psycopg.rows import dict_row

from celery_pglock import definitions, errors, plans, schedules, settings, table_names
from celery_pglock.cli import (
    columns,
    documents,
    entry_edits,
    groups,
    moments,
    session,
    switches,
    terminal,
)

_STATES: Final = """
select entry, task, schedule, definition::text as definition, registered, due_at, next_due_at, paused_until,
 paused_reason, pg_catalog.clock_timestamp() as now
from {entries} where namespace = %(namespace)s::text
"""
_SHOWN: Final = (
    columns.Column("entry", least=16),
    columns.Column("task", least=16, rank=3),
    columns.Column("schedule", least=16),
    columns.Column("next_due_at"),
    columns.Column("due_at", rank=2),
    columns.Column("paused", rank=1),
    columns.Column("source", rank=4),
)


@click.group(name="entries", cls=groups.Group, invoke_without_command=True)
@switches.utc
@switches.as_json
@click.pass_context
def entries(ctx: click.Context, *, utc: bool, as_json: bool) -> None:
    """Show all schedule entries: when each is due next, and whether it is paused.

    Of the configuration, of the database, and of a scheduler that reads them elsewhere.
    """
    if ctx.invoked_subcommand is not None:
        return
    zone = moments.zone(ctx, utc=utc)
    rows = _read(ctx.obj.app, ctx.obj.settings)
    if as_json:
        documents.write(rows, zone)
        return
    if not rows:
        terminal.say("no schedule entries")
        return
    body = [[(_text(row, column.name, zone), "") for column in _SHOWN] for row in rows]
    terminal.write(columns.table(_SHOWN, body, terminal.width()))
    for row in rows:
        if row["fault"]:
            click.echo(row["fault"], err=True)


entries.add_command(entry_edits.add)
entries.add_command(entry_edits.remove)


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
            found.append({**row, **_pause(state), **_dues(state)})
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
            task, schedule = found.task, entry_edits.told(app, config, name, found)
        except errors.ConfigurationError as error:
            task, schedule, fault = state["task"], "left out", str(error)
    elif state["next_due_at"] is not None and state["registered"] is None:
        # Of a scheduler that reads its entries elsewhere, or of another release.
        source, task, schedule = "elsewhere", state["task"], state["schedule"]
    else:
        return None
    return {"entry": name, "task": task, "schedule": schedule, "source": source, "fault": fault}


def _pause(state: Mapping[str, Any]) -> dict[str, Any]:
    until = state.get("paused_until")
    if until is None or until <= state["now"]:
        return {"paused": False, "paused_until": None, "paused_reason": None}
    return {
        "paused": True,
        "paused_until": until if until.year < plans.FOREVER.year else None,
        "paused_reason": state["paused_reason"],
    }


def _dues(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"next_due_at": state.get("next_due_at"), "due_at": state.get("due_at")}


def _text(row: Mapping[str, Any], name: str, zone: dt.tzinfo) -> str:
    if name == "paused":
        if not row["paused"]:
            return ""
        until = row["paused_until"]
        return "until resumed" if until is None else f"until {moments.told(until, zone)}"
    value = row[name]
    if isinstance(value, dt.datetime):
        return moments.told(value, zone)
    return "" if value is None else str(value)

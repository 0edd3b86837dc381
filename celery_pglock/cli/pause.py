"""``pglock pause`` and ``pglock resume``."""

from __future__ import annotations

import datetime as dt

import click

from celery_pglock import entries
from celery_pglock.cli import completion, documents, moments, session, switches, terminal


@click.command(name="pause")
@click.argument("entry", shell_complete=completion.entries)
@click.option(
    "--for",
    "duration",
    callback=moments.duration,
    metavar="DURATION",
    help="Like 90s, 30m, 2h, 7d; else until resumed.",
)
@click.option("--reason", default="", help="Why, for whoever looks later.")
@switches.dry_run
@switches.utc
@switches.as_json
@click.pass_context
def pause(
    ctx: click.Context,
    *,
    entry: str,
    duration: dt.timedelta | None,
    reason: str,
    dry_run: bool,
    utc: bool,
    as_json: bool,
) -> None:
    """Send no occurrence of a schedule ENTRY for a while.

    What is due meanwhile is not made up for afterwards. A message that is in the broker already
    is not called back.
    """
    config = ctx.obj.settings
    zone = moments.zone(ctx, utc=utc)
    told = f"by {session.who()}: {reason}" if reason else f"by {session.who()}"
    with session.connected(config, "pause") as connection:
        known = entries.Entries(connection, config.schema, config.namespace)
        until = None if duration is None else known.now() + duration
        if dry_run:
            known.find(entry)
        else:
            known.pause(entry, until, told)
    if as_json:
        document = {
            "entry": entry,
            "paused_until": until,
            "paused_reason": told,
            "dry_run": dry_run,
        }
        documents.write(document, zone)
        return
    when = "until it is resumed" if until is None else f"until {moments.told(until, zone)}"
    terminal.say(f"{entry} {'would be' if dry_run else 'is'} paused {when}")


@click.command(name="resume")
@click.argument("entry", shell_complete=completion.paused_entries)
@switches.dry_run
@switches.as_json
@click.pass_context
def resume(ctx: click.Context, *, entry: str, dry_run: bool, as_json: bool) -> None:
    """Send a paused schedule ENTRY again, from its next occurrence on."""
    config = ctx.obj.settings
    with session.connected(config, "resume") as connection:
        known = entries.Entries(connection, config.schema, config.namespace)
        paused = known.is_paused(entry) if dry_run else known.resume(entry)
    if as_json:
        document = {"entry": entry, "was_paused": paused, "dry_run": dry_run}
        documents.write(document, config.zone)
    elif not paused:
        terminal.say(f"{entry} {'is' if dry_run else 'was'} not paused")
    else:
        terminal.say(f"{entry} {'would be' if dry_run else 'is'} resumed")

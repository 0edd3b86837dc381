"""``pglock pause`` and ``pglock resume``."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

import click

from celery_pglock import entries
from celery_pglock.cli import session

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST: Final = 36500 * 86400


def _duration(_: click.Context, __: click.Parameter, value: str | None) -> dt.timedelta | None:
    if value is None:
        return None
    match = _DURATION.fullmatch(value)
    if match is None:
        msg = f"must be a number and a unit, like 90s, 30m, 2h or 7d; got {value!r}"
        raise click.BadParameter(msg)
    length = float(match[1]) * _SECONDS[match[2]]
    if not 0 < length <= _LONGEST:
        msg = f"must be more than nothing and at most 36500d; got {value!r}"
        raise click.BadParameter(msg)
    return dt.timedelta(seconds=length)


@click.command(name="pause")
@click.argument("entry")
@click.option(
    "--for", "duration", callback=_duration, help="Like 90s, 30m, 2h, 7d; else until resumed."
)
@click.option("--reason", default="", help="Why, for whoever looks later.")
@click.pass_context
def pause(ctx: click.Context, *, entry: str, duration: dt.timedelta | None, reason: str) -> None:
    """Send no occurrence of a schedule ENTRY for a while.

    What is due meanwhile is not made up for afterwards. A message that is in the broker already
    is not called back.
    """
    config = ctx.obj.settings
    who = session.who()
    with session.connected(config, "pause") as connection:
        known = entries.Entries(connection, config.schema, config.namespace)
        until = None if duration is None else known.now() + duration
        known.pause(entry, until, f"by {who}: {reason}" if reason else f"by {who}")
    when = "until it is resumed" if until is None else f"until {_in(config.zone, until)}"
    click.echo(f"{entry} is paused {when}")


@click.command(name="resume")
@click.argument("entry")
@click.pass_context
def resume(ctx: click.Context, *, entry: str) -> None:
    """Send a paused schedule ENTRY again, from its next occurrence on."""
    config = ctx.obj.settings
    with session.connected(config, "resume") as connection:
        resumed = entries.Entries(connection, config.schema, config.namespace).resume(entry)
    click.echo(f"{entry} is resumed" if resumed else f"{entry} was not paused")


def _in(zone: dt.tzinfo, moment: dt.datetime) -> str:
    return moment.astimezone(zone).isoformat(sep=" ", timespec="seconds")

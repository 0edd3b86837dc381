"""``pglock runs``: what ran, what did not, and why."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from typing import Any, Final

import click
import sqlalchemy as sa

from celery_pglock import settings, tables
from celery_pglock.cli import session

_STATUSES: Final = ("sent", "running", "retrying", "done", "failed", "skipped", "missed")
_SHOWN: Final = ("job", "period", "status", "attempts", "started_at", "seconds", "node", "reason")


@click.command(name="runs")
@click.option("--job", help="Only this job, with or without its namespace.")
@click.option(
    "--status", type=click.Choice(_STATUSES), multiple=True, help="Only these; may be repeated."
)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, metavar="N")
@click.option("--json", "as_json", is_flag=True, help="One JSON list with all columns.")
@click.pass_context
def command(
    ctx: click.Context, *, job: str | None, status: Sequence[str], limit: int, as_json: bool
) -> None:
    """Show the latest runs, the newest first."""
    config = ctx.obj.settings
    rows = _read(config, job, status, limit)
    if as_json:
        click.echo(json.dumps(rows, default=_json))
        return
    if not rows:
        click.echo("no runs recorded")
        return
    lines = [_SHOWN, *(tuple(_text(row, name) for name in _SHOWN) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(map(str.ljust, line, widths)).rstrip())


def _read(
    config: settings.Settings, job: str | None, status: Sequence[str], limit: int
) -> list[dict[str, Any]]:
    namespace = config.namespace
    runs = tables.job_runs(sa.MetaData(), config.schema)
    newest = sa.func.coalesce(runs.c.started_at, runs.c.finished_at, runs.c.sent_at)
    query = sa.select(runs).order_by(newest.desc().nulls_last(), runs.c.period.desc()).limit(limit)
    # Two applications in one database are not shown each other's runs.
    query = query.where(runs.c.job.startswith(f"{namespace}:", autoescape=True))
    if job is not None:
        full = job if job.startswith(f"{namespace}:") else f"{namespace}:{job}"
        query = query.where(runs.c.job == full)
    if status:
        query = query.where(runs.c.status.in_(status))
    with session.connected(config, "runs") as connection:
        engine = sa.create_engine(
            "postgresql+psycopg://", creator=lambda: connection, poolclass=sa.StaticPool
        )
        try:
            with engine.connect() as executing:
                return [dict(row) for row in executing.execute(query).mappings()]
        except sa.exc.DBAPIError as error:
            raise (error.orig or error) from None


def _text(row: dict[str, Any], name: str) -> str:
    if name == "seconds":
        begin, end = row["started_at"], row["finished_at"]
        return f"{(end - begin).total_seconds():.3f}" if begin and end and row["attempts"] else ""
    value = row[name]
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat(sep=" ", timespec="seconds")
    return "" if value is None else str(value)


def _json(value: object) -> str:
    return value.isoformat() if isinstance(value, dt.datetime) else str(value)

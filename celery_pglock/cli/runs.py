"""``pglock runs``: what ran, what did not, and why."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

import click
import sqlalchemy as sa

from celery_pglock import settings, table_names, tables
from celery_pglock.cli import (
    columns,
    completion,
    documents,
    moments,
    names,
    session,
    switches,
    terminal,
)

_OPEN: Final = ("sent", "running", "retrying")
_SETTLED: Final = ("done", "failed", "skipped", "missed")
_SHOWN: Final = (
    columns.Column("job", least=16),
    columns.Column("period"),
    columns.Column("status"),
    columns.Column("attempts", rank=3),
    columns.Column("started_at", rank=1),
    columns.Column("seconds", rank=2),
    columns.Column("node", least=16, rank=4),
    columns.Column("reason", least=24, rank=5),
)


@click.command(name="runs")
@click.option(
    "--job",
    shell_complete=completion.jobs,
    help="Only this job, with or without its namespace.",
)
@click.option(
    "--status",
    type=click.Choice((*_OPEN, *_SETTLED)),
    multiple=True,
    help="Only these; may be repeated.",
)
@click.option(
    "--since",
    callback=moments.since,
    metavar="WHEN",
    help="Only what began, ended or was sent since: 2h, 7d, or 2026-11-30T14:00.",
)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, metavar="N")
@switches.utc
@switches.as_json
@click.pass_context
def command(
    ctx: click.Context,
    *,
    job: str | None,
    status: Sequence[str],
    since: dt.datetime | dt.timedelta | None,
    limit: int,
    utc: bool,
    as_json: bool,
) -> None:
    """Show the latest runs, the newest first."""
    config = ctx.obj.settings
    zone = moments.zone(ctx, utc=utc)
    full = _full(config, job)
    with session.connected(config, "runs") as connection:
        rows = _read(connection, _query(config, full, status, _bound(since, zone), limit))
        hint = _hint(connection, config, full) if full and not rows and not as_json else ""
    if as_json:
        documents.write(rows, zone)
    elif rows:
        body = [_row(row, zone) for row in rows]
        terminal.write(columns.table(_SHOWN, body, terminal.width()))
    else:
        terminal.say("no runs recorded")
    if hint:
        click.echo(hint, err=True)


def _full(config: settings.Settings, job: str | None) -> str | None:
    prefix = f"{config.namespace}:"
    return job if job is None or job.startswith(prefix) else f"{prefix}{job}"


def _bound(given: dt.datetime | dt.timedelta | None, zone: dt.tzinfo) -> Any:
    if isinstance(given, dt.timedelta):
        return sa.func.clock_timestamp() - given
    # Without an offset it is meant as times are shown.
    return given.replace(tzinfo=zone) if given is not None and given.tzinfo is None else given


def _query(
    config: settings.Settings, job: str | None, status: Sequence[str], since: Any, limit: int
) -> sa.Select[Any]:
    runs = tables.job_runs(sa.MetaData(), config.schema)
    # Two applications in one database are not shown each other's runs.
    wanted = [runs.c.job.startswith(f"{config.namespace}:", autoescape=True)]
    if job is not None:
        wanted.append(runs.c.job == job)
    if status:
        wanted.append(runs.c.status.in_(status))
    # What is settled is found by its end, the newest first, and what is not is little: each has
    # its index, however long the history is.
    settled = runs.c.status.in_(_SETTLED)
    ended = sa.select(runs).where(settled, runs.c.finished_at.is_not(None), *wanted)
    ended = ended.order_by(runs.c.finished_at.desc()).limit(limit)
    endless = sa.select(runs).where(settled, runs.c.finished_at.is_(None), *wanted).limit(limit)
    open_ones = sa.select(runs).where(runs.c.status.in_(_OPEN), *wanted)
    if since is not None:
        ended = ended.where(runs.c.finished_at >= since)
        endless = endless.where(sa.func.greatest(runs.c.sent_at, runs.c.started_at) >= since)
        open_ones = open_ones.where(sa.func.greatest(runs.c.sent_at, runs.c.started_at) >= since)
    found = sa.union_all(ended.subquery().select(), endless.subquery().select(), open_ones)
    latest = found.subquery("latest")
    newest = sa.func.greatest(latest.c.sent_at, latest.c.started_at, latest.c.finished_at)
    ordered = (newest.desc().nulls_last(), latest.c.period.desc())
    return sa.select(latest).order_by(*ordered).limit(limit)


def _read(connection: Any, query: sa.Select[Any]) -> list[dict[str, Any]]:
    engine = sa.create_engine(
        "postgresql+psycopg://", creator=lambda: connection, poolclass=sa.StaticPool
    )
    try:
        with engine.connect() as executing:
            return [dict(row) for row in executing.execute(query).mappings()]
    except sa.exc.DBAPIError as error:
        raise (error.orig or error) from None


def _hint(connection: Any, config: settings.Settings, job: str) -> str:
    """Return what to say of a job of which nothing was found; nothing, if there is such a job."""
    prefix = f"{config.namespace}:"
    parameters = {"prefix": prefix, "most": 1000}
    query = table_names.statement(completion.JOBS, config.schema)
    known = [name for (name,) in connection.execute(query, parameters).fetchall()]
    name = job.removeprefix(prefix)
    if name in known or not known:
        return ""
    return f"no run of job {name!r} is recorded; {names.nearest(name, known)}"


def _row(row: dict[str, Any], zone: dt.tzinfo) -> list[columns.Piece]:
    begin, end = row["started_at"], row["finished_at"]
    took = f"{(end - begin).total_seconds():.3f}" if begin and end and row["attempts"] else ""
    return [
        (row["job"], ""),
        (row["period"], ""),
        (row["status"], row["status"]),
        (str(row["attempts"]), ""),
        (moments.told(begin, zone) if begin else "", ""),
        (took, ""),
        (row["node"] or "", ""),
        (": ".join(filter(None, (row["reason"], row["error"]))), ""),
    ]

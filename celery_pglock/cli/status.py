"""``pglock status``: who leads, who stands by, who holds what, what is due next."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any, Final

import click
from psycopg.rows import dict_row

from celery_pglock import elections, keys, locks, settings, statements
from celery_pglock.cli import session

_LEADER: Final = """
select t.node, t.term, t.elected_at, t.last_tick_at, t.resigned_at, h.pid,
 pg_catalog.clock_timestamp() as now
from (select 1) as one left join {terms} t on t.namespace = %(namespace)s::text
left join (select l.pid from pg_catalog.pg_locks l where {held_by} limit 1) h on true
"""
_STANDBYS: Final = """
select pid, pg_catalog.split_part(application_name, '@', 2) as node
from pg_catalog.pg_stat_activity
where datname = pg_catalog.current_database()
 and pg_catalog.starts_with(application_name, %(application)s::text)
order by node, pid
"""
_HOLDERS: Final = f"""
select r.job, r.period, r.node, r.attempts, r.started_at, r.task_id, l.pid
from {{runs}} r join ({locks.HELD_KEYS}) l on l.key = r.name_key
where r.status = 'running' and pg_catalog.starts_with(r.job, %(prefix)s::text)
order by r.started_at
"""
_NEXT: Final = """
select entry, task, next_due_at, published_at is null and due_at is not null as unconfirmed
from {entries} where namespace = %(namespace)s::text and next_due_at is not null
 and (definition is not null or registered is null)
order by next_due_at limit 10
"""


@click.command(name="status")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def command(ctx: click.Context, *, as_json: bool) -> None:
    """Show the leader, the standbys, the locks that are held and what is due next.

    Exits 1 when no beat leads.
    """
    status = _read(ctx.obj.settings)
    if as_json:
        click.echo(json.dumps(status, default=_json))
    else:
        for line in _lines(status):
            click.echo(line)
    ctx.exit(0 if status["leader"] is not None else 1)


def _read(config: settings.Settings) -> dict[str, Any]:
    parameters = {
        "namespace": config.namespace,
        "prefix": f"{config.namespace}:",
        "key": keys.from_name(config.namespace, "beat", "leader"),
        "application": elections.application("standby", config.namespace),
    }
    with (
        session.connected(config, "status") as connection,
        connection.cursor(row_factory=dict_row) as cursor,
    ):

        def rows(template: str) -> list[dict[str, Any]]:
            cursor.execute(statements.statement(template, config.schema), parameters)
            return cursor.fetchall()

        term = rows(_LEADER)[0]
        return {
            "namespace": config.namespace,
            "database": f"{connection.info.host}:{connection.info.port}/{connection.info.dbname}",
            "now": term["now"],
            "leader": None
            if term["pid"] is None
            else {
                name: term[name] for name in ("node", "term", "pid", "elected_at", "last_tick_at")
            },
            "standbys": rows(_STANDBYS),
            "holders": rows(_HOLDERS),
            "next": rows(_NEXT),
        }


def _lines(status: dict[str, Any]) -> list[str]:
    now = status["now"]
    leader = status["leader"]
    lines = [f"namespace  {status['namespace']} in {status['database']}"]
    if leader is None:
        lines.append("leader     none: start celery beat -S pglock")
    else:
        lines.append(
            f"leader     {leader['node']}, term {leader['term']}, backend {leader['pid']}, since "
            f"{_ago(now, leader['elected_at'])}, last tick {_ago(now, leader['last_tick_at'])}"
        )
    nodes = ", ".join(standby["node"] for standby in status["standbys"])
    lines.append(f"standbys   {nodes or 'none'}")
    lines.append("holders" if status["holders"] else "holders    none")
    lines += [
        f"  {held['job']} {held['period']} on {held['node']}, attempt {held['attempts']}, since "
        f"{_ago(now, held['started_at'])}, backend {held['pid']}"
        for held in status["holders"]
    ]
    lines.append("next due" if status["next"] else "next due   nothing")
    lines += [
        f"  {entry['entry']} at {entry['next_due_at'].astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
        f"{' (its last message is not confirmed)' if entry['unconfirmed'] else ''}"
        for entry in status["next"]
    ]
    return lines


def _ago(now: dt.datetime, moment: dt.datetime | None) -> str:
    return "never" if moment is None else f"{max(0.0, (now - moment).total_seconds()):.1f} s ago"


def _json(value: object) -> str:
    return value.isoformat() if isinstance(value, dt.datetime) else str(value)

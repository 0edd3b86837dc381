"""``pglock status``: who leads, who stands by, who holds what, what is due next, what was skipped."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator
from typing import Any, Final

import click
from psycopg.rows import dict_row

from celery_pglock import connections, elections, keys, locks, settings, statements
from celery_pglock.cli import columns, documents, moments, session, switches, terminal

_WIDTH: Final = 11
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
select entry, task, next_due_at, published_at is null and due_at is not null as unconfirmed,
 coalesce(paused_until > pg_catalog.clock_timestamp(), false) as paused
from {entries} where namespace = %(namespace)s::text and next_due_at is not null
 and (definition is not null or registered is null)
order by next_due_at limit 10
"""
# Of the newest that are settled, a bounded number: where nothing is ever skipped, the search for
# the latest skip would read the whole history.
_SKIPS: Final = """
select job, period, task, reason, finished_at from (
 select * from {runs} where status in ('done', 'failed', 'skipped', 'missed')
  and finished_at is not null order by finished_at desc limit 10000) as newest
where status = 'skipped' and pg_catalog.starts_with(job, %(prefix)s::text)
order by finished_at desc limit 5
"""


@click.command(name="status")
@switches.utc
@switches.as_json
@click.pass_context
def command(ctx: click.Context, *, utc: bool, as_json: bool) -> None:
    """Show who leads and stands by, what is held, what is due next and what was skipped.

    Exits 1 when no beat leads.
    """
    status = _read(ctx.obj.settings)
    zone = moments.zone(ctx, utc=utc)
    if as_json:
        documents.write(status, zone)
    else:
        terminal.write(_Described(status, zone, terminal.width()).lines())
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
            "database": connections.describe_open(connection),
            "now": term["now"],
            "leader": None
            if term["pid"] is None
            else {
                name: term[name] for name in ("node", "term", "pid", "elected_at", "last_tick_at")
            },
            "standbys": rows(_STANDBYS),
            "holders": rows(_HOLDERS),
            "next": rows(_NEXT),
            "skips": rows(_SKIPS),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class _Described:
    """The status, in lines of a width and with times in a zone."""

    status: dict[str, Any]
    zone: dt.tzinfo
    width: int | None

    def lines(self) -> Iterator[columns.Line]:
        status = self.status
        yield from self._beside("namespace", f"{status['namespace']} in {status['database']}")
        if status["leader"] is None:
            told = "none: start celery beat -S pglock"
            yield from self._beside("leader", told, kind="error")
        else:
            yield from self._beside("leader", *self._leader(status["leader"]))
        nodes = ", ".join(standby["node"] for standby in status["standbys"])
        yield from self._beside("standbys", nodes or "none")
        yield from self._beside("holders", *map(self._holder, status["holders"]))
        yield from self._beside("next due", *map(self._due, status["next"]))
        yield from self._beside("skipped", *map(self._skip, status["skips"]))

    def _beside(self, label: str, *texts: str, kind: str = "label") -> Iterator[columns.Line]:
        told = texts or ("none",)
        return columns.hanging(label, _WIDTH, *told, width=self.width, kind=kind)

    def _leader(self, leader: dict[str, Any]) -> Iterator[str]:
        now = self.status["now"]
        if leader["term"] is None:
            yield f"backend {leader['pid']}, whose term is not recorded"
            return
        yield f"{leader['node']}, term {leader['term']}, backend {leader['pid']}"
        tick = moments.ago(now, leader["last_tick_at"])
        yield f"since {self._moment(leader['elected_at'])}, last tick {tick}"

    def _holder(self, held: dict[str, Any]) -> str:
        since = moments.ago(self.status["now"], held["started_at"])
        return (
            f"{held['job']} {held['period']} on {held['node']}, attempt {held['attempts']}, since "
            f"{since}, backend {held['pid']}"
        )

    def _due(self, entry: dict[str, Any]) -> str:
        paused = ", paused" if entry["paused"] else ""
        unconfirmed = ", its last message is not confirmed" if entry["unconfirmed"] else ""
        return f"{self._moment(entry['next_due_at'])} {entry['entry']}{paused}{unconfirmed}"

    def _skip(self, skip: dict[str, Any]) -> str:
        reason = skip["reason"] or "no reason given"
        return f"{self._moment(skip['finished_at'])} {skip['job']} {skip['period']}: {reason}"

    def _moment(self, moment: dt.datetime | None) -> str:
        return "never" if moment is None else moments.told(moment, self.zone)

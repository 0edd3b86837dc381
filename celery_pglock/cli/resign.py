"""``pglock resign``: have the leading beat hand over before it is stopped."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Final

import click
import psycopg

from celery_pglock import elections, entries, settings, table_names
from celery_pglock.cli import documents, session, switches, terminal

_POLL: Final = 0.1
_LEADER: Final = """
select t.term, t.node, t.resigned_at is null and exists (
  select from pg_catalog.pg_stat_activity a where a.pid = t.backend_pid
   and a.datname = pg_catalog.current_database()
   and pg_catalog.starts_with(a.application_name, %(application)s::text)) as leads
from {terms} t where t.namespace = %(namespace)s::text
"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Leader:
    node: str
    term: int


@click.command(name="resign")
@switches.dry_run
@switches.as_json
@click.pass_context
def command(ctx: click.Context, *, dry_run: bool, as_json: bool) -> None:
    """Have the beat that leads give its leadership to a standby.

    It goes on as a standby itself. Where no other beat stands by, it leads again a second
    later. Exits 1 when no beat leads, or the leader does not answer.
    """
    config = ctx.obj.settings
    with session.connected(config, "resign") as connection:
        before = _leader(connection, config)
        if before is None:
            msg = f"no beat leads {config.namespace}; start one: celery beat -S pglock"
            raise click.ClickException(msg)
        after = None if dry_run else _handed_over(connection, config, before)
    if as_json:
        document = {
            "namespace": config.namespace,
            "before": dataclasses.asdict(before),
            "after": None if after is None else dataclasses.asdict(after),
            "dry_run": dry_run,
        }
        documents.write(document, config.zone)
    elif after is None:
        told = f"{before.node}, which leads {config.namespace} in term {before.term}"
        terminal.say(f"{told}, would be asked to resign")
    else:
        again = " again, because no other stood by" if after.node == before.node else ""
        terminal.say(f"{before.node} resigned; {after.node} leads{again}, term {after.term}")


def _handed_over(
    connection: psycopg.Connection[Any], config: settings.Settings, before: _Leader
) -> _Leader:
    entries.Entries(connection, config.schema, config.namespace).tell("resign")
    # It listens once a second, stands back for some polls, and may be sending.
    patience = 10 + 3 * config.standby_poll + config.leader_lease / 4
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        after = _leader(connection, config)
        if after is not None and after.term > before.term:
            return after
        time.sleep(_POLL)
    msg = (
        f"{before.node}, which leads {config.namespace}, did not hand over within {patience:.0f} "
        f"s; look at its log, or stop it: then another beat leads"
    )
    raise click.ClickException(msg)


def _leader(connection: psycopg.Connection[Any], config: settings.Settings) -> _Leader | None:
    parameters = {
        "namespace": config.namespace,
        "application": elections.application("leader", config.namespace),
    }
    row = connection.execute(table_names.statement(_LEADER, config.schema), parameters).fetchone()
    return _Leader(node=row[1], term=row[0]) if row is not None and row[2] else None

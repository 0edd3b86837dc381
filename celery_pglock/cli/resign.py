"""``pglock resign``: have the leading beat hand over before it is stopped."""

from __future__ import annotations

import time
from typing import Any, Final

import click
import psycopg

from celery_pglock import elections, entries, table_names
from celery_pglock.cli import session

_POLL: Final = 0.1
_LEADER: Final = """
select t.term, t.node, t.resigned_at is null and exists (
  select from pg_catalog.pg_stat_activity a where a.pid = t.backend_pid
   and a.datname = pg_catalog.current_database()
   and pg_catalog.starts_with(a.application_name, %(application)s::text)) as leads
from {terms} t where t.namespace = %(namespace)s::text
"""


@click.command(name="resign")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Have the beat that leads give its leadership to a standby.

    It goes on as a standby itself. Where no other beat stands by, it leads again a second
    later. Exits 1 when no beat leads, or the leader does not answer.
    """
    config = ctx.obj.settings
    with session.connected(config, "resign") as connection:
        before = _leader(connection, config.schema, config.namespace)
        if before is None:
            msg = f"no beat leads {config.namespace}; start one: celery beat -S pglock"
            raise click.ClickException(msg)
        entries.Entries(connection, config.schema, config.namespace).tell("resign")
        # It listens once a second, stands back for some polls, and may be sending.
        patience = 10 + 3 * config.standby_poll + config.leader_lease / 4
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            now = _leader(connection, config.schema, config.namespace)
            if now is not None and now[0] > before[0]:
                again = " again, because no other stood by" if now[1] == before[1] else ""
                click.echo(f"{before[1]} resigned; {now[1]} leads{again}, term {now[0]}")
                return
            time.sleep(_POLL)
    msg = (
        f"{before[1]}, which leads {config.namespace}, did not hand over within {patience:.0f} s; "
        f"look at its log, or stop it: then another beat leads"
    )
    raise click.ClickException(msg)


def _leader(
    connection: psycopg.Connection[Any], schema: str, namespace: str
) -> tuple[int, str] | None:
    query = table_names.statement(_LEADER, schema)
    parameters = {
        "namespace": namespace,
        "application": elections.application("leader", namespace),
    }
    row = connection.execute(query, parameters).fetchone()
    return (row[0], row[1]) if row is not None and row[2] else None

"""What can be wrong with the database and the way to it: one small check for each.

They look and change nothing. No lock is tried, not even for a moment, because a real run that
asks in that moment would be refused; whether a pooler is between is asked as a lock session asks
it, which takes none.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg

from celery_pglock import (
    clocks,
    connections,
    errors,
    findings,
    guards,
    keys,
    locks,
    patience,
    schema,
    sessions,
    stacks,
    table_names,
)

#: The oldest PostgreSQL that is supported, as the server numbers itself.
OLDEST: Final = 140000
APPLICATION: Final = "pglock doctor"

# By the two indexes that are there: all that are open, and the newest of those that are settled.
_RECENT: Final = """
from {runs} r where pg_catalog.starts_with(r.job, %(prefix)s::text) and (
 r.status in ('sent', 'running', 'retrying')
 or r.status in ('done', 'failed', 'skipped', 'missed')
 and r.finished_at > pg_catalog.clock_timestamp() - %(within)s::interval
)
"""
_TASKS: Final = f"""
select r.task, max(coalesce(r.started_at, r.sent_at, r.finished_at)) {_RECENT}
 and r.task is not null group by r.task order by r.task
"""
# A message of our beat has an entry; one without an occurrence is its own period.
_UNSCHEDULED: Final = f"""
select r.task, r.started_at {_RECENT}
 and r.started_at is not null and r.entry is null and pg_catalog.starts_with(r.period, 'id:')
order by r.started_at desc limit 5000
"""
_LEADER: Final = f"""
select t.node, t.fingerprint from {{terms}} t
where t.namespace = %(namespace)s::text
 and exists (select from ({locks.HELD_KEYS}) h where h.key = %(key)s::bigint)
"""


def connected(target: connections.Target) -> psycopg.Connection[Any]:
    """Open a connection for the checks.

    Raises:
        ConfigurationError: the target is no connection string, or its function raised something.
        DatabaseUnavailable: the server cannot be reached, or refuses the login.
    """
    # Until a pooler is ruled out nothing may be prepared by name.
    return connections.connect(
        connections.resolved(target),
        application=APPLICATION,
        factory=patience.Patient,
        prepare_threshold=None,
        tcp_user_timeout=5000,
    )


def version(connection: psycopg.Connection[Any]) -> Iterator[findings.Finding]:
    """Find a server that is too old."""
    found = connection.info.server_version
    if found < OLDEST:
        yield findings.Finding(
            severity="error",
            code="server_too_old",
            reason=f"the server is PostgreSQL {found // 10000}, and celery-pglock needs "
            f"PostgreSQL {OLDEST // 10000} or newer",
            remedy="upgrade the server, or point pglock_database_url at a newer one",
        )


def clock(
    connection: psycopg.Connection[Any],
    wall_clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
) -> Iterator[findings.Finding]:
    """Find that the clocks of this host and of the server are apart."""
    reading = clocks.ServerClock(wall_clock=wall_clock)
    ahead: list[dt.timedelta] = []
    reading.host_differs = ahead.append
    started = time.monotonic()
    reading.read(_value(connection, "select pg_catalog.clock_timestamp()"), started)
    for difference in ahead:
        seconds = difference.total_seconds()
        way = "behind" if seconds < 0 else "ahead of"
        yield findings.Finding(
            severity="warning",
            code="clock_differs",
            reason=f"the clock of this host is {abs(seconds):.1f} s {way} the one of PostgreSQL, "
            f"and Celery uses this host's for expires and countdowns",
            remedy="have both hosts synchronize their clocks",
        )


def session(
    plan: sessions.Plan, *, refused: findings.Severity = "error"
) -> Iterator[findings.Finding]:
    """Find why a lock session cannot be opened, or which limits it could not lift.

    Args:
        plan: how it is opened.
        refused: how bad it is that a pooler in transaction mode is between.

    Raises:
        DatabaseUnavailable: the server has gone meanwhile.
    """
    limits: list[guards.Unlifted] = []
    try:
        stacks.open_session(plan, lambda _, unlifted: limits.extend(unlifted)).close()
    except errors.ServerInRecovery as error:
        yield findings.of_error("server_in_recovery", error)
    except errors.TransactionPooler as error:
        yield findings.of_error("pooler", error, refused)
    except errors.ReadOnlyByDefault as error:
        yield findings.of_error("read_only", error)
    except errors.ConfigurationError as error:
        # A pooler in statement mode, which allows no transactions.
        yield findings.of_error("pooler", error)
    for limit in limits:
        yield _limit(plan.level, limit)


def _limit(level: sessions.Level, limit: guards.Unlifted) -> findings.Finding:
    if limit.setting == "transaction_timeout":
        reason = (
            f"behind the pooler transaction_timeout stays {limit.found}, as the role or the "
            f"database has it, and ends a run at transaction level in the middle of its work"
        )
        remedy = (
            "run: ALTER ROLE ... SET transaction_timeout = 0, for the role as which the pooler "
            "logs in"
        )
    else:
        reason = (
            f"{limit.setting} is {limit.found} and could not be set to {limit.wanted} for a lock "
            f"session at {level} level, whose lock may so be lost early or outlive its holder"
        )
        remedy = "have the limits of the role, the database or the host allow it"
    return findings.Finding(
        severity="warning", code="limit_not_lifted", reason=reason, remedy=remedy
    )


def rights(connection: psycopg.Connection[Any], name: str) -> Iterator[findings.Finding]:
    """Find rights that this role has not.

    Raises:
        SchemaError: there is no such schema, in which it could have some.
    """
    with _translated(connection, name):
        there = "select count(*) from pg_catalog.pg_namespace where nspname = %s"
        if not _value(connection, there, name):
            raise errors.SchemaError(name, "is not there", schema.MIGRATE_COMMAND)
        missing = schema.rights_missing(connection, name)
        role = str(_value(connection, "select pg_catalog.quote_ident(current_user)"))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""  # noqa: PLR2004 - enough
        yield findings.Finding(
            severity="error",
            code="rights_missing",
            reason=f'role {role} may not use schema "{name}" as a worker or a beat does: it lacks '
            f"{', '.join(missing[:3])}{more}",
            remedy=f"have the owner run: {' '.join(schema.grants(name, role).split())}",
        )


def tables_there(connection: psycopg.Connection[Any], name: str) -> Iterator[findings.Finding]:
    """Find that the tables are missing, or older than this release needs."""
    with _translated(connection, name):
        error = schema.outdated(connection, name)
    if error is not None:
        old = "is older" in error.fault
        yield findings.of_error("schema_old" if old else "schema_missing", error)


def unique(connection: psycopg.Connection[Any], name: str) -> Iterator[findings.Finding]:
    """Find that nothing keeps a period from having two rows."""
    with _translated(connection, name):
        error = schema.without_unique(connection, name)
    if error is not None:
        yield findings.of_error("unique_missing", error)


def recent_tasks(
    connection: psycopg.Connection[Any], name: str, namespace: str, within: dt.timedelta
) -> list[tuple[str, dt.datetime | None]]:
    """Return the tasks that have rows in a namespace, open or settled within a while, and when."""
    return _recent(_TASKS, connection, name, namespace, within)


def unscheduled_starts(
    connection: psycopg.Connection[Any], name: str, namespace: str, within: dt.timedelta
) -> dict[str, list[dt.datetime]]:
    """Return when runs began, by their task, whose message no beat of ours has sent; in order."""
    starts: dict[str, list[dt.datetime]] = {}
    for task, started_at in reversed(_recent(_UNSCHEDULED, connection, name, namespace, within)):
        starts.setdefault(task, []).append(started_at)
    return starts


def leader(
    connection: psycopg.Connection[Any], name: str, namespace: str
) -> tuple[str, str | None] | None:
    """Return node and fingerprint of the beat that leads a namespace now, or None."""
    parameters = {
        "namespace": namespace,
        "key": keys.from_name(namespace, "beat", "leader"),
    }
    with _translated(connection, name):
        row = connection.execute(table_names.statement(_LEADER, name), parameters).fetchone()
    return None if row is None else (row[0], row[1])


def _recent(
    template: str,
    connection: psycopg.Connection[Any],
    name: str,
    namespace: str,
    within: dt.timedelta,
) -> list[Any]:
    parameters = {"prefix": f"{namespace}:", "within": within}
    with _translated(connection, name):
        return connection.execute(table_names.statement(template, name), parameters).fetchall()


def _translated(
    connection: psycopg.Connection[Any], name: str
) -> contextlib.AbstractContextManager[None]:
    return schema.translated(connections.describe_open(connection), name)


def _value(connection: psycopg.Connection[Any], query: Any, *parameters: object) -> Any:
    try:
        row = connection.execute(query, parameters or None).fetchone()
    except psycopg.Error as error:
        raise errors.DatabaseUnavailable(
            connections.describe_open(connection), " ".join(str(error).split())
        ) from None
    assert row is not None  # noqa: S101 - for the type checker
    return row[0]

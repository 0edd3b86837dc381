"""What a candidate says to ``beat_terms`` and to the other beats of its namespace."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any, Final

from celery_pglock import keys

# What fell due while nobody led stays what was missed for all leaders that follow: the first may
# die before it has been through it.
ELECT: Final = """
with l as materialized (
 select pg_catalog.pg_try_advisory_lock(%(key)s::bigint) as got
), p as materialized (
 select term, node, last_tick_at, resigned_at, fingerprint from {terms}
 where namespace = %(namespace)s::text
), t as (
 insert into {terms} as t (namespace, term, node, backend_pid, elected_at, last_tick_at,
  fingerprint)
 select %(namespace)s::text, 1, %(node)s::text, pg_catalog.pg_backend_pid(),
  pg_catalog.clock_timestamp(), pg_catalog.clock_timestamp(), %(fingerprint)s::text
 from l where got
 on conflict (namespace) do update set term = t.term + 1, node = excluded.node,
  backend_pid = excluded.backend_pid, elected_at = excluded.elected_at,
  last_tick_at = excluded.last_tick_at, resigned_at = null, fingerprint = excluded.fingerprint,
  missed_until = case when excluded.elected_at - t.last_tick_at
    > %(take_over)s::double precision * interval '1 s'
   then excluded.elected_at
   when t.missed_until <= excluded.elected_at then t.missed_until end
 returning term, elected_at, missed_until
)
select l.got, t.term, t.elected_at, t.missed_until, pg_catalog.clock_timestamp() as now,
 p.term as previous_term,
 p.node as previous_node, p.last_tick_at as previous_tick_at, p.resigned_at as previous_resigned_at,
 p.fingerprint as previous_fingerprint,
 case when l.got then pg_catalog.set_config('application_name', %(application)s::text, false) end
from l left join t on true left join p on true
"""

CONFIRM: Final = """
update {terms} set last_tick_at = pg_catalog.clock_timestamp()
where namespace = %(namespace)s::text and term = %(term)s::bigint
returning pg_catalog.clock_timestamp() as now
"""

# Committed before the lock is given back: a standby that wins it in the same instant reads the
# row from a snapshot that is older than its lock, and would call the leader vanished.
RESIGN: Final = """
update {terms} set resigned_at = pg_catalog.clock_timestamp(),
 last_tick_at = pg_catalog.clock_timestamp()
where namespace = %(namespace)s::text and term = %(term)s::bigint
"""
STANDBYS: Final = b"""
select pg_catalog.count(*) as standbys, pg_catalog.clock_timestamp() as now
from pg_catalog.pg_stat_activity where datname = pg_catalog.current_database()
 and pg_catalog.starts_with(application_name, %(application)s::text)
"""
# The unlock stands before the NOTIFY: the other way round the standbys wake too early, find
# the lock taken and sleep for another poll.
GIVE_UP: Final = b"""
with u as materialized (select pg_catalog.pg_advisory_unlock(%(key)s::bigint) as freed)
select u.freed, pg_catalog.pg_notify(%(channel)s::text, '') from u
"""

# With the name of the entry behind it.
EDITED: Final = "entry:"


@dataclasses.dataclass(frozen=True, slots=True)
class Predecessor:
    """The leader before this one.

    Attributes:
        node: where it ran.
        term: the number of its leadership.
        last_tick_at: its last sign of life.
        resigned_at: when it resigned, or None when it vanished.
    """

    node: str
    term: int
    last_tick_at: dt.datetime
    resigned_at: dt.datetime | None


@dataclasses.dataclass(frozen=True, slots=True)
class Elected:
    """An election that was won.

    Attributes:
        term: the number of this leadership.
        at: when, by the server's clock.
        before: the leader before, or None for the first one ever.
        missed_until: what fell due up to then did so while nobody led; None: nothing did.
    """

    term: int
    at: dt.datetime
    before: Predecessor | None
    missed_until: dt.datetime | None = None


def won(row: Any) -> Elected:
    """Return what the row of ``ELECT`` says of an election that was won."""
    before = None
    if row.previous_term is not None:
        before = Predecessor(
            row.previous_node, row.previous_term, row.previous_tick_at, row.previous_resigned_at
        )
    return Elected(row.term, row.elected_at, before, row.missed_until)


def channel(namespace: str) -> str:
    """Return the channel on which the beats of a namespace are told of things.

    The payload says of what: empty, a leader has resigned; ``entries``, entries were paused or
    resumed; ``entry:`` and a name, its definition in the database was edited; ``resign``, the
    leader is asked to.
    """
    return f"pglock_beat_{keys.from_name(namespace, 'beat', 'leader') & (2**64 - 1):016x}"


def application(role: str, namespace: str) -> str:
    """Return what the ``application_name`` of a beat begins with, up to its node.

    PostgreSQL keeps 63 bytes of it, so of a long namespace only the beginning is in there.
    """
    return f"pglock:{role}:{namespace[:30]}@"

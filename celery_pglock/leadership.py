"""Which of several beats may send: a state machine over one lock session.

::

                 try-lock granted (term + 1)
      STANDBY ───────────────────────────────▶ LEADER
         ▲                                       │
         │   session lost, lease run out,        │ resign()
         └───────────────────────────────────────┤
             unlocked                            ▼
                                              STANDBY (for another to win)

*Authority.* The leader is who holds the advisory lock of kind ``beat`` and the namespace's
name. Its term, in ``beat_terms``, grows by one with each election; it is a label for messages
and rows, and the lock is what decides.

*Lease.* The leader's session sets ``idle_session_timeout`` to the lease: a leader that is
frozen or cut off loses its session, and with it the lock, when the lease has passed since its
last statement (PostgreSQL manual, "Client Connection Defaults"). Only the statements of the
main loop feed the lease. The leader in turn trusts itself for half the lease, counted from
the *start* of its last statement that succeeded: long before the server can give the lock to
another, it has stopped.

*Standby.* It tries the lock once per poll and never waits in the server. In between it
listens: a leader that resigns notifies the others, so that a clean stop does not cost a poll.

*In doubt, lost.* Whatever goes wrong with a statement closes the session.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import select
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import psycopg
from psycopg import sql

from celery_pglock import connections, errors, keys, schema, sessions, tables

_SHORTEST_BACK_OFF: Final = 0.1
_LONGEST_BACK_OFF: Final = 1.0

_ELECT: Final = """
with l as materialized (
 select pg_catalog.pg_try_advisory_lock(%(key)s::bigint) as got
), p as materialized (
 select term, node, last_tick_at, resigned_at from {terms} where namespace = %(namespace)s::text
), t as (
 insert into {terms} as t (namespace, term, node, backend_pid, elected_at, last_tick_at)
 select %(namespace)s::text, 1, %(node)s::text, pg_catalog.pg_backend_pid(),
  pg_catalog.clock_timestamp(), pg_catalog.clock_timestamp()
 from l where got
 on conflict (namespace) do update set term = t.term + 1, node = excluded.node,
  backend_pid = excluded.backend_pid, elected_at = excluded.elected_at,
  last_tick_at = excluded.last_tick_at, resigned_at = null
 returning term, elected_at
)
select l.got, t.term, t.elected_at, pg_catalog.clock_timestamp() as now, p.term as previous_term,
 p.node as previous_node, p.last_tick_at as previous_tick_at, p.resigned_at as previous_resigned_at,
 case when l.got then pg_catalog.set_config('application_name', %(application)s::text, false) end
from l left join t on true left join p on true
"""

_CONFIRM: Final = """
update {terms} set last_tick_at = pg_catalog.clock_timestamp()
where namespace = %(namespace)s::text and term = %(term)s::bigint
returning pg_catalog.clock_timestamp() as now
"""

# Committed before the lock is given back: a standby that wins it in the same instant reads the
# row from a snapshot that is older than its lock, and would call the leader vanished.
_RESIGN: Final = """
update {terms} set resigned_at = pg_catalog.clock_timestamp(),
 last_tick_at = pg_catalog.clock_timestamp()
where namespace = %(namespace)s::text and term = %(term)s::bigint
"""
# The unlock stands before the NOTIFY: the other way round the standbys wake too early, find
# the lock taken and sleep for another poll.
_GIVE_UP: Final = b"""
with u as materialized (select pg_catalog.pg_advisory_unlock(%(key)s::bigint) as freed)
select u.freed, pg_catalog.pg_notify(%(channel)s::text, '') from u
"""


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
    """

    term: int
    at: dt.datetime
    before: Predecessor | None


class Leadership:
    """One candidate for the leadership of a namespace.

    Used by one thread. ``stand`` and ``execute`` block for as long as their statement does,
    which the session bounds; ``held`` never blocks.
    """

    def __init__(
        self,
        target: connections.Target,
        *,
        namespace: str,
        node: str,
        schema_name: str = "pglock",
        poll: float = 0.5,
        lease: float = 10.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.namespace = namespace
        self.node = node
        self.poll = poll
        self.lease = lease
        self.term: int | None = None
        self._schema = schema_name
        self._key = keys.from_name(namespace, "beat", "leader")
        self._channel = f"pglock_beat_{self._key & (2**64 - 1):016x}"
        self._monotonic = monotonic
        self._plan = sessions.Plan(
            target=target,
            level="session",
            application=self._application("standby"),
            lost_after=lease / 2,
            lease=lease,
        )
        self._session: sessions.Session | None = None
        self._next_try = 0.0
        self._back_off = 0.0
        self._elected_at = float("-inf")
        self._told = False
        # The server's clock at some moment of ours, carried on by the monotonic clock.
        self._server_time: tuple[dt.datetime, float] | None = None
        self._proved_at = self._confirmed_at = float("-inf")

    @property
    def leading(self) -> bool:
        """Whether this candidate was elected and has not noticed an end of it."""
        return self.term is not None

    @property
    def held(self) -> bool:
        """Whether it may send now: elected, and its last statement not older than half a lease.

        No I/O. After that time it says no, whatever the socket says.
        """
        return (
            self.term is not None
            and self._session is not None
            and not self._session.connection.closed
            and self._monotonic() < self._proved_at + self.lease / 2
        )

    @property
    def idle(self) -> bool:
        """Whether a statement may be sent: a session is there and in no other one."""
        session = self._session
        return (
            session is not None
            and not session.connection.closed
            and session.connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        )

    @property
    def feed_in(self) -> float:
        """Seconds until the next sign of life: a quarter of the lease after the last one.

        Other statements feed the lease too, but only ``confirm`` shows in ``beat_terms`` until
        when there was a leader, by which the next one tells a take-over from a downtime.
        """
        return max(0.0, self._confirmed_at + self.lease / 4 - self._monotonic())

    def now(self) -> dt.datetime:
        """Return the server's clock, carried on from the last statement that told it."""
        if self._server_time is None:
            return dt.datetime.now(dt.UTC)
        moment, at = self._server_time
        return moment + dt.timedelta(seconds=self._monotonic() - at)

    def stand(self) -> Elected | None:
        """Wait until the next poll or a notification, try the lock once, return the result.

        Never takes longer than a poll and one statement.

        Raises:
            DatabaseUnavailable, ServerInRecovery, TransactionPooler, ConfigurationError: the
                server cannot be used; the next call tries again, with a back-off of at most
                one second.
            SchemaError: the tables are missing.
        """
        self._wait()
        started = self._monotonic()
        self._told = False
        try:
            session = self._session or self._open()
            with schema.translated(session.target, self._schema):
                row = session.execute(
                    _statement(_ELECT, self._schema),
                    {
                        "key": self._key,
                        "namespace": self.namespace,
                        "node": self.node,
                        "application": self._application("leader"),
                    },
                )
        except errors.PGLockError:
            self._drop()
            self._try_later()
            raise
        if not row.got:
            self._back_off = 0.0
            # A notification that came together with the answer is not on the socket any more.
            self._next_try = self._monotonic() + (0.0 if self._told else self.poll)
            return None
        session.held.add(self._key)
        self.term = row.term
        self._proved(started, row.now)
        self._elected_at = self._confirmed_at = started
        before = None
        if row.previous_term is not None:
            before = Predecessor(
                row.previous_node,
                row.previous_term,
                row.previous_tick_at,
                row.previous_resigned_at,
            )
        return Elected(row.term, row.elected_at, before)

    def execute(self, query: bytes, parameters: Mapping[str, Any] | None = None) -> list[Any]:
        """Run a leader's statement over the lock's own session, which also feeds the lease.

        A session that is gone cannot run it: so nothing is written by a leader that is none.

        Raises:
            LeadershipLost: the session is gone, or this candidate does not lead.
        """
        if self._session is None or self.term is None:
            raise errors.LeadershipLost(self.namespace, self.term or 0, "it was not held")
        started = self._monotonic()
        try:
            rows = self._session.rows(query, parameters)
        except psycopg.Error as error:
            raise self.lose(" ".join(str(error).split())) from None
        except BaseException:
            self._drop()
            raise
        # The last row: the first may be much older than the answer.
        self._proved(started, getattr(rows[-1], "now", None) if rows else None)
        return rows

    def confirm(self) -> None:
        """Feed the lease and show a sign of life in ``beat_terms``.

        Raises:
            LeadershipLost: the session is gone, or another term has begun.
        """
        parameters = {"namespace": self.namespace, "term": self.term}
        started = self._monotonic()
        if not self.execute(_statement(_CONFIRM, self._schema), parameters):
            raise self.lose("another term has begun")
        self._confirmed_at = started

    def lose(self, reason: str) -> errors.LeadershipLost:
        """Close the session, which frees the lock, and return the error to raise.

        A term that ended as soon as it began will do so again: then the next try has to wait,
        at most one second. Any other is followed by a try at once.
        """
        error = errors.LeadershipLost(self.namespace, self.term or 0, reason)
        brief = self._monotonic() < self._elected_at + _LONGEST_BACK_OFF
        self._drop()
        if brief:
            self._try_later()
        else:
            self._back_off = 0.0
        return error

    def resign(self) -> bool:
        """Give the lock back, tell the standbys, close the session; return whether it was so.

        When a statement was interrupted the session is only closed: the server then frees the
        lock by itself, and a standby finds it at its next poll.
        """
        freed = False
        if self.term is not None and self.idle and self._session is not None:
            try:
                self._session.execute(
                    _statement(_RESIGN, self._schema),
                    {"namespace": self.namespace, "term": self.term},
                )
                row = self._session.execute(_GIVE_UP, {"key": self._key, "channel": self._channel})
                freed = bool(row.freed)
            except psycopg.Error:
                freed = False
        self._drop()
        return freed

    def _wait(self) -> None:
        left = self._next_try - self._monotonic()
        if left <= 0:
            return
        if self._session is None or self._session.connection.closed:
            time.sleep(left)
            return
        # Not psycopg's own wait: a signal's handler has to run at once.
        poller = select.poll()
        poller.register(self._session.connection.fileno(), select.POLLIN)
        poller.poll(left * 1000)

    def _open(self) -> sessions.Session:
        session = sessions.open_session(self._plan)
        try:
            session.execute(sql.SQL("listen {}").format(sql.Identifier(self._channel)).as_bytes())
        except psycopg.Error as error:
            session.close()
            raise errors.DatabaseUnavailable(session.target, " ".join(str(error).split())) from None
        session.connection.add_notify_handler(self._notified)
        self._session = session
        return session

    def _notified(self, _: psycopg.Notify) -> None:
        self._told = True

    def _try_later(self) -> None:
        self._back_off = min(_LONGEST_BACK_OFF, max(_SHORTEST_BACK_OFF, self._back_off * 2))
        self._next_try = self._monotonic() + self._back_off

    def _proved(self, started: float, now: dt.datetime | None) -> None:
        self._proved_at = started
        if now is not None:
            # Taken at the end of the round trip, the clock can only be late by it, never
            # early: an occurrence is not sent before it is due.
            self._server_time = (now, self._monotonic())

    def _drop(self) -> None:
        self.term = None
        self._next_try = 0.0
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _application(self, role: str) -> str:
        return f"pglock:{role}:{self.namespace}@{self.node}"[:63]


@functools.cache
def _statement(template: str, schema_name: str) -> bytes:
    return sql.SQL(template).format(**tables.names(schema_name)).as_bytes()

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

import contextlib
import datetime as dt
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import psycopg
from psycopg import sql

from celery_pglock import (
    answers,
    clocks,
    connections,
    elections,
    errors,
    keys,
    schema,
    sessions,
    stacks,
    table_names,
)

_SHORTEST_BACK_OFF: Final = 0.1
_LONGEST_BACK_OFF: Final = 1.0


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
        fingerprint: str | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.namespace = namespace
        self.node = node
        self.poll = poll
        self.lease = lease
        self.term: int | None = None
        self.fingerprint = fingerprint
        # What others have told: that entries were paused or resumed, which of them were edited,
        # that this leader is to resign; and whether the leader that a standby found has another
        # fingerprint.
        self.entries_changed = False
        self.edited: set[str] = set()
        self.asked_to_resign = False
        self.differs = False
        self._schema = schema_name
        self._key = keys.from_name(namespace, "beat", "leader")
        self._channel = elections.channel(namespace)
        self._monotonic = monotonic
        self._plan = sessions.Plan(
            target=target,
            level="session",
            application=self._application("standby"),
            lost_after=lease / 2,
            lease=lease,
        )
        self._session: sessions.Session | None = None
        self._awaited: answers.Answer | None = None
        self._next_try = 0.0
        self._back_off = 0.0
        self._elected_at = float("-inf")
        self._told = False
        self.clock = clocks.ServerClock(monotonic)
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
            and self._session.owner == os.getpid()
            and self._monotonic() < self._proved_at + self.lease / 2
        )

    def ensure(self) -> None:
        """Make sure that this beat leads, before messages are handed over.

        Mostly without a round trip: the server is asked when the trust in its last answer has
        run out, when it is time for a sign of life, and when something has come over the socket
        that nobody has read: perhaps that the session was ended.

        Raises:
            LeadershipLost: it does not lead any more.
        """
        if self._heard and self._awaited is not None:
            self.settle()
        if self._heard or not self.held or self.feed_in <= 0:
            self.confirm()

    @property
    def feed_in(self) -> float:
        """Seconds until the next sign of life: a quarter of the lease after the last one.

        Other statements feed the lease too, but only ``confirm`` shows in ``beat_terms`` until
        when there was a leader, by which the next one tells a take-over from a downtime.
        """
        return max(0.0, self._confirmed_at + self.lease / 4 - self._monotonic())

    @property
    def longest_take_over(self) -> dt.timedelta:
        """For how long nobody may have led when one beat takes over from another that hangs.

        After more than that nobody was there to lead.
        """
        # The last sign of life is up to a quarter of the lease older than the leader's end.
        return dt.timedelta(seconds=1.25 * self.lease + 4 * self.poll)

    def now(self) -> dt.datetime:
        """Return the server's clock, carried on from the last statement that told it."""
        return self.clock.now()

    def stand(self) -> elections.Elected | None:
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
                    table_names.statement(elections.ELECT, self._schema),
                    {
                        "key": self._key,
                        "namespace": self.namespace,
                        "node": self.node,
                        "application": self._application("leader"),
                        "fingerprint": self.fingerprint,
                        "take_over": self.longest_take_over.total_seconds(),
                    },
                )
        except errors.PGLockError:
            self._drop()
            self._try_later()
            raise
        if not row.got:
            self.clock.read(row.now, started)
            self._back_off = 0.0
            # Whoever takes over reads all of them.
            self.edited.clear()
            self.differs = row.previous_fingerprint not in (None, self.fingerprint)
            # A notification that came together with the answer is not on the socket any more.
            self._next_try = self._monotonic() + (0.0 if self._told else self.poll)
            return None
        session.held.add(self._key)
        self.entries_changed = self.asked_to_resign = self.differs = False
        self.edited.clear()
        self.term = row.term
        self._proved(started, row.now)
        self._elected_at = self._confirmed_at = started
        return elections.won(row)

    def execute(self, query: bytes, parameters: Mapping[str, Any] | None = None) -> list[Any]:
        """Run a leader's statement over the lock's own session, which also feeds the lease.

        A session that is gone cannot run it: so nothing is written by a leader that is none.

        Raises:
            LeadershipLost: the session is gone, or this candidate does not lead.
        """
        session = self._ready()
        started = self._monotonic()
        with self._losing():
            rows = session.rows(query, parameters)
        self._proved_by(rows, started)
        return rows

    def send(
        self,
        query: bytes,
        parameters: Mapping[str, Any] | None = None,
        *,
        uninterrupted: bool = False,
    ) -> answers.Answer:
        """Send a leader's statement, as ``execute``, and do not wait for its answer.

        That is read when it is asked for, and before anything else is said over the session,
        which takes one statement at a time.

        Args:
            query: as for ``execute``.
            parameters: as for ``execute``.
            uninterrupted: a signal that stops this beat waits for the answer.

        Raises:
            LeadershipLost: as ``execute`` does.
        """
        session = self._ready()
        started = self._monotonic()
        with self._losing():
            sent = session.send(query, parameters)

        def receive() -> list[Any]:
            if session is not self._session:
                # Whoever leads by now must not lose it to an answer from before.
                raise self._not_held()
            with self._losing():
                rows = session.receive(sent)
            self._proved_by(rows, started)
            return rows

        self._awaited = answers.Answer(receive, uninterrupted=uninterrupted)
        return self._awaited

    def settle(self) -> None:
        """Wait for the answer to what ``send`` has sent, if that is still to come.

        Raises:
            LeadershipLost: as ``execute`` does.
        """
        if self._awaited is not None:
            self._awaited.rows()
            self._awaited = None

    @property
    def _heard(self) -> bool:
        return self._session is not None and not self._session.alive

    def _ready(self) -> sessions.Session:
        self.settle()
        if self._session is None or self.term is None:
            raise self._not_held()
        return self._session

    def _not_held(self) -> errors.LeadershipLost:
        return errors.LeadershipLost(self.namespace, self.term or 0, "it was not held")

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Lose the leadership with its session, to whatever a statement raises."""
        try:
            yield
        except psycopg.Error as error:
            self._awaited = None
            raise self.lose(" ".join(str(error).split())) from None
        except Exception:
            self._drop()
            raise

    def _proved_by(self, rows: list[Any], started: float) -> None:
        # The last row: the first may be much older than the answer.
        self._proved(started, getattr(rows[-1], "now", None) if rows else None)

    def confirm(self) -> None:
        """Feed the lease and show a sign of life in ``beat_terms``.

        Raises:
            LeadershipLost: the session is gone, or another term has begun.
        """
        parameters = {"namespace": self.namespace, "term": self.term}
        started = self._monotonic()
        if not self.execute(table_names.statement(elections.CONFIRM, self._schema), parameters):
            raise self.lose("another term has begun")
        self._confirmed_at = started

    def feed(self) -> None:
        """Confirm if it is time for that; to be called now and then in whatever takes long.

        Raises:
            LeadershipLost: as ``confirm`` does.
        """
        if self.feed_in <= 0:
            self.confirm()

    def listen(self) -> None:
        """Read what others have told this leader, if there is anything; else no statement.

        Raises:
            LeadershipLost: the session has ended, which shows on its socket too.
        """
        if self._heard:
            self.confirm()

    def has_standby(self) -> bool:
        """Whether another beat of this namespace stands by.

        Raises:
            LeadershipLost: as ``execute`` does.
        """
        beginning = elections.application("standby", self.namespace)
        return bool(self.execute(elections.STANDBYS, {"application": beginning})[0].standbys)

    def stand_back(self) -> None:
        """Resign and let others win the next two polls."""
        self.resign()
        self._next_try = self._monotonic() + 2.5 * self.poll

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

        When the server does not answer the session is only closed: then it frees the lock by
        itself, and a standby finds it at its next poll.
        """
        freed = False
        session = self._session
        if self.term is not None and session is not None and not session.connection.closed:
            try:
                session.execute(
                    table_names.statement(elections.RESIGN, self._schema),
                    {"namespace": self.namespace, "term": self.term},
                )
                row = session.execute(
                    elections.GIVE_UP, {"key": self._key, "channel": self._channel}
                )
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
        session = stacks.open_session(self._plan)
        try:
            session.execute(sql.SQL("listen {}").format(sql.Identifier(self._channel)).as_bytes())
        except psycopg.Error as error:
            session.close()
            raise errors.DatabaseUnavailable(session.target, " ".join(str(error).split())) from None
        session.connection.add_notify_handler(self._notified)
        session.outlives_exit = True
        self._session = session
        return session

    def _notified(self, notification: psycopg.Notify) -> None:
        payload = notification.payload
        if payload == "entries":
            self.entries_changed = True
        elif payload == "resign":
            self.asked_to_resign = True
        elif payload.startswith(elections.EDITED):
            self.edited.add(payload.removeprefix(elections.EDITED))
        else:
            self._told = True

    def _try_later(self) -> None:
        self._back_off = min(_LONGEST_BACK_OFF, max(_SHORTEST_BACK_OFF, self._back_off * 2))
        self._next_try = self._monotonic() + self._back_off

    def _proved(self, started: float, now: dt.datetime | None) -> None:
        self._proved_at = started
        if now is not None:
            self.clock.read(now, started)

    def _drop(self) -> None:
        self.term = self._awaited = None
        self._next_try = 0.0
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _application(self, role: str) -> str:
        return f"{elections.application(role, self.namespace)}{self.node}"[:63]

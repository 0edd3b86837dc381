"""What was sent and never started, or was started and died: found by the leader, sent again.

A broker that loses its memory, or a worker that dies with a message it has acknowledged, leaves
a row that says ``sent``, ``running`` or ``retrying`` and no message that would ever change it.
Only rows of schedule entries can be helped: of other messages nobody knows the arguments.

- ``sent`` for longer than ``sent_after``: perhaps it is only waiting in a long queue. So each
  copy waits twice as long as the one before.
- ``running`` whose run lock nobody holds, seen so for ``lost_after``: it is dead. The lock is
  looked up in ``pg_locks`` and never tried, because a try would make a real run skip.
- ``retrying`` for ``lost_after`` longer than its retry was due.

Under a calendar rule an occurrence has two rows, the beat's own and that of its run. While the
run's is open it is that one which counts.

A copy says how many attempts its row had (``pglock_seen``); one more, and it is dropped where
it arrives. It has the number of a new postponed copy, so that an older one that turns up again
is dropped too. What an operator has opened again is left to him: only he knows with which
arguments. First it is sent and then that is recorded: a leader that dies in between has
done no harm but to send another. After eight copies that nobody started the row is closed. While
an entry is paused nothing of it is sent again, but what was triggered.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from celery_pglock import locks, table_names

MOST_COPIES: Final = 8
_AT_ONCE: Final = 100
_LOOK_EVERY: Final = 30.0
_AGAIN_AFTER: Final = 900.0
# For so many seconds it sends without a pause; then what is due goes first.
_AT_A_STRETCH: Final = 1.0

# The key of a run lock, as keys.of_run makes it. SQL text holds no NUL, hence the bytes.
_RUN_KEY: Final = r"""
('x' || pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(
 pg_catalog.convert_to('celery_pglock:v1:' || %(namespace)s::text || ':run:' || r.job, 'UTF8')
 || '\x00'::bytea || pg_catalog.convert_to(r.period, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint
"""

_FIND: Final = f"""
with held as materialized (
{locks.HELD_KEYS}), twice as materialized (
 select o.task_id, pg_catalog.bool_or(o.status <> 'sent') as started,
  pg_catalog.max(o.sent_at) filter (where o.status = 'sent') as newest
 from {{runs}} o
 where o.status in ('sent', 'running', 'retrying') and o.task_id is not null
 group by o.task_id having pg_catalog.count(*) > 1
)
select r.job, r.period, r.due_at, r.status, r.task, r.task_id, r.entry, r.attempts,
 r.postponements, r.rescues, r.claim, coalesce(r.reason, '') ~ '^triggered ' as by_hand,
 pg_catalog.clock_timestamp() as now
from {{runs}} r left join twice t on t.task_id = r.task_id
where r.status in ('sent', 'running', 'retrying') and r.entry is not null
 and pg_catalog.starts_with(r.job, %(prefix)s::text)
 and coalesce(r.reason, '') !~ '^opened again '
 and (coalesce(r.reason, '') ~ '^triggered ' or not exists (select from {{entries}} e where e.namespace = %(namespace)s::text
  and e.entry = r.entry and e.paused_until > pg_catalog.now()))
 and (r.rescues = 0 or r.sent_at < pg_catalog.now()
  - %(again_after)s::double precision * (2 ^ r.rescues) * interval '1 s')
 and case r.status
  when 'sent' then r.sent_at < pg_catalog.now()
   - %(sent_after)s::double precision * interval '1 s'
   and (t.task_id is null or not t.started and r.sent_at >= t.newest)
  when 'retrying' then coalesce(r.retry_at, r.started_at) < pg_catalog.now()
   - %(lost_after)s::double precision * interval '1 s'
  else r.started_at < pg_catalog.now() - %(lost_after)s::double precision * interval '1 s'
   and not exists (select from held h where h.key = {_RUN_KEY})
 end
order by r.due_at limit {_AT_ONCE}
"""

_SAME: Final = """
where r.job = %(job)s::text and r.period = %(period)s::text and r.status = %(status)s::text
 and r.attempts = %(attempts)s::integer and r.claim is not distinct from %(claim)s::uuid
 and r.task_id is not distinct from %(task_id)s::text
"""
_TAKE: Final = (
    """
update {runs} r set rescues = r.rescues + 1,
 postponements = greatest(r.postponements, %(number)s::integer), sent_at = pg_catalog.clock_timestamp()
"""
    + _SAME
    + " returning pg_catalog.clock_timestamp() as now"
)
_CLOSE: Final = (
    """
update {runs} r set status = %(outcome)s::text, reason = %(reason)s::text,
 finished_at = pg_catalog.clock_timestamp()
"""
    + _SAME
    + " returning pg_catalog.clock_timestamp() as now"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """A row that waits for a message which is perhaps gone."""

    job: str
    period: str
    due_at: dt.datetime | None
    status: str
    task: str | None
    task_id: str | None
    entry: str
    attempts: int
    postponements: int
    rescues: int
    claim: uuid.UUID | None
    by_hand: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """What is sent for a lost row.

    Attributes:
        row: the row as it was found.
        number: of the postponed copy that this one replaces any other of.
    """

    row: Lost
    number: int


@dataclasses.dataclass(slots=True, kw_only=True)
class Rescuer:
    """Looks for lost rows while a leader has nothing else to do.

    Attributes:
        execute: runs a statement over the leader's session.
        schema: where the tables are.
        namespace: whose rows.
        sent_after: seconds; None: rows that are ``sent`` are left alone.
        lost_after: seconds; None: rows that are ``running`` or ``retrying`` are.
        unwanted: returns why a row is not to be run any more, or None.
        send: hands a copy to the broker; returns whether it was taken.
        closed: told of a row that is given up, and why.
    """

    execute: Callable[[bytes, Mapping[str, Any]], list[Any]]
    schema: str
    namespace: str
    sent_after: float | None
    lost_after: float | None
    unwanted: Callable[[Lost, dt.datetime], str | None]
    send: Callable[[Copy], bool]
    closed: Callable[[Lost, str, str], None]
    _next_at: float = 0.0
    # Since when which claims are known to be dead. A lock that is free at one look may be that
    # of a run which is just ending.
    _dead: dict[tuple[str, str, uuid.UUID | None], float] = dataclasses.field(default_factory=dict)

    # Whose message was not taken at the last try.
    _refused: set[str] = dataclasses.field(default_factory=set)

    @property
    def every(self) -> float:
        """Seconds between two looks."""
        limits = [limit for limit in (self.sent_after, self.lost_after) if limit is not None]
        return min([_LOOK_EVERY, *(limit / 2 for limit in limits)])

    def begin(self) -> None:
        """Begin a leadership."""
        self._dead = {}
        self._refused = set()
        self._next_at = time.monotonic() + self.every

    def work(self, idle_for: float) -> float:
        """Look if it is time to; return when to come back, at most ``idle_for``.

        Raises:
            LeadershipLost: as every statement of a leader does.
        """
        if self.sent_after is None and self.lost_after is None:
            return idle_for
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + self.every
            self._look()
        return min(idle_for, max(0.0, self._next_at - time.monotonic()))

    def _look(self) -> None:
        rows = self.execute(
            table_names.statement(_FIND, self.schema),
            {
                "namespace": self.namespace,
                "prefix": f"{self.namespace}:",
                # A comparison with null is never true.
                "sent_after": self.sent_after,
                "lost_after": self.lost_after,
                "again_after": _AGAIN_AFTER if self.sent_after is None else self.sent_after,
            },
        )
        names = [field.name for field in dataclasses.fields(Lost)]
        found = [(Lost(*(getattr(row, name) for name in names)), row.now) for row in rows]
        lost = self._long_dead(found)
        # An entry whose message the broker does not take must not stand in front of the others.
        lost.sort(key=lambda pair: pair[0].entry in self._refused)
        until = time.monotonic() + _AT_A_STRETCH
        for row, now in lost:
            if not self._help(row, now):
                return
            if time.monotonic() > until:
                self._next_at = 0.0
                return
        if lost and len(rows) == _AT_ONCE:
            # There are more of them.
            self._next_at = 0.0

    def _help(self, row: Lost, now: dt.datetime) -> bool:
        """Send a row's message again, or close the row; return False if the broker fails."""
        reason = self.unwanted(row, now)
        if reason is not None:
            # What was started and died is not missed.
            self._close(row, "missed" if row.status == "sent" else "failed", reason)
            return True
        if row.rescues >= MOST_COPIES:
            what = "never started" if row.status == "sent" else "never started again"
            self._close(row, "failed", f"{what}, though sent {row.rescues + 1} times")
            return True
        copy = Copy(row, row.postponements + 1)
        if not self.send(copy):
            self._refused.add(row.entry)
            return False
        self._refused.discard(row.entry)
        self.execute(
            table_names.statement(_TAKE, self.schema), {**_same(row), "number": copy.number}
        )
        return True

    def _long_dead(self, found: list[tuple[Lost, dt.datetime]]) -> list[tuple[Lost, dt.datetime]]:
        now = time.monotonic()
        before, self._dead = self._dead, {}
        lost = []
        for row, at in found:
            if row.status == "running":
                key = (row.job, row.period, row.claim)
                since = self._dead[key] = before.get(key, now)
                if now - since < (self.lost_after or 0.0):
                    continue
            lost.append((row, at))
        return lost

    def _close(self, row: Lost, outcome: str, reason: str) -> None:
        parameters = {**_same(row), "outcome": outcome, "reason": reason}
        if self.execute(table_names.statement(_CLOSE, self.schema), parameters):
            self.closed(row, outcome, reason)


def _same(row: Lost) -> dict[str, Any]:
    return {
        "job": row.job,
        "period": row.period,
        "status": row.status,
        "attempts": row.attempts,
        "claim": row.claim,
        "task_id": row.task_id,
    }

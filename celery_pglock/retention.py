"""How long ``job_runs`` remembers: old rows are deleted, and what they forbade stays forbidden.

Deleted is what was settled *and* due longer ago than the retention; never a row that is
``sent``, ``running`` or ``retrying``, and never the newest row of a job, which says when it
last ran (with several kinds of labels under one job, the newest of each kind). Rows go in
batches of bounded size, each a statement of its own, so that no claim waits for a clean-up.

A row that is gone must not open its period again. So a message whose occurrence was due
longer ago than the retention, and of which there is no row, is refused (``stale``): whether
it ran is not known any more. Under a calendar rule a message may be due up to a whole bucket
later than the row that forbids it, so such a row is kept for as much longer. Each application
deletes only what is of its own namespace: another may keep its history for longer.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from celery_pglock import table_names

# Rows that one statement looks at, of which it deletes those that may go.
BATCH: Final = 1000
# Of a leader that does it by the way, in seconds: after its election, between batches, between
# walks, and how long it has to have nothing else to do.
_FIRST_AFTER: Final = 30.0
_BETWEEN_BATCHES: Final = 0.25
_BETWEEN_WALKS: Final = 600.0
_SPARE: Final = 0.1
# A leader that never has time to spare does a batch all the same when it is so much overdue.
_OVERDUE: Final = 5.0

_HORIZON: Final = "(pg_catalog.statement_timestamp() - %(keep)s::double precision * interval '1 s')"
_SETTLED: Final = "{r}.status in ('done', 'failed', 'skipped', 'missed')"
_MOMENT: Final = "coalesce({r}.due_at, {r}.started_at, {r}.sent_at, {r}.finished_at)"
_OCCURRENCE: Final = r"{r}.period ~ '^\d\d\d\d-\d\d-\d\dT\d\d:\d\d:\d\d[.]'"
_CALENDAR: Final = r"{r}.period ~ '^\d\d\d\d-(W\d\d|\d\d|\d\d-\d\d(T\d\d(:\d\d)?[+-].*)?)$'"
# Labels of one form sort by time.
_FORM: Final = "pg_catalog.translate({r}.period, '123456789-', '000000000+')"

# By how much later than a row's own due instant another message of its period may be due. What
# a function of the user's returns is not known; a year is the longest bucket worth a name.
_REACH: Final = rf"""
case
 when pg_catalog.starts_with({{r}}.period, 'id:') or {_OCCURRENCE} then interval '0'
 when not {_CALENDAR} then interval '367 days'
 when {{r}}.period ~ 'W' then interval '8 days'
 when {{r}}.period ~ '^\d\d\d\d-\d\d$' then interval '32 days'
 else interval '2 days'
end
"""

# The newest row of a job is not found by its label alone: a task may have changed its rule, and
# a function's labels need not sort. So a row goes when there is a newer one of its own kind.
# And a function may give a quarter a label that looks like a month's: where a period is longer
# than an instant, the newer row has to be beyond the horizon too. All of the older period was
# due before it, and is stale.
# Asked of the next entries of the index, a bounded number: a filter on more of them, in a plan for
# a table without statistics, reads and sorts all that follows in the job, for each row. Where
# none of them will do, the row stays.
_SUPERSEDED: Final = f"""
case
 when pg_catalog.starts_with(s.period, 'id:') then exists (select from (
  select m.* from {{runs}} m where (m.job, m.period) >= (s.job, 'id:')
  order by m.job, m.period limit 100) n
  where n.job = s.job and pg_catalog.starts_with(n.period, 'id:')
   and n.finished_at > s.finished_at)
 when {_OCCURRENCE.format(r="s")} or {_CALENDAR.format(r="s")} then (
  select {_OCCURRENCE.format(r="s")} or {_MOMENT.format(r="n")} < {_HORIZON} from (
   select m.* from {{runs}} m where (m.job, m.period) > (s.job, s.period)
   order by m.job, m.period limit 16) n
  where n.job = s.job and {_MOMENT.format(r="n")} > s.moment
   and {_FORM.format(r="n")} = {_FORM.format(r="s")}
  order by n.period limit 1)
 else exists (select from (
  select m.* from {{runs}} m where (m.job, m.period) >= (s.job, '')
  order by m.job, m.period limit 100) n
  where n.job = s.job and not pg_catalog.starts_with(n.period, 'id:')
   and not ({_OCCURRENCE.format(r="n")})
   and {_MOMENT.format(r="n")} > s.moment and {_MOMENT.format(r="n")} < {_HORIZON})
end
"""

# Not clock_timestamp(), which moves while the statement runs: the index could not be left
# where the rows become too new. Rows of other namespaces are looked at too, so that a statement
# is bounded however many there are of them.
_SEEN: Final = f"""
with seen as materialized (
 select r.ctid, r.job, r.period, r.finished_at, {_MOMENT.format(r="r")} as moment
 from {{runs}} r
 where {_SETTLED.format(r="r")}
  and r.finished_at < {_HORIZON}
  and (r.finished_at, r.job, r.period)
   > (%(finished_at)s::timestamptz, %(job)s::text, %(period)s::text)
  and r.finished_at >= %(finished_at)s::timestamptz
 order by r.finished_at, r.job, r.period limit %(most)s::integer
), old as materialized (
 select j.ctid from (
  select s.ctid, {_SUPERSEDED} as superseded from seen s
  where pg_catalog.starts_with(s.job, %(prefix)s::text)
   and s.moment + {_REACH.format(r="s")} < {_HORIZON}
 ) j where j.superseded
)
"""

# By their places, which no plan looks for in the whole table. A row that was written in between,
# because it was opened again, is at another place; one that somebody has locked is left for the
# next walk: a leader waits for nobody.
_PRUNE: Final = (
    _SEEN
    + """
, free as materialized (
 select r.ctid from {runs} r where r.ctid = any (array(select o.ctid from old o))
 for update of r skip locked
), gone as (
 delete from {runs} r where r.ctid = any (array(select f.ctid from free f))
 returning 1
)
select (select pg_catalog.count(*) from gone) as removed,
 (select pg_catalog.count(*) from seen) as seen, l.finished_at, l.job, l.period,
 pg_catalog.clock_timestamp() as now
from (select 1) as one
left join (select * from seen order by finished_at desc, job desc, period desc limit 1) l on true
"""
)
_COUNT: Final = (
    _SEEN
    + """
select (select pg_catalog.count(*) from old) as removed,
 (select pg_catalog.count(*) from seen) as seen, l.finished_at, l.job, l.period,
 pg_catalog.clock_timestamp() as now
from (select 1) as one
left join (select * from seen order by finished_at desc, job desc, period desc limit 1) l on true
"""
)
_BEGINNING: Final = dt.datetime(1, 1, 1, tzinfo=dt.UTC)


@dataclasses.dataclass(slots=True, kw_only=True)
class Pass:
    """One walk over the settled rows, from the oldest on, a batch at a time.

    Attributes:
        execute: runs a statement and returns its rows.
        schema: where the tables are.
        namespace: whose rows.
        keep: the retention, in seconds.
        dry: count and delete nothing.
        seen: how many rows have been looked at.
        removed: how many rows have been deleted, or would be.
        ended: the walk has come to rows that are too new.
    """

    execute: Callable[[bytes, Mapping[str, Any]], list[Any]]
    schema: str
    namespace: str
    keep: float
    dry: bool = False
    seen: int = 0
    removed: int = 0
    ended: bool = False
    _after: tuple[dt.datetime, str, str] = (_BEGINNING, "", "")

    def step(self, most: int = BATCH) -> int:
        """Look at the next ``most`` rows, of all namespaces; return how many were deleted.

        Rows that may not go are passed by, so a walk looks at each row once.
        """
        finished_at, job, period = self._after
        (answer,) = self.execute(
            table_names.statement(_COUNT if self.dry else _PRUNE, self.schema),
            {
                "keep": self.keep,
                "prefix": f"{self.namespace}:",
                "finished_at": finished_at,
                "job": job,
                "period": period,
                "most": most,
            },
        )
        self.seen += answer.seen
        self.removed += answer.removed
        self.ended = answer.seen < most
        if answer.finished_at is not None:
            self._after = (answer.finished_at, answer.job, answer.period)
        return int(answer.removed)


class Upkeep:
    """Walks over the history while a leader has nothing else to do, a batch at a time.

    Args:
        execute: runs a statement over the leader's session.
        schema: where the tables are.
        namespace: whose rows.
        keep: the retention in seconds; None: nothing is ever deleted.
        told: called after each walk that deleted something, with how many rows.
    """

    def __init__(
        self,
        execute: Callable[[bytes, Mapping[str, Any]], list[Any]],
        schema: str,
        namespace: str,
        keep: float | None,
        told: Callable[[int], None],
    ) -> None:
        self._execute = execute
        self._schema = schema
        self._namespace = namespace
        self._keep = keep
        self._told = told
        self._walk: Pass | None = None
        self._next_at = math.inf

    def begin(self) -> None:
        """Begin a leadership: first there is something else to do than to clean up."""
        self._walk = None
        self._next_at = math.inf if self._keep is None else time.monotonic() + _FIRST_AFTER

    def work(self, idle_for: float) -> float:
        """Do a batch if it is time to and nothing else is due; return when to come back.

        Args:
            idle_for: for how many seconds nothing else will be due.

        Raises:
            LeadershipLost: as every statement of a leader does.
        """
        now = time.monotonic()
        if now < self._next_at:
            return min(idle_for, self._next_at - now)
        if idle_for < _SPARE and now < self._next_at + _OVERDUE:
            return idle_for
        if self._walk is None:
            self._walk = Pass(
                execute=self._execute,
                schema=self._schema,
                namespace=self._namespace,
                keep=self._keep or 0.0,
            )
        self._walk.step()
        pause = _BETWEEN_BATCHES
        if self._walk.ended:
            if self._walk.removed:
                self._told(self._walk.removed)
            self._walk = None
            pause = _BETWEEN_WALKS
        self._next_at = time.monotonic() + pause
        return min(idle_for, pause)

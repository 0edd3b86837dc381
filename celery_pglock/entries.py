"""What an operator says to the leader about schedule entries: pause, resume, resign.

Written to ``beat_entries`` and told by NOTIFY in the same statement. The leader hears it within
a second; should it not, a pause holds all the same, because each claim asks for it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import difflib
from typing import Final

from celery_pglock import elections, errors, namespaced, periods, plans

_SEE: Final = """
select entry, paused_until, paused_reason, next_due_at from {entries}
where namespace = %(namespace)s::text and entry = %(entry)s::text
"""
_NAMES: Final = "select entry from {entries} where namespace = %(namespace)s::text"

# The notification goes with the change, or not at all.
_PAUSE: Final = """
with u as (
 update {entries} set paused_until = %(until)s::timestamptz, paused_reason = %(reason)s::text
 where namespace = %(namespace)s::text and entry = %(entry)s::text
 returning entry
)
select entry, pg_catalog.pg_notify(%(channel)s::text, 'entries') from u
"""
_IS_PAUSED: Final = """
select coalesce(paused_until > pg_catalog.clock_timestamp(), false) from {entries}
where namespace = %(namespace)s::text and entry = %(entry)s::text
"""
# Not null: what was due before this moment is not made up for.
_RESUME: Final = """
with u as (
 update {entries} set paused_until = pg_catalog.clock_timestamp(), paused_reason = null
 where namespace = %(namespace)s::text and entry = %(entry)s::text
  and paused_until > pg_catalog.clock_timestamp()
 returning entry
)
select entry, pg_catalog.pg_notify(%(channel)s::text, 'entries') from u
"""
_OCCUR: Final = """
insert into {runs} (job, period, due_at, status, task, task_id, entry, sent_at, reason)
values (%(job)s::text, %(period)s::text, %(due)s::timestamptz, 'sent', %(task)s::text,
 %(task_id)s::text, %(entry)s::text, pg_catalog.clock_timestamp(), %(reason)s::text)
"""
_WITHDRAW: Final = """
delete from {runs} where job = %(job)s::text and period = %(period)s::text
 and status = 'sent' and task_id = %(task_id)s::text
"""
_TELL: Final = b"select pg_catalog.pg_notify(%(channel)s::text, %(payload)s::text)"


@dataclasses.dataclass(frozen=True, slots=True)
class Triggered:
    """An occurrence that somebody asked for.

    Attributes:
        job: its job.
        period: its label.
        due: the instant at which it is due.
        entry: the schedule entry.
        task_id: the id that its message has to have.
    """

    job: str
    period: str
    due: dt.datetime
    entry: str
    task_id: str


class Entries(namespaced.Namespaced):
    """The entries of one namespace, as an operator sees them."""

    def pause(self, entry: str, until: dt.datetime | None, reason: str) -> None:
        """Send no occurrence of an entry that is due before ``until``; None: until resumed.

        Raises:
            ConfigurationError: no leader has ever seen such an entry.
        """
        self.find(entry)
        self.run(_PAUSE, entry=entry, until=until or plans.FOREVER, reason=reason)

    def resume(self, entry: str) -> bool:
        """End a pause from now on; return whether there was one.

        Raises:
            ConfigurationError: no leader has ever seen such an entry.
        """
        self.find(entry)
        return bool(self.run(_RESUME, entry=entry))

    def occur(self, entry: str, task: str, task_id: str, reason: str) -> Triggered:
        """Record an occurrence that is due now, for a message with ``task_id`` to run."""
        now = self.now()
        job = f"{self.namespace}:{entry}"
        made = Triggered(job, periods.occurrence(now), now, entry, task_id)
        self.run(_OCCUR, **dataclasses.asdict(made), task=task, reason=reason)
        return made

    def withdraw(self, triggered: Triggered) -> None:
        """Undo ``occur``, because its message could not be sent, unless it has been run."""
        self.run(_WITHDRAW, **dataclasses.asdict(triggered))

    def now(self) -> dt.datetime:
        """Return the server's clock."""
        ((now,),) = self.connection.execute("select pg_catalog.clock_timestamp()").fetchall()
        assert isinstance(now, dt.datetime)  # noqa: S101 - for the type checker
        return now

    def tell(self, payload: str) -> None:
        """Tell the beats of the namespace; see ``elections.channel``."""
        parameters = {"channel": elections.channel(self.namespace), "payload": payload}
        self.connection.execute(_TELL, parameters)

    def is_paused(self, entry: str) -> bool:
        """Return whether ``resume`` would end a pause.

        Raises:
            ConfigurationError: no leader has ever seen such an entry.
        """
        self.find(entry)
        ((paused,),) = self.run(_IS_PAUSED, entry=entry)
        return bool(paused)

    def find(self, entry: str) -> None:
        """Look whether there is such an entry.

        Raises:
            ConfigurationError: no leader has ever seen one; the sentence says which there are.
        """
        if self.run(_SEE, entry=entry):
            return
        names = [str(row.entry) for row in self.run(_NAMES)]
        nearest = difflib.get_close_matches(entry, names, n=1)
        hint = (
            f"did you mean {nearest[0]!r}?"
            if nearest
            else f"known: {', '.join(sorted(names)[:10]) or 'none, because no beat has led yet'}"
        )
        msg = f"there is no schedule entry {entry!r} in namespace {self.namespace}; {hint}"
        raise errors.ConfigurationError(msg)

"""Opening a settled period again, because an operator says so.

No message ever does this. The row keeps its history: ``attempts`` goes on from where it was,
so a fencing token never comes again; only what counts towards giving up begins anew. A new
task id makes the old message, should it turn up, somebody else's: it finds the period done.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from typing import Any, Final

import psycopg
from psycopg.rows import dict_row

from celery_pglock import errors, keys, statements

# What is settled and did not run. A message may still be on its way for a row that is sent or
# retrying. One that is running without its run lock is dead, and has perhaps no message left.
_SETTLED: Final = ("failed", "skipped", "missed")

_READ: Final = f"""
select r.status, r.reason, r.error, r.task, r.entry, r.due_at, r.task_id, r.claim,
 r.lost_attempts, r.postponements, r.rescues, r.sent_at, r.started_at, r.finished_at, r.retry_at,
 exists (select from pg_catalog.pg_locks l where {{held_by}}) as held,
 coalesce(r.started_at > pg_catalog.clock_timestamp()
  - interval '{statements.CLAIM_GRACE_SECONDS} s', false) as just_claimed
from {{runs}} r where r.job = %(job)s::text and r.period = %(period)s::text
"""
_LOCK_ROW: Final = _READ + "for update of r"

_OPEN: Final = """
update {runs} set status = 'sent', task_id = %(task_id)s::text, claim = null, lost_attempts = 0,
 postponements = 0, rescues = 0, sent_at = pg_catalog.clock_timestamp(), finished_at = null,
 retry_at = null,
 reason = %(reason)s::text, error = null
where job = %(job)s::text and period = %(period)s::text
"""

_RESTORE: Final = """
update {runs} set status = %(status)s::text, task_id = %(old_task_id)s::text,
 claim = %(claim)s::uuid, lost_attempts = %(lost_attempts)s::integer,
 postponements = %(postponements)s::integer, rescues = %(rescues)s::integer,
 sent_at = %(sent_at)s::timestamptz,
 finished_at = %(finished_at)s::timestamptz, retry_at = %(retry_at)s::timestamptz,
 reason = %(reason)s::text, error = %(error)s::text
where job = %(job)s::text and period = %(period)s::text and status = 'sent'
 and task_id = %(task_id)s::text
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A row before it is opened again.

    Attributes:
        job: its job.
        period: its label.
        status: what it says.
        task: the registered name of the task; None where no message was ever known.
        entry: its schedule entry, or None.
        due: the instant at which it was due, or None.
        columns: all that opening it changes.
    """

    job: str
    period: str
    status: str
    task: str | None
    entry: str | None
    due: dt.datetime | None
    columns: dict[str, Any] = dataclasses.field(repr=False)


class Reruns:
    """The statements that open periods again, over one connection that is in no transaction.

    Args:
        connection: of a role that may update the ledger.
        schema: where the tables are.
        namespace: of the application.
        zone: in which moments are told.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        schema: str,
        namespace: str,
        zone: dt.tzinfo = dt.UTC,
    ) -> None:
        self._zone = zone
        self._connection = connection
        self._schema = schema
        self._namespace = namespace

    def find(self, job: str, period: str) -> Recorded:
        """Return a row as it is.

        Raises:
            RerunRefused: there is none.
        """
        return self._recorded(job, period, self._read(_READ, job, period))

    def reopen(
        self, job: str, period: str, *, task_id: uuid.UUID, who: str, force: bool = False
    ) -> Recorded:
        """Make a settled period ``sent``, so that a message with ``task_id`` runs it.

        Args:
            job: ``<namespace>:<name>``.
            period: its label.
            task_id: of the message that will be sent; its result is a new one.
            who: who asks, for the row's ``reason``.
            force: also when it is done, or a message for it may still be on its way.

        Returns:
            The row as it was, for ``restore``.

        Raises:
            RerunRefused: there is no such row, it is being run, or ``force`` is needed.
        """
        with self._connection.transaction():
            row = self._read(_LOCK_ROW, job, period)
            found = self._recorded(job, period, row)
            needs_force = self._refuse(found, force=force)
            was = found.status if row["reason"] is None else f"{found.status}: {row['reason']}"
            self._connection.execute(
                statements.statement(_OPEN, self._schema),
                {
                    "job": job,
                    "period": period,
                    "task_id": str(task_id),
                    "reason": f"opened again{' with --force' if needs_force else ''} by {who}; "
                    f"it was {was}",
                },
            )
        return found

    def examine(self, job: str, period: str, *, force: bool = False) -> tuple[Recorded, bool]:
        """Return the row that ``reopen`` would open, and whether it needs ``force``; open nothing.

        Raises:
            RerunRefused: as ``reopen`` does.
        """
        found = self.find(job, period)
        return found, self._refuse(found, force=force)

    def _refuse(self, found: Recorded, *, force: bool) -> bool:
        row = found.columns
        if found.status == "running" and (row["held"] or row["just_claimed"]):
            reason = f"it is being run since {self._told(row['started_at'])}"
            raise errors.RerunRefused(found.job, found.period, reason)
        needs_force = found.status not in (*_SETTLED, "running")
        if needs_force and not force:
            why = (
                f"it was done at {self._told(row['finished_at'])}"
                if found.status == "done"
                else f"it is {found.status}, so its message may still be on its way"
            )
            reason = f"{why}; add --force to run it all the same"
            raise errors.RerunRefused(found.job, found.period, reason)
        return needs_force

    def _told(self, moment: dt.datetime | None) -> str:
        if moment is None:
            return "a time that nobody has recorded"
        return moment.astimezone(self._zone).isoformat(sep=" ", timespec="seconds")

    def restore(self, found: Recorded, task_id: uuid.UUID) -> None:
        """Undo ``reopen``, because its message could not be sent, unless it has been run."""
        columns = {**found.columns, "old_task_id": found.columns["task_id"]}
        self._connection.execute(
            statements.statement(_RESTORE, self._schema),
            {**columns, "job": found.job, "period": found.period, "task_id": str(task_id)},
        )

    def _read(self, template: str, job: str, period: str) -> dict[str, Any]:
        with self._connection.cursor(row_factory=dict_row) as cursor:
            key = keys.of_run(self._namespace, job, period)
            cursor.execute(
                statements.statement(template, self._schema),
                {"job": job, "period": period, "key": key},
            )
            row = cursor.fetchone()
        if row is None:
            reason = "no such run is recorded; pglock runs shows those that are"
            raise errors.RerunRefused(job, period, reason)
        return row

    def _recorded(self, job: str, period: str, row: dict[str, Any]) -> Recorded:
        return Recorded(job, period, row["status"], row["task"], row["entry"], row["due_at"], row)

"""``job_runs``: one row per (job, period), claimed before the work and settled after it.

A claim is one statement: it looks at the row, takes the *run lock* (this very period), then
the *name lock* (all runs under one lock name), and writes the row. Three rules hold it
together; for each there is a test that fails without it.

- A statement's snapshot is older than its lock: while it waits for neither, another session
  may have finished the period in between. So the snapshot only refuses; what admits is the
  WHERE of the upsert, which reads the newest version of the row.
- Only the run lock proves that a ``running`` row is dead. The name lock does not: a deploy
  may have changed its name.
- Settling is fenced by the claim's identity. A run that lost its locks finds that the row is
  no longer its own, and changes nothing.

States: ``sent`` (by a beat) → ``running`` → ``done`` | ``failed`` | ``retrying``; ``skipped``
and ``missed``. A message never re-opens ``done``, ``skipped``, ``missed`` or an exhausted
``failed``.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from typing import Any

import psycopg

from celery_pglock import claims, errors, locks, sessions, statements


class Ledger:
    """The statements over one schema's ``job_runs``; holds no connection and no state.

    Args:
        schema: where the tables are.
        keep: for how many seconds history is kept (see ``retention``); None: for ever.
    """

    def __init__(self, schema: str = "pglock", keep: float | None = None) -> None:
        self.schema = schema
        self.keep = None if keep is None else dt.timedelta(seconds=keep)

    def claim(
        self,
        session: sessions.Session,
        work: claims.Work,
        *,
        claim: uuid.UUID,
        window: claims.Window | None = None,
    ) -> claims.Claimed | claims.Refused:
        """Claim a period in one round trip, at the level of the session.

        At session level both locks are held afterwards. At transaction level the claim is
        committed and no lock is held: take them with ``transactions`` before working.

        Args:
            session: a session that holds nothing.
            work: what is to be run.
            claim: the identity of this claim; the same one again is the same claim.
            window: refuse with ``moved`` when the server's clock is outside it.

        Raises:
            LockLost: the session holds one of the keys already.
            psycopg.Error: the session is broken and has been closed; whether the claim was
                made is unknown, and asking again with the same ``claim`` is safe.
        """
        wanted = work.lock_keys
        locks.refuse_again(session, wanted)
        since, until = window or (None, None)
        parameters = {
            **_parameters(work),
            "claim": claim,
            "since": since,
            "until": until,
            "run_key": work.run_key,
            "max_lost": work.max_lost,
            "seen": work.seen or 0,
            "moved": _moved(work),
            "keep": self.keep,
            "application": work.application,
        }
        query = statements.claim(self.schema, session.level)
        for _ in range(10):
            answer = session.execute(query, parameters)
            before = None if answer.status is None else _row(answer)
            match answer.answer:
                case "claimed":
                    if session.level == "session":
                        session.held.update(wanted)
                    return claims.Claimed(claim, answer.attempt, answer.lost, before)
                case "closed" | "exhausted" | "running" | "held" | "moved" | "stale" as kind:
                    return claims.Refused(kind, before, answer.now, answer.lost or 0)
                case "changed":
                    # Somebody settled the row between this statement's snapshot and its lock:
                    # a new snapshot shows how.
                    continue
                case _:
                    # An unlock in the statement was answered with no.
                    session.close()
                    raise errors.LockLost(work.job, work.period, "a lock was not held any more")
        session.close()
        raise errors.LockLost(work.job, work.period, "its row changed with every look at it")

    def settle(
        self,
        session: sessions.Session,
        work: claims.Work,
        claim: uuid.UUID,
        status: claims.Status,
        *,
        reason: str | None = None,
        error: str | None = None,
        retry_in: float | None = None,
    ) -> bool:
        """Record what came of a claim and give its locks back, in one round trip.

        Returns:
            Whether the row was still ours. False: it was not, and nothing was changed; or an
            earlier call recorded it already (``settled_as`` tells).

        Raises:
            LockLost: an unlock was answered with no. The row has been settled if it was ours.
            psycopg.Error: the session is broken and has been closed.
        """
        parameters = {
            "job": work.job,
            "period": work.period,
            "claim": claim,
            "status": status,
            "reason": reason,
            "error": _storable(error),
            "retry_in": retry_in,
            **_origin(work),
            "origin_reason": None if work.origin is None else f"run as {work.job} {work.period}",
        }
        if not session.held:
            query = statements.statement(statements.SETTLE_ONLY, self.schema)
            return bool(session.execute(query, parameters).settled)
        answer = session.execute(
            statements.statement(statements.SETTLE_AND_UNLOCK, self.schema),
            {
                **parameters,
                "name_key": work.name_key,
                "run_key": work.run_key,
                "application": work.idle_application,
            },
        )
        session.held.clear()
        if not (answer.name_freed and answer.run_freed):
            session.close()
            if not answer.settled:
                reason = "the server did not know its locks any more"
                raise errors.LockLost(work.job, work.period, reason)
        return bool(answer.settled)

    def settled_as(
        self, session: sessions.Session, work: claims.Work, claim: uuid.UUID
    ) -> str | None:
        """Return the status of the row if it still carries this claim, else None."""
        row = self.read(session, work)
        return row.status if row is not None and row.claim == claim else None

    def ask_whose(
        self, session: sessions.Session, work: claims.Work, claim: uuid.UUID
    ) -> psycopg.Cursor[Any]:
        """Ask, for instance in a pipeline, for one row if the claim is still ours."""
        return session.cursor().execute(
            statements.statement(statements.STILL_MINE, self.schema),
            {"job": work.job, "period": work.period, "claim": claim},
        )

    def give_back(
        self, session: sessions.Session, work: claims.Work, claim: uuid.UUID, reason: str
    ) -> None:
        """Undo a claim whose run never started: ``sent`` again, its attempt number used up."""
        session.execute(
            statements.statement(statements.RETURN, self.schema),
            {"job": work.job, "period": work.period, "claim": claim, "reason": reason},
        )

    def skip(self, session: sessions.Session, work: claims.Work, reason: str) -> int:
        """Record that a period did not run; a row that is more than ``sent`` is left alone.

        Returns:
            How many periods of the job were skipped in a row since one was run, with this one;
            no more than a bounded number is looked at.
        """
        answer = session.execute(
            statements.statement(statements.SKIP, self.schema),
            {**_parameters(work), "reason": reason},
        )
        return int(answer.skips)

    def postpone(
        self, session: sessions.Session, work: claims.Work, number: int, reason: str
    ) -> None:
        """Record that postponed copy ``number`` has been sent; a lower number changes nothing."""
        session.execute(
            statements.statement(statements.POSTPONE, self.schema),
            {**_parameters(work), "number": number, "reason": reason},
        )

    def close_origin(self, session: sessions.Session, work: claims.Work, reason: str) -> None:
        """Record for the beat's own row that its run was refused under a calendar period."""
        session.execute(
            statements.statement(statements.CLOSE_ORIGIN, self.schema),
            {**_origin(work), "reason": reason},
        )

    def revoke(
        self,
        session: sessions.Session,
        namespace: str,
        task_id: str,
        reason: str,
        *,
        running: bool,
    ) -> None:
        """Settle what waits for a message that is thrown away: ``skipped``, or ``failed``.

        Args:
            session: any session of this level.
            namespace: of the application.
            task_id: the message's id.
            reason: why.
            running: also a run in progress, because its process is being ended.
        """
        session.execute(
            statements.statement(statements.REVOKE, self.schema),
            {
                "prefix": f"{namespace}:",
                "task_id": task_id,
                "reason": reason,
                "running": running,
            },
        )

    def seen(self, session: sessions.Session, work: claims.Work) -> int | None:
        """Return by how many attempts a rescue copy of the beat's own row knows a new start.

        Under a calendar rule its run has another row, which may have had attempts for other
        occurrences. None: this occurrence itself has been started, or its row is settled.
        """
        answer = session.execute(
            statements.statement(statements.ORIGIN, self.schema),
            {"job": work.job, "period": work.period, **_origin(work)},
        )
        if answer.origin not in (None, "sent"):
            return None
        if answer.task_id == work.task_id and answer.status in ("running", "retrying"):
            return None
        return int(answer.attempts or 0)

    def read(self, session: sessions.Session, work: claims.Work) -> claims.Row | None:
        """Return the row of a period, or None."""
        answer = session.execute(
            statements.statement(statements.READ, self.schema),
            {"job": work.job, "period": work.period},
        )
        return None if answer is None else _row(answer)

    def period_of(self, session: sessions.Session, job: str, task_id: str) -> str | None:
        """Return the period under which this message was claimed before, or None."""
        answer = session.execute(
            statements.statement(statements.PERIOD_OF, self.schema),
            {"job": job, "task_id": task_id},
        )
        return None if answer is None else str(answer.period)

    def holder(self, session: sessions.Session, work: claims.Work) -> claims.Holder | None:
        """Return who holds the name lock of ``work``, or None when nobody does any more."""
        answer = session.execute(
            statements.statement(statements.HOLDER, self.schema), {"key": work.name_key}
        )
        return None if answer is None else claims.Holder(*answer)


def _moved(work: claims.Work) -> str:
    """Return the states in which a row with more attempts has no need of a rescue copy.

    A row that is ``sent`` again after a claim was given back needs it. So does the run of a
    copy that died with its worker, when the broker delivers that copy once more.
    """
    if work.seen is None:
        return ""
    return "retrying failed" if work.again else "running retrying failed"


def _origin(work: claims.Work) -> dict[str, str | None]:
    job, period = work.origin or (None, None)
    return {"origin_job": job, "origin_period": period}


def _parameters(work: claims.Work) -> dict[str, Any]:
    return {
        "job": work.job,
        "period": work.period,
        "due_at": work.due_at,
        "name_key": work.name_key,
        "task": work.task,
        "task_id": work.task_id,
        "entry": work.entry,
        "node": work.node,
        "term": work.term,
    }


def _storable(text: str | None) -> str | None:
    # What an exception says may be anything, and must not keep its own outcome from being
    # recorded: PostgreSQL stores neither NUL nor half a surrogate pair.
    if text is None:
        return None
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def _row(answer: Any) -> claims.Row:
    return claims.Row(
        **{field.name: getattr(answer, field.name) for field in dataclasses.fields(claims.Row)}
    )

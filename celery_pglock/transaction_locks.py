"""The locks of a transaction-level run, taken as the first thing in its transaction.

The transaction begins READ COMMITTED; both transaction-level locks are tried; and *in a
statement of its own* follows the question whether the claim is still ours. Asked together with
the locks it would be answered from a snapshot that is older than they are, and a period that
another attempt finished in between would be run again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final, Literal

from celery_pglock import claims, ledger, locks, sessions

BEGIN: Final = (b"begin isolation level read committed",)
# Where somebody else begins it, on a connection that was not made for this: without the second
# the lock of a killed worker lasts until its statement has ended.
BEGUN: Final = (
    b"set transaction isolation level read committed",
    b"set local client_connection_check_interval = 500",
)

# Through a pooler nothing may be SET for longer than the transaction.
_LOCK: Final = b"""
with l as materialized (
 select case when %(run_key)s::bigint is null then true
  else pg_catalog.pg_try_advisory_xact_lock(%(run_key)s::bigint) end as run
), n as materialized (
 select case when run then pg_catalog.pg_try_advisory_xact_lock(%(name_key)s::bigint) end as name
 from l
)
select l.run, n.name,
 pg_catalog.set_config('application_name', %(application)s::text, true) as named,
 pg_catalog.set_config('idle_in_transaction_session_timeout', '0', true) as may_idle
from l cross join n
"""

# A run lock that is taken although the claim is ours: another claim looks at this period and
# has it for the length of its statement. It will find our claim and give way, so we must not;
# but we have to be done well within the time that protects a claim without locks.
_LOOKED_AT: Final = 1.0
_POLL: Final = 0.01

Records = ledger.Ledger | locks.NameLockOnly
Refusal = Literal["running", "held"]


def take(
    session: sessions.Session,
    records: Records,
    work: claims.Work,
    claim: uuid.UUID,
    opening: Sequence[bytes] = BEGIN,
) -> Refusal | None:
    """Begin the transaction and take the locks; None when all is ours.

    ``running``: the period is in somebody else's hands; ``held``: the lock name is. In both
    cases the transaction has been rolled back.

    Args:
        session: a session in no transaction.
        records: the ledger, or what stands for it.
        work: what is to be run.
        claim: under which claim.
        opening: the first statements of the transaction.

    Raises:
        psycopg.Error: the session is broken.
    """
    deadline = time.monotonic() + _LOOKED_AT
    while (refusal := _try(session, records, work, claim, opening)) is not None:
        session.execute(b"rollback")
        if refusal != "looked at" or time.monotonic() > deadline:
            return "held" if refusal == "held" else "running"
        time.sleep(_POLL)
    return None


def _try(
    session: sessions.Session,
    records: Records,
    work: claims.Work,
    claim: uuid.UUID,
    opening: Sequence[bytes],
) -> Literal["running", "held", "looked at"] | None:
    with session.connection.pipeline():
        for statement in opening:
            session.cursor().execute(statement)
        locked = session.cursor().execute(
            _LOCK,
            {
                "run_key": work.run_key,
                "name_key": work.name_key,
                "application": work.application,
            },
        )
        mine = _ask_whose(session, records, work, claim)
    run, name, *_ = locked.fetchone() or (False, False)
    if not mine():
        return "running"
    if not run:
        return "looked at"
    return None if name else "held"


def _ask_whose(
    session: sessions.Session, records: Records, work: claims.Work, claim: uuid.UUID
) -> Callable[[], bool]:
    if not isinstance(records, ledger.Ledger) or work.period is None:
        return lambda: True
    asked = records.ask_whose(session, work, claim)
    return lambda: asked.fetchone() is not None

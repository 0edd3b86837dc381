"""What can come between a statement's snapshot and its lock, one interleaving at a time.

Each rule is shown twice: as the package keeps it, and broken in the way that looks right, where
the same judgement has to fail. Ordinary load misses most of the broken ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.rows import namedtuple_row

from celery_pglock import (
    attempts,
    claims,
    errors,
    execution,
    ledger,
    sessions,
    statements,
    transaction_locks,
    working_transactions,
)
from tests.integration.workbench import (
    PERIOD,
    Gate,
    Sessions,
    advisory_locks,
    age,
    in_thread,
    replaced,
    row,
    terminate,
    work,
)
from tests.support.databases import Database
from tests.support.processes import eventually

LEDGER = ledger.Ledger()
LEVELS: list[sessions.Level] = ["session", "transaction"]
RUN_LOCK = {
    "session": b"pg_catalog.pg_try_advisory_lock(%(run_key)s::bigint)",
    "transaction": b"pg_catalog.pg_try_advisory_xact_lock(%(run_key)s::bigint)",
}
NAME_LOCK = {level: lock.replace(b"run_key", b"name_key") for level, lock in RUN_LOCK.items()}

both_levels = pytest.mark.parametrize("level", LEVELS)


class RanTwice(AssertionError):
    """A period was, or would be, run a second time."""


def use_claim(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(statements, "claim", lambda *_: text)


def run_once(session: sessions.Session, wanted: claims.Work) -> uuid.UUID:
    """Claim, work and settle as `done`, at the level of the session."""
    claimed = LEDGER.claim(session, wanted, claim=uuid.uuid4())
    assert isinstance(claimed, claims.Claimed)
    if session.level == "session":
        assert LEDGER.settle(session, wanted, claimed.claim, "done")
    else:
        transaction = working_transactions.WorkingTransaction(
            session, LEDGER, wanted, claimed.claim
        )
        assert transaction.begin() is None
        assert transaction.complete()
    return claimed.claim


def insert_row(database: Database, status: str) -> None:
    database.rows(
        "insert into pglock.job_runs (job, period, status, attempts, claim, backend_pid, started_at)"
        " values ('app:report', %s, %s, 1, gen_random_uuid(), 1, now() - interval '1 hour')",
        PERIOD,
        status,
    )


def judge_closed(answer: claims.Claimed | claims.Refused, database: Database) -> None:
    """Raise unless the answer is a refusal and the row is still the rival's `done`."""
    if isinstance(answer, claims.Claimed) or row(database, "status") != "done":
        raise RanTwice
    assert answer.kind == "closed"
    assert answer.before is not None
    assert answer.before.status == "done"


# --- between the snapshot and the lock of a claim --------------------------------------------


def claim_late(
    database: Database,
    lock_sessions: Sessions,
    level: sessions.Level,
    spoil: Callable[[bytes], bytes] = lambda text: text,
) -> claims.Claimed | claims.Refused:
    """Claim with a statement that takes its lock only after a rival has run the period."""
    ours, rivals = (lock_sessions.open(database.url, level) for _ in range(2))
    gate = Gate(database)
    text = gate.before(spoil(statements.claim("pglock", level)), RUN_LOCK[level])
    with pytest.MonkeyPatch.context() as patch:
        use_claim(patch, text)
        with in_thread(lambda: LEDGER.claim(ours, work(), claim=uuid.uuid4()), gate) as answer:
            gate.wait_for_arrival()
            patch.undo()
            run_once(rivals, work())
            gate.open()
            return answer.result(10)


@both_levels
@pytest.mark.parametrize("status", ["", "sent", "running", "retrying", "failed"])
def test_a_period_done_between_snapshot_and_lock_is_closed(
    database: Database, lock_sessions: Sessions, level: sessions.Level, status: str
) -> None:
    if status:
        insert_row(database, status)
    answer = claim_late(database, lock_sessions, level)
    judge_closed(answer, database)
    assert not advisory_locks(database)


@both_levels
def test_control_a_snapshot_that_admits_runs_a_done_period_again(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> None:
    """`NOT EXISTS (SELECT … done)` in the claim, and an upsert that takes whatever it finds."""

    def admit_by_snapshot(text: bytes) -> bytes:
        start = text.index(b"\n where not (r.status in")
        return text[:start] + text[text.index(b"\n returning r.status") :]

    answer = claim_late(database, lock_sessions, level, admit_by_snapshot)
    with pytest.raises(RanTwice):
        judge_closed(answer, database)


# --- one key instead of two ------------------------------------------------------------------


def claim_under_another_name(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> claims.Claimed | claims.Refused:
    """Claim a period that a run of the release before holds, which calls the lock otherwise."""
    ours, rivals = (lock_sessions.open(database.url, level) for _ in range(2))
    claimed = LEDGER.claim(rivals, work(name="old"), claim=uuid.uuid4())
    assert isinstance(claimed, claims.Claimed)
    if level == "session":
        return LEDGER.claim(ours, work(name="new"), claim=uuid.uuid4())
    transaction = working_transactions.WorkingTransaction(
        rivals, LEDGER, work(name="old"), claimed.claim
    )
    assert transaction.begin() is None
    age(database)  # the time that protects the claim until its locks are taken is over
    answer = LEDGER.claim(ours, work(name="new"), claim=uuid.uuid4())
    rivals.execute(b"rollback")
    return answer


def judge_running(answer: claims.Claimed | claims.Refused) -> None:
    if isinstance(answer, claims.Claimed):
        raise RanTwice
    assert answer.kind == "running"


def test_a_period_that_is_run_under_another_lock_name_is_running(
    database: Database, lock_sessions: Sessions
) -> None:
    judge_running(claim_under_another_name(database, lock_sessions, "session"))
    assert row(database, "attempts", "lost_attempts") == (1, 0)


def test_control_the_name_lock_alone_takes_a_live_run_for_dead(
    database: Database, lock_sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = statements.claim("pglock", "session")
    use_claim(monkeypatch, replaced(text, RUN_LOCK["session"], b"true"))
    with pytest.raises(RanTwice):
        judge_running(claim_under_another_name(database, lock_sessions, "session"))


# --- a finish that comes late ----------------------------------------------------------------


def finish_late(database: Database, lock_sessions: Sessions, status: claims.Status) -> bool:
    """Settle a claim whose session was ended and whose period another attempt is running."""
    ours, rivals, third = (lock_sessions.open(database.url) for _ in range(3))
    claimed = LEDGER.claim(ours, work(), claim=uuid.uuid4())
    assert isinstance(claimed, claims.Claimed)
    terminate(database, ours.pid)
    taken = LEDGER.claim(rivals, work(task_id="m-2"), claim=uuid.uuid4())
    assert isinstance(taken, claims.Claimed)
    assert (taken.attempt, taken.lost_attempts) == (2, 1)
    return LEDGER.settle(third, work(), claimed.claim, status)


def judge_untouched(database: Database, *, settled: bool) -> None:
    if settled or row(database, "status", "task_id", "finished_at") != ("running", "m-2", None):
        raise RanTwice


@pytest.mark.parametrize("status", ["done", "failed", "retrying"])
def test_a_late_finisher_leaves_another_attempt_alone(
    database: Database, lock_sessions: Sessions, status: claims.Status
) -> None:
    judge_untouched(database, settled=finish_late(database, lock_sessions, status))


def test_control_a_finish_without_fence_ends_another_attempt(
    database: Database, lock_sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfenced = statements.SETTLE_ONLY.replace(" and claim = %(claim)s::uuid", "")
    assert unfenced != statements.SETTLE_ONLY
    monkeypatch.setattr(statements, "SETTLE_ONLY", unfenced)
    with pytest.raises(RanTwice):
        judge_untouched(database, settled=finish_late(database, lock_sessions, "done"))


def test_the_second_of_two_finishes_changes_nothing(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    claim = run_once(session, work())
    before = row(database, "status", "finished_at", "reason")
    assert not LEDGER.settle(session, work(), claim, "failed", reason="late")
    assert row(database, "status", "finished_at", "reason") == before
    assert LEDGER.settled_as(session, work(), claim) == "done"


# --- between the claim and the locks of the working transaction ------------------------------


def begun(
    session: sessions.Session, wanted: claims.Work, claimed: claims.Claimed | claims.Refused
) -> working_transactions.WorkingTransaction | str:
    """Take the locks of a claim; return what refused it, if something did."""
    assert isinstance(claimed, claims.Claimed)
    transaction = working_transactions.WorkingTransaction(session, LEDGER, wanted, claimed.claim)
    return transaction.begin() or transaction


@pytest.mark.parametrize("max_lost", [0, 3])
def test_a_copy_between_claim_and_locks_is_refused_and_the_period_runs(
    database: Database, lock_sessions: Sessions, max_lost: int
) -> None:
    wanted = work(max_lost=max_lost)
    ours, others = (lock_sessions.open(database.url, "transaction") for _ in range(2))
    claimed = LEDGER.claim(ours, wanted, claim=uuid.uuid4())
    copy = LEDGER.claim(others, wanted, claim=uuid.uuid4())
    assert isinstance(copy, claims.Refused)
    assert copy.kind == "running"
    transaction = begun(ours, wanted, claimed)
    assert isinstance(transaction, working_transactions.WorkingTransaction)
    assert transaction.complete()
    assert row(database, "status", "attempts", "lost_attempts") == ("done", 1, 0)


@pytest.mark.parametrize(("max_lost", "status"), [(0, "failed"), (3, "running")])
def test_control_without_grace_the_copy_takes_the_claimer_for_dead(
    database: Database,
    lock_sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    max_lost: int,
    status: str,
) -> None:
    text = statements.claim("pglock", "transaction")
    assert text.count(b"interval '2 s'") == 2
    use_claim(monkeypatch, text.replace(b"interval '2 s'", b"interval '0 seconds'"))
    wanted = work(max_lost=max_lost)
    ours, others = (lock_sessions.open(database.url, "transaction") for _ in range(2))
    claimed = LEDGER.claim(ours, wanted, claim=uuid.uuid4())
    LEDGER.claim(others, wanted, claim=uuid.uuid4())
    assert begun(ours, wanted, claimed) == "running"  # although nobody had died
    assert row(database, "status", "lost_attempts") == (status, 1)


def test_a_claimer_that_is_late_for_its_locks_is_refused_and_rolls_back(
    database: Database, lock_sessions: Sessions
) -> None:
    ours, rivals = (lock_sessions.open(database.url, "transaction") for _ in range(2))
    claimed = LEDGER.claim(ours, work(), claim=uuid.uuid4())
    age(database)
    taken = LEDGER.claim(rivals, work(), claim=uuid.uuid4())
    assert isinstance(taken, claims.Claimed)
    assert (taken.attempt, taken.lost_attempts) == (2, 1)
    assert begun(ours, work(), claimed) == "running"
    assert not advisory_locks(database)
    assert not ours.connection.info.transaction_status
    transaction = begun(rivals, work(), taken)
    assert isinstance(transaction, working_transactions.WorkingTransaction)
    assert transaction.complete()


def start_late(
    database: Database, lock_sessions: Sessions, lock_text: Callable[[Gate], bytes]
) -> Any:
    """Take the locks of a claim only after a rival, taking us for dead, has run the period."""
    ours, rivals = (lock_sessions.open(database.url, "transaction") for _ in range(2))
    claimed = LEDGER.claim(ours, work(), claim=uuid.uuid4())
    assert isinstance(claimed, claims.Claimed)
    gate = Gate(database)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction_locks, "_LOCK", lock_text(gate))
        transaction = working_transactions.WorkingTransaction(ours, LEDGER, work(), claimed.claim)
        with in_thread(transaction.begin, gate) as refusal:
            gate.wait_for_arrival()
            patch.undo()
            age(database)
            run_once(rivals, work())
            gate.open()
            return refusal.result(10)


def test_whose_the_claim_is_is_asked_after_the_locks(
    database: Database, lock_sessions: Sessions
) -> None:
    text = transaction_locks._LOCK  # noqa: SLF001 - the very text
    refusal = start_late(
        database, lock_sessions, lambda gate: gate.before(text, RUN_LOCK["transaction"])
    )
    assert refusal == "running"
    assert row(database, "status", "attempts") == ("done", 2)


def test_control_asked_in_the_same_statement_as_the_locks_it_is_answered_wrongly(
    database: Database, lock_sessions: Sessions
) -> None:
    ours, rivals = (lock_sessions.open(database.url, "transaction") for _ in range(2))
    claimed = LEDGER.claim(ours, work(), claim=uuid.uuid4())
    assert isinstance(claimed, claims.Claimed)
    gate = Gate(database)
    question = statements.statement(statements.STILL_MINE, "pglock")
    text = replaced(
        gate.before(transaction_locks._LOCK, RUN_LOCK["transaction"]),  # noqa: SLF001
        b"select l.run, n.name,",
        b"select l.run, n.name, exists (" + question + b") as mine,",
    )
    parameters = {
        "run_key": work().run_key,
        "name_key": work().name_key,
        "application": "x",
        "job": work().job,
        "period": PERIOD,
        "claim": claimed.claim,
    }

    def lock_and_ask() -> Any:
        ours.execute(b"begin")
        return ours.connection.execute(text, parameters).fetchone()

    with in_thread(lock_and_ask, gate) as answer:
        gate.wait_for_arrival()
        age(database)
        run_once(rivals, work())
        gate.open()
        found = answer.result(10)
    ours.execute(b"rollback")
    got_both, mine = found[:2], found[2]
    assert got_both == (True, True)
    assert mine, "the control has to be wrong: the period is done"
    assert row(database, "status") == "done"


def admitted(sessions_: list[sessions.Session], begin: bytes) -> list[bool]:
    """Take the locks of one run on each session, and return who got them."""
    got = []
    for session in sessions_:
        session.execute(begin)
        answer = session.connection.execute(
            transaction_locks._LOCK,  # noqa: SLF001 - the very text
            {"run_key": work().run_key, "name_key": work().name_key, "application": "x"},
        ).fetchone()
        assert answer is not None
        got.append(bool(answer[0] and answer[1]))
    return got


def test_the_locks_of_a_transaction_last(database: Database, lock_sessions: Sessions) -> None:
    opened = [lock_sessions.open(database.url, "transaction") for _ in range(2)]
    assert admitted(opened, b"begin") == [True, False]


def test_control_the_locks_of_a_transaction_do_not_last_in_autocommit(
    database: Database, lock_sessions: Sessions
) -> None:
    opened = [lock_sessions.open(database.url, "transaction") for _ in range(2)]
    assert admitted(opened, b"select 1") == [True, True]


def test_a_claim_that_only_looks_does_not_make_both_give_way(
    database: Database, lock_sessions: Sessions
) -> None:
    """One has claimed and wants its locks, while the other's claim holds the run lock.

    The other will find that the period is being run, and give way. If the first gave way too,
    nobody would run it.
    """
    first, other = (
        execution.Executor(
            stack=lock_sessions.stack(database.url, "transaction", application=name),
            records=LEDGER,
            terms=attempts.Terms(
                classify=lambda error: claims.Verdict(status="failed", error=str(error))
            ),
        )
        for name in ("first", "other")
    )
    snapshot, looks = Gate(database, 1001), Gate(database, 1002)
    text = statements.claim("pglock", "transaction")
    text = snapshot.before(text, RUN_LOCK["transaction"])
    text = looks.before(text, NAME_LOCK["transaction"])
    refused = (
        "select 1 from pg_stat_activity where application_name = 'first' and state = 'idle'"
        " and query = 'rollback'"
    )

    def run(executor: execution.Executor) -> Any:
        return executor.execute(work(), lambda run: run.attempt)

    with pytest.MonkeyPatch.context() as patch:
        use_claim(patch, text)
        with in_thread(lambda: run(other), snapshot, looks) as others:
            snapshot.wait_for_arrival()
            patch.undo()
            claimed_by_first = "select 1 from pglock.job_runs where status = 'running'"
            held = Gate(database, 1003)
            lock = held.before(transaction_locks._LOCK, RUN_LOCK["transaction"])  # noqa: SLF001
            patch.setattr(transaction_locks, "_LOCK", lock)
            with in_thread(lambda: run(first), held) as firsts:
                held.wait_for_arrival()  # claimed, and about to take the locks
                assert database.rows(claimed_by_first)
                snapshot.open()
                looks.wait_for_arrival()  # the other holds the run lock
                held.open()
                eventually(lambda: database.rows(refused), what="the first is refused")
                looks.open()
                outcomes = [firsts.result(10), others.result(10)]
    assert [type(outcome) for outcome in outcomes] == [attempts.Ran, claims.Refused]
    assert row(database, "status", "attempts", "lost_attempts") == ("done", 1, 0)


# --- a session that was lost while its claim was answered ------------------------------------


def test_the_same_claim_again_is_the_same_attempt(
    database: Database, lock_sessions: Sessions
) -> None:
    claim = uuid.uuid4()
    for _ in range(2):
        session = lock_sessions.open(database.url)
        answer = LEDGER.claim(session, work(max_lost=0), claim=claim)
        assert isinstance(answer, claims.Claimed)
        assert (answer.attempt, answer.lost_attempts) == (1, 0)
        terminate(database, session.pid)


def test_control_another_claim_is_a_crash_of_the_one_before(
    database: Database, lock_sessions: Sessions
) -> None:
    for expected in [(1, 0), (2, 1)]:
        session = lock_sessions.open(database.url)
        answer = LEDGER.claim(session, work(), claim=uuid.uuid4())
        assert isinstance(answer, claims.Claimed)
        assert (answer.attempt, answer.lost_attempts) == expected
        terminate(database, session.pid)


# --- a claim that fails half-way -------------------------------------------------------------


@both_levels
def test_a_claim_that_fails_under_its_locks_leaves_none(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> None:
    database.rows(
        "create function pglock.refuse() returns trigger language plpgsql as"
        " $$ begin raise 'no'; end $$"
    )
    database.rows(
        "create trigger refuse before insert on pglock.job_runs"
        " for each row execute function pglock.refuse()"
    )
    session = lock_sessions.open(database.url, level)
    with pytest.raises(psycopg.errors.RaiseException):
        LEDGER.claim(session, work(), claim=uuid.uuid4())
    assert session.connection.closed
    eventually(lambda: not advisory_locks(database), 1.0, "no lock is left")


def test_control_an_error_in_the_statement_leaves_its_session_locks(database: Database) -> None:
    connection = database.connect(row_factory=namedtuple_row)
    with pytest.raises(psycopg.errors.DivisionByZero):
        connection.execute("select 1 / (not pg_try_advisory_lock(7))::int")
    assert [key for key, _ in advisory_locks(database)] == [7]


def test_a_session_never_asks_twice_for_a_key(database: Database, lock_sessions: Sessions) -> None:
    session = lock_sessions.open(database.url)
    assert isinstance(LEDGER.claim(session, work(), claim=uuid.uuid4()), claims.Claimed)
    with pytest.raises(errors.LockLost, match="a second time"):
        LEDGER.claim(session, work(), claim=uuid.uuid4())

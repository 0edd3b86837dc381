"""The life of a row: claimed, refused, taken over, settled, given back, skipped, postponed."""

from __future__ import annotations

import datetime as dt
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from celery_pglock import claims, errors, ledger, sessions, statements, working_transactions
from tests.integration.workbench import (
    PERIOD,
    Gate,
    Sessions,
    advisory_locks,
    in_thread,
    replaced,
    row,
    terminate,
    work,
)
from tests.support.databases import Database
from tests.support.processes import eventually
from tests.support.servers import TestedPostgres

LEDGER = ledger.Ledger()
HOUR = dt.timedelta(hours=1)

both_levels = pytest.mark.parametrize("level", ["session", "transaction"])


def claim(
    session: sessions.Session, wanted: claims.Work, window: claims.Window | None = None
) -> claims.Claimed | claims.Refused:
    return LEDGER.claim(session, wanted, claim=uuid.uuid4(), window=window)


def claimed(session: sessions.Session, wanted: claims.Work | None = None) -> claims.Claimed:
    answer = claim(session, wanted or work())
    assert isinstance(answer, claims.Claimed), answer
    return answer


def refused(session: sessions.Session, wanted: claims.Work | None = None) -> claims.Refused:
    answer = claim(session, wanted or work())
    assert isinstance(answer, claims.Refused), answer
    assert not session.held
    return answer


def die(database: Database, session: sessions.Session) -> None:
    """End a session that holds a claim, without an outcome."""
    terminate(database, session.pid)
    session.close()


def insert(database: Database, status: str, reason: str | None = None, **columns: object) -> None:
    columns = {"job": "app:report", "period": PERIOD, "status": status, "reason": reason, **columns}
    database.rows(
        f"insert into pglock.job_runs ({', '.join(columns)})"  # noqa: S608 - names of this file
        f" values ({', '.join(['%s'] * len(columns))})",
        *columns.values(),
    )


def everything(database: Database) -> list[object]:
    return list(database.rows("select * from pglock.job_runs order by job, period"))


# --- claimed --------------------------------------------------------------------------------


def test_a_claim_of_a_new_period_writes_the_row_and_holds_both_locks(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    due = dt.datetime(2026, 11, 29, 3, tzinfo=dt.UTC)
    wanted = work(due_at=due, entry="nightly", term=7)
    answer = claimed(session, wanted)
    assert (answer.attempt, answer.lost_attempts, answer.before) == (1, 0, None)
    assert row(
        database,
        *("status", "attempts", "lost_attempts", "postponements", "claim", "name_key", "task"),
        *("task_id", "entry", "node", "backend_pid", "term", "due_at", "finished_at", "reason"),
    ) == (
        *("running", 1, 0, 0, answer.claim, wanted.name_key, "report"),
        *("m-1", "nightly", "w1:1", session.pid, 7, due, None, None),
    )
    assert row(database, "started_at between now() - interval '10 s' and now()")
    assert session.held == wanted.lock_keys
    assert advisory_locks(database) == [(key, session.pid) for key in sorted(wanted.lock_keys)]
    assert database.rows(
        "select application_name, state, backend_xid, backend_xmin from pg_stat_activity"
        " where pid = %s",
        session.pid,
    ) == [("pglock:report@w1:1", "idle", None, None)]


def test_a_claim_at_transaction_level_is_committed_and_holds_nothing(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url, "transaction")
    assert claimed(session).attempt == 1
    assert row(database, "status", "attempts", "backend_pid") == ("running", 1, None)
    assert not session.held
    assert not advisory_locks(database)
    assert session.connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


@both_levels
@pytest.mark.parametrize(
    ("status", "reason"),
    [("sent", None), ("retrying", "retry"), ("failed", "error"), ("failed", None)],
)
def test_what_is_open_can_be_claimed_and_is_no_crash(
    database: Database,
    lock_sessions: Sessions,
    level: sessions.Level,
    status: str,
    reason: str | None,
) -> None:
    insert(
        database, status, reason, attempts=4, lost_attempts=2, task_id="m-0", retry_at="2030-01-01"
    )
    answer = claimed(lock_sessions.open(database.url, level))
    assert (answer.attempt, answer.lost_attempts) == (5, 2)
    assert answer.before is not None
    before = answer.before
    assert (before.status, before.reason, before.task_id, before.attempts) == (
        *(status, reason, "m-0", 4),
    )
    assert row(database, "status", "reason", "task_id", "retry_at") == (
        "running",
        None,
        "m-1",
        None,
    )


def test_what_a_message_does_not_know_is_kept_from_the_beats_row(
    database: Database, lock_sessions: Sessions
) -> None:
    insert(database, "sent", entry="nightly", due_at="2026-11-29 03:00Z", term=7)
    claimed(lock_sessions.open(database.url), work(due_at=None))
    due = dt.datetime(2026, 11, 29, 3, tzinfo=dt.UTC)
    assert row(database, "entry", "due_at", "term") == ("nightly", due, 7)


# --- refused --------------------------------------------------------------------------------


@both_levels
@pytest.mark.parametrize(
    ("status", "reason"),
    [("done", None), ("skipped", "overlap"), ("missed", None), ("failed", "exhausted")],
)
def test_what_is_settled_for_good_is_closed(
    database: Database,
    lock_sessions: Sessions,
    level: sessions.Level,
    status: str,
    reason: str | None,
) -> None:
    insert(database, status, reason)
    before = everything(database)
    answer = refused(lock_sessions.open(database.url, level))
    assert answer.kind == "closed"
    assert answer.before is not None
    assert (answer.before.status, answer.before.reason) == (status, reason)
    assert everything(database) == before
    assert not advisory_locks(database)


def test_a_period_that_is_being_run_is_refused_with_its_row(
    database: Database, lock_sessions: Sessions
) -> None:
    holder, other = (lock_sessions.open(database.url) for _ in range(2))
    answer = claimed(holder)
    before = everything(database)
    refusal = refused(other, work(name="another name", task_id="m-2"))
    assert refusal.kind == "running"
    assert refusal.before is not None
    assert (refusal.before.claim, refusal.before.backend_pid) == (answer.claim, holder.pid)
    assert everything(database) == before
    assert {pid for _, pid in advisory_locks(database)} == {holder.pid}


def test_a_taken_lock_name_is_refused_and_tells_who_has_it(
    database: Database, lock_sessions: Sessions
) -> None:
    holder, other = (lock_sessions.open(database.url) for _ in range(2))
    claimed(holder, work(job="app:nightly", task="nightly", task_id="m-9", node="w9:9"))
    refusal = refused(other)
    assert (refusal.kind, refusal.before) == ("held", None)
    assert row(database, "status") is None
    found = LEDGER.holder(other, work())
    assert found is not None
    assert (found.pid, found.application, found.job, found.period) == (
        *(holder.pid, "pglock:nightly@w9:9", "app:nightly", PERIOD),
    )
    assert (found.task_id, found.node, found.ours) == ("m-9", "w9:9", True)
    assert found.started_at == row(database, "started_at", job="app:nightly")
    # The run lock that was taken on the way has been given back.
    assert {pid for _, pid in advisory_locks(database)} == {holder.pid}


def test_a_lock_name_held_by_somebody_else_is_told_apart(
    database: Database, lock_sessions: Sessions
) -> None:
    stranger = database.connect(application_name="psql")
    stranger.execute("select pg_advisory_lock(%s)", [work().name_key])
    session = lock_sessions.open(database.url)
    assert refused(session).kind == "held"
    found = LEDGER.holder(session, work())
    assert found is not None
    assert (found.pid, found.application, found.job) == (stranger.info.backend_pid, "psql", None)
    assert not found.ours
    started = "select backend_start from pg_stat_activity where pid = %s"
    assert database.rows(started, found.pid) == [(found.session_since,)]
    stranger.close()
    eventually(lambda: LEDGER.holder(session, work()) is None, what="the lock is free")
    claimed(session)


@both_levels
@pytest.mark.parametrize("hours", [(-2, -1), (1, 2)])
def test_a_claim_outside_its_window_is_refused_with_the_servers_clock(
    database: Database, lock_sessions: Sessions, level: sessions.Level, hours: tuple[int, int]
) -> None:
    now = dt.datetime.now(dt.UTC)
    since, until = (now + hour * HOUR for hour in hours)
    session = lock_sessions.open(database.url, level)
    answer = claim(session, work(), (since, until))
    assert isinstance(answer, claims.Refused)
    assert answer.kind == "moved"
    assert answer.now is not None
    assert abs(answer.now - now) < dt.timedelta(seconds=10)
    assert row(database, "status") is None
    assert not advisory_locks(database)
    assert isinstance(claim(session, work(), (now - HOUR, now + HOUR)), claims.Claimed)


# --- taken over, and given up ----------------------------------------------------------------


def test_each_dead_attempt_is_counted(database: Database, lock_sessions: Sessions) -> None:
    for number in range(1, 4):
        session = lock_sessions.open(database.url)
        answer = claimed(session)
        assert (answer.attempt, answer.lost_attempts) == (number, number - 1)
        die(database, session)
    assert row(database, "status", "attempts", "lost_attempts") == ("running", 3, 2)


@both_levels
@pytest.mark.parametrize("max_lost", [0, 3])
def test_a_period_is_given_up_when_too_many_attempts_died(
    database: Database, lock_sessions: Sessions, level: sessions.Level, max_lost: int
) -> None:
    wanted = work(max_lost=max_lost)
    for number in range(1, max_lost + 2):
        if level == "session":
            session = lock_sessions.open(database.url)
            assert claimed(session, wanted).attempt == number
            die(database, session)
        else:
            session = lock_sessions.open(database.url, level)
            assert claimed(session, wanted).attempt == number
            database.rows("update pglock.job_runs set started_at = now() - interval '1 min'")
    last = lock_sessions.open(database.url, level)
    answer = refused(last, wanted)
    assert (answer.kind, answer.lost_attempts) == ("exhausted", max_lost + 1)
    assert row(database, "status", "reason", "attempts", "lost_attempts") == (
        *("failed", "exhausted", max_lost + 1, max_lost + 1),
    )
    assert row(database, "finished_at") is not None
    assert not advisory_locks(database)
    assert refused(last, wanted).kind == "closed"


def test_deaths_count_whatever_came_after_them(database: Database, lock_sessions: Sessions) -> None:
    insert(database, "failed", "error", attempts=5, lost_attempts=2)
    assert refused(lock_sessions.open(database.url), work(max_lost=1)).kind == "exhausted"
    assert row(database, "attempts", "lost_attempts") == (5, 2)


def test_a_failure_is_no_death(database: Database, lock_sessions: Sessions) -> None:
    session = lock_sessions.open(database.url)
    for number in range(1, 4):
        answer = claimed(session, work(max_lost=0))
        assert (answer.attempt, answer.lost_attempts) == (number, 0)
        assert LEDGER.settle(session, work(), answer.claim, "failed", reason="error")


# --- settled --------------------------------------------------------------------------------


@both_levels
@pytest.mark.parametrize("status", ["done", "failed", "retrying"])
def test_an_outcome_is_recorded_and_the_locks_given_back(
    database: Database, lock_sessions: Sessions, level: sessions.Level, status: claims.Status
) -> None:
    session = lock_sessions.open(database.url, level)
    answer = claimed(session)
    retry_in = 60.0 if status == "retrying" else None
    assert LEDGER.settle(
        session, work(), answer.claim, status, reason="why", error="what", retry_in=retry_in
    )
    assert row(database, "status", "reason", "error", "claim", "attempts") == (
        *(status, "why", "what", answer.claim, 1),
    )
    assert (row(database, "finished_at") is None) == (status == "retrying")
    seconds = row(database, "extract(epoch from retry_at - now())::float")
    assert seconds is None if retry_in is None else 30 < seconds <= 60
    assert LEDGER.settled_as(session, work(), answer.claim) == status
    assert not session.held
    assert not advisory_locks(database)
    if level == "session":
        name = "select application_name from pg_stat_activity where pid = %s"
        assert database.rows(name, session.pid) == [("pglock:idle@w1:1",)]


def test_an_outcome_is_recorded_whatever_its_error_says(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    answer = claimed(session)
    assert LEDGER.settle(session, work(), answer.claim, "failed", error="a\0b \ud800 %s ü")
    assert row(database, "status", "error") == ("failed", r"a\x00b \ud800 %s ü")


@pytest.mark.parametrize("status", ["sent", "retrying", "done", "failed", "skipped", "missed"])
def test_only_a_running_row_is_settled(
    database: Database, lock_sessions: Sessions, status: str
) -> None:
    session = lock_sessions.open(database.url, "transaction")
    answer = claimed(session)
    database.rows("update pglock.job_runs set status = %s", status)
    before = everything(database)
    assert not LEDGER.settle(session, work(), answer.claim, "done")
    assert everything(database) == before


def test_a_claim_of_somebody_else_is_not_settled(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url, "transaction")
    claimed(session)
    before = everything(database)
    assert not LEDGER.settle(session, work(), uuid.uuid4(), "done")
    assert LEDGER.settled_as(session, work(), uuid.uuid4()) is None
    assert everything(database) == before


def test_locks_that_the_server_has_forgotten_are_noticed_when_settling(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    answer = claimed(session)
    session.connection.execute("select pg_advisory_unlock_all()")
    # Nobody has taken the period over, so it is ours to settle; but the session is not trusted.
    assert LEDGER.settle(session, work(), answer.claim, "done")
    assert session.connection.closed
    assert row(database, "status") == "done"


def test_locks_that_the_server_has_forgotten_and_another_took_are_lost(
    database: Database, lock_sessions: Sessions
) -> None:
    session, other = (lock_sessions.open(database.url) for _ in range(2))
    answer = claimed(session)
    session.connection.execute("select pg_advisory_unlock_all()")
    assert claimed(other, work(task_id="m-2")).attempt == 2
    with pytest.raises(errors.LockLost):
        LEDGER.settle(session, work(), answer.claim, "done")
    assert session.connection.closed
    assert row(database, "status", "task_id") == ("running", "m-2")


def claim_between_the_unlocks(
    database: Database, lock_sessions: Sessions, last_unlock: bytes
) -> claims.Claimed | claims.Refused:
    """Claim the period again while its run stands before the last of its two unlocks."""
    holder, other = (lock_sessions.open(database.url) for _ in range(2))
    answer = claimed(holder)
    gate = Gate(database)
    text = gate.before(statements.SETTLE_AND_UNLOCK.encode(), last_unlock).decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statements, "SETTLE_AND_UNLOCK", text)
        settle = in_thread(lambda: LEDGER.settle(holder, work(), answer.claim, "done"), gate)
        with settle as settled:
            gate.wait_for_arrival()
            found = claim(other, work())
            gate.open()
            assert settled.result(10)
    return found


UNLOCK_NAME = b"pg_catalog.pg_advisory_unlock(%(name_key)s::bigint)"
UNLOCK_RUN = b"pg_catalog.pg_advisory_unlock(%(run_key)s::bigint)"


def test_the_name_lock_is_given_back_first(database: Database, lock_sessions: Sessions) -> None:
    answer = claim_between_the_unlocks(database, lock_sessions, UNLOCK_RUN)
    assert isinstance(answer, claims.Refused)
    assert answer.kind == "running"


def test_control_the_other_order_says_that_another_run_has_the_lock_name(
    database: Database, lock_sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = statements.SETTLE_AND_UNLOCK.encode()
    text = replaced(text, UNLOCK_NAME, b"pg_catalog.pg_advisory_unlock(%(KEY)s::bigint)")
    text = replaced(text, UNLOCK_RUN, UNLOCK_NAME).replace(b"KEY", b"run_key")
    monkeypatch.setattr(statements, "SETTLE_AND_UNLOCK", text.decode())
    answer = claim_between_the_unlocks(database, lock_sessions, UNLOCK_NAME)
    assert isinstance(answer, claims.Refused)
    assert answer.kind == "held"  # by the very run of this period, and so as an overlap


# --- given back, skipped, postponed ----------------------------------------------------------


def test_a_claim_that_is_given_back_is_neither_run_nor_dead(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url, "transaction")
    answer = claimed(session)
    LEDGER.give_back(session, work(), uuid.uuid4(), "not ours")
    assert row(database, "status") == "running"
    LEDGER.give_back(session, work(), answer.claim, "lock taken before start")
    assert row(database, "status", "claim", "attempts", "lost_attempts", "reason") == (
        *("sent", None, 1, 0, "lock taken before start"),
    )
    again = claimed(session)  # at once: its grace has ended with it
    assert (again.attempt, again.lost_attempts) == (2, 0)


def test_a_skip_writes_a_row_where_there_is_none(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    LEDGER.skip(session, work(entry="nightly", term=7), "overlap")
    assert row(database, "status", "reason", "task_id", "entry", "term", "attempts") == (
        *("skipped", "overlap", "m-1", "nightly", 7, 0),
    )
    assert row(database, "finished_at") is not None
    assert refused(session).kind == "closed"


@pytest.mark.parametrize(
    ("status", "after"),
    [
        ("sent", "skipped"),
        ("running", "running"),
        ("retrying", "retrying"),
        ("done", "done"),
        ("failed", "failed"),
        ("missed", "missed"),
    ],
)
def test_a_skip_leaves_what_is_more_than_sent_alone(
    database: Database, lock_sessions: Sessions, status: str, after: str
) -> None:
    insert(database, status, "before")
    LEDGER.skip(lock_sessions.open(database.url), work(), "overlap")
    reason = "overlap" if status == "sent" else "before"
    assert row(database, "status", "reason") == (after, reason)


def test_the_number_of_postponed_copies_only_grows(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    for number, expected in [(2, 2), (1, 2), (2, 2), (5, 5), (3, 5)]:
        LEDGER.postpone(session, work(), number, "held")
        assert row(database, "status", "postponements") == ("sent", expected)
    answer = claimed(session)
    assert answer.before is not None
    assert answer.before.postponements == 5
    LEDGER.postpone(lock_sessions.open(database.url), work(), 6, "held")
    assert row(database, "status", "postponements") == ("running", 6)


@pytest.mark.parametrize("status", ["done", "skipped", "missed"])
def test_a_postponed_copy_does_not_touch_a_settled_row(
    database: Database, lock_sessions: Sessions, status: str
) -> None:
    insert(database, status)
    before = everything(database)
    LEDGER.postpone(lock_sessions.open(database.url), work(), 1, "held")
    assert everything(database) == before


def test_the_period_of_a_message_is_known_from_its_row(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    assert LEDGER.period_of(session, "app:report", "m-1") is None
    for period in ("2026-11-28", "2026-11-29"):
        answer = claimed(session, work(period))
        LEDGER.settle(session, work(period), answer.claim, "failed")
    assert LEDGER.period_of(session, "app:report", "m-1") == "2026-11-29"
    assert LEDGER.period_of(session, "app:other", "m-1") is None
    assert LEDGER.period_of(session, "app:report", "m-2") is None


# --- the server's log ------------------------------------------------------------------------


def complaints(server: TestedPostgres, database: Database) -> list[str]:
    """Return what the server's log holds against this database's clients."""
    return [
        line
        for line in server.log().splitlines()
        if f"@{database.name}" in line and any(word in line for word in ("ERROR", "WARNING"))
    ]


@both_levels
def test_of_sixteen_claimants_one_wins_and_fifteen_are_told_so(
    database: Database,
    lock_sessions: Sessions,
    postgres_server: TestedPostgres,
    level: sessions.Level,
) -> None:
    claimants, rounds = 16, 50
    barrier = threading.Barrier(claimants, timeout=30)
    opened = [lock_sessions.open(database.url, level) for _ in range(claimants)]

    def compete(session: sessions.Session) -> list[str]:
        found = []
        for number in range(rounds):
            wanted = work(f"round-{number}", name=f"round-{number}")
            barrier.wait()
            answer = claim(session, wanted)
            barrier.wait()
            if isinstance(answer, claims.Claimed):
                found.append("claimed")
                assert LEDGER.settle(session, wanted, answer.claim, "done")
            else:
                found.append(answer.kind)
        return found

    with ThreadPoolExecutor(claimants) as pool:
        rows = list(pool.map(compete, opened))
    for answers in zip(*rows, strict=True):
        assert sorted(answers) == ["claimed", *["running"] * 15]
    assert database.rows(
        "select status, count(*), sum(attempts) from pglock.job_runs group by 1"
    ) == [("done", rounds, rounds)]
    assert not complaints(postgres_server, database)


def test_control_a_bare_insert_leaves_errors_in_the_servers_log(
    database: Database, postgres_server: TestedPostgres
) -> None:
    insert(database, "running")
    with pytest.raises(psycopg.errors.UniqueViolation):
        insert(database, "running")
    eventually(lambda: complaints(postgres_server, database), what="the server has logged it")


@both_levels
def test_a_row_that_is_being_written_does_not_keep_the_loser_waiting(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> None:
    holder, other = (lock_sessions.open(database.url, level) for _ in range(2))
    answer = claimed(holder)
    if level == "session":
        stranger = database.connect()
        stranger.execute("begin")
        stranger.execute("update pglock.job_runs set reason = 'open transaction'")
    else:
        transaction = working_transactions.WorkingTransaction(holder, LEDGER, work(), answer.claim)
        assert transaction.begin() is None
        assert LEDGER.settle(holder, work(), answer.claim, "done")  # and no COMMIT yet
        database.rows("select 1 from pglock.job_runs")
    started = time.monotonic()
    assert refused(other).kind == "running"
    assert time.monotonic() - started < 1
    holder.close()


def test_a_loser_releases_nothing(
    database: Database, lock_sessions: Sessions, postgres_server: TestedPostgres
) -> None:
    holder, loser, third = (lock_sessions.open(database.url) for _ in range(3))
    claimed(holder)
    same_name = work("2026-11-30")
    for _ in range(3):
        assert refused(loser).kind == "running"
        assert refused(loser, same_name).kind == "held"
    loser.close()
    assert refused(third).kind == "running"
    assert refused(third, same_name).kind == "held"
    assert {pid for _, pid in advisory_locks(database)} == {holder.pid}
    assert not complaints(postgres_server, database)


def test_control_an_unlock_of_what_is_not_held_is_in_the_servers_log(
    database: Database, postgres_server: TestedPostgres
) -> None:
    assert database.rows("select pg_advisory_unlock(%s)", work().name_key) == [(False,)]
    eventually(
        lambda: [line for line in complaints(postgres_server, database) if "own a lock" in line],
        what="the server has logged it",
    )


@pytest.mark.parametrize("template", ["SETTLE_ONLY", "SETTLE_AND_UNLOCK", "STILL_MINE", "RETURN"])
def test_a_run_finds_its_row_by_job_and_period(
    database: Database, lock_sessions: Sessions, template: str
) -> None:
    """The index of what is open is small, and full of dead entries while a backup is made."""
    database.rows(
        "insert into pglock.job_runs (job, period, status, claim) select 'app:report', i::text,"
        " 'done', gen_random_uuid() from generate_series(1, 20000) i"
    )
    database.rows("analyze pglock.job_runs")
    names = {
        "job": "app:report", "period": "5000", "claim": uuid.uuid4(), "status": "done",
        "reason": None, "error": None, "retry_in": None, "origin_job": None,
        "origin_period": None, "origin_reason": None, "name_key": 1, "run_key": 2,
        "application": "x",
    }  # fmt: skip
    text = statements.statement(getattr(statements, template), "pglock")
    session = lock_sessions.open(database.url)
    plan = "\n".join(str(line[0]) for line in session.rows(b"explain " + text, names))
    assert "job_runs_job_period_key" in plan
    assert "job_runs_open_idx" not in plan
    # What it would be otherwise.
    visible = text.replace(b"status || '' = 'running'", b"status = 'running'")
    assert visible != text
    plan = "\n".join(str(line[0]) for line in session.rows(b"explain " + visible, names))
    assert "job_runs_open_idx" in plan

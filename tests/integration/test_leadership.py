"""Leadership: one of many leads, hands over at once, and knows when it does not lead any more."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from celery_pglock import elections, errors, keys, leadership, migrating, table_names
from celery_pglock.demo.servers import PostgresServer
from tests.integration.workbench import Gate, advisory_locks, in_thread, replaced, terminate
from tests.support.databases import Database
from tests.support.processes import eventually

KEY = keys.from_name("app", "beat", "leader")
# A standby with this poll is woken by a notification, or the test fails.
LONG = 60.0


class Clock:
    """The monotonic clock, which can be put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


Stand = Callable[..., leadership.Leadership]


@pytest.fixture
def candidate(database: Database) -> Iterator[Stand]:
    """Makes candidates for the leadership of `app`; their sessions are closed at the end."""
    made: list[leadership.Leadership] = []

    def make(node: str = "a:1", **more: Any) -> leadership.Leadership:
        given: dict[str, Any] = {"namespace": "app", "poll": 0.05, "node": node, **more}
        target = given.pop("target", database.url)
        made.append(leadership.Leadership(target, **given))
        return made[-1]

    yield make
    for each in made:
        each.resign()


def elected(candidate: leadership.Leadership) -> elections.Elected:
    result = eventually(candidate.stand, what=f"{candidate.node} is elected")
    assert result is not None
    return result


def term_row(database: Database, *columns: str, namespace: str = "app") -> Any:
    ((*values,),) = database.rows(
        f"select {', '.join(columns)} from pglock.beat_terms where namespace = %s",  # noqa: S608
        namespace,
    )
    return values if len(values) > 1 else values[0]


def server_pid(candidate: leadership.Leadership) -> int:
    assert candidate._session is not None  # noqa: SLF001 - what the server knows it by
    return candidate._session.pid  # noqa: SLF001


# --- elections ------------------------------------------------------------------------------


def test_one_of_two_candidates_leads(database: Database, candidate: Stand) -> None:
    one, other = candidate("a:1"), candidate("b:2")
    won = one.stand()
    assert won is not None
    assert (won.term, won.before) == (1, None)
    assert one.leading
    assert one.held
    for _ in range(3):
        assert other.stand() is None
    assert not other.leading
    assert not other.held
    assert advisory_locks(database) == [(KEY, server_pid(one))]
    assert term_row(database, "term", "node", "backend_pid") == [1, "a:1", server_pid(one)]
    names = database.rows("select application_name from pg_stat_activity where pid > 0")
    assert ("pglock:leader:app@a:1",) in names
    assert ("pglock:standby:app@b:2",) in names


def test_the_term_grows_and_the_predecessor_is_named(database: Database, candidate: Stand) -> None:
    nodes = ["a:1", "b:2", "c:3"]
    for number, node in enumerate(nodes, start=1):
        beat = candidate(node)
        won = elected(beat)
        assert won.term == number
        if number > 1:
            assert won.before is not None
            assert (won.before.node, won.before.term) == (nodes[number - 2], number - 1)
            assert won.before.resigned_at is not None
            assert won.before.last_tick_at <= won.at
        assert beat.resign()
    beat = candidate("d:4")
    elected(beat)
    terminate(database, server_pid(beat))
    won = elected(candidate("e:5"))
    assert won.before is not None
    assert (won.before.node, won.before.term, won.before.resigned_at) == ("d:4", 4, None)


def test_what_was_missed_in_a_downtime_stays_so_for_every_leader_that_follows(
    database: Database, candidate: Stand
) -> None:
    """The first of them may die before it has been through it."""

    def lead() -> elections.Elected:
        beat = candidate()
        won = elected(beat)
        assert beat.resign()
        return won

    longest = candidate().longest_take_over
    assert lead().missed_until is None
    assert lead().missed_until is None
    last_tick = "update pglock.beat_terms set last_tick_at = clock_timestamp() - %s"
    database.rows(last_tick, longest / 2)
    assert lead().missed_until is None
    database.rows(last_tick, longest * 1.5)
    first = lead()
    assert first.missed_until == first.at
    assert [lead().missed_until for _ in range(2)] == [first.at] * 2
    # The clock was set back: then it has not come yet.
    database.rows("update pglock.beat_terms set missed_until = now() + interval '1 h'")
    assert lead().missed_until is None


def test_two_namespaces_and_two_schemas_do_not_meet(database: Database, candidate: Stand) -> None:
    migrating.migrate(database.url, "other")
    assert elected(candidate()).term == 1
    assert elected(candidate(namespace="billing")).term == 1
    assert len(database.rows("select 1 from pglock.beat_terms")) == 2
    # The lock is of the database: the same namespace in another schema waits for it.
    assert candidate(schema_name="other").stand() is None
    assert database.rows("select 1 from other.beat_terms") == []
    assert elected(candidate(namespace="shop", schema_name="other")).term == 1
    assert len(database.rows("select 1 from other.beat_terms")) == 1


def test_nothing_is_written_while_standing_by(database: Database, candidate: Stand) -> None:
    leader, standby = candidate(), candidate("b:2", poll=0.01)
    elected(leader)
    query = "select xmin::text, ctid::text, t::text from pglock.beat_terms t"
    before = database.rows(query)
    for _ in range(5):
        assert standby.stand() is None
    assert database.rows(query) == before
    assert database.rows("select 1 from pglock.beat_entries") == []
    # A try that is refused takes not even a transaction id; one that is won does.
    statement = table_names.statement(elections.ELECT, "pglock")
    given = {
        "namespace": "app",
        "node": "c:3",
        "application": "c",
        "fingerprint": None,
        "take_over": 9.0,
    }
    ids = []
    for key in (KEY, KEY + 1):
        with psycopg.connect(database.url) as connection:
            connection.execute(statement, {**given, "key": key})
            ids.append(connection.execute("select pg_current_xact_id_if_assigned()").fetchone())
            connection.rollback()
    assert ids[0] == (None,)
    assert ids[1] != (None,)


def test_a_try_never_takes_longer_than_a_poll_and_a_statement(
    database: Database, candidate: Stand
) -> None:
    elected(candidate())
    standby = candidate("b:2", poll=0.2)
    assert standby.stand() is None
    for _ in range(3):
        started = time.monotonic()
        assert standby.stand() is None
        assert 0.15 < time.monotonic() - started < 1.5
    waiting = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and pid = %s"
    assert database.rows(waiting, server_pid(standby)) == []


# --- handing over ---------------------------------------------------------------------------


def hand_over(leader: leadership.Leadership, standby: leadership.Leadership) -> bool:
    """Let one resign while the other waits for its poll; return whether that one leads then."""
    assert standby.stand() is None
    with in_thread(standby.stand) as outcome:
        assert leader.resign()
        return outcome.result(20) is not None


def test_a_leader_that_resigns_wakes_the_standbys(database: Database, candidate: Stand) -> None:
    """With a poll of a minute, the standby leads at once."""
    leader, standby = candidate(), candidate("b:2", poll=LONG, lease=10 * LONG)
    elected(leader)
    assert hand_over(leader, standby)
    assert not leader.leading
    assert advisory_locks(database) == [(KEY, server_pid(standby))]
    assert term_row(database, "term", "node", "resigned_at") == [2, "b:2", None]


def test_a_notification_before_the_unlock_would_wake_them_too_early(
    database: Database, candidate: Stand
) -> None:
    """The control: the lock is still taken when they try, and then they sleep."""
    leader, standby = candidate(), candidate("b:2", poll=LONG, lease=10 * LONG)
    elected(leader)
    assert standby.stand() is None
    # As two statements, with the unlock last.
    leader.execute(b"select pg_notify(%(channel)s, '')", {"channel": leader._channel})  # noqa: SLF001
    assert standby.stand() is None
    assert standby.stand() is None  # once more, for a notification that it was just handed
    with in_thread(standby.stand) as outcome:
        unlocked = leader.execute(b"select pg_advisory_unlock(%(key)s) as freed", {"key": KEY})
        assert unlocked[0].freed
        assert advisory_locks(database) == []
        with pytest.raises(TimeoutError):
            outcome.result(0.7)
        database.rows(f"notify {leader._channel}")  # noqa: SLF001
        assert outcome.result(20) is not None


def test_a_notification_that_comes_with_the_answer_is_not_slept_through(
    database: Database, candidate: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby has tried the lock, and before it hears so the leader resigns."""
    gate = Gate(database)
    leader, standby = candidate(), candidate("b:2", poll=LONG, lease=10 * LONG)
    elected(leader)
    assert standby.stand() is None
    standby._next_try = 0.0  # noqa: SLF001
    with monkeypatch.context() as patch:
        wait = f"case when pg_catalog.pg_advisory_xact_lock_shared({gate.key}) is not null"
        slow = replaced(
            elections.ELECT.encode(),
            b"select l.got, t.term",
            f"select {wait} then l.got end as got, t.term".encode(),
        )
        patch.setattr(elections, "ELECT", slow.decode())
        with in_thread(standby.stand, gate) as outcome:
            gate.wait_for_arrival()
            assert leader.resign()
            gate.open()
            assert outcome.result(20) is None
    started = time.monotonic()
    assert standby.stand() is not None
    assert time.monotonic() - started < 10


def test_resigning_is_for_leaders_and_may_be_done_twice(
    database: Database, candidate: Stand
) -> None:
    leader, standby = candidate(), candidate("b:2")
    elected(leader)
    assert standby.stand() is None
    assert not standby.resign()
    assert leader.leading
    assert term_row(database, "resigned_at") is None
    assert leader.resign()
    assert not leader.resign()
    assert term_row(database, "resigned_at") is not None
    assert advisory_locks(database) == []


# --- losing it ------------------------------------------------------------------------------


def test_a_leader_trusts_itself_for_half_the_lease(database: Database, candidate: Stand) -> None:
    """It stops long before the server gives the lock to another."""
    clock = Clock()
    leader = candidate(monotonic=clock, lease=40.0)
    elected(leader)
    assert leader.feed_in == pytest.approx(10.0, abs=2)
    clock.ahead += 19
    assert (leader.held, leader.feed_in) == (True, 0.0)
    clock.ahead += 1.1
    assert (leader.held, leader.leading) == (False, True)
    assert advisory_locks(database) == [(KEY, server_pid(leader))]
    # The server decides: the lock is still its own, so it goes on.
    leader.confirm()
    assert (leader.held, leader.feed_in > 8) == (True, True)


def test_trust_counts_from_the_start_of_the_last_statement(candidate: Stand) -> None:
    clock = Clock()
    leader = candidate(monotonic=clock, lease=40.0)
    elected(leader)
    session: Any = leader._session  # noqa: SLF001
    rows = session.rows

    def slow(query: bytes, parameters: Any = None) -> list[Any]:
        clock.ahead += 30  # as long as the answer takes
        found: list[Any] = rows(query, parameters)
        return found

    session.rows = slow
    leader.execute(b"select 1")
    assert not leader.held


def test_an_answer_is_trusted_from_when_it_was_asked_for(candidate: Stand) -> None:
    """Not from when it was read: the leader may have been frozen in between."""
    clock = Clock()
    leader = candidate(monotonic=clock, lease=40.0)
    elected(leader)
    answer = leader.send(b"select 1 as one, clock_timestamp() as now")
    clock.ahead += 30
    assert [row.one for row in answer.rows()] == [1]
    assert not leader.held


def test_an_answer_is_read_before_anything_else_is_said(candidate: Stand) -> None:
    leader = candidate()
    elected(leader)
    first = leader.send(b"select 1 as number, pg_sleep(0.05)")
    second = leader.send(b"select 2 as number")
    assert leader.execute(b"select 3 as number")[0].number == 3
    assert [answer.rows()[0].number for answer in (second, first, first)] == [2, 1, 1]
    leader.settle()  # nothing is awaited any more


def test_a_statement_that_fails_after_it_was_sent_ends_the_leadership(candidate: Stand) -> None:
    leader = candidate()
    elected(leader)
    leader.send(b"select 1 / (select 0 from pg_sleep(0.05))")
    with pytest.raises(errors.LeadershipLost, match="division by zero"):
        leader.settle()
    assert not leader.leading
    leader.settle()  # of a session that is gone nothing is awaited


def test_an_answer_from_an_earlier_term_does_not_end_this_one(candidate: Stand) -> None:
    leader = candidate()
    elected(leader)
    answer = leader.send(b"select 1 as one")
    leader.resign()
    assert elected(leader).term == 2
    with pytest.raises(errors.LeadershipLost, match="it was not held"):
        answer.rows()
    assert leader.held


def test_the_server_ends_a_leader_that_is_silent_for_the_lease(
    database: Database, candidate: Stand
) -> None:
    leader, standby = candidate(lease=1.0), candidate("b:2")
    elected(leader)
    pid = server_pid(leader)
    assert elected(standby).term == 2
    assert advisory_locks(database) == [(KEY, server_pid(standby))]
    assert database.rows("select 1 from pg_stat_activity where pid = %s", pid) == []
    assert not leader.held
    with pytest.raises(errors.LeadershipLost, match=r'"app", term 1, is lost: .*idle'):
        leader.execute(b"select 1")
    assert leader.stand() is None


def test_statements_feed_the_lease(database: Database, candidate: Stand) -> None:
    """The control: twice the lease, and nothing happens to a leader that works."""
    leader, standby = candidate(lease=1.0), candidate("b:2")
    elected(leader)
    ended = time.monotonic() + 2
    while time.monotonic() < ended:
        leader.execute(b"select 1")
        assert standby.stand() is None
    assert term_row(database, "term") == 1


def test_another_term_ends_this_one(database: Database, candidate: Stand) -> None:
    leader = candidate()
    elected(leader)
    database.rows("update pglock.beat_terms set term = term + 1")
    with pytest.raises(errors.LeadershipLost, match="another term has begun"):
        leader.confirm()
    assert not leader.leading
    assert elected(leader).term == 3


def test_a_sign_of_life_is_recorded(database: Database, candidate: Stand) -> None:
    leader = candidate()
    elected(leader)
    before = term_row(database, "last_tick_at")
    leader.confirm()
    assert term_row(database, "last_tick_at") > before
    assert abs((leader.now() - term_row(database, "clock_timestamp()")).total_seconds()) < 2


def test_a_terminated_session_ends_leadership_and_the_next_try_works(
    database: Database, candidate: Stand
) -> None:
    clock = Clock()
    leader = candidate(monotonic=clock, poll=LONG, lease=10 * LONG)
    elected(leader)
    clock.ahead += 2
    terminate(database, server_pid(leader))
    with pytest.raises(errors.LeadershipLost, match="terminat"):
        leader.confirm()
    assert (leader.leading, leader.held) == (False, False)
    with pytest.raises(errors.LeadershipLost, match="it was not held"):
        leader.execute(b"select 1")
    won = leader.stand()
    assert won is not None
    assert (won.term, won.before and won.before.resigned_at) == (2, None)


def test_terms_that_end_as_soon_as_they_begin_are_not_tried_without_a_pause(
    database: Database, candidate: Stand
) -> None:
    """A right that is missing, a disk that is full: the fault stays, and nobody is flooded."""
    leader = candidate()
    started = time.monotonic()
    for _ in range(5):
        elected(leader)
        with pytest.raises(errors.LeadershipLost, match="no_such_table"):
            leader.execute(b"select from no_such_table")
    assert time.monotonic() - started > 0.1 + 0.2 + 0.4 + 0.8
    assert term_row(database, "term") == 5


class Stop(SystemExit):
    """What Celery's handler of SIGTERM raises, wherever it strikes."""


@contextlib.contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGTERM, stop)
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(Stop):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGTERM, before)


def test_a_leader_that_is_stopped_in_a_statement_still_resigns(candidate: Stand) -> None:
    leader, standby = candidate("a:1"), candidate("b:2")
    elected(leader)
    assert standby.stand() is None
    with stopped_after(0.05):
        leader.execute(b"select pg_sleep(0.15), clock_timestamp() as now")
    assert leader.resign()
    before = elected(standby).before
    assert before is not None
    assert before.resigned_at is not None, "it has not vanished"


@pytest.mark.parametrize("held_back", [True, False], ids=["as it is", "control"])
def test_a_signal_that_stops_a_leader_waits_for_the_answer(
    database: Database, candidate: Stand, *, held_back: bool
) -> None:
    """What was sent is done, and known to be."""
    leader, standby = candidate("a:1"), candidate("b:2")
    elected(leader)
    database.rows("create table done (by text)")
    done = leader.send(
        b"insert into done select 'a' from pg_sleep(0.15) returning by", uninterrupted=held_back
    )
    with stopped_after(0.05):
        leader.settle()
    if not held_back:
        with pytest.raises(errors.LeadershipLost):
            leader.settle()
        return
    assert database.rows("select by from done") == [("a",)]
    leader.settle()
    assert done.rows()[0].by == "a"
    leader.send(b"select pg_sleep(0.15)")
    assert leader.resign()
    before = elected(standby).before
    assert before is not None
    assert before.resigned_at is not None, "it has not vanished"


def test_a_leader_that_is_stopped_in_a_long_statement_is_soon_gone(
    database: Database, candidate: Stand
) -> None:
    leader = candidate("a:1")
    elected(leader)
    with stopped_after(0.05):
        leader.execute(b"select pg_sleep(60), clock_timestamp() as now")
    started = time.monotonic()
    leader.resign()  # psycopg may have cancelled the statement, or not
    assert time.monotonic() - started < 5
    eventually(lambda: nobody_holds(database), what="the server frees its lock")


def test_a_server_that_is_down_is_tried_at_least_once_a_second(
    own_postgres: PostgresServer, candidate: Stand
) -> None:
    migrating.migrate(own_postgres.url(), "pglock")
    beat = candidate(target=own_postgres.url(), poll=0.5)
    elected(beat)
    own_postgres.stop("immediate")
    with pytest.raises(errors.LeadershipLost):
        beat.execute(b"select 1")
    pauses = []
    for _ in range(6):
        started = time.monotonic()
        with pytest.raises(errors.DatabaseUnavailable):
            beat.stand()
        pauses.append(beat._next_try - time.monotonic())  # noqa: SLF001
        assert time.monotonic() - started < 3
    assert pauses[-1] > pauses[0]
    assert max(pauses) <= 1.0
    own_postgres.start()
    assert elected_in_spite_of_errors(beat).term == 2


def elected_in_spite_of_errors(beat: leadership.Leadership) -> elections.Elected:
    def stand() -> elections.Elected | None:
        try:
            return beat.stand()
        except errors.DatabaseUnavailable:
            return None

    won = eventually(stand, what="it is elected")
    assert won is not None
    return won


@pytest.mark.slow
def test_a_server_in_recovery_is_refused_until_it_is_promoted(
    own_postgres: PostgresServer, candidate: Stand
) -> None:
    """A standby server grants advisory locks, and would elect a second leader."""
    migrating.migrate(own_postgres.url(), "pglock")
    with own_postgres.standby() as copy:
        beat = candidate(target=copy.url())
        with pytest.raises(errors.ServerInRecovery):
            beat.stand()
        assert not beat.leading
        copy.promote()
        elected(beat)
        beat.resign()


def test_missing_tables_are_told_with_the_command(
    blank_database: Database, candidate: Stand
) -> None:
    beat = candidate(target=blank_database.url)
    with pytest.raises(errors.SchemaError, match="pglock migrate"):
        beat.stand()
    # Elected or not, nobody holds the lock of a leader that cannot write.
    eventually(functools.partial(nobody_holds, blank_database), what="the lock is free")


def nobody_holds(database: Database) -> bool:
    return advisory_locks(database) == []

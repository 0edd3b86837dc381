"""A leader does not wait for the server while it has messages to publish; what may go wrong then."""

from __future__ import annotations

import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import pytest
import redis

from celery_pglock import dispatch, errors, leadership
from celery_pglock.beat_rows import Occurrence
from celery_pglock.demo.servers import ValkeyServer
from tests.integration.test_dispatch import ONE_BY_ONE, Bench, benched, overdue
from tests.integration.test_leadership import stopped_after
from tests.integration.workbench import terminate
from tests.support.databases import Database
from tests.support.requirements import since

NAMES: Final = "abcdef"


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, and as many of these in a tick as there are."""
    monkeypatch.setattr(dispatch, "_CHUNK", 2)
    monkeypatch.setattr(dispatch, "_CONFIRM_EVERY", 2)
    monkeypatch.setattr(dispatch, "_CLAIM_AHEAD", 60.0)


def work(bench: Bench) -> None:
    """Tick until nothing is due."""
    while bench.dispatcher.work(300) == 0:
        pass


@pytest.fixture
def bench(
    database: Database, fresh_redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    small_chunks(monkeypatch)
    with benched(database, fresh_redis_url) as bench:
        yield bench


def course(bench: Bench) -> list[str]:
    """Note in what order the leader says what to the server, and publishes."""
    noted: list[str] = []
    begin_claim, begin_confirm = bench.store.begin_claim, bench.store.begin_confirm

    def names(those: Any) -> str:
        return "".join(occurrence.entry for occurrence in those)

    def claim(due: Any, term: int) -> Any:
        noted.append(f"claim {names(due)}")
        return begin_claim(due, term)

    def confirm(sent: Any) -> Any:
        noted.append(f"confirm {names(sent)}")
        return begin_confirm(sent)

    bench.store.begin_claim = claim  # type: ignore[method-assign, assignment]
    bench.store.begin_confirm = confirm  # type: ignore[method-assign, assignment]
    bench.before_each = lambda occurrence: noted.append(occurrence.entry)
    return noted


def test_the_next_are_claimed_while_these_are_published(bench: Bench) -> None:
    bench.lead(overdue(*NAMES))
    noted = course(bench)
    assert bench.dispatcher.work(300) > 0
    assert noted == [
        *("claim ab", "claim cd", "a", "b", "confirm ab"),
        *("claim ef", "c", "d", "confirm cd", "e", "f", "confirm ef"),
    ]
    assert bench.messages() == bench.confirmed() == [*NAMES]


def test_a_tick_ends_although_more_is_due(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that others may tell the leader something, before each of all its entries is sent."""
    monkeypatch.setattr(dispatch, "_CLAIM_AHEAD", 0.0)
    bench.lead(overdue(*NAMES))
    assert bench.dispatcher.work(300) == 0
    assert bench.messages() == bench.confirmed() == ["a", "b"]
    assert bench.claimed() == []


@pytest.mark.parametrize("reads", [True, False], ids=["as it is", "control"])
def test_an_answer_that_has_come_is_read_and_no_sign_that_the_session_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, reads: bool
) -> None:
    """Else the server would be asked whether it has ended, for each of them."""
    asked = 0
    confirm = leadership.Leadership.confirm

    def count(candidate: leadership.Leadership) -> None:
        nonlocal asked
        asked += 1
        confirm(candidate)

    bench.lead(overdue(*NAMES))
    bench.before_each = lambda _: _come(bench.candidate)
    monkeypatch.setattr(leadership.Leadership, "confirm", count)
    if not reads:
        monkeypatch.setattr(leadership.Leadership, "ensure", _ask_whatever_was_heard)
    bench.dispatcher.work(300)
    assert bench.messages() == [*NAMES]
    assert (asked == 0) is reads


def _come(candidate: leadership.Leadership) -> None:
    """Wait until what the server says to the last statement is there to be read."""
    session = candidate._session  # noqa: SLF001
    assert session is not None
    if candidate._awaited is not None:  # noqa: SLF001
        assert select.select([session.connection], [], [], 5.0)[0]


def _ask_whatever_was_heard(candidate: leadership.Leadership) -> None:
    if candidate._heard:  # noqa: SLF001
        candidate.confirm()


@pytest.mark.parametrize("settled", [True, False], ids=["as it is", "control"])
def test_nothing_is_handed_over_when_what_was_asked_meanwhile_has_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, settled: bool
) -> None:
    """Its lock went with the session, and another may lead."""
    held_up = bench.database.connect(autocommit=False)

    def cut(occurrence: Occurrence) -> None:
        if occurrence.entry == "d":
            # Long before.
            assert bench.confirmed() == ["a", "b"]
            pids = bench.database.rows("select backend_pid from pglock.beat_terms")
            terminate(bench.database, *(pid for (pid,) in pids))
            held_up.close()

    bench.before_each = cut
    told: list[str] = []
    bench.dispatcher._sent = lambda occurrence: told.append(occurrence.entry)  # noqa: SLF001
    bench.lead(overdue(*NAMES))
    held_up.execute("select from pglock.beat_entries where entry = 'e' for update")
    monkeypatch.setattr(leadership.Leadership, "ensure", lambda _: None)
    if not settled:
        monkeypatch.setattr(dispatch.Dispatcher, "_settle", lambda _: None)
    with pytest.raises(errors.LeadershipLost):
        bench.dispatcher.work(300)
    assert bench.messages() == (["a", "b"] if settled else ["a", "b", "c", "d"])
    # What was recorded is told, whatever has ended the leadership since.
    assert told == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "sent"), [({}, "ab"), (ONE_BY_ONE, "abcd")], ids=["together", "one by one"]
)
def test_a_claim_that_fails_doubles_nothing_of_what_was_sent_before_it(
    database: Database,
    fresh_redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    sent: str,
) -> None:
    """Where each message is out at once, it is recorded before anything else is asked."""
    small_chunks(monkeypatch)
    told: list[str] = []
    with benched(database, fresh_redis_url, **options) as bench:
        bench.dispatcher._sent = lambda occurrence: told.append(occurrence.entry)  # noqa: SLF001
        bench.lead(overdue(*NAMES))
        bench.candidate.execute(b"set statement_timeout = 300")
        with database.connect(autocommit=False) as held_up:
            held_up.execute("select from pglock.beat_entries where entry = 'e' for update")
            with pytest.raises(errors.LeadershipLost, match="statement timeout"):
                work(bench)
        assert bench.messages() == bench.confirmed() == told == [*sent]
        bench.lead(overdue(*NAMES))
        work(bench)
        assert Counter(bench.messages()) == Counter(NAMES)


@pytest.mark.parametrize("options", [{}, ONE_BY_ONE], ids=["together", "one by one"])
def test_a_stop_does_not_wait_for_a_claim(
    database: Database,
    fresh_redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """Somebody may have its rows for long, and nobody needs it any more."""
    small_chunks(monkeypatch)
    with benched(database, fresh_redis_url, **options) as bench:
        bench.lead(overdue(*NAMES))
        held_up = database.connect(autocommit=False)
        held_up.execute("select from pglock.beat_entries where entry = 'e' for update")
        begun = time.monotonic()
        with stopped_after(0.5):
            work(bench)
        bench.candidate.resign()
        assert time.monotonic() - begun < 5.0
        assert bench.messages() == bench.confirmed()
        held_up.close()


def test_while_the_broker_is_down_no_more_is_claimed(
    database: Database, own_valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is paused or edited meanwhile is not sent when it is back."""
    small_chunks(monkeypatch)
    with benched(database, own_valkey.url()) as bench:
        bench.lead(overdue(*NAMES))
        own_valkey.kill()
        claimed = []
        for _ in range(3):
            bench.dispatcher._broken_until = 0.0  # noqa: SLF001 - as if it had waited
            bench.dispatcher.work(300)
            claimed.append("".join(bench.claimed()))
        assert claimed == ["ab", "ab", "ab"]
        own_valkey.start()
        bench.dispatcher._broken_until = 0.0  # noqa: SLF001
        work(bench)
        assert bench.messages() == bench.confirmed() == [*NAMES]


@pytest.mark.parametrize("remembers", [True, False], ids=["as it is", "control"])
def test_while_the_broker_refuses_no_more_is_claimed(
    database: Database,
    own_valkey: ValkeyServer,
    monkeypatch: pytest.MonkeyPatch,
    *,
    remembers: bool,
) -> None:
    """It can be connected to and takes nothing: its memory is full."""
    small_chunks(monkeypatch)
    with (
        benched(database, own_valkey.url()) as bench,
        redis.Redis.from_url(own_valkey.url()) as own,
    ):
        # Before it each message is handed over by itself after the first refusal.
        since(hasattr(bench.publisher.producer(), "batch"), "kombu 5.7, which has batches")
        monkeypatch.setattr(dispatch, "_CONFIRM_EVERY", 4)
        own.config_set("maxmemory", 1)
        bench.lead(overdue(*NAMES))
        claimed = []
        for _ in range(3):
            bench.dispatcher._broken_until = 0.0  # noqa: SLF001 - as if it had waited
            if not remembers:
                bench.dispatcher.failures = 0
            bench.dispatcher.work(300)
            claimed.append("".join(bench.claimed()))
        assert claimed == (["abcd"] * 3 if remembers else ["abcd", "abcdef", "abcdef"])
        own.config_set("maxmemory", 0)
        bench.dispatcher._broken_until = 0.0  # noqa: SLF001
        work(bench)
        assert bench.messages() == bench.confirmed() == [*NAMES]


@pytest.mark.parametrize("options", [{}, ONE_BY_ONE], ids=["together", "one by one"])
@pytest.mark.parametrize("at", NAMES)
def test_a_signal_loses_nothing_of_what_was_claimed_ahead_and_doubles_nothing(
    database: Database,
    fresh_redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    at: str,
) -> None:
    small_chunks(monkeypatch)
    told: list[str] = []

    def stop(occurrence: Occurrence) -> None:
        if occurrence.entry == at:
            raise SystemExit

    with benched(database, fresh_redis_url, **options) as bench:
        bench.dispatcher._sent = lambda occurrence: told.append(occurrence.entry)  # noqa: SLF001
        bench.before_each = stop
        bench.lead(overdue(*NAMES))
        with pytest.raises(SystemExit):
            work(bench)
        # What the broker has is recorded, and told.
        assert bench.messages() == bench.confirmed() == told
        claimed = bench.claimed()
        assert claimed == [*NAMES[len(told) :]][: len(claimed)]
        assert bench.candidate.resign()
        bench.before_each = lambda _: None
        bench.lead(overdue(*NAMES))
        work(bench)
        assert Counter(bench.messages()) == Counter(NAMES)


def test_a_real_signal_in_a_burst_waits_for_the_record(bench: Bench) -> None:
    """What the server has not answered yet counts too."""

    def strike(occurrence: Occurrence) -> None:
        if occurrence.entry == "c":
            signal.raise_signal(signal.SIGTERM)

    def stop(*_: object) -> None:
        raise SystemExit  # as Celery's handler does

    bench.before_each = strike
    bench.lead(overdue(*NAMES))
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(SystemExit):
            bench.dispatcher.work(300)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert bench.messages() == bench.confirmed() == ["a", "b"]
    assert bench.claimed() == ["c", "d", "e", "f"]


def test_what_was_handed_over_is_told_also_when_the_next_claim_ends_the_term(bench: Bench) -> None:
    told: list[str] = []
    bench.dispatcher._sent = lambda occurrence: told.append(occurrence.entry)  # noqa: SLF001
    bench.lead(overdue(*NAMES))
    bench.database.rows("delete from pglock.beat_entries where entry = 'c'")
    with pytest.raises(errors.LeadershipLost, match="changed by somebody else"):
        bench.dispatcher.work(300)
    assert bench.messages() == bench.confirmed() == told == ["a", "b"]


def test_what_is_paused_meanwhile_is_not_claimed_and_the_others_are(bench: Bench) -> None:
    bench.lead(overdue(*NAMES))
    bench.database.rows(
        "update pglock.beat_entries set paused_until = now() + interval '1 h' where entry = 'd'"
    )
    bench.dispatcher.work(300)
    assert bench.messages() == bench.confirmed() == ["a", "b", "c", "e", "f"]
    assert bench.claimed() == []

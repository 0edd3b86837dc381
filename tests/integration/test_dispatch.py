"""A leader at work over a real database and a real broker: nothing lost, nothing held up."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import select
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import celery
import celery.schedules
import kombu
import pytest
import redis
from typing_extensions import override

from celery_pglock import (
    agenda,
    answers,
    beat,
    confirms,
    dispatch,
    errors,
    leadership,
    occurrences,
    plans,
    publishing,
    sessions,
    stop_signals,
)
from celery_pglock.beat_rows import Occurrence
from celery_pglock.demo.servers import ValkeyServer
from celery_pglock.schedule_store import ScheduleStore
from tests.integration.workbench import terminate
from tests.support.databases import Database
from tests.support.processes import eventually

SECOND: Final = dt.timedelta(seconds=1)
QUEUE: Final = "dispatch"


class UnserializableError(Exception):
    """One message alone is at fault."""


class Clock:
    """The monotonic clock, which can be put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@dataclasses.dataclass
class Bench:
    """One leader, its agenda and its broker."""

    database: Database
    candidate: leadership.Leadership
    publisher: publishing.Publisher
    broker: str
    clock: Clock
    before_each: Callable[[Occurrence], None] = lambda _: None
    queue: str = QUEUE
    exchanges: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.agenda = agenda.Agenda("app")
        self.store = ScheduleStore("app", "pglock", self.candidate)
        self.dispatcher = dispatch.Dispatcher(
            self.candidate,
            self.agenda,
            self.store,
            self.publisher,
            self.publish,
            sent=lambda _: None,
        )
        self.batches: list[list[str]] = []
        confirm = self.store.begin_confirm

        def count(sent: Any) -> answers.Answer:
            self.batches.append([occurrence.entry for occurrence in sent])
            return confirm(sent)

        self.store.begin_confirm = count  # type: ignore[method-assign, assignment]

    def publish(self, occurrence: Occurrence) -> BaseException | None:
        try:
            producer = self.publisher.producer()
            self.before_each(occurrence)
            producer.publish(
                [occurrence.entry, occurrence.task_id],
                exchange=self.exchanges.get(occurrence.entry, ""),
                routing_key=self.queue,
                serializer="json",
                retry=False,
            )
        except Exception as error:  # noqa: BLE001 - as the scheduler does
            return error
        return None

    def lead(
        self, entries: dict[str, float], *, catchup: int = 1, after_downtime: bool = False
    ) -> None:
        """Lead, with entries whose next occurrence is that many seconds from now."""
        won = self.candidate.stand()
        assert won is not None
        planned = [
            plans.Planned(
                name=name,
                task="report",
                text="every minute",
                schedule=lambda anchor: occurrences.Interval(60 * SECOND, anchor),
                recorded=True,
                catchup=catchup,
            )
            for name in entries
        ]
        stored = self.store.load()
        if not stored:
            new = agenda.Agenda("app").take_over(
                planned, {}, now=won.at, missed_until=None, between=lambda: None
            )
            due = [won.at + SECOND * seconds for seconds in entries.values()]
            self.store.register(
                [
                    dataclasses.replace(each, next_due_at=at, anchor=at - 6000 * SECOND)
                    for each, at in zip(new, due, strict=True)
                ]
            )
            stored = self.store.load()
        registrations = self.agenda.take_over(
            planned,
            stored,
            now=won.at,
            missed_until=won.at if after_downtime else None,
            between=lambda: None,
        )
        assert registrations == []
        self.dispatcher.begin()

    def messages(self) -> list[str]:
        """Return the entries whose messages the broker has, in their order."""
        if self.broker.startswith("amqp"):
            with kombu.Connection(self.broker) as connection:
                channel: Any = connection.default_channel
                taken = iter(lambda: channel.basic_get(self.queue), None)
                return [json.loads(message.body)[0] for message in taken]
        with redis.Redis.from_url(self.broker) as client:
            raw: Any = client.lrange(self.queue, 0, -1)
        return [self._entry(message) for message in reversed(raw)]

    @staticmethod
    def _entry(message: bytes) -> str:
        import base64

        body = json.loads(base64.b64decode(json.loads(message)["body"]))
        return str(body[0])

    def confirmed(self) -> list[str]:
        return self._entries("published_at is not null")

    def claimed(self) -> list[str]:
        return self._entries("due_at is not null and published_at is null")

    def _entries(self, condition: str) -> list[str]:
        query = f"select entry from pglock.beat_entries where {condition} order by entry"  # noqa: S608
        return [entry for (entry,) in self.database.rows(query)]


# With these kombu hands over each message by itself: redis-py might repeat a whole batch.
ONE_BY_ONE: Final = {"retry_on_timeout": True}


@contextlib.contextmanager
def benched(
    database: Database, broker: str, lease: float = 40.0, **transport_options: Any
) -> Iterator[Bench]:
    app = celery.Celery("dispatch", broker=broker, set_as_current=False)
    app.conf.broker_transport_options = transport_options
    clock = Clock()
    candidate = leadership.Leadership(
        database.url, namespace="app", node="a:1", lease=lease, monotonic=clock
    )
    publisher = publishing.Publisher(app, 2.0)
    yield Bench(database, candidate, publisher, broker, clock)
    publisher.forget()
    candidate.resign()


@pytest.fixture
def bench(database: Database, fresh_redis_url: str) -> Iterator[Bench]:
    with benched(database, fresh_redis_url) as bench:
        yield bench


BATCH: Final = dispatch._CONFIRM_EVERY  # noqa: SLF001
NAMES: Final = [f"e{number:03}" for number in range(2 * BATCH - 10)]


def overdue(*names: str) -> dict[str, float]:
    return {name: -30 + number / 1000 for number, name in enumerate(names)}


# --- sending ----------------------------------------------------------------------------------


def test_what_is_due_is_sent_in_order_and_the_rest_is_waited_for(bench: Bench) -> None:
    bench.lead({"late": -1, "later": -20, "soon": 3})
    rest = bench.dispatcher.work(300)
    assert bench.messages() == ["later", "late"]
    assert bench.confirmed() == ["late", "later"]
    assert 1 < rest <= 3
    assert bench.dispatcher.work(0.5) == 0.5
    assert bench.messages() == ["later", "late"]


def test_confirmations_are_batched(bench: Bench) -> None:
    bench.lead(overdue(*NAMES))
    bench.dispatcher.work(300)
    assert bench.messages() == NAMES
    assert [entry for batch in bench.batches for entry in batch] == NAMES
    assert max(map(len, bench.batches)) <= BATCH
    assert len(bench.batches) < 20
    assert bench.claimed() == []


@pytest.mark.parametrize(
    ("options", "together"), [({}, True), (ONE_BY_ONE, False)], ids=["as it is", "control"]
)
def test_messages_are_handed_over_together(
    database: Database, own_valkey: ValkeyServer, options: dict[str, Any], *, together: bool
) -> None:
    """A few batches of messages."""
    with benched(database, own_valkey.url(), **options) as bench:
        bench.lead({"early": -40, **overdue(*NAMES)})
        with redis.Redis.from_url(own_valkey.url()) as client:

            def reads() -> int:
                info: Any = client.info("stats")
                return int(info["total_reads_processed"])

            before = reads()
            bench.dispatcher.work(300)
            count = reads() - before
        print(f"{len(NAMES) + 1} messages, {count} reads from the socket by the broker")
        assert bench.messages() == ["early", *NAMES]
        assert (count < 50) is together


class BoundQueue(kombu.Queue):
    """Counts how often a copy of it is bound to a channel."""

    bound: Final[Counter[str]] = Counter()

    @override
    def bind(self, channel: Any) -> Any:
        self.bound[self.name] += 1
        return super().bind(channel)


@pytest.mark.parametrize("as_kombu_does", [False, True], ids=["as it is", "control"])
def test_a_queue_is_declared_once_on_each_connection(
    own_valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch, *, as_kombu_does: bool
) -> None:
    app = celery.Celery("declaring", broker=own_valkey.url(), set_as_current=False)
    publisher = publishing.Publisher(app, 2.0)
    queue = BoundQueue(str(uuid.uuid4()), kombu.Exchange("declared"), routing_key="here")
    if as_kombu_does:

        def declare(producer: Any, entity: Any, **retrying: Any) -> Any:
            return type(producer).maybe_declare(producer, entity, **retrying)

        monkeypatch.setattr(publishing, "_declare_once", declare)
    with redis.Redis.from_url(own_valkey.url()) as client:
        for _ in "12":
            client.flushall()
            for number in range(10):
                publisher.producer().publish(
                    number, exchange="declared", routing_key="here", declare=[queue]
                )
            assert client.llen(queue.name) == 10
            # Another connection declares it again: whoever stopped the broker may have lost it.
            publisher.forget()
    assert (queue.bound[queue.name] < 10) is not as_kombu_does


def test_a_batch_that_breaks_is_in_doubt_and_sent_again(
    database: Database, own_valkey: ValkeyServer
) -> None:
    """All of it: nobody knows what has arrived."""

    def break_at_last(occurrence: Occurrence) -> None:
        if occurrence.entry == "c" and own_valkey.running:
            own_valkey.stop()

    with benched(database, own_valkey.url()) as bench:
        bench.before_each = break_at_last
        bench.lead(overdue("a", "b", "c"))
        rest = bench.dispatcher.work(300)
        assert (bench.confirmed(), bench.claimed()) == ([], ["a", "b", "c"])
        assert bench.batches == []
        assert bench.dispatcher.failures == 1
        assert 0 < rest <= 0.5
        bench.before_each = lambda _: None
        own_valkey.start()
        eventually(lambda: bench.dispatcher.work(300) > 5, what="all is sent")
        assert bench.messages() == ["a", "b", "c"]
        assert bench.claimed() == []


@pytest.fixture
def rabbit(database: Database, rabbitmq_url: str, queue_name: str) -> Iterator[Bench]:
    with benched(database, rabbitmq_url) as bench:
        bench.queue = queue_name
        with kombu.Connection(rabbitmq_url) as connection:
            channel: Any = connection.default_channel
            channel.queue_declare(queue_name, durable=True, auto_delete=False)
            yield bench
            channel.queue_delete(queue_name)


@pytest.mark.parametrize("together", [True, False], ids=["as it is", "control"])
def test_amqp_messages_are_confirmed_together(
    rabbit: Bench, monkeypatch: pytest.MonkeyPatch, *, together: bool
) -> None:
    """The answers to all of them are waited for once, and where else each waits for its own."""
    wait = confirms.Confirms._wait  # noqa: SLF001 - what is counted
    waits: list[int] = []

    def count(each: confirms.Confirms) -> None:
        waits.append(len(each._open))  # noqa: SLF001
        wait(each)
        assert not each._open  # noqa: SLF001

    monkeypatch.setattr(confirms.Confirms, "_wait", count)
    if not together:
        rabbit.publisher.one_by_one()
    rabbit.lead(overdue(*NAMES[:30]))
    rabbit.dispatcher.work(300)
    assert len(waits) == (1 if together else 30)
    assert rabbit.messages() == NAMES[:30]
    assert rabbit.claimed() == []


@pytest.mark.parametrize("told", ["while they are waited for", "while the next is published"])
def test_one_message_at_fault_among_those_that_are_confirmed_together_holds_back_itself_alone(
    rabbit: Bench, told: str
) -> None:
    """The broker closes the channel, and says of which exchange and not of which message."""
    rabbit.exchanges["bad"] = "there-is-none-like-this"

    def wait_for_the_answer(occurrence: Occurrence) -> None:
        if occurrence.entry == "c" and rabbit.exchanges and not rabbit.batches:
            connection = rabbit.publisher.producer().channel.connection
            # The answer to the one before; py-amqp reads it before it writes this one.
            assert select.select([connection.sock], [], [], 10)[0]

    if told == "while the next is published":
        rabbit.before_each = wait_for_the_answer
    rabbit.lead(overdue("a", "bad", "c"))
    eventually(
        lambda: rabbit.dispatcher.work(300) >= 0 and rabbit.confirmed() == ["a", "c"],
        what="the others are sent",
    )
    assert rabbit.claimed() == ["bad"]
    # What went before it had arrived already; nobody knew that.
    assert Counter(rabbit.messages()) == {"a": 2, "c": 1}
    assert rabbit.dispatcher.failures == 0
    rabbit.exchanges.clear()
    eventually(
        lambda: rabbit.dispatcher.work(300) >= 0 and not rabbit.claimed(), what="it is sent too"
    )


def test_an_idle_leader_feeds_its_lease_each_quarter(bench: Bench) -> None:
    bench.lead({"far": 3000})
    last_tick = "select last_tick_at from pglock.beat_terms"
    before = bench.database.rows(last_tick)
    assert 5 < bench.dispatcher.work(300) <= 10
    assert bench.database.rows(last_tick) == before
    bench.clock.ahead += 10
    bench.dispatcher.work(300)
    assert bench.database.rows(last_tick) > before


def test_a_slow_broker_does_not_hold_up_the_tick(bench: Bench) -> None:
    """What is left is sent by the next one, before anything else."""
    bench.candidate.lease = 2.0
    names = NAMES[:20]
    bench.lead(overdue(*names))
    bench.before_each = lambda _: time.sleep(0.1)
    rest = bench.dispatcher.work(300)
    sent = bench.messages()
    assert 0 < len(sent) < 12
    assert bench.confirmed() == sent
    assert rest == 0.0
    for _ in range(20):
        bench.dispatcher.work(300)
    assert bench.messages() == names


# --- what cannot be sent ------------------------------------------------------------------------


def test_a_message_at_fault_holds_back_its_own_entry_alone(bench: Bench) -> None:
    def refuse(occurrence: Occurrence) -> None:
        if occurrence.entry == "bad":
            raise UnserializableError

    bench.before_each = refuse
    bench.lead(overdue("a", "bad", "c"))
    rest = bench.dispatcher.work(300)
    assert bench.messages() == ["a", "c"]
    assert (bench.confirmed(), bench.claimed()) == (["a", "c"], ["bad"])
    assert 0 < rest <= 0.5
    tries = 0

    def count(_: Occurrence) -> None:
        nonlocal tries
        tries += 1

    bench.before_each = count
    bench.dispatcher.work(300)
    assert tries == 0
    eventually(lambda: bench.dispatcher.work(300) > 1, what="it is sent when its time has come")
    assert tries == 1
    assert bench.messages() == ["a", "c", "bad"]
    assert bench.claimed() == []


def test_a_broker_that_fails_stops_the_batch_and_is_left_alone_for_a_while(
    bench: Bench,
) -> None:
    def break_at_third(occurrence: Occurrence) -> None:
        tried.append(occurrence.entry)
        if occurrence.entry == "c" and len(tried) < 5:
            raise ConnectionResetError

    tried: list[str] = []
    bench.before_each = break_at_third
    bench.lead(overdue("a", "b", "c", "d", "e"))
    rest = bench.dispatcher.work(300)
    assert tried == ["a", "b", "c"]
    assert (bench.confirmed(), bench.claimed()) == (["a", "b"], ["c", "d", "e"])
    assert 0.2 < rest <= 0.5
    bench.dispatcher.work(300)
    assert tried == ["a", "b", "c"]
    # The pause grows while the broker does not answer.
    rest = eventually(lambda: len(tried) == 4 or bench.dispatcher.work(300) > 0.55)
    eventually(lambda: bench.dispatcher.work(300) > 5, what="all is sent")
    assert tried == ["a", "b", "c", "c", "c", "d", "e"]
    assert bench.messages() == ["a", "b", "c", "d", "e"]
    assert bench.claimed() == []


def test_a_broker_that_was_stopped_gets_everything_when_it_is_back(
    database: Database, own_valkey: ValkeyServer
) -> None:
    with benched(database, own_valkey.url(), lease=10.0) as bench:
        bench.lead(overdue("a", "b"))
        own_valkey.stop()
        bench.dispatcher.work(300)
        assert bench.candidate.held
        assert (bench.confirmed(), bench.claimed()) == ([], ["a", "b"])
        own_valkey.start()
        eventually(lambda: bench.dispatcher.work(300) > 1, what="all is sent")
        assert bench.messages() == ["a", "b"]


# --- leadership that ends in the middle -----------------------------------------------------------


def test_a_session_that_ends_in_the_middle_leaves_the_rest_to_the_next_leader(
    bench: Bench,
) -> None:
    def cut(occurrence: Occurrence) -> None:
        if occurrence.entry == NAMES[BATCH + BATCH // 2]:
            pids = bench.database.rows("select backend_pid from pglock.beat_terms")
            terminate(bench.database, *(pid for (pid,) in pids))
            bench.clock.ahead += 30  # its own trust has run out, too

    bench.before_each = cut
    bench.lead(overdue(*NAMES))
    with pytest.raises(errors.LeadershipLost):
        bench.dispatcher.work(300)
    # Of the batch nothing went out.
    assert bench.messages() == bench.confirmed() == NAMES[:BATCH]
    assert not bench.candidate.leading
    bench.before_each = lambda _: None
    bench.lead(overdue(*NAMES))
    assert bench.messages() == NAMES
    assert bench.claimed() == []
    count = "select count(*), count(distinct task_id) from pglock.job_runs"
    assert bench.database.rows(count) == [(len(NAMES), len(NAMES))]


@pytest.mark.parametrize("heard", [True, False], ids=["as it is", "control"])
def test_a_batch_is_given_up_when_the_session_was_ended_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, heard: bool
) -> None:
    """Another leads by then, and has sent the same: the server tells, and the clock does not."""

    def cut(occurrence: Occurrence) -> None:
        if occurrence.entry == "c":
            pids = bench.database.rows("select backend_pid from pglock.beat_terms")
            terminate(bench.database, *(pid for (pid,) in pids))

    if not heard:
        monkeypatch.setattr(sessions.Session, "alive", True)
    bench.before_each = cut
    bench.lead(overdue("a", "b", "c", "d"))
    with pytest.raises(errors.LeadershipLost):
        bench.dispatcher.work(300)
    assert bench.messages() == ([] if heard else ["a", "b", "c", "d"])


@pytest.mark.parametrize(
    ("options", "sent"), [({}, []), (ONE_BY_ONE, ["a", "b"])], ids=["together", "one by one"]
)
def test_a_signal_in_a_publication_leaves_confirmed_what_was_sent(
    database: Database, fresh_redis_url: str, options: dict[str, Any], sent: list[str]
) -> None:
    def stop(occurrence: Occurrence) -> None:
        if occurrence.entry == "c":
            raise SystemExit

    with benched(database, fresh_redis_url, **options) as bench:
        bench.before_each = stop
        bench.lead(overdue("a", "b", "c", "d"))
        with pytest.raises(SystemExit):
            bench.dispatcher.work(300)
        assert bench.messages() == bench.confirmed() == sent
        assert bench.claimed() == [name for name in "abcd" if name not in sent]
        assert bench.candidate.resign()


@pytest.mark.parametrize("undisturbed", [True, False], ids=["as it is", "control"])
def test_a_signal_while_a_batch_is_handed_over_waits_until_that_is_recorded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, undisturbed: bool
) -> None:
    """Else the next leader would send it once more, at each deploy that strikes there."""
    hand_over = publishing.Batch.hand_over

    def stop_after(batch: publishing.Batch) -> None:
        hand_over(batch)
        signal.raise_signal(signal.SIGTERM)

    def stop(*_: object) -> None:
        raise SystemExit  # as Celery's handler does

    monkeypatch.setattr(publishing.Batch, "hand_over", stop_after)
    if not undisturbed:
        monkeypatch.setattr(stop_signals, "held_back", contextlib.nullcontext)
    bench.lead(overdue("a", "b"))
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(SystemExit):
            bench.dispatcher.work(300)
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
    assert bench.messages() == ["a", "b"]
    assert bench.confirmed() == (["a", "b"] if undisturbed else [])


def test_rows_that_somebody_changed_end_the_term(bench: Bench) -> None:
    """Else it would lead on with an empty agenda, and nothing would ever be sent again."""
    bench.lead(overdue("a", "b"))
    bench.database.rows("delete from pglock.beat_entries where entry = 'a'")
    with pytest.raises(errors.LeadershipLost, match="changed by somebody else"):
        bench.dispatcher.work(300)
    assert not bench.candidate.leading
    bench.lead({"b": 0})
    assert bench.messages() == ["b"]


# --- after a downtime -----------------------------------------------------------------------------


def test_nothing_is_sent_before_it_is_due_where_nothing_is_made_up(bench: Bench) -> None:
    bench.lead({"a": -150}, catchup=0, after_downtime=True)
    assert bench.dispatcher.work(300) > 1
    assert bench.messages() == []
    assert bench.database.rows(
        "select status, count(*), bool_and(due_at < now()) from pglock.job_runs group by 1"
    ) == [("missed", 3, True)]
    ((due_at, soon),) = bench.database.rows(
        "select due_at, next_due_at between now() and now() + interval '60 s'"
        " from pglock.beat_entries"
    )
    assert (due_at, soon) == (None, True)


def test_the_newest_is_sent_where_one_is_made_up(bench: Bench) -> None:
    bench.lead({"a": -150}, catchup=1, after_downtime=True)
    bench.dispatcher.work(300)
    assert bench.messages() == ["a"]
    statuses = "select status from pglock.job_runs order by due_at"
    assert bench.database.rows(statuses) == [("missed",), ("missed",), ("sent",)]


# --- the scheduler over it --------------------------------------------------------------------------


def scheduler_app(url: str, **schedules: Any) -> celery.Celery:
    app = celery.Celery("scheduler", broker="memory://", set_as_current=False)
    app.conf.update(
        pglock_database_url=url,
        result_expires=None,
        beat_schedule={
            name: {"task": "report", "schedule": schedule} for name, schedule in schedules.items()
        },
    )
    return app


def test_an_interval_of_nothing_is_refused_at_the_start(database: Database) -> None:
    with pytest.raises(SystemExit, match="entry 'b' in beat_schedule is every 0 s"):
        beat.LeaderScheduler(scheduler_app(database.url, a=1.0, b=0))


def test_an_outage_of_the_database_does_not_flood_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nowhere = "postgresql://postgres@127.0.0.1:1/postgres"
    scheduler = beat.LeaderScheduler(scheduler_app(nowhere, a=60.0))
    tries = 0
    ended = time.monotonic() + 2.5
    with caplog.at_level("ERROR", "celery_pglock.beat"):
        while time.monotonic() < ended:
            assert scheduler.tick() == 0.0
            tries += 1
    scheduler.close()
    told = [record for record in caplog.records if record.name == "celery_pglock.beat"]
    assert tries >= 4
    assert 1 <= len(told) <= 2


def test_a_second_signal_finds_a_resignation_in_progress(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler must not send a statement while the first one's is in the middle of it."""
    scheduler = beat.LeaderScheduler(scheduler_app(database.url, a=60.0))
    scheduler.tick()
    candidate = scheduler._leadership  # noqa: SLF001
    assert candidate is not None
    assert candidate.leading
    depth = 0
    resign = candidate.resign

    def struck() -> bool:
        nonlocal depth
        depth += 1
        scheduler.close()
        return resign()

    monkeypatch.setattr(candidate, "resign", struck)
    scheduler.close()
    assert depth == 1
    assert database.rows("select resigned_at is not null from pglock.beat_terms") == [(True,)]

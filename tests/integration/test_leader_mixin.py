"""LeaderMixin over schedulers of other people."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import celery
import celery.beat
import pytest
from celery.schedules import schedule
from typing_extensions import override

from celery_pglock import LeaderMixin, beat_events
from tests.support.databases import Database
from tests.support.processes import eventually

HOUR = 3600.0


class Store(celery.beat.Scheduler):
    """Has its entries in a store that others write to as well."""

    table: ClassVar[dict[str, float]] = {}
    broken: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.did: list[str] = []
        self._read: Any = None
        super().__init__(*args, **kwargs)

    @override
    def setup_schedule(self) -> None:
        self.did.append("set up")

    @property
    @override
    def schedule(self) -> Any:  # type: ignore[override]
        if self.broken:
            msg = "the store is down"
            raise ConnectionError(msg)
        if self._read is None or {n: e.args[0] for n, e in self._read.items()} != self.table:
            self.did.append("read")
            self._read = {
                name: celery.beat.ScheduleEntry(
                    name=name, task="report", schedule=schedule(every), args=(every,), app=self.app
                )
                for name, every in self.table.items()
            }
        return self._read

    @override
    def reserve(self, entry: Any) -> Any:
        self.did.append(f"reserved {entry.name}")
        return next(entry)

    @override
    def sync(self) -> None:
        self.did.append("synced")


class Gated(LeaderMixin, Store):
    """It, gated."""

    @override
    def on_takeover(self) -> None:
        super().on_takeover()
        self.did.append("took over")
        self._read = None


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    Store.table, Store.broken = {}, False
    yield
    Store.table, Store.broken = {}, False


@pytest.fixture
def app(database: Database) -> celery.Celery:
    app = celery.Celery("mixed", broker="memory://", set_as_current=False)
    app.conf.update(
        pglock_database_url=database.url,
        pglock_standby_poll=0.05,
        result_expires=None,
        beat_max_loop_interval=0.1,
    )
    return app


def leads(scheduler: Any) -> bool:
    scheduler.tick()
    return bool(scheduler._leadership.leading)  # noqa: SLF001


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "event", None) == event]


def stored(database: Database) -> dict[str, int]:
    return dict(database.rows("select entry, total_run_count from pglock.beat_entries"))


def test_a_standby_asks_for_nothing_and_takes_over_what_there_is_then(
    app: celery.Celery, database: Database
) -> None:
    Store.table = {"one": HOUR}
    leader, standby = Gated(app), Gated(app)
    eventually(lambda: leads(leader), what="one leads")
    assert leader.did == ["took over", "set up", "read"]
    for _ in range(3):
        assert not leads(standby)
    standby.sync()
    assert standby.did == []
    Store.table = {"one": HOUR, "two": HOUR}
    leader.close()
    assert leader.did[-1] == "synced"
    eventually(lambda: leads(standby), what="the other leads")
    assert standby.did == ["took over", "set up", "read"]
    assert stored(database) == {"one": 0, "two": 0}
    # Another time it is set up already.
    standby._leadership.stand_back()  # type: ignore[union-attr]  # noqa: SLF001
    eventually(lambda: leads(standby), what="it leads again")
    assert standby.did[3:] == ["took over", "read"]
    standby.close()


def test_what_changes_is_taken_up_and_what_is_sent_is_told(
    app: celery.Celery, database: Database
) -> None:
    Store.table = {"one": HOUR}
    scheduler = Gated(app)
    eventually(lambda: leads(scheduler), what="it leads")
    Store.table = {"two": 0.2}
    eventually(
        lambda: leads(scheduler) and "reserved two" in scheduler.did, 20, "the new one is sent"
    )
    assert "reserved one" not in scheduler.did
    assert stored(database)["one"] == 0
    assert stored(database)["two"] == scheduler.did.count("reserved two")
    scheduler.close()


def test_a_store_that_cannot_be_read_stops_nothing_that_is_known(
    app: celery.Celery, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    Store.table = {"one": 0.2}
    scheduler = Gated(app)
    eventually(lambda: leads(scheduler), what="it leads")
    Store.broken = True
    before = stored(database)["one"]
    eventually(lambda: leads(scheduler) and stored(database)["one"] > before + 5, 20, "it goes on")
    said = told(caplog, "scheduler_failed")
    assert 1 <= len(said) <= 3
    assert "the store is down" in said[0].getMessage()
    Store.broken = False
    Store.table = {"two": 0.2}
    eventually(lambda: leads(scheduler) and stored(database).get("two"), 20, "it is read again")
    scheduler.close()


def test_a_beat_that_cannot_read_its_store_hands_on(
    app: celery.Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """As many tries as for the broker; and it does not fail."""

    class Cut(Gated):
        @property
        @override
        def schedule(self) -> Any:  # type: ignore[override]
            msg = "not from this host"
            raise ConnectionError(msg)

    Store.table = {"one": HOUR}
    caplog.set_level("INFO", "celery_pglock.beat")
    cut, other = Cut(app), Gated(app)
    eventually(lambda: leads(cut), what="it is elected")
    assert not leads(other)
    eventually(lambda: (cut.tick(), leads(other))[1], 20, "the other leads")
    reasons = [record.reason for record in told(caplog, "leadership_handed_over")]
    assert reasons == ["the schedule could not be read 3 times in a row"]
    cut.close()
    other.close()


def test_an_only_run_that_nobody_could_tell_is_told_by_the_next_leader(
    app: celery.Celery, database: Database
) -> None:
    changed = dt.datetime.now(dt.UTC)

    class WithRows(Gated):
        asked = 0

        @property
        @override
        def schedule(self) -> Any:  # type: ignore[override]
            found = super().schedule
            for entry in found.values():
                entry.model = SimpleNamespace(
                    one_off=True, enabled=True, total_run_count=0, date_changed=changed
                )
                entry.is_due = self.ask
            return found

        def ask(self) -> None:
            self.asked += 1

        @override
        def reserve(self, entry: Any) -> Any:
            self.did.append(f"reserved {entry.name}")
            return entry

    class Dies(WithRows):
        @override
        def reserve(self, entry: Any) -> Any:
            msg = "as if killed"
            raise SystemError(msg)

    Store.table = {"once": 0.2}
    first = Dies(app)
    eventually(lambda: leads(first) and stored(database)["once"], 20, "it is sent")
    first._leadership.resign()  # type: ignore[union-attr]  # noqa: SLF001
    second = WithRows(app)
    eventually(lambda: leads(second) and second.asked, 20, "it is asked, by which it ends")
    assert "reserved once" in second.did
    for _ in range(5):
        second.tick()
    assert stored(database) == {"once": 1}
    first.close()
    second.close()


def test_the_mixin_has_to_come_first() -> None:
    with pytest.raises(TypeError, match="LeaderMixin has to come before Store"):
        type("Wrong", (Store, LeaderMixin), {})


def test_a_scheduler_with_a_tick_of_its_own_has_to_say_what_becomes_of_it(
    app: celery.Celery,
) -> None:
    class Ticking(Store):
        @override
        def tick(self, *args: Any, **kwargs: Any) -> float:
            return super().tick(*args, **kwargs)

    class Undecided(LeaderMixin, Ticking):
        pass

    class Replaced(Undecided):
        own_tick: ClassVar[bool | None] = False

    with pytest.raises(
        SystemExit, match=r"Ticking has a tick\(\) of its own.* = True in Undecided"
    ):
        Undecided(app)
    Store.table = {"one": 0.2}
    scheduler = Replaced(app)
    eventually(lambda: leads(scheduler) and "reserved one" in scheduler.did, 20, "it is sent")
    scheduler.close()


def test_a_scheduler_that_is_to_keep_its_tick_does_and_is_asked_before_each_message(
    app: celery.Celery, database: Database
) -> None:
    class Ticks(Gated):
        own_tick: ClassVar[bool | None] = True

    Store.table = {"one": 0.2}
    scheduler = Ticks(app)
    eventually(lambda: leads(scheduler) and "reserved one" in scheduler.did, 20, "it ticks")
    assert stored(database) == {}
    lost: list[Any] = []
    beat_events.leadership_lost.connect(lambda reason, **_: lost.append(reason), weak=False)
    # From now on it is frozen for longer than its lease, as soon as it is asked.
    database.rows("select pg_terminate_backend(backend_pid) from pglock.beat_terms")
    sent = scheduler.did.count("reserved one")
    eventually(lambda: not leads(scheduler) or lost, 20, "it has noticed")
    assert lost
    assert scheduler.did.count("reserved one") <= sent + 1
    scheduler.close()

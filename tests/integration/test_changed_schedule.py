"""A schedule that changes while its beat leads: taken up as it is, and only what changed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import celery
import celery.beat
import pytest
import redis

from celery_pglock import beat, errors
from tests.integration.workbench import Overheard, terminate
from tests.support.databases import Database
from tests.support.processes import eventually
from tests.support.queued import queued

QUEUE: Final = "changed"
HOURLY: Final = 3600.0
Schedule = dict[str, celery.beat.ScheduleEntry]
Lead = Callable[..., beat.LeaderScheduler]


@pytest.fixture
def lead(database: Database, fresh_redis_url: str) -> Iterator[Lead]:
    """Start a leader with these entries."""
    started: list[beat.LeaderScheduler] = []

    def start(*, elected: bool = True, **schedule: Any) -> beat.LeaderScheduler:
        app = celery.Celery("changed", broker=fresh_redis_url, set_as_current=False)
        app.conf.update(
            pglock_database_url=database.url,
            task_default_queue=QUEUE,
            result_expires=None,
            beat_schedule=schedule,
        )
        scheduler = beat.LeaderScheduler(app)
        started.append(scheduler)
        if elected:
            eventually(lambda: leading_after_tick(scheduler), what="it leads")
        return scheduler

    yield start
    for scheduler in started:
        scheduler.close()


def leading_after_tick(scheduler: beat.LeaderScheduler) -> bool:
    scheduler.tick()
    assert scheduler._leadership is not None  # noqa: SLF001
    return scheduler._leadership.leading  # noqa: SLF001


def take_up(scheduler: beat.LeaderScheduler, schedule: Schedule) -> None:
    # The next leadership reads it there.
    scheduler.schedule = dict(schedule)
    scheduler._leading.take_up(schedule)  # noqa: SLF001


def entries(scheduler: beat.LeaderScheduler, **configured: Any) -> Schedule:
    return {
        name: scheduler.Entry(name=name, app=scheduler.app, **given)
        for name, given in configured.items()
    }


def entry(schedule: float = HOURLY, *args: Any, **more: Any) -> dict[str, Any]:
    return {"task": "report", "schedule": schedule, "args": args, **more}


def stored(database: Database) -> dict[str, str]:
    return dict(database.rows("select entry, schedule from pglock.beat_entries order by entry"))


def arguments(broker: str) -> dict[str, list[Any]]:
    """Return with what each entry was sent, in the order of its messages."""
    with redis.Redis.from_url(broker) as client:
        raw: Any = client.lrange(QUEUE, 0, -1)
    told: dict[str, list[Any]] = {}
    for message in map(json.loads, reversed(raw)):
        args = json.loads(base64.b64decode(message["body"]))[0]
        told.setdefault(message["headers"]["pglock_entry"], []).append(args)
    return told


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Callable[[beat.LeaderScheduler], Overheard]:
    def watch(scheduler: beat.LeaderScheduler) -> Overheard:
        store: Any = scheduler._leading.store  # noqa: SLF001
        overheard = Overheard(store._leader)  # noqa: SLF001
        monkeypatch.setattr(store, "_leader", overheard)
        return overheard

    return watch


def test_what_is_new_edited_and_gone_is_taken_up_at_once(
    lead: Lead, database: Database, fresh_redis_url: str
) -> None:
    before = {"kept": entry(), "edited": entry(), "gone": entry(0.2, "gone"), "args": entry(0.2, 1)}
    scheduler = lead(**before)
    schedule = dict(scheduler.schedule)
    del schedule["gone"]
    schedule |= entries(scheduler, edited=entry(0.2, "edited"), new=entry(0.2, "new"))
    schedule |= entries(scheduler, args=entry(0.2, 2))
    sent = len(queued(fresh_redis_url, QUEUE))
    take_up(scheduler, schedule)

    def all_sent_twice() -> bool:
        scheduler.tick()
        after = [message.entry for message in queued(fresh_redis_url, QUEUE)][sent:]
        assert set(after) <= {"edited", "new", "args"}
        return all(after.count(name) >= 2 for name in ("edited", "new", "args"))

    eventually(all_sent_twice, what="all that is due is sent")
    assert stored(database) == {
        "args": "every 0.200000 s",
        "edited": "every 0.200000 s",
        "gone": "",
        "kept": "every 3600.000000 s",
        "new": "every 0.200000 s",
    }
    told = arguments(fresh_redis_url)
    assert told["edited"][0] == ["edited"]
    assert told["args"][-1] == [2]
    # Each instant once, also of the entry that went on with other arguments.
    instants = [(message.entry, message.due) for message in queued(fresh_redis_url, QUEUE)]
    assert len(instants) == len(set(instants))


def test_the_control_a_schedule_that_nobody_takes_up_changes_nothing(
    lead: Lead, database: Database, fresh_redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = lead(one=entry(0.2))
    monkeypatch.setattr(scheduler._source, "look", lambda _: False)  # noqa: SLF001
    scheduler.schedule.update(entries(scheduler, new=entry(0.2)))

    def sent_for_a_while() -> bool:
        scheduler.tick()
        return len(queued(fresh_redis_url, QUEUE)) >= 5

    eventually(sent_for_a_while, what="the other one is sent")
    assert set(stored(database)) == {"one"}


def test_only_what_changed_costs_a_statement(
    lead: Lead, statements: Callable[[beat.LeaderScheduler], Overheard]
) -> None:
    scheduler = lead(**{f"entry {number}": entry() for number in range(300)})
    overheard = statements(scheduler)
    take_up(scheduler, dict(scheduler.schedule))
    # Made anew and the same, as a scheduler does that reads all of its entries again.
    again = entries(scheduler, **{f"entry {number}": entry() for number in range(300)})
    take_up(scheduler, again)
    take_up(scheduler, again | entries(scheduler, **{"entry 7": entry(HOURLY, "other")}))
    assert overheard.said == []
    take_up(scheduler, again | entries(scheduler, **{"entry 7": entry(60.0), "new": entry()}))
    assert overheard.said == ["select", "insert"]
    del again["entry 9"]
    take_up(scheduler, again | entries(scheduler, **{"entry 7": entry(60.0), "new": entry()}))
    assert overheard.said == ["select", "insert", "with"]


def test_a_standby_takes_over_with_what_it_was_told_last(lead: Lead, database: Database) -> None:
    scheduler = lead(elected=False, one=entry())
    take_up(scheduler, entries(scheduler, two=entry(60.0)))
    assert stored(database) == {}
    eventually(lambda: leading_after_tick(scheduler), what="it leads")
    assert stored(database) == {"two": "every 60.000000 s"}


def test_an_edit_repairs_a_message_that_could_not_be_sent(
    lead: Lead, database: Database, fresh_redis_url: str
) -> None:
    """It is held back for a minute in the end, and the edit does not wait for that."""
    scheduler = lead(bad=entry(1.0, object()))
    claimed = "select due_at from pglock.beat_entries where published_at is null"

    def refused() -> bool:
        scheduler.tick()
        dispatcher: Any = scheduler._leading._dispatcher  # noqa: SLF001
        return bool(dispatcher._back_off.get("bad", 0.0) >= 2)  # noqa: SLF001

    eventually(refused, what="it is refused again and again")
    ((due,),) = database.rows(claimed)
    take_up(scheduler, entries(scheduler, bad=entry(HOURLY, "good")))
    scheduler.tick()
    (message,) = queued(fresh_redis_url, QUEUE)
    assert message.due == due
    assert arguments(fresh_redis_url) == {"bad": [["good"]]}
    assert stored(database) == {"bad": "every 3600.000000 s"}


def test_a_leader_whose_session_ends_while_it_takes_up_is_none(
    lead: Lead, database: Database
) -> None:
    scheduler = lead(one=entry())
    ((pid,),) = database.rows("select backend_pid from pglock.beat_terms")
    terminate(database, pid)
    with pytest.raises(errors.LeadershipLost):
        take_up(scheduler, entries(scheduler, two=entry(60.0)))
    assert stored(database) == {"one": "every 3600.000000 s"}
    # Its schedule is the new one all the same.
    eventually(lambda: "two" in stored(database) or scheduler.tick() is None, what="it leads again")

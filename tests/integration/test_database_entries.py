"""Entries that are kept in the database: written by anybody, taken up by whoever leads."""

from __future__ import annotations

import datetime as dt
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import celery
import pytest
from celery.schedules import crontab, schedule, solar

from celery_pglock import (
    Entry,
    LockedTask,
    beat,
    beat_rows,
    database_entries,
    elections,
    entry_rows,
    errors,
    schedule_statements,
)
from celery_pglock.schedule_store import ScheduleStore
from tests.integration.test_changed_schedule import QUEUE, arguments, leading_after_tick
from tests.integration.workbench import Overheard
from tests.support.databases import Database
from tests.support.processes import eventually
from tests.support.queued import Message, queued

HOURLY: Final = 3600.0
REVISIONS: Final = (
    "select entry, revision, added, registered, definition is not null from pglock.beat_entries"
    " order by entry"
)


@pytest.fixture
def app(database: Database, fresh_redis_url: str) -> Iterator[celery.Celery]:
    app = celery.Celery("kept", broker=fresh_redis_url, set_as_current=False)
    app.conf.update(pglock_database_url=database.url, task_default_queue=QUEUE, result_expires=None)
    yield app
    app.close()


@pytest.fixture
def lead(app: celery.Celery) -> Iterator[Callable[..., beat.LeaderScheduler]]:
    """Start a leader with these entries in its configuration."""
    started: list[beat.LeaderScheduler] = []

    def start(**configured: Any) -> beat.LeaderScheduler:
        app.conf.beat_schedule = configured
        scheduler = beat.LeaderScheduler(app)
        started.append(scheduler)
        eventually(lambda: leading_after_tick(scheduler), what="it leads")
        return scheduler

    yield start
    for scheduler in started:
        scheduler.close()


@pytest.fixture
def sent(fresh_redis_url: str) -> Callable[[], list[Message]]:
    return lambda: queued(fresh_redis_url, QUEUE)


def ticking(scheduler: beat.LeaderScheduler, done: Callable[[], Any], what: str) -> None:
    def ticked() -> bool:
        scheduler.tick()
        return bool(done())

    eventually(ticked, what=what)


def state(database: Database, entry: str) -> tuple[str, str, bool]:
    """Return task, schedule, and whether something is due of an entry."""
    ((task, text, due),) = database.rows(
        "select task, schedule, next_due_at is not null from pglock.beat_entries where entry = %s",
        entry,
    )
    return task, text, due


def dues(messages: list[Message], entry: str) -> list[dt.datetime]:
    return [message.due for message in messages if message.entry == entry]


# --- save, get, all, delete -------------------------------------------------------------------


def test_an_entry_is_read_as_it_was_saved(app: celery.Celery) -> None:
    kept = Entry(
        "a", crontab(minute=0, hour=7), "report", [1], {"x": 2}, {"queue": "q"}, "Asia/Tokyo"
    )
    kept.save(app=app)
    assert kept.revision == 1
    found = Entry.get("a", app=app)
    assert found == kept
    assert Entry.get("b", app=app) is None
    Entry("b", 60, "report").save(app=app)
    Entry("c", solar("sunset", 52.5, 13.4, app=app), "report").save(app=app)
    assert [entry.name for entry in Entry.all(app=app)] == ["a", "b", "c"]
    assert Entry.all(app=app)[1].schedule == schedule(dt.timedelta(seconds=60))
    assert kept.delete(app=app)
    assert not kept.delete(app=app)
    assert [entry.name for entry in Entry.all(app=app)] == ["b", "c"]


def test_the_current_application_is_the_default(app: celery.Celery) -> None:
    before: Any = celery.current_app
    before = before._get_current_object()  # noqa: SLF001
    app.set_current()
    try:
        Entry("a", 60, "report").save()
        assert Entry.get("a") == Entry.all()[0]
        assert Entry("a", 60, "report").delete()
    finally:
        before.set_current()


def test_each_application_has_its_own(app: celery.Celery, database: Database) -> None:
    other = celery.Celery("other", set_as_current=False)
    other.conf.pglock_database_url = database.url
    Entry("a", 60, "report").save(app=app)
    assert Entry.all(app=other) == []
    assert not Entry("a", 60, "report").delete(app=other)
    assert [entry.name for entry in Entry.all(app=app)] == ["a"]


def test_of_two_who_read_the_same_only_one_writes_over_it(app: celery.Celery) -> None:
    Entry("a", 60, "report").save(app=app)
    one, other = Entry.get("a", app=app), Entry.get("a", app=app)
    assert one is not None
    assert other is not None
    one.args, other.args = [1], [2]
    one.save(app=app)
    with pytest.raises(errors.EntryChanged, match="changed or deleted by somebody else"):
        other.save(app=app)
    found = Entry.get("a", app=app)
    assert found is not None
    assert (found.args, found.revision) == ([1], 2)
    # And once more over what it wrote itself.
    one.args = [3]
    one.save(app=app)
    assert one.revision == 3


def test_the_control_who_has_not_read_it_writes_over_it(app: celery.Celery) -> None:
    """Two add one to what both have read before, and one of the two is lost."""
    Entry("a", 60, "report", [1]).save(app=app)
    read = [Entry.get("a", app=app), Entry.get("a", app=app)]
    for entry in read:
        assert entry is not None
        Entry("a", 60, "report", [entry.args[0] + 1]).save(app=app)
    found = Entry.get("a", app=app)
    assert found is not None
    assert found.args == [2]


def test_what_was_deleted_is_not_brought_back_by_who_read_it_before(app: celery.Celery) -> None:
    Entry("a", 60, "report").save(app=app)
    read = Entry.get("a", app=app)
    assert read is not None
    Entry("a", 60, "report").delete(app=app)
    with pytest.raises(errors.EntryChanged):
        read.save(app=app)
    assert Entry.all(app=app) == []
    # A new one of that name may be.
    Entry("a", 60, "report").save(app=app)
    with pytest.raises(errors.EntryChanged):
        read.save(app=app)


def test_an_edit_that_changes_nothing_is_none(app: celery.Celery, database: Database) -> None:
    for _ in range(3):
        Entry("a", 60, "report", [1]).save(app=app)
    assert database.rows(REVISIONS) == [("a", 1, 1, 0, True)]
    Entry("a", 60, "report", [2]).save(app=app)
    assert database.rows(REVISIONS) == [("a", 2, 1, 0, True)]


def test_concurrent_edits_are_numbered_without_a_gap(
    app: celery.Celery, database: Database
) -> None:
    """Each is a statement over one row: none is lost, and the last one is what is there."""

    def edit(worker: int) -> None:
        with database.connect() as connection:
            rows = entry_rows.EntryRows(connection, "pglock", "kept")
            for number in range(50):
                text = Entry("a", 60, "report", [worker, number])._definition().text()  # noqa: SLF001
                revisions[rows.save("a", "report", text)] = [worker, number]

    revisions: dict[int | None, list[int]] = {}
    threads = [threading.Thread(target=edit, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(revisions) == [*range(1, 201)]  # type: ignore[type-var]
    found = Entry.get("a", app=app)
    assert found is not None
    assert (found.revision, found.args) == (200, revisions[200])


def test_tables_of_an_older_release_are_told(blank_database: Database) -> None:
    app = celery.Celery("kept", set_as_current=False)
    app.conf.pglock_database_url = blank_database.url
    with pytest.raises(errors.SchemaError, match="pglock migrate"):
        Entry("a", 60, "report").save(app=app)
    with pytest.raises(errors.ConfigurationError, match="pglock_database_url is not set"):
        Entry("a", 60, "report").save(app=celery.Celery("bare", set_as_current=False))


# --- the leader -------------------------------------------------------------------------------


def test_what_was_saved_before_is_taken_over(
    app: celery.Celery, lead: Any, database: Database, sent: Callable[[], list[Message]]
) -> None:
    Entry("a", 0.2, "report", [1]).save(app=app)
    Entry("deleted", 0.2, "report").save(app=app)
    Entry("deleted", 0.2, "report").delete(app=app)
    scheduler = lead(one={"task": "report", "schedule": 0.2})
    ticking(scheduler, lambda: len(dues(sent(), "a")) >= 3 and dues(sent(), "one"), "they are sent")
    assert {message.entry for message in sent()} == {"a", "one"}
    assert database.rows(REVISIONS) == [
        ("a", 1, 1, 1, True), ("deleted", 2, 1, 0, False), ("one", 0, None, None, False),
    ]  # fmt: skip


def test_an_entry_lives_from_its_save_to_its_delete(
    app: celery.Celery, lead: Any, database: Database, sent: Callable[[], list[Message]],
    fresh_redis_url: str,
) -> None:  # fmt: skip
    scheduler = lead(one={"task": "report", "schedule": HOURLY})
    Entry("a", 0.2, "report", [1]).save(app=app)
    ((saved_at,),) = database.rows("select edited_at from pglock.beat_entries where entry = 'a'")
    ticking(scheduler, lambda: len(dues(sent(), "a")) >= 2, "it is sent")
    # From the moment it was saved, whenever that was seen.
    every = dt.timedelta(seconds=0.2)
    assert dues(sent(), "a")[:2] == [saved_at + every, saved_at + 2 * every]

    Entry("a", 0.2, "report", [2]).save(app=app)
    ticking(scheduler, lambda: [2] in arguments(fresh_redis_url)["a"], "the edit is sent")
    told = arguments(fresh_redis_url)["a"]
    assert told == sorted(told)
    # It went on where it was.
    first = dues(sent(), "a")[0]
    assert all((due - first) % every == dt.timedelta(0) for due in dues(sent(), "a"))

    Entry("a", HOURLY, "other").save(app=app)
    ticking(
        scheduler,
        lambda: state(database, "a") == ("other", "every 3600.000000 s", True),
        "the schedule is another",
    )
    Entry("a", HOURLY, "other").delete(app=app)
    ticking(scheduler, lambda: state(database, "a") == ("other", "", False), "it is gone")
    instants = [(message.entry, message.due) for message in sent()]
    assert len(instants) == len(set(instants))


@pytest.fixture
def told_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told of an edit: as when the leader has not looked at its socket yet."""
    for name in ("_SAVE", "_EDIT", "_DELETE"):
        text = getattr(entry_rows, name)
        assert text.count("pg_catalog.pg_notify(") == 1
        quiet = text.replace("pg_catalog.pg_notify(", "pg_catalog.concat(")
        monkeypatch.setattr(entry_rows, name, quiet)


@pytest.mark.usefixtures("told_late")
def test_an_edit_applies_from_its_commit_on_also_if_it_is_told_late(
    app: celery.Celery, lead: Any, database: Database, sent: Callable[[], list[Message]],
    fresh_redis_url: str,
) -> None:  # fmt: skip
    """The claim asks for the revision, as it asks for a pause."""
    Entry("a", 0.2, "report", [1]).save(app=app)
    Entry("b", 0.2, "report").save(app=app)
    scheduler = lead()
    term = scheduler._leadership.term  # noqa: SLF001
    ticking(scheduler, lambda: len(dues(sent(), "b")) >= 2, "they are sent")
    Entry("a", 0.2, "report", [2]).save(app=app)
    Entry("b", 0.2, "report").delete(app=app)
    before = sent()
    ticking(scheduler, lambda: len(dues(sent(), "a")) >= len(dues(before, "a")) + 3, "it goes on")
    assert dues(sent(), "b") == dues(before, "b")
    after = arguments(fresh_redis_url)["a"][len(dues(before, "a")) :]
    assert after[0] == [2]
    assert scheduler._leadership.term == term  # noqa: SLF001
    assert state(database, "b") == ("report", "", False)


@pytest.mark.usefixtures("told_late")
def test_the_control_a_claim_that_does_not_ask_sends_what_was_deleted(
    app: celery.Celery,
    lead: Any,
    sent: Callable[[], list[Message]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    condition = "  and (w.revision is null or e.revision = w.revision)\n"
    assert schedule_statements.CLAIM.count(condition) == 1
    claim = schedule_statements.CLAIM.replace(condition, "")
    monkeypatch.setattr(schedule_statements, "CLAIM", claim)
    Entry("b", 0.2, "report").save(app=app)
    scheduler = lead()
    ticking(scheduler, lambda: len(dues(sent(), "b")) >= 2, "it is sent")
    Entry("b", 0.2, "report").delete(app=app)
    before = dues(sent(), "b")
    ticking(scheduler, lambda: len(dues(sent(), "b")) >= len(before) + 2, "it is sent all the same")


def test_what_was_saved_while_nobody_led_counts_from_then(
    app: celery.Celery, lead: Any, database: Database, sent: Callable[[], list[Message]]
) -> None:
    """And not from when the next leader sees it: what was due meanwhile is made up for."""
    lead().close()
    Entry("a", 60, "report").save(app=app)
    database.rows("update pglock.beat_entries set edited_at = edited_at - interval '150 s'")
    database.rows("update pglock.beat_terms set last_tick_at = last_tick_at - interval '200 s'")
    ((saved_at,),) = database.rows("select edited_at from pglock.beat_entries")
    scheduler = lead()
    ticking(scheduler, sent, "the newest of two is made up for")
    assert dues(sent(), "a") == [saved_at + dt.timedelta(seconds=120)]
    assert database.rows("select anchor from pglock.beat_entries") == [(saved_at,)]


def test_what_was_deleted_and_saved_again_while_nobody_led_begins_anew(
    app: celery.Celery, lead: Any, database: Database, sent: Callable[[], list[Message]]
) -> None:
    """With the same schedule: what was due in between was due of nothing."""
    Entry("a", 60, "report").save(app=app)
    lead().close()
    database.rows("update pglock.beat_entries set next_due_at = next_due_at - interval '1 h'")
    Entry("a", 60, "report").delete(app=app)
    Entry("a", 60, "report").save(app=app)
    ((saved_at,),) = database.rows("select edited_at from pglock.beat_entries")
    scheduler = lead()
    scheduler.tick()
    assert sent() == []
    assert database.rows("select anchor, registered from pglock.beat_entries") == [(saved_at, 3)]


def test_the_control_what_was_not_deleted_goes_on(
    app: celery.Celery, lead: Any, database: Database, sent: Callable[[], list[Message]]
) -> None:
    Entry("a", 60, "report").save(app=app)
    lead().close()
    database.rows("update pglock.beat_entries set next_due_at = next_due_at - interval '90 s'")
    Entry("a", 60, "report", [2]).save(app=app)
    scheduler = lead()
    ticking(scheduler, sent, "it is late, and sent")


def test_a_claim_that_is_not_sent_yet_is_sent_although_its_entry_is_edited(
    app: celery.Celery, lead: Any, database: Database, sent: Callable[[], list[Message]],
    fresh_redis_url: str,
) -> None:  # fmt: skip
    """Torn between claim and publication by a leader that died; then edited, then taken over."""
    Entry("a", 60, "report", [1]).save(app=app)
    scheduler = lead()
    ((due,),) = database.rows("select next_due_at from pglock.beat_entries")
    store = ScheduleStore("kept", "pglock", scheduler._leadership)  # noqa: SLF001
    torn = beat_rows.Occurrence(
        entry="a",
        task="report",
        due_at=due,
        next_due_at=None,
        task_id=beat_rows.task_id("kept", "a", due),
        recorded=False,
        revision=1,
    )
    assert store.claim([torn], scheduler._leadership.term) == {"a"}  # noqa: SLF001
    scheduler.close()
    database.rows("update pglock.beat_entries set due_at = due_at - interval '60 s'")
    Entry("a", HOURLY, "report", [2]).save(app=app)
    scheduler = lead()
    ticking(scheduler, sent, "it is sent")
    (message,) = sent()
    assert message.due == due - dt.timedelta(seconds=60)
    # What is sent from now on is the edit's.
    assert arguments(fresh_redis_url) == {"a": [[2]]}
    assert state(database, "a") == ("report", "every 3600.000000 s", True)


def test_the_configuration_counts_where_both_have_a_name(
    app: celery.Celery, lead: Any, database: Database, fresh_redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    Entry("both", 0.1, "kept").save(app=app)
    with caplog.at_level(logging.WARNING, "celery_pglock.beat"):
        scheduler = lead(both={"task": "configured", "schedule": 0.2, "args": ["configured"]})
        Entry("both", 0.1, "kept", ["again"]).save(app=app)
        ticking(scheduler, lambda: len(queued(fresh_redis_url, QUEUE)) >= 5, "it is sent")
        scheduler.close()
        scheduler = lead(both={"task": "configured", "schedule": 0.2, "args": ["configured"]})
        Entry("both", 0.1, "kept").delete(app=app)
        more = len(queued(fresh_redis_url, QUEUE)) + 3
        ticking(
            scheduler,
            lambda: len(queued(fresh_redis_url, QUEUE)) >= more,
            "it goes on when the other is deleted",
        )
    assert {str(args) for args in arguments(fresh_redis_url)["both"]} == {"['configured']"}
    assert state(database, "both")[:2] == ("configured", "every 0.200000 s")
    told = [
        record for record in caplog.records if vars(record).get("event") == "entry_configured_too"
    ]
    # Once by each beat.
    assert [record.levelname for record in told] == ["WARNING", "WARNING"]
    assert "entry both is configured and in the database too" in told[0].getMessage()


def test_an_entry_of_the_database_counts_again_when_its_name_is_not_configured_any_more(
    app: celery.Celery, lead: Any, database: Database, sent: Callable[[], list[Message]]
) -> None:
    """From then on, and not from when it was saved."""
    Entry("both", 60, "kept").save(app=app)
    database.rows("update pglock.beat_entries set edited_at = edited_at - interval '1 h'")
    scheduler = lead(both={"task": "configured", "schedule": HOURLY})
    scheduler._leading.take_up({})  # noqa: SLF001
    scheduler.tick()
    assert sent() == []
    assert state(database, "both") == ("kept", "every 60.000000 s", True)
    assert database.rows(
        "select next_due_at - pg_catalog.now() between '50 s' and '60 s' from pglock.beat_entries"
    ) == [(True,)]


def break_by_hand(database: Database, entry: str, definition: object) -> None:
    """Write into the table as somebody might, who also tells of it."""
    database.rows(
        "update pglock.beat_entries set definition = %s::jsonb, revision = revision + 1"
        " where entry = %s",
        json.dumps(definition),
        entry,
    )
    channel = elections.channel("kept")
    database.rows("select pg_notify(%s, %s)", channel, f"{elections.EDITED}{entry}")


@pytest.mark.parametrize("definition", [{"version": 1, "task": 3}, "x", None])
def test_a_broken_row_stops_nobody_elses_and_is_told_once(
    lead: Any, database: Database, sent: Callable[[], list[Message]],
    caplog: pytest.LogCaptureFixture, definition: object,
) -> None:  # fmt: skip
    scheduler = lead()
    app = scheduler.app
    for name in ("a", "broken", "z"):
        Entry(name, 0.2, "report").save(app=app)
    ticking(scheduler, lambda: dues(sent(), "broken"), "it is sent while it is whole")
    with caplog.at_level(logging.ERROR, "celery_pglock.beat"):
        break_by_hand(database, "broken", definition)
        ticking(scheduler, lambda: state(database, "broken")[1] == "", "it is left out")
        before = sent()
        ticking(
            scheduler,
            lambda: all(len(dues(sent(), name)) >= len(dues(before, name)) + 3 for name in "az"),
            "the others go on",
        )
        # Also for who takes over with it; and it is told once by each.
        scheduler.close()
        scheduler = lead()
        taken_over = sent()
        ticking(
            scheduler,
            lambda: all(
                len(dues(sent(), name)) >= len(dues(taken_over, name)) + 3 for name in "az"
            ),
            "the others go on",
        )
    assert dues(sent(), "broken") == dues(before, "broken")
    told = [record for record in caplog.records if vars(record).get("event") == "entry_broken"]
    assert len(told) == 2
    assert "entry 'broken': " in told[0].getMessage()
    # Everybody can read the others, and repair it.
    assert [entry.name for entry in Entry.all(app=app)] == ["a", "z"]
    Entry("broken", 0.2, "report").save(app=app)
    ticking(
        scheduler, lambda: len(dues(sent(), "broken")) > len(dues(before, "broken")), "it is back"
    )


def test_a_task_that_keeps_rows_has_them_for_entries_in_the_database(
    app: celery.Celery, lead: Any, database: Database
) -> None:
    @app.task(name="locked", base=LockedTask, shared=False)
    def locked() -> None:
        """Do nothing."""

    Entry("a", 0.2, "locked").save(app=app)
    scheduler = lead()
    query = "select distinct job, status, task, entry from pglock.job_runs"
    ticking(scheduler, lambda: database.rows(query), "it is sent")
    assert database.rows(query) == [("kept:a", "sent", "locked", "a")]


def test_a_paused_entry_stays_paused_when_it_is_edited(
    app: celery.Celery, lead: Any, database: Database, sent: Callable[[], list[Message]]
) -> None:
    Entry("a", 0.2, "report").save(app=app)
    Entry("b", 0.2, "report").save(app=app)
    scheduler = lead()
    ticking(scheduler, lambda: dues(sent(), "a"), "it is sent")
    database.rows("update pglock.beat_entries set paused_until = '9999-1-1' where entry = 'a'")
    before = dues(sent(), "a")
    Entry("a", 0.1, "report", [2]).save(app=app)
    more = len(dues(sent(), "b")) + 3
    ticking(scheduler, lambda: len(dues(sent(), "b")) >= more, "the other one goes on")
    assert dues(sent(), "a") == before


def test_an_idle_leader_asks_no_more_than_before(
    app: celery.Celery, lead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at all until somebody tells; and then one look-up of what was told of."""
    for number in range(50):
        Entry(f"e{number}", HOURLY, "report").save(app=app)
    scheduler = lead()
    store: Any = scheduler._leading.store  # noqa: SLF001
    overheard = Overheard(store._leader)  # noqa: SLF001
    monkeypatch.setattr(store, "_leader", overheard)
    ended = time.monotonic() + 1.5
    ticks = 0
    while time.monotonic() < ended:
        # As Celery's loop does.
        time.sleep(scheduler.tick())
        ticks += 1
    assert ticks >= 3
    assert overheard.said == []
    Entry("e7", HOURLY, "report", [2]).save(app=app)
    ticking(scheduler, lambda: overheard.said, "it looks it up")
    scheduler.tick()
    assert overheard.said == ["select"]


def test_a_standby_does_not_collect_what_is_told_to_the_leader(
    app: celery.Celery, lead: Any
) -> None:
    lead()
    standby = beat.LeaderScheduler(app)
    try:
        for number in range(3):
            Entry("a", 60, "report", [number]).save(app=app)
            standby.tick()
        assert standby._leadership is not None  # noqa: SLF001
        standby.tick()
        assert standby._leadership.edited == set()  # noqa: SLF001
        assert not standby._leadership.leading  # noqa: SLF001
    finally:
        standby.close()


def test_the_module_is_what_the_package_offers() -> None:
    assert database_entries.Entry is Entry

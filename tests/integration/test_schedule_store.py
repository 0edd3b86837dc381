"""What is stored of an occurrence: claimed, published, confirmed; nothing lost and nothing twice."""

from __future__ import annotations

import datetime as dt
import itertools
import uuid
from collections.abc import Iterator
from typing import Any, Final

import pytest

from celery_pglock import beat_rows, leadership, schedule_statements, schedule_store
from celery_pglock.beat_rows import Occurrence, Passed, Registration
from celery_pglock.schedule_store import ScheduleStore
from tests.integration.workbench import Overheard
from tests.support.databases import Database

UTC: Final = dt.UTC
DUE: Final = dt.datetime(2026, 11, 29, 12, tzinfo=UTC)
MINUTE: Final = dt.timedelta(minutes=1)
TERM: Final = 1
ENTRIES = "select entry, due_at, published_at is not null, next_due_at from pglock.beat_entries"
RUNS = (
    "select job, period, status, due_at, sent_at is not null from pglock.job_runs order by due_at"
)


@pytest.fixture
def leader(database: Database) -> Iterator[leadership.Leadership]:
    """The leader of `app`, in its first term."""
    candidate = leadership.Leadership(database.url, namespace="app", node="a:1")
    assert candidate.stand() is not None
    yield candidate
    candidate.resign()


@pytest.fixture
def store(leader: leadership.Leadership) -> ScheduleStore:
    return ScheduleStore("app", "pglock", leader)


def registration(entry: str = "a", **more: Any) -> Registration:
    given: dict[str, Any] = {
        "task": "report",
        "schedule": "every minute",
        "anchor": DUE - MINUTE,
        "next_due_at": DUE,
        **more,
    }
    return Registration(entry=entry, **given)


def occurrence(entry: str = "a", due_at: dt.datetime = DUE, **more: Any) -> Occurrence:
    given: dict[str, Any] = {
        "task": "report",
        "next_due_at": due_at + MINUTE,
        "task_id": beat_rows.task_id("app", entry, due_at),
        "recorded": True,
        **more,
    }
    return Occurrence(entry=entry, due_at=due_at, **given)


def period(moment: dt.datetime) -> str:
    return moment.isoformat(timespec="microseconds")


# --- task ids -------------------------------------------------------------------------------


def test_a_task_id_is_a_function_of_namespace_entry_and_instant() -> None:
    """Golden: a release that computed another one would send a second message."""
    expected = "7c47b8a3-4ad0-5695-985d-8aab9de94544"
    assert beat_rows.task_id("app", "a", DUE) == expected
    elsewhere = DUE.astimezone(dt.timezone(dt.timedelta(hours=5, minutes=30)))
    assert beat_rows.task_id("app", "a", elsewhere) == expected
    assert uuid.UUID(expected).version == 5
    others = itertools.product(["app", "shop"], ["a", "b"], [DUE, DUE + dt.timedelta.resolution])
    assert len({beat_rows.task_id(*other) for other in others}) == 8


# --- claim, publish, confirm ------------------------------------------------------------------


def test_an_occurrence_goes_through_its_steps(database: Database, store: ScheduleStore) -> None:
    store.register([registration()])
    assert database.rows(ENTRIES) == [("a", None, False, DUE)]
    assert store.claim([occurrence()], TERM) == {"a"}
    assert database.rows(ENTRIES) == [("a", DUE, False, DUE + MINUTE)]
    assert database.rows(RUNS) == [("app:a", period(DUE), "sent", DUE, False)]
    store.confirm([occurrence()])
    assert database.rows(ENTRIES) == [("a", DUE, True, DUE + MINUTE)]
    assert database.rows(RUNS) == [("app:a", period(DUE), "sent", DUE, True)]
    (loaded,) = store.load().values()
    assert loaded.task_id == occurrence().task_id
    assert (loaded.due_at, loaded.next_due_at, loaded.total_run_count) == (DUE, DUE + MINUTE, 1)


def test_a_claim_that_is_not_confirmed_is_the_last_one(
    database: Database, store: ScheduleStore
) -> None:
    store.register([registration()])
    following = occurrence(due_at=DUE + MINUTE)
    assert store.claim([occurrence()], TERM) == {"a"}
    for again in (occurrence(), following):
        assert store.claim([again], TERM) == set()
    assert [due_at for _, due_at, _, _ in database.rows(ENTRIES)] == [DUE]
    assert len(database.rows(RUNS)) == 1
    store.confirm([occurrence()])
    # The same instant never comes again; the one after it does.
    assert store.claim([occurrence()], TERM) == set()
    assert store.claim([occurrence(due_at=DUE - MINUTE)], TERM) == set()
    assert store.claim([following], TERM) == {"a"}
    assert len(database.rows(RUNS)) == 2


@pytest.mark.parametrize("term", [0, 2])
def test_another_term_claims_nothing(database: Database, store: ScheduleStore, term: int) -> None:
    store.register([registration()])
    before = database.rows(ENTRIES)
    assert store.claim([occurrence(missed=(DUE - MINUTE,))], term) == set()
    store.pass_over([passed()], term)
    assert (database.rows(ENTRIES), database.rows(RUNS)) == (before, [])


def test_a_claim_is_of_its_namespace(database: Database, store: ScheduleStore) -> None:
    store.register([registration()])
    other = ScheduleStore("shop", "pglock", store._leader)  # noqa: SLF001
    assert other.load() == {}
    assert other.claim([occurrence()], TERM) == set()
    other.confirm([occurrence()])
    assert database.rows(ENTRIES) == [("a", None, False, DUE)]


def test_only_what_could_be_claimed_is(database: Database, store: ScheduleStore) -> None:
    store.register([registration("a"), registration("b")])
    assert store.claim([occurrence("b")], TERM) == {"b"}
    both = [occurrence(entry, DUE + MINUTE) for entry in ("a", "b", "unknown")]
    assert store.claim(both, TERM) == {"a"}
    assert sorted(row[:2] for row in database.rows(RUNS)) == [
        ("app:a", period(DUE + MINUTE)),
        ("app:b", period(DUE)),
    ]


def test_a_task_without_a_period_has_no_row(database: Database, store: ScheduleStore) -> None:
    store.register([registration("a"), registration("plain")])
    plain = occurrence("plain", recorded=False, missed=(DUE - MINUTE,))
    assert store.claim([occurrence("a"), plain], TERM) == {"a", "plain"}
    assert [job for job, *_ in database.rows(RUNS)] == ["app:a"]
    store.confirm([plain])
    assert ("plain", DUE, True, DUE + MINUTE) in database.rows(ENTRIES)


def test_a_confirmation_leaves_a_run_alone_that_is_done_already(
    database: Database, store: ScheduleStore
) -> None:
    store.register([registration()])
    store.claim([occurrence()], TERM)
    database.rows(
        "update pglock.job_runs set status = 'done', attempts = 1, claim = gen_random_uuid(),"
        " started_at = now(), finished_at = now(), node = 'w:1'"
    )
    everything = "select to_jsonb(r) - 'sent_at' from pglock.job_runs r"
    before = database.rows(everything)
    store.confirm([occurrence()])
    assert database.rows(everything) == before
    assert database.rows(RUNS) == [("app:a", period(DUE), "done", DUE, True)]


def test_a_confirmation_that_is_late_changes_nothing(
    database: Database, store: ScheduleStore
) -> None:
    store.register([registration()])
    store.claim([occurrence()], TERM)
    store.confirm([occurrence()])
    store.claim([occurrence(due_at=DUE + MINUTE)], TERM)
    sent_at = database.rows("select sent_at from pglock.job_runs where due_at = %s", DUE)
    store.confirm([occurrence()])
    assert database.rows(ENTRIES) == [("a", DUE + MINUTE, False, DUE + 2 * MINUTE)]
    query = "select sent_at from pglock.job_runs where due_at = %s"
    assert database.rows(query, DUE) == sent_at


def test_a_row_that_is_there_already_is_kept(database: Database, store: ScheduleStore) -> None:
    database.rows(
        "insert into pglock.job_runs (job, period, due_at, status, attempts) values"
        " ('app:a', %s, %s, 'done', 1)",
        period(DUE),
        DUE,
    )
    store.register([registration()])
    assert store.claim([occurrence()], TERM) == {"a"}
    assert [row[2] for row in database.rows(RUNS)] == ["done"]


# --- what is missed ---------------------------------------------------------------------------


def passed(entry: str = "a", **more: Any) -> Passed:
    given: dict[str, Any] = {
        "task": "report",
        "next_due_at": DUE + 5 * MINUTE,
        "recorded": True,
        "missed": (DUE, DUE + MINUTE),
        **more,
    }
    return Passed(entry=entry, **given)


def test_a_claim_records_what_it_passes_over(database: Database, store: ScheduleStore) -> None:
    store.register([registration("a"), registration("b")])
    late = occurrence("a", DUE + 2 * MINUTE, missed=(DUE, DUE + MINUTE))
    assert store.claim([late, occurrence("b")], TERM) == {"a", "b"}
    assert [row[:4] for row in database.rows(RUNS) if row[0] == "app:a"] == [
        ("app:a", period(DUE), "missed", DUE),
        ("app:a", period(DUE + MINUTE), "missed", DUE + MINUTE),
        ("app:a", period(DUE + 2 * MINUTE), "sent", DUE + 2 * MINUTE),
    ]
    assert database.rows(
        "select distinct reason, finished_at is not null, task, entry, term from pglock.job_runs"
        " where status = 'missed'"
    ) == [("no beat was leading when it was due", True, "report", "a", TERM)]


def test_what_ran_is_never_recorded_as_missed(database: Database, store: ScheduleStore) -> None:
    store.register([registration()])
    database.rows(
        "insert into pglock.job_runs (job, period, due_at, status) values ('app:a', %s, %s, 'done')",
        period(DUE),
        DUE,
    )
    store.claim([occurrence(due_at=DUE + MINUTE, missed=(DUE,))], TERM)
    assert [row[2] for row in database.rows(RUNS)] == ["done", "sent"]


def test_what_is_not_made_up_is_recorded_without_a_claim(
    database: Database, store: ScheduleStore
) -> None:
    store.register([registration("a"), registration("plain"), registration("other")])
    store.pass_over([passed("a"), passed("plain", recorded=False)], TERM)
    assert [row[:3] for row in database.rows(RUNS)] == [
        ("app:a", period(DUE), "missed"),
        ("app:a", period(DUE + MINUTE), "missed"),
    ]
    assert sorted(database.rows(ENTRIES)) == [
        ("a", None, False, DUE + 5 * MINUTE),
        ("other", None, False, DUE),
        ("plain", None, False, DUE + 5 * MINUTE),
    ]
    assert store.claim([occurrence(due_at=DUE + 5 * MINUTE)], TERM) == {"a"}


# --- entries ----------------------------------------------------------------------------------


def test_an_edit_keeps_what_was_claimed(store: ScheduleStore) -> None:
    store.register([registration()])
    store.claim([occurrence()], TERM)
    edited = registration(schedule="hourly", anchor=DUE, next_due_at=DUE + 60 * MINUTE)
    store.register([edited])
    (loaded,) = store.load().values()
    assert (loaded.schedule, loaded.anchor) == ("hourly", DUE)
    assert (loaded.due_at, loaded.published_at) == (DUE, None)
    assert loaded.next_due_at == DUE + 60 * MINUTE


@pytest.mark.parametrize("page", [1, 7, 20, 21, 10_000])
def test_many_entries_are_read_and_stored_page_by_page(
    store: ScheduleStore, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(schedule_store, "_PAGE", page)
    names = [f"entry {number}" for number in range(20)]
    store.register([registration(name) for name in names])
    assert sorted(store.load()) == sorted(names)
    assert sorted(store.load([*names[:9], "unknown"])) == sorted(names[:9])
    assert store.load([]) == {}


def edit(database: Database, revision: int) -> None:
    database.rows("update pglock.beat_entries set revision = %s", revision)


@pytest.mark.parametrize(
    ("planned_by", "claimed"), [(3, True), (2, False), (4, False), (None, True)]
)
def test_only_by_the_edit_that_the_row_has_is_it_claimed_and_passed_over(
    database: Database, store: ScheduleStore, planned_by: int | None, *, claimed: bool
) -> None:
    """None: by a configuration, which counts whatever else the row has."""
    store.register([registration()])
    edit(database, 3)
    before = database.rows(ENTRIES)
    store.pass_over([passed(revision=planned_by, missed=())], TERM)
    assert (database.rows(ENTRIES) != before) is claimed
    assert store.claim([occurrence(revision=planned_by)], TERM) == ({"a"} if claimed else set())
    assert bool(database.rows(RUNS)) is claimed


def test_an_entry_that_was_removed_has_nothing_due(store: ScheduleStore) -> None:
    store.register([registration(name, registered=7) for name in ("a", "b", "c")])
    store.leave(["a", "unknown"], TERM)
    store.leave(["b"], TERM + 1)
    assert {name: (row.schedule, row.next_due_at) for name, row in store.load().items()} == {
        "a": ("", None), "b": ("every minute", DUE), "c": ("every minute", DUE),
    }  # fmt: skip
    assert {row.registered for row in store.load().values()} == {7}
    assert store.load(["b", "unknown"]).keys() == {"b"}


def test_a_claim_of_an_entry_that_was_removed_is_left_to_the_rescue(
    database: Database, store: ScheduleStore
) -> None:
    """Which looks only at what was sent: else its row would say so for ever."""
    store.register([registration(name) for name in ("claimed", "sent", "stays")])
    due = [occurrence(name) for name in ("claimed", "sent", "stays")]
    store.claim(due, TERM)
    store.confirm(due[1:2])
    query = "select entry, sent_at from pglock.job_runs"
    sent_at: dict[str, Any] = dict(database.rows(query))
    store.leave(["claimed", "sent"], TERM)
    assert {name: row.unconfirmed for name, row in store.load().items()} == {
        "claimed": False, "sent": False, "stays": True,
    }  # fmt: skip
    after: dict[str, Any] = dict(database.rows(query))
    assert after["claimed"] is not None
    assert (after["sent"], after["stays"]) == (sent_at["sent"], None)


def test_a_schedule_that_never_comes_can_be_stored(store: ScheduleStore) -> None:
    store.register([registration(next_due_at=None)])
    (loaded,) = store.load().values()
    assert loaded.next_due_at is None


def test_two_thousand_entries_in_one_claim(database: Database, store: ScheduleStore) -> None:
    names = [f"entry {number}" for number in range(2000)]
    store.register([registration(name) for name in names])
    assert len(store.load()) == 2000
    due = [occurrence(name) for name in names]
    assert store.claim(due, TERM) == set(names)
    assert store.claim([occurrence(name, DUE + MINUTE) for name in names], TERM) == set()
    store.confirm(due)
    counts = (
        "select count(*), count(published_at), count(distinct task_id) from pglock.beat_entries"
    )
    assert database.rows(counts) == [(2000, 2000, 2000)]
    assert database.rows("select count(*), count(sent_at) from pglock.job_runs") == [(2000, 2000)]


@pytest.mark.parametrize("template", ["CLAIM", "CONFIRM", "MOVE_ON"])
def test_a_statement_looks_rows_up_by_their_keys(
    database: Database, store: ScheduleStore, template: str
) -> None:
    """However long the history is; also with the plan that PostgreSQL keeps for any values."""
    database.rows(
        "insert into pglock.job_runs (job, period, due_at, status) select 'app:e' || n % 100,"
        " n::text, now(), 'done' from generate_series(1, 20000) n"
    )
    store.register([registration(f"e{number}") for number in range(5000)])
    database.rows("analyze pglock.job_runs, pglock.beat_entries")
    overheard = Overheard()
    recorder = ScheduleStore("app", "pglock", overheard)
    recorder.claim([occurrence("e1", missed=(DUE,))], TERM)
    recorder.confirm([occurrence("e1")])
    recorder.pass_over([passed("e1")], TERM)
    wanted = schedule_statements.statement(getattr(schedule_statements, template), "pglock")
    ((query, parameters),) = [pair for pair in overheard.asked if pair[0] == wanted]
    connection = database.connect()
    connection.execute("set plan_cache_mode = force_generic_plan")
    plan = "\n".join(
        line for (line,) in connection.execute(b"explain " + query, parameters).fetchall()
    )
    assert "Seq Scan on beat_entries" not in plan
    assert "Seq Scan on job_runs" not in plan
    control = connection.execute("explain select from pglock.job_runs where status = 'x'")
    assert any("Seq Scan" in line for (line,) in control.fetchall())

"""What the leader stores when the server's clock was set back, or forward and back again."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Final

import pytest

from celery_pglock import beat_rows, leadership, periods, schedule_store
from celery_pglock.beat_rows import Occurrence, Passed, Registration, Reset
from celery_pglock.schedule_store import ScheduleStore
from tests.support.databases import Database

DUE: Final = dt.datetime(2026, 11, 29, 12, tzinfo=dt.UTC)
MINUTE: Final = dt.timedelta(minutes=1)
HOUR: Final = dt.timedelta(hours=1)
TERM: Final = 1
ROW: Final = "select status, reason, sent_at, finished_at, task_id from pglock.job_runs"


@pytest.fixture
def store(database: Database) -> Iterator[ScheduleStore]:
    """The entries of `app`, whose leader is in its first term; `a` has its first claim."""
    candidate = leadership.Leadership(database.url, namespace="app", node="a:1")
    assert candidate.stand() is not None
    made = ScheduleStore("app", "pglock", candidate)
    made.register(
        [
            Registration(
                entry="a",
                task="report",
                schedule="every minute",
                anchor=DUE - MINUTE,
                next_due_at=DUE,
            )
        ]
    )
    yield made
    candidate.resign()


def occurrence(due_at: dt.datetime) -> Occurrence:
    return Occurrence(
        entry="a",
        task="report",
        due_at=due_at,
        next_due_at=due_at + MINUTE,
        task_id=beat_rows.task_id("app", "a", due_at),
        recorded=True,
    )


def back_to(moment: dt.datetime | None) -> Reset:
    return Reset(
        entry="a",
        anchor=DUE - 3 * HOUR,
        due_at=moment,
        next_due_at=DUE - HOUR if moment is None else moment + MINUTE,
    )


@pytest.mark.parametrize("moment", [DUE - HOUR, None])
def test_an_entry_that_was_reset_can_be_claimed_for_an_earlier_instant(
    store: ScheduleStore, moment: dt.datetime | None
) -> None:
    earlier = occurrence(DUE - HOUR + MINUTE)
    assert store.claim([occurrence(DUE)], TERM) == {"a"}
    store.confirm([occurrence(DUE)])
    assert store.claim([earlier], TERM) == set(), "without it, it cannot"
    store.reset([back_to(moment)], TERM)
    (stored,) = store.load().values()
    assert (stored.anchor, stored.due_at) == (DUE - 3 * HOUR, moment)
    assert not stored.unconfirmed
    assert store.claim([earlier], TERM) == {"a"}
    assert store.claim([earlier], TERM) == set(), "once"


def test_what_is_unconfirmed_is_not_reset(store: ScheduleStore) -> None:
    """It would be forgotten, and was perhaps never sent."""
    store.claim([occurrence(DUE)], TERM)
    before = store.load()
    store.reset([back_to(DUE - HOUR)], TERM)
    assert store.load() == before
    assert before["a"].unconfirmed


def test_nobody_resets_in_the_term_of_another(store: ScheduleStore) -> None:
    store.claim([occurrence(DUE)], TERM)
    store.confirm([occurrence(DUE)])
    before = store.load()
    store.reset([back_to(DUE - HOUR)], TERM + 1)
    assert store.load() == before


def missed(due_at: dt.datetime) -> Passed:
    return Passed(entry="a", task="report", next_due_at=DUE, recorded=True, missed=(due_at,))


def test_what_was_missed_is_sent_when_the_clock_comes_to_it_after_all(
    database: Database, store: ScheduleStore
) -> None:
    """A clock that was set forward by mistake, and right again."""
    store.why_missed = schedule_store.CLOCK_SET_FORWARD
    store.pass_over([missed(DUE)], TERM)
    ((status, reason, *_),) = database.rows(ROW)
    assert (status, reason) == ("missed", "the server's clock was set forward over it")
    store.claim([occurrence(DUE)], TERM)
    ((status, reason, sent_at, finished_at, task_id),) = database.rows(ROW)
    assert (status, reason, sent_at, finished_at) == ("sent", None, None, None)
    assert task_id == occurrence(DUE).task_id
    store.confirm([occurrence(DUE)])
    assert database.rows(ROW)[0][2] is not None


@pytest.mark.parametrize(
    ("status", "attempts"), [("missed", 1), ("done", 1), ("skipped", 0), ("failed", 1)]
)
def test_a_row_that_says_more_than_that_stays_as_it_is(
    database: Database, store: ScheduleStore, status: str, attempts: int
) -> None:
    database.rows(
        "insert into pglock.job_runs (job, period, due_at, status, attempts, finished_at)"
        " values ('app:a', %s, %s, %s, %s, now())",
        periods.occurrence(DUE),
        DUE,
        status,
        attempts,
    )
    before = database.rows("select r::text from pglock.job_runs r")
    assert store.claim([occurrence(DUE)], TERM) == {"a"}
    assert database.rows("select r::text from pglock.job_runs r") == before

"""What a message says of itself, and the copies that are sent when it has to wait."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_pglock import LockedTask, claims, messages

MINUTE = dt.timedelta(minutes=1)
FRESH = messages.Delivery(task_id="abc", direct=False)
WORK = claims.Work(
    job="proj:nightly",
    period="2026-11-03T02:00:00.000000+00:00",
    name="proj.t",
    name_key=5,
    run_key=6,
    task="proj.t",
    task_id="abc",
    due_at=dt.datetime(2026, 11, 3, 2, tzinfo=dt.UTC),
    entry="nightly",
    term=7,
)


def body(*args: Any, **kwargs: Any) -> None:
    """Take anything."""


def a_task(**conf: Any) -> Any:
    app: Any = Celery("proj", set_as_current=False)
    app.conf.update(conf)
    return app.task(body, base=LockedTask, shared=False, lazy=False, name="proj.t")


def copies(task: Any, delivery: messages.Delivery = FRESH) -> list[messages.Copy]:
    """Return all the copies of a message, as if each were refused at the moment it arrives."""
    found: list[messages.Copy] = []
    elapsed = dt.timedelta()
    while len(found) < 20_000:
        since = dt.datetime.now(dt.UTC) - elapsed
        if found:
            delivery = dataclasses.replace(
                delivery, postponed=found[-1].number, postponed_since=since
            )
        copy = messages.next_copy(task, delivery)
        if copy is None:
            return found
        found.append(copy)
        elapsed += dt.timedelta(seconds=copy.countdown)
    pytest.fail("it never ends")


def test_copies_are_sent_after_1_2_4_up_to_60_seconds_for_an_hour() -> None:
    found = copies(a_task())
    countdowns = [copy.countdown for copy in found]
    assert countdowns[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(countdowns[6:]) == {60}
    assert [copy.number for copy in found] == list(range(1, len(found) + 1))
    assert 3600 - 60 < sum(countdowns) <= 3600


@pytest.mark.parametrize("visibility", [3, 9, 30, 60, 100, 600, 3600])
def test_waiting_and_countdown_stay_within_a_third_of_the_visibility_time_out(
    visibility: float,
) -> None:
    """Beyond it the broker delivers the waiting copy once more, and copies multiply."""
    task = a_task(broker_transport_options={"visibility_timeout": visibility})
    longest = max(copy.countdown for copy in copies(task)[:20])
    assert messages.wait(task) > 0
    assert messages.wait(task) + longest <= visibility / 3 + 1e-9


def test_with_a_long_visibility_time_out_a_message_waits_three_seconds_in_the_worker() -> None:
    assert messages.wait(a_task()) == 3.0
    assert messages.wait(a_task(broker_transport_options={"visibility_timeout": 9})) == 1.5


@pytest.mark.parametrize("options", [{}, None, {"visibility_timeout": None}, {"other": 1}])
def test_without_a_visibility_time_out_of_ones_own_the_usual_hour_counts(options: Any) -> None:
    task = a_task(broker_transport_options=options)
    assert max(copy.countdown for copy in copies(task)) == 60


def test_a_message_is_given_up_an_hour_after_its_first_copy() -> None:
    task = a_task()
    now = dt.datetime.now(dt.UTC)
    waits = dataclasses.replace(FRESH, postponed=60, postponed_since=now - 58 * MINUTE)
    copy = messages.next_copy(task, waits)
    assert copy is not None
    assert (copy.number, copy.countdown, copy.since) == (61, 60.0, now - 58 * MINUTE)
    late = dataclasses.replace(waits, postponed_since=now - 59.5 * MINUTE)
    assert messages.next_copy(task, late) is None


def test_a_message_is_given_up_before_it_expires() -> None:
    task = a_task()
    now = dt.datetime.now(dt.UTC)
    for left, sent in [(MINUTE / 2, True), (MINUTE / 120, False), (-MINUTE, False)]:
        expiring = dataclasses.replace(FRESH, expires=now + left)
        assert (messages.next_copy(task, expiring) is not None) is sent
    last = copies(task, dataclasses.replace(FRESH, expires=now + MINUTE))
    assert [copy.countdown for copy in last] == [1, 2, 4, 8, 16, 32, 60][: len(last)]


# --- Reading ----------------------------------------------------------------------------------


def test_a_direct_call_has_no_message() -> None:
    assert messages.read(Context()) == messages.Delivery(task_id=None, direct=True)


def test_a_call_out_of_a_running_task_is_a_direct_call_too() -> None:
    request = Context(id="abc", called_directly=False)
    assert not messages.read(request).direct
    marked: Any = Context(id="abc", called_directly=False, _protected=1)  # by the worker
    assert messages.read(marked).direct


def test_all_that_a_beat_says_is_read() -> None:
    request = Context(
        id="abc",
        called_directly=False,
        retries=2,
        is_eager=False,
        expires="2026-11-03T04:00:00+00:00",
        delivery_info={"redelivered": True},
        headers={
            "pglock_job": "proj:nightly",
            "pglock_period": "p",
            "pglock_due": "2026-11-03T02:00:00+00:00",
            "pglock_term": 7,
            "pglock_entry": "nightly",
            "pglock_fixed": True,
            "pglock_postponed": 3,
            "pglock_postponed_since": "2026-11-03T02:01:00+00:00",
            "pglock_late": True,
            "celery_beat_task": True,
        },
    )
    assert messages.read(request) == messages.Delivery(
        task_id="abc",
        direct=False,
        redelivered=True,
        retries=2,
        postponed=3,
        postponed_since=dt.datetime(2026, 11, 3, 2, 1, tzinfo=dt.UTC),
        fixed=True,
        job="proj:nightly",
        period="p",
        due=dt.datetime(2026, 11, 3, 2, tzinfo=dt.UTC),
        term=7,
        entry="nightly",
        stock_beat=False,
        late=True,
        expires=dt.datetime(2026, 11, 3, 4, tzinfo=dt.UTC),
    )


def test_a_message_of_a_beat_that_names_no_due_instant_is_a_stock_beats() -> None:
    request = Context(id="abc", called_directly=False, headers={"celery_beat_task": True})
    assert messages.read(request).stock_beat


@pytest.mark.parametrize(
    ("value", "moment"),
    [
        (None, None),
        ("soon", None),
        (17, None),
        ("2026-11-03T02:00:00", dt.datetime(2026, 11, 3, 2, tzinfo=dt.UTC)),
        ("2026-11-03T03:00:00+01:00", dt.datetime(2026, 11, 3, 2, tzinfo=dt.UTC)),
    ],
)
def test_a_due_instant_that_cannot_be_read_is_none(
    value: object, moment: dt.datetime | None
) -> None:
    request = Context(id="abc", called_directly=False, headers={"pglock_due": value})
    assert messages.read(request).due == moment


# --- Fixing and sending -----------------------------------------------------------------------


def test_a_claim_fixes_job_and_period_for_the_retries_of_its_message() -> None:
    request = Context(id="abc", called_directly=False, headers={"theirs": 1})
    messages.fix(request, WORK)
    read = messages.read(Context(id="abc", called_directly=False, headers=request.headers))
    assert (read.fixed, read.job, read.period) == (True, WORK.job, WORK.period)
    assert (read.due, read.entry, read.term) == (WORK.due_at, WORK.entry, WORK.term)
    assert request.headers is not None
    assert request.headers["theirs"] == 1


def test_fixing_does_not_change_the_headers_that_were_received() -> None:
    received = {"theirs": 1}
    messages.fix(Context(id="abc", called_directly=False, headers=received), WORK)
    assert received == {"theirs": 1}


def test_headers_are_plain_json() -> None:
    request = Context(id="abc", called_directly=False)
    messages.fix(request, WORK)
    assert json.loads(json.dumps(request.headers)) == request.headers


def test_a_replaced_task_is_given_our_headers_and_keeps_its_own() -> None:
    signature = a_task().s().set(headers={"own": 1})
    messages.carry(signature, {"pglock_job": "proj:nightly", "theirs": 2})
    assert signature.options["headers"] == {"own": 1, "pglock_job": "proj:nightly"}


@pytest.mark.parametrize(
    ("row_id", "status", "repeats"),
    [
        ("abc", "running", True),
        ("abc", "retrying", True),
        ("abc", "failed", True),
        ("abc", "sent", False),
        ("other", "running", False),
        (None, "running", False),
    ],
)
def test_a_message_repeats_when_a_row_of_its_own_has_been_worked_on(
    row_id: str | None, status: str, *, repeats: bool
) -> None:
    row = claims.Row(status, None, row_id, 1, 0, 0, None, None, None, None, None)
    assert FRESH.repeats(row) is repeats
    assert not messages.Delivery(task_id=None, direct=True).repeats(row)

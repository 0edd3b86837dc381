"""Which job and which period a call belongs to."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable
from typing import NoReturn
from zoneinfo import ZoneInfo

import pytest

from celery_pglock import errors, identity, messages, options, periods

BERLIN = ZoneInfo("Europe/Berlin")
DUE = dt.datetime(2026, 11, 3, 2, tzinfo=dt.UTC)
FRESH = messages.Delivery(task_id="abc", direct=False)
OCCURRENCE = dataclasses.replace(FRESH, job="proj:nightly", due=DUE, entry="nightly", term=7)
DIRECT = messages.Delivery(task_id=None, direct=True)


def never(*_: object) -> NoReturn:
    pytest.fail("this call needs neither the ledger nor the server's clock")


def nothing(*_: str | None) -> None:
    return None


def identify(
    delivery: messages.Delivery,
    rule: options.OncePer,
    *,
    lock_name: str = "proj.t",
    now: dt.datetime | None = None,
    period_of: Callable[[str, str | None], str | None] = never,
    server_now: Callable[[], dt.datetime] = never,
) -> identity.Identity:
    identifier = identity.Identifier(
        namespace="proj",
        zone=BERLIN,
        task="proj.t",
        rule=rule,
        period_of=period_of,
        server_now=server_now,
    )
    return identifier.identify(delivery, lock_name, now)


def test_an_occurrence_is_known_by_its_entry_and_its_due_instant() -> None:
    assert identify(OCCURRENCE, "occurrence") == identity.Identity(
        "proj:nightly", "2026-11-03T02:00:00.000000+00:00"
    )


def test_a_period_that_the_beat_named_is_kept_as_it_is() -> None:
    named = dataclasses.replace(OCCURRENCE, period="from-the-beat")
    assert identify(named, "occurrence").period == "from-the-beat"


def test_a_message_without_an_occurrence_is_known_by_its_id_and_the_tasks_name() -> None:
    """And not by the lock's, which may hold arguments: each would have a history for ever."""
    for delivery in (FRESH, dataclasses.replace(FRESH, redelivered=True, retries=3)):
        found = identify(delivery, "occurrence", lock_name='proj.t{"a":1}')
        assert found == identity.Identity("proj:proj.t", "id:abc")


def test_each_direct_call_is_a_period_of_its_own() -> None:
    one, other = identify(DIRECT, "occurrence"), identify(DIRECT, "occurrence")
    assert one.job == other.job == "proj:proj.t"
    assert one.period != other.period


@pytest.mark.parametrize("delivery", [FRESH, OCCURRENCE, DIRECT])
def test_where_only_the_lock_is_wanted_there_is_no_period(delivery: messages.Delivery) -> None:
    assert identify(delivery, None, lock_name="x") == identity.Identity("proj:x", None)


@pytest.mark.parametrize("rule", ["occurrence", "day", lambda _: "mine"])
def test_what_a_claim_has_fixed_stays_fixed(rule: options.OncePer) -> None:
    fixed = dataclasses.replace(FRESH, fixed=True, job="proj:elsewhere", period="2026-10")
    assert identify(fixed, rule) == identity.Identity("proj:elsewhere", "2026-10")


@pytest.mark.parametrize(
    ("rule", "label"),
    [
        ("minute", "2026-11-03T03:00+01:00"),
        ("hour", "2026-11-03T03+01:00"),
        ("day", "2026-11-03"),
        ("week", "2026-W45"),
        ("month", "2026-11"),
    ],
)
def test_a_calendar_period_is_the_bucket_of_the_due_instant_under_the_lock_name(
    rule: str, label: str
) -> None:
    found = identify(OCCURRENCE, rule, lock_name='proj.t{"a":1}')
    assert found == identity.Identity('proj:proj.t{"a":1}', label)


def test_a_bucket_is_counted_in_the_applications_zone() -> None:
    late = dataclasses.replace(OCCURRENCE, due=dt.datetime(2026, 11, 3, 23, 30, tzinfo=dt.UTC))
    assert identify(late, "day").period == "2026-11-04"


def test_without_a_due_instant_the_clock_is_a_guess_that_the_claim_checks() -> None:
    before = dt.datetime.now(dt.UTC)
    found = identify(FRESH, "minute")
    assert found.window is not None
    since, until = found.window
    assert until - since == dt.timedelta(minutes=1)
    assert since <= dt.datetime.now(dt.UTC)
    assert until > before
    assert found == identity.Identity(
        "proj:proj.t", periods.calendar("minute", since, BERLIN), (since, until)
    )


def test_the_servers_clock_settles_it() -> None:
    now = dt.datetime(2026, 11, 3, 23, 30, tzinfo=dt.UTC)
    assert identify(FRESH, "day", now=now) == identity.Identity("proj:proj.t", "2026-11-04")


def test_a_redelivered_message_stays_in_the_period_of_its_first_claim() -> None:
    again = dataclasses.replace(FRESH, redelivered=True)
    asked: list[tuple[str, str | None]] = []

    def period_of(job: str, task_id: str | None) -> str:
        asked.append((job, task_id))
        return "2026-11-02"

    assert identify(again, "day", period_of=period_of).period == "2026-11-02"
    assert asked == [("proj:proj.t", again.task_id)]


def test_a_redelivered_message_that_was_never_claimed_takes_the_period_of_now() -> None:
    again = dataclasses.replace(FRESH, redelivered=True)
    now = dt.datetime(2026, 11, 3, 12, tzinfo=dt.UTC)
    assert identify(again, "day", now=now, period_of=nothing).period == "2026-11-03"


def test_a_function_names_the_period_of_the_due_moment_in_the_applications_zone() -> None:
    seen: list[dt.datetime] = []

    def half(moment: dt.datetime) -> str:
        seen.append(moment)
        return f"{moment:%Y-%m-%d}-{'am' if moment.hour < 12 else 'pm'}"

    assert identify(OCCURRENCE, half).period == "2026-11-03-am"
    assert (seen[0], seen[0].tzinfo) == (DUE, BERLIN)


def test_a_function_is_given_the_servers_clock_where_nothing_is_due() -> None:
    found = identify(FRESH, lambda moment: f"{moment:%Y}", server_now=lambda: DUE)
    assert found == identity.Identity("proj:proj.t", "2026")


@pytest.mark.parametrize("label", ["", None, 5, "a\0b", b"2026"])
def test_a_function_that_names_no_period_is_an_error_that_names_the_task(label: object) -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        identify(OCCURRENCE, lambda _: label)  # type: ignore[arg-type, return-value]
    assert str(caught.value) == (
        "the once_per function of task 'proj.t' must return a text that names the period; "
        f"it returned {label!r}"
    )

"""The agenda when the server's clock was set: no silence, nothing twice, nothing lost."""

from __future__ import annotations

import datetime as dt
from typing import Any, Final
from zoneinfo import ZoneInfo

import pytest

from celery_pglock import beat_rows, occurrences
from celery_pglock.agenda import Agenda
from celery_pglock.plans import Planned
from tests.unit.test_agenda import EVERY_MINUTE, MINUTE, NOW, known, planned, send_all

# Not a whole number of minutes, as it would be in life.
BACK: Final = dt.timedelta(hours=2, microseconds=17)
THEN: Final = NOW - BACK
RESOLUTION: Final = dt.timedelta.resolution


def set_back(
    agenda: Agenda, entry: Planned, stored: beat_rows.Stored, **more: Any
) -> list[beat_rows.Registration]:
    given: dict[str, Any] = {"now": THEN, "missed_until": None, "clock_was": NOW, **more}
    return agenda.take_over([entry], {entry.name: stored}, between=lambda: None, **given)


def hourly(name: str = "a", **more: Any) -> Planned:
    crontab = occurrences.Crontab(
        minutes=frozenset({0}),
        hours=frozenset(range(24)),
        days_of_week=frozenset(range(7)),
        days_of_month=frozenset(range(1, 32)),
        months=frozenset(range(1, 13)),
        zone=ZoneInfo("UTC"),
        elapsed=True,
    )
    return planned(name, schedule=lambda _: crontab, **more)


def test_an_interval_goes_on_as_it_would_have() -> None:
    """The same distance from the last one, and instants that were never due before."""
    agenda = Agenda("app")
    anchor = NOW - 998.75 * MINUTE
    assert set_back(agenda, planned("a"), known(0.25, anchor=anchor)) == []
    assert agenda.set_back == BACK
    (reset,) = agenda.resets
    assert reset.anchor == anchor - BACK
    assert reset.next_due_at == THEN + MINUTE / 4 == agenda.next_due_at
    assert reset.due_at == THEN - MINUTE * 0.75
    (sent,) = agenda.pop(THEN + MINUTE, 9)
    assert sent.due_at == THEN + MINUTE / 4
    assert (sent.due_at - anchor) % MINUTE != dt.timedelta(0)


def test_an_interval_does_not_come_to_the_same_instants_again() -> None:
    """Also when the clock is set back by just so much that it would."""
    agenda = Agenda("app")
    now = NOW - 120 * MINUTE
    set_back(agenda, planned("a"), known(0.25, anchor=NOW - 999.75 * MINUTE), now=now)
    (reset,) = agenda.resets
    assert agenda.next_due_at == now + MINUTE / 4 + RESOLUTION
    assert reset.next_due_at == agenda.next_due_at


def test_an_interval_that_was_late_is_not_lost() -> None:
    agenda = Agenda("app")
    set_back(agenda, planned("a"), known(-2))
    assert [occurrence.due_at for occurrence in agenda.pop(THEN, 9)] == [THEN - 2 * MINUTE]


def test_a_crontab_comes_to_the_instants_of_the_clock_once_more() -> None:
    agenda = Agenda("app")
    stored = known(60, due_at=NOW, anchor=NOW - 9999 * MINUTE)
    set_back(agenda, hourly(), stored)
    (reset,) = agenda.resets
    # 17 microseconds before ten o'clock.
    assert reset.due_at == NOW - 180 * MINUTE
    assert reset.next_due_at == NOW - 120 * MINUTE == agenda.next_due_at


def test_a_crontab_that_was_not_due_in_that_time_stays_where_it_is() -> None:
    agenda = Agenda("app")
    stored = known(30, due_at=NOW - 30 * MINUTE)
    set_back(agenda, hourly(), stored, now=NOW - MINUTE, clock_was=NOW)
    assert agenda.next_due_at == NOW


@pytest.mark.parametrize("what", ["due_at", "published_at", "anchor", "clock_was"])
def test_any_trace_of_the_clock_tells_that_it_was_set_back(what: str) -> None:
    """Whoever takes over knows only what is stored."""
    agenda = Agenda("app")
    long_ago = THEN - 99 * MINUTE
    given = {"due_at": long_ago, "published_at": long_ago, "anchor": long_ago, "clock_was": THEN}
    given[what] = NOW
    clock_was = given.pop("clock_was")
    set_back(agenda, planned("a"), known(0.5, **given), clock_was=clock_was)
    assert agenda.next_due_at == THEN + MINUTE / 2
    assert len(agenda.resets) == 1


def test_control_an_entry_without_such_a_trace_is_left_alone() -> None:
    agenda = Agenda("app")
    set_back(agenda, planned("a"), known(0.5), now=NOW, clock_was=NOW)
    set_back(agenda, planned("a"), known(0.5), now=NOW - MINUTE / 13, clock_was=NOW)
    assert (agenda.resets, agenda.set_back) == ([], dt.timedelta(0))
    assert agenda.next_due_at == NOW + MINUTE / 2


def test_what_is_unconfirmed_is_sent_under_its_own_instant_and_then_planned_anew() -> None:
    agenda = Agenda("app")
    claimed = known(1, due_at=NOW, published_at=None)
    assert set_back(agenda, planned("a"), claimed) == []
    assert agenda.resets == []
    (unsent,) = agenda.unsent.values()
    assert unsent.due_at == NOW
    told = [agenda.outdated]
    agenda.sent(unsent)
    assert [*told, agenda.outdated] == [False, True]
    confirmed = known(1, due_at=NOW, published_at=THEN)
    set_back(agenda, planned("a"), confirmed, clock_was=THEN)
    assert not agenda.outdated
    assert agenda.next_due_at == THEN + MINUTE


def test_an_edited_entry_whose_claim_is_of_a_time_to_come_can_be_claimed_again() -> None:
    agenda = Agenda("app")
    (registration,) = set_back(agenda, planned("a"), known(1, schedule="daily", due_at=NOW))
    (reset,) = agenda.resets
    assert registration.next_due_at == reset.next_due_at == THEN + MINUTE
    assert reset.due_at is None
    unconfirmed = known(1, schedule="daily", due_at=NOW, published_at=None)
    set_back(agenda, planned("a"), unconfirmed)
    assert agenda.resets == []
    agenda.sent(next(iter(agenda.unsent.values())))
    assert agenda.outdated


def test_what_is_paused_stays_paused() -> None:
    agenda = Agenda("app")
    until = NOW + 5 * MINUTE
    set_back(agenda, planned("a"), known(1, due_at=NOW, paused_until=until))
    assert send_all(agenda, THEN + 9 * MINUTE) == []
    (passed,) = agenda.passed_over
    assert passed.next_due_at is not None
    assert passed.next_due_at >= until


def test_a_clock_that_was_set_forward_is_as_a_downtime() -> None:
    """The newest is made up, the others are missed; nothing is stored anew."""
    agenda = Agenda("app")
    later = NOW + BACK
    stored = {"a": known(1, schedule=EVERY_MINUTE)}
    agenda.take_over(
        [planned("a")],
        stored,
        now=later,
        missed_until=later,
        between=lambda: None,
        clock_was=NOW,
    )
    assert agenda.resets == []
    ((sent, late, missed),) = send_all(agenda, later)
    assert (sent, late, len(missed)) == (120, False, 119)

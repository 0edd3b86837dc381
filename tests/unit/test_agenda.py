"""The agenda: what is sent, in which order, and what is made up after a downtime."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any, Final

import pytest

from celery_pglock import occurrences, schedule_store
from celery_pglock.agenda import Agenda, Planned

NOW: Final = dt.datetime(2026, 11, 29, 12, tzinfo=dt.UTC)
MINUTE: Final = dt.timedelta(minutes=1)
EVERY_MINUTE: Final = "every minute"


class Never:
    """A schedule that never comes."""

    def after(self, moment: dt.datetime) -> None:
        assert moment.tzinfo


def planned(name: str, text: str = EVERY_MINUTE, **more: Any) -> Planned:
    given: dict[str, Any] = {
        "task": "report",
        "schedule": lambda anchor: occurrences.Interval(MINUTE, anchor),
        "recorded": True,
        "catchup": 1,
        **more,
    }
    return Planned(name=name, text=text, **given)


def known(next_in: float | None, **more: Any) -> schedule_store.Stored:
    """Return a stored entry whose next occurrence is that many minutes after NOW."""
    next_due_at = None if next_in is None else NOW + MINUTE * next_in
    given: dict[str, Any] = {
        "schedule": EVERY_MINUTE,
        "anchor": NOW - 1_000_000 * MINUTE,
        "due_at": None if next_due_at is None else next_due_at - MINUTE,
        "task_id": "before",
        "published_at": NOW - MINUTE,
        "total_run_count": 3,
        "next_due_at": next_due_at,
        **more,
    }
    return schedule_store.Stored(**given)


def take_over(
    agenda: Agenda,
    entries: Iterable[Planned],
    stored: dict[str, schedule_store.Stored] | None = None,
    *,
    after_downtime: bool = False,
) -> list[schedule_store.Registration]:
    return agenda.take_over(
        entries, stored or {}, now=NOW, after_downtime=after_downtime, between=lambda: None
    )


def minutes(occurrence: schedule_store.Occurrence) -> float:
    return (occurrence.due_at - NOW) / MINUTE


def send_all(agenda: Agenda, now: dt.datetime) -> list[tuple[float, bool, list[float]]]:
    """Send what is due; return (minutes after NOW, late, those that are missed), in order."""
    told = []
    while due := agenda.pop(now, 500):
        for occurrence in due:
            missed = [(moment - NOW) / MINUTE for moment in occurrence.missed]
            told.append((minutes(occurrence), occurrence.late, missed))
            agenda.sent(occurrence)
    return told


# --- taking over ----------------------------------------------------------------------------


def test_a_new_entry_counts_from_now() -> None:
    agenda = Agenda("app")
    (registration,) = take_over(agenda, [planned("a")])
    assert registration == schedule_store.Registration(
        entry="a", task="report", schedule=EVERY_MINUTE, anchor=NOW, next_due_at=NOW + MINUTE
    )
    assert agenda.next_due_at == NOW + MINUTE
    assert agenda.pop(NOW, 10) == []


def test_a_known_entry_goes_on_from_its_own_anchor() -> None:
    agenda = Agenda("app")
    anchor = NOW - dt.timedelta(seconds=61.5)
    assert take_over(agenda, [planned("a")], {"a": known(0.5, anchor=anchor)}) == []
    assert agenda.next_due_at == NOW + MINUTE / 2
    (occurrence,) = agenda.pop(NOW + MINUTE / 2, 10)
    assert occurrence.next_due_at == anchor + 2 * MINUTE
    assert not occurrence.late


def test_an_edited_entry_starts_from_its_next_occurrence() -> None:
    """C10 (b): what the old schedule had due is not run retroactively."""
    agenda = Agenda("app")
    (registration,) = take_over(agenda, [planned("a")], {"a": known(-5, schedule="daily")})
    assert (registration.anchor, registration.next_due_at) == (NOW, NOW + MINUTE)
    assert agenda.pop(NOW, 10) == []


def test_an_entry_that_is_not_configured_is_left_alone() -> None:
    agenda = Agenda("app")
    unconfirmed = known(-1, due_at=NOW - 2 * MINUTE, published_at=None)
    assert take_over(agenda, [planned("a")], {"gone": known(-5), "torn": unconfirmed})
    assert [occurrence.entry for occurrence in agenda.pop(NOW + MINUTE, 10)] == ["a"]
    assert agenda.unsent == {}


def test_what_was_claimed_and_not_confirmed_comes_first_with_its_instant_and_id() -> None:
    agenda = Agenda("app")
    claimed = known(-1, due_at=NOW - 2 * MINUTE, published_at=None)
    assert take_over(agenda, [planned("a"), planned("b")], {"a": claimed, "b": known(-1)}) == []
    (unsent,) = agenda.unsent.values()
    assert (unsent.entry, minutes(unsent), unsent.late) == ("a", -2, True)
    assert unsent.task_id == schedule_store.task_id("app", "a", NOW - 2 * MINUTE)
    # Until it is sent, nothing else of that entry is.
    assert [occurrence.entry for occurrence in agenda.pop(NOW, 10)] == ["b"]
    assert agenda.pop(NOW, 10) == []
    agenda.sent(unsent)
    assert agenda.unsent == {}
    assert [(o.entry, minutes(o)) for o in agenda.pop(NOW, 10)] == [("a", -1)]


def test_a_claim_is_sent_before_an_edit_applies() -> None:
    agenda = Agenda("app")
    claimed = known(-1, due_at=NOW - 2 * MINUTE, published_at=None, schedule="daily")
    (registration,) = take_over(agenda, [planned("a")], {"a": claimed})
    (unsent,) = agenda.unsent.values()
    assert (minutes(unsent), unsent.next_due_at) == (-2, registration.next_due_at)
    agenda.sent(unsent)
    assert agenda.next_due_at == NOW + MINUTE


def test_the_lease_is_fed_before_each_entry() -> None:
    fed: list[int] = []
    entries = [planned(str(number)) for number in range(7)]
    Agenda("app").take_over(
        entries, {}, now=NOW, after_downtime=False, between=lambda: fed.append(1)
    )
    assert len(fed) == 7


def test_whoever_does_not_lead_has_forgotten_everything() -> None:
    agenda = Agenda("app")
    claimed = known(-1, published_at=None)
    take_over(agenda, [planned("a"), planned("b")], {"a": claimed, "b": known(-1)})
    agenda.clear()
    assert (agenda.unsent, agenda.next_due_at, agenda.pop(NOW, 10)) == ({}, None, [])


# --- what is due ----------------------------------------------------------------------------


def test_the_earliest_come_first_and_only_as_many_as_are_wanted() -> None:
    agenda = Agenda("app")
    next_in = {"a": -1, "b": -3, "c": -2, "d": 1}
    take_over(agenda, map(planned, next_in), {name: known(at) for name, at in next_in.items()})
    assert [occurrence.entry for occurrence in agenda.pop(NOW, 2)] == ["b", "c"]
    assert [occurrence.entry for occurrence in agenda.pop(NOW, 2)] == ["a"]
    assert agenda.pop(NOW, 2) == []
    assert agenda.next_due_at == NOW + MINUTE


def test_each_occurrence_is_sent_and_those_in_a_row_are_late() -> None:
    """Without a downtime nothing is passed over, however late it is."""
    agenda = Agenda("app")
    take_over(agenda, [planned("a", catchup=0)], {"a": known(-2)})
    assert send_all(agenda, NOW) == [(-2, True, []), (-1, True, []), (0, True, [])]
    assert send_all(agenda, NOW + MINUTE) == [(1, False, [])]


def test_a_schedule_that_never_comes_is_registered_and_not_planned() -> None:
    agenda = Agenda("app")
    never = planned("a", schedule=lambda _: Never())
    (registration,) = take_over(agenda, [never, planned("b")], {"b": known(None)})
    assert registration.next_due_at is None
    assert (agenda.next_due_at, agenda.pop(NOW + 9999 * MINUTE, 10)) == (None, [])


def test_the_last_occurrence_of_a_schedule_has_none_after_it() -> None:
    agenda = Agenda("app")
    take_over(
        agenda, [planned("a", schedule=lambda _: Never())], {"a": known(-1)}, after_downtime=True
    )
    (occurrence,) = agenda.pop(NOW, 10)
    assert (minutes(occurrence), occurrence.next_due_at) == (-1, None)
    agenda.sent(occurrence)
    assert agenda.next_due_at is None


def test_an_idle_look_asks_no_schedule() -> None:
    asked: list[dt.datetime] = []

    class Counting:
        def after(self, moment: dt.datetime) -> dt.datetime:
            asked.append(moment)
            return moment + MINUTE

    agenda = Agenda("app")
    take_over(agenda, [planned(str(n), schedule=lambda _: Counting()) for n in range(1000)])
    assert len(asked) == 1000
    for _ in range(100):
        assert agenda.pop(NOW, 500) == []
        assert agenda.next_due_at == NOW + MINUTE
    assert len(asked) == 1000


# --- after a downtime -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("catchup", "sent"),
    [
        (1, [(0, False, [-4, -3, -2, -1])]),
        (3, [(-2, True, [-4, -3]), (-1, True, []), (0, True, [])]),
        (9, [(-4, True, []), (-3, True, []), (-2, True, []), (-1, True, []), (0, True, [])]),
    ],
)
def test_the_newest_are_made_up_and_the_others_are_missed(
    catchup: int, sent: list[tuple[float, bool, list[float]]]
) -> None:
    """C14 (a)."""
    agenda = Agenda("app")
    take_over(agenda, [planned("a", catchup=catchup)], {"a": known(-4)}, after_downtime=True)
    assert send_all(agenda, NOW) == sent
    assert agenda.passed_over == []
    assert send_all(agenda, NOW + 2 * MINUTE)[-1][0] == 2


def test_with_no_catch_up_all_are_missed_and_the_next_is_not_sent_before_it_is_due() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a", catchup=0)], {"a": known(-4)}, after_downtime=True)
    assert agenda.pop(NOW, 500) == []
    (passed,) = agenda.passed_over
    assert passed == schedule_store.Passed(
        entry="a",
        task="report",
        next_due_at=NOW + MINUTE,
        recorded=True,
        missed=tuple(NOW + minute * MINUTE for minute in (-4, -3, -2, -1, 0)),
    )
    assert agenda.next_due_at == NOW + MINUTE
    assert send_all(agenda, NOW + MINUTE) == [(1, False, [])]


def test_what_falls_due_after_the_take_over_is_not_missed() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a", catchup=1)], {"a": known(1)}, after_downtime=True)
    assert send_all(agenda, NOW + 3 * MINUTE) == [(1, True, []), (2, True, []), (3, True, [])]


def test_a_long_downtime_is_recorded_up_to_a_limit() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a")], {"a": known(-100_000)}, after_downtime=True)
    ((sent, late, missed),) = send_all(agenda, NOW)
    assert (sent, late) == (0, False)
    assert missed == list(range(-1000, 0))


def test_the_stored_instant_counts_although_the_schedule_would_not_find_it_again() -> None:
    """As with solar, which finds an instant a little beside the one it told before."""

    class Beside:
        def after(self, moment: dt.datetime) -> dt.datetime:
            return moment + 10 * MINUTE

    agenda = Agenda("app")
    take_over(
        agenda, [planned("a", schedule=lambda _: Beside())], {"a": known(-3)}, after_downtime=True
    )
    assert send_all(agenda, NOW) == [(-3, False, [])]

"""The agenda: what is sent, in which order, and what is made up after a downtime."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable
from typing import Any, Final

import pytest

from celery_pglock import beat_rows, occurrences
from celery_pglock.agenda import Agenda
from celery_pglock.plans import FOREVER, Planned

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


def known(next_in: float | None, **more: Any) -> beat_rows.Stored:
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
    return beat_rows.Stored(**given)


def take_over(
    agenda: Agenda,
    entries: Iterable[Planned],
    stored: dict[str, beat_rows.Stored] | None = None,
    *,
    after_downtime: bool = False,
) -> list[beat_rows.Registration]:
    return agenda.take_over(
        entries,
        stored or {},
        now=NOW,
        missed_until=NOW if after_downtime else None,
        between=lambda: None,
    )


def minutes(occurrence: beat_rows.Occurrence) -> float:
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
    assert registration == beat_rows.Registration(
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
    assert unsent.task_id == beat_rows.task_id("app", "a", NOW - 2 * MINUTE)
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
    Agenda("app").take_over(entries, {}, now=NOW, missed_until=None, between=lambda: fed.append(1))
    assert len(fed) == 7


def test_whoever_does_not_lead_has_forgotten_everything() -> None:
    agenda = Agenda("app")
    claimed = known(-1, published_at=None)
    take_over(agenda, [planned("a"), planned("b")], {"a": claimed, "b": known(-1)})
    agenda.clear()
    assert (agenda.unsent, agenda.next_due_at, agenda.pop(NOW, 10)) == ({}, None, [])


# --- a schedule that changes while this beat leads --------------------------------------------


def take_up(
    agenda: Agenda,
    edited: Collection[Planned] = (),
    removed: Collection[str] = (),
    stored: dict[str, beat_rows.Stored] | None = None,
    *,
    missed_until: dt.datetime | None = None,
) -> list[beat_rows.Registration]:
    return agenda.take_up(edited, removed, stored or {}, now=NOW, missed_until=missed_until)


def due_in_an_hour(agenda: Agenda) -> dict[str, list[float]]:
    """Send all that is due within an hour; return the minutes at which each entry was."""
    told: dict[str, list[float]] = {}
    while due := agenda.pop(NOW + 60 * MINUTE, 500):
        for occurrence in due:
            told.setdefault(occurrence.entry, []).append(minutes(occurrence))
            agenda.sent(occurrence)
    return told


def every(count: float, name: str = "a", **more: Any) -> Planned:
    return planned(
        name,
        text=f"every {count} minutes",
        schedule=lambda anchor: occurrences.Interval(count * MINUTE, anchor),
        **more,
    )


def test_an_entry_that_is_added_counts_from_now_and_the_others_stay() -> None:
    agenda = Agenda("app")
    take_over(
        agenda, [every(20)], {"a": known(7, schedule="every 20 minutes", due_at=NOW - 13 * MINUTE)}
    )
    (registration,) = take_up(agenda, [every(30, "b")])
    assert registration == beat_rows.Registration(
        entry="b",
        task="report",
        schedule="every 30 minutes",
        anchor=NOW,
        next_due_at=NOW + 30 * MINUTE,
    )
    assert due_in_an_hour(agenda) == {"a": [7, 20, 40, 60], "b": [30, 60]}


def test_only_what_changed_is_asked_for() -> None:
    agenda = Agenda("app")
    asked: list[str] = []

    class Counting:
        def __init__(self, name: str) -> None:
            self.name = name

        def after(self, moment: dt.datetime) -> dt.datetime:
            asked.append(self.name)
            return moment + MINUTE

    take_over(agenda, [planned(n, schedule=lambda _, n=n: Counting(n)) for n in "abc"])
    asked.clear()
    take_up(agenda, [planned("b", "edited", schedule=lambda _: Counting("b"))], ["a"])
    assert asked == ["b"]


def test_an_edited_schedule_starts_from_its_next_occurrence_and_the_old_one_ends() -> None:
    """What the old one had due, and was not sent, is not sent any more."""
    agenda = Agenda("app")
    take_over(agenda, [every(20), every(50, "b")], {"a": known(-1, schedule="every 20 minutes")})
    (registration,) = take_up(
        agenda, [every(25)], stored={"a": known(-1, schedule="every 20 minutes")}
    )
    assert (registration.schedule, registration.anchor) == ("every 25 minutes", NOW)
    assert due_in_an_hour(agenda) == {"a": [25, 50], "b": [50]}


def test_an_edit_of_anything_else_leaves_the_entry_where_it_is() -> None:
    agenda = Agenda("app")
    stored = {"a": known(7, schedule="every 20 minutes", due_at=NOW - 13 * MINUTE)}
    take_over(agenda, [every(20)], stored)
    assert take_up(agenda, [every(20, task="other")], stored=stored) == []
    (occurrence,) = agenda.pop(NOW + 7 * MINUTE, 9)
    assert (occurrence.task, minutes(occurrence)) == ("other", 7)
    agenda.sent(occurrence)
    assert due_in_an_hour(agenda) == {"a": [20, 40, 60]}


@pytest.mark.parametrize(("missed_until", "sent"), [(NOW, [0]), (None, [-2, -1, 0])])
def test_an_edit_does_not_end_what_is_being_made_up(
    missed_until: dt.datetime | None, sent: list[float]
) -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a")], {"a": known(-2)}, after_downtime=missed_until is not None)
    take_up(
        agenda, [planned("a", task="other")], stored={"a": known(-2)}, missed_until=missed_until
    )
    assert [due for due, *_ in send_all(agenda, NOW)] == sent


def test_an_edit_in_the_middle_of_a_row_of_late_ones_leaves_them_late() -> None:
    """Or one of them would be skipped as an overlap of the one before."""
    agenda = Agenda("app")
    take_over(agenda, [planned("a")], {"a": known(-1)})
    (first,) = agenda.pop(NOW, 9)
    agenda.sent(first)
    assert first.late
    stored = {"a": known(0, due_at=first.due_at)}
    take_up(agenda, [planned("a", task="other")], stored=stored)
    assert send_all(agenda, NOW) == [(0, True, [])]
    assert send_all(agenda, NOW + MINUTE) == [(1, False, [])]


def test_an_entry_that_is_removed_is_not_sent_any_more() -> None:
    agenda = Agenda("app")
    claimed = known(-1, due_at=NOW - 2 * MINUTE, published_at=None)
    take_over(
        agenda,
        [planned("a"), every(30, "b"), planned("torn")],
        {"a": known(-1), "torn": claimed},
    )
    assert take_up(agenda, [], ["a", "torn", "never there"]) == []
    assert agenda.unsent == {}
    assert due_in_an_hour(agenda) == {"b": [30, 60]}


def test_an_entry_that_was_removed_and_is_there_again_counts_from_now() -> None:
    """With the same schedule: what was due in between is not sent."""
    agenda = Agenda("app")
    take_over(agenda, [planned("a")], {"a": known(-1)})
    take_up(agenda, [], ["a"])
    (registration,) = take_up(agenda, [planned("a")], stored={"a": known(-30)})
    assert (registration.anchor, registration.next_due_at) == (NOW, NOW + MINUTE)


def test_what_is_claimed_is_sent_before_an_edit_applies_while_leading() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a")], {"a": known(0)})
    (claimed,) = agenda.pop(NOW, 9)
    agenda.unsent["a"] = claimed
    stored = known(1, due_at=claimed.due_at, published_at=None)
    (registration,) = take_up(agenda, [every(30, task="other")], stored={"a": stored})
    assert registration.next_due_at == NOW + 30 * MINUTE
    assert agenda.pop(NOW + 60 * MINUTE, 9) == []
    (unsent,) = agenda.unsent.values()
    assert (unsent.task_id, unsent.due_at) == (claimed.task_id, claimed.due_at)
    agenda.sent(unsent)
    assert due_in_an_hour(agenda) == {"a": [30, 60]}


def test_an_edit_can_repair_a_schedule_and_can_break_it() -> None:
    class Raises:
        def after(self, moment: dt.datetime) -> dt.datetime:
            raise ZeroDivisionError(moment)

    agenda = Agenda("app")
    take_over(agenda, [planned("a", schedule=lambda _: Raises()), every(30, "b")])
    take_up(agenda, [every(20), planned("b", schedule=lambda _: Raises())])
    assert [name for name, _ in agenda.failed] == ["a", "b"]
    assert due_in_an_hour(agenda) == {"a": [20, 40, 60]}


def test_an_entry_that_is_the_same_is_known() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a")])
    assert agenda.knows(planned("a"))
    different: dict[str, Any] = {"task": "other", "recorded": False, "catchup": 2}
    others = [planned("a", **{name: value}) for name, value in different.items()]
    assert not any(map(agenda.knows, [*others, planned("a", "edited"), planned("b")]))
    take_up(agenda, removed=["a"])
    assert not agenda.knows(planned("a"))


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
    assert passed == beat_rows.Passed(
        entry="a",
        task="report",
        next_due_at=NOW + MINUTE,
        recorded=True,
        missed=tuple(NOW + minute * MINUTE for minute in (-4, -3, -2, -1, 0)),
    )
    assert agenda.next_due_at == NOW + MINUTE
    assert send_all(agenda, NOW + MINUTE) == [(1, False, [])]


@pytest.mark.parametrize(
    ("minutes_back", "sent"),
    [
        (9, [(-1, True, [-4, -3, -2]), (0, True, [])]),
        (0.5, [(0, False, [-4, -3, -2, -1])]),
        (0, [(0, False, [-4, -3, -2, -1])]),
    ],
)
def test_what_is_older_than_the_window_is_not_made_up(
    minutes_back: float, sent: list[tuple[float, bool, list[float]]]
) -> None:
    agenda = Agenda("app", catchup_window=60 * minutes_back)
    take_over(agenda, [planned("a", catchup=2)], {"a": known(-4)}, after_downtime=True)
    assert send_all(agenda, NOW) == sent


def test_outside_the_window_all_are_missed() -> None:
    agenda = Agenda("app", catchup_window=30)
    late = NOW + 0.9 * MINUTE
    agenda.take_over(
        [planned("a", catchup=2)],
        {"a": known(-4)},
        now=late,
        missed_until=late,
        between=lambda: None,
    )
    assert agenda.pop(late, 500) == []
    (passed,) = agenda.passed_over
    assert passed.missed == tuple(NOW + minute * MINUTE for minute in (-4, -3, -2, -1, 0))
    assert passed.next_due_at == NOW + MINUTE


def test_the_lease_is_fed_for_each_entry_that_is_looked_through() -> None:
    agenda = Agenda("app")
    fed: list[int] = []
    agenda.take_over(
        [planned(name) for name in "abc"],
        {name: known(-4) for name in "abc"},
        now=NOW,
        missed_until=NOW,
        between=lambda: fed.append(1),
    )
    before = len(fed)
    assert len(agenda.pop(NOW, 500)) == 3
    assert len(fed) - before == 3


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


# --- pauses -----------------------------------------------------------------------------------


def test_what_is_due_during_a_pause_is_passed_over_without_a_trace() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a")], {"a": known(1)})
    agenda.pause({"a": NOW + 3 * MINUTE}, NOW)
    assert send_all(agenda, NOW + 2 * MINUTE) == []
    (passed,) = agenda.passed_over
    assert (passed.next_due_at, passed.missed) == (NOW + 3 * MINUTE, ())
    assert send_all(agenda, NOW + 4 * MINUTE) == [(3, True, []), (4, True, [])]


def test_a_pause_without_an_end_lasts_until_somebody_ends_it() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a"), planned("b")], {"a": known(1), "b": known(1)})
    agenda.pause({"a": FOREVER}, NOW)
    assert [due for due, *_ in send_all(agenda, NOW + 2 * MINUTE)] == [1, 2]  # of b alone
    (passed,) = agenda.passed_over
    assert (passed.entry, passed.next_due_at) == ("a", None)
    later = NOW + 10 * MINUTE
    agenda.pause({"a": later}, later)
    assert agenda.next_due_at == NOW + 3 * MINUTE  # b
    due = {(o.entry, minutes(o)) for o in agenda.pop(NOW + 11 * MINUTE, 500)}
    assert ("a", 11) in due
    assert not [entry for entry, due_in in due if entry == "a" and due_in < 11]


def test_an_entry_that_is_resumed_early_is_due_again_from_then_on() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a")], {"a": known(1)})
    agenda.pause({"a": NOW + 60 * MINUTE}, NOW)
    assert send_all(agenda, NOW + MINUTE) == []
    assert agenda.next_due_at == NOW + 60 * MINUTE
    resumed = NOW + 5 * MINUTE + MINUTE / 2
    agenda.pause({"a": resumed}, resumed)
    assert send_all(agenda, NOW + 7 * MINUTE) == [(6, True, []), (7, True, [])]


def test_whoever_takes_over_makes_up_for_no_pause() -> None:
    agenda = Agenda("app")
    stored = {"a": known(-5, paused_until=NOW - 2 * MINUTE)}
    take_over(agenda, [planned("a", catchup=9)], stored, after_downtime=True)
    assert [due for due, *_ in send_all(agenda, NOW)] == [-2, -1, 0]


def test_an_entry_that_was_resumed_while_nobody_led_is_due_again() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a")], {"a": known(None, paused_until=NOW - MINUTE / 2)})
    assert [due for due, *_ in send_all(agenda, NOW + MINUTE)] == [0, 1]


def test_what_cannot_be_claimed_is_planned_anew() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a")], {"a": known(0)})
    (occurrence,) = agenda.pop(NOW, 10)
    agenda.put_back(occurrence)
    agenda.pause({"a": NOW + MINUTE}, NOW)
    assert send_all(agenda, NOW + MINUTE) == [(1, False, [])]


def test_an_entry_whose_pause_is_made_shorter_is_due_when_that_ends() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a")], {"a": known(1)})
    agenda.pause({"a": FOREVER}, NOW)
    assert send_all(agenda, NOW + MINUTE) == []
    assert agenda.next_due_at is None
    agenda.pause({"a": NOW + 5 * MINUTE}, NOW + 2 * MINUTE)
    assert agenda.next_due_at == NOW + 5 * MINUTE


def test_whoever_takes_over_knows_of_a_pause_that_was_made_shorter_meanwhile() -> None:
    agenda = Agenda("app")
    stored = {"a": known(60, due_at=NOW - 9 * MINUTE, paused_until=NOW + MINUTE)}
    take_over(agenda, [planned("a")], stored)
    assert agenda.next_due_at == NOW + MINUTE


def test_a_pause_of_long_ago_does_not_bring_back_what_came_after_it() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("a")], {"a": known(1, paused_until=NOW - 99 * MINUTE)})
    assert agenda.next_due_at == NOW + MINUTE


def test_an_entry_that_is_there_again_is_not_sent_for_all_the_time_that_it_was_not() -> None:
    agenda = Agenda("app")
    take_over(agenda, [planned("back"), planned("late")], {"back": known(-1500), "late": known(-3)})
    sent = [(o.entry, minutes(o), len(o.missed)) for o in agenda.pop(NOW, 500)]
    assert sorted(sent) == [("back", 0, 1000), ("late", -3, 0)]


class Moody:
    """A schedule of somebody's own, which raises while it may not work."""

    def __init__(self) -> None:
        self.works = True

    def after(self, moment: dt.datetime) -> dt.datetime:
        if not self.works:
            raise ZeroDivisionError
        return moment + MINUTE


@pytest.mark.parametrize("begins", ["at the take-over", "when it is due", "when it is resumed"])
def test_a_schedule_that_raises_is_left_out_and_asked_again(begins: str) -> None:
    agenda, moody = Agenda("app"), Moody()
    entries = [planned("a"), planned("bad", schedule=lambda _: moody)]
    stored = {"a": known(1), "bad": known(1)}
    if begins == "at the take-over":
        moody.works = False
        take_over(agenda, [planned("new", schedule=lambda _: moody), *entries], stored)
        assert agenda.failed[0][0] == "new"
    else:
        take_over(agenda, entries, stored)
        moody.works = False
        if begins == "when it is resumed":
            agenda.pause({"bad": NOW}, NOW)
            assert [name for name, _ in agenda.failed] == ["bad"]
    later = NOW + MINUTE
    assert [occurrence.entry for occurrence in agenda.pop(later, 500)] == ["a"]
    assert agenda.failed[-1][0] in ("bad", "new")
    again_at = agenda.look_again_at
    assert again_at is not None
    assert NOW + MINUTE <= again_at <= later + MINUTE
    # Whoever looks again takes over once more, from what is stored.
    moody.works = True
    take_over(agenda, entries, stored)
    assert agenda.look_again_at is None
    assert sorted(occurrence.entry for occurrence in agenda.pop(later, 500)) == ["a", "bad"]
    assert agenda.failed == []


# --- entries that are kept in the database ------------------------------------------------------


def kept(name: str, revision: int, edited: float, added: int = 1, **more: Any) -> Planned:
    """Return an entry whose definition was edited that many minutes after NOW."""
    edited_at = NOW + edited * MINUTE
    return planned(name, revision=revision, edited_at=edited_at, added=added, **more)


def test_what_was_saved_counts_from_then_whoever_sees_it_first() -> None:
    agenda = Agenda("app")
    stored = {"a": known(None, schedule="", due_at=None, registered=0, revision=1)}
    (registration,) = take_over(agenda, [kept("a", 1, -2.5)], stored, after_downtime=True)
    assert (registration.anchor, registration.registered) == (NOW - 2.5 * MINUTE, 1)
    # The newest is made up for, and the one before is missed, as if somebody had seen it before.
    assert send_all(agenda, NOW) == [(-0.5, False, [-1.5])]


def test_what_was_saved_long_before_it_is_seen_is_made_up_for_like_a_downtime() -> None:
    agenda = Agenda("app")
    stored = {"a": known(None, schedule="", due_at=None, registered=0, revision=1)}
    take_over(agenda, [kept("a", 1, -60 * 24 * 3)], stored)
    ((sent, _, missed),) = send_all(agenda, NOW)
    assert (sent, len(missed)) == (0, 1000)


def test_an_edit_counts_from_when_it_was_made_but_never_before_what_was_claimed() -> None:
    agenda = Agenda("app")
    before = known(1, schedule="daily", due_at=NOW - 0.25 * MINUTE, registered=1, revision=2)
    (registration,) = take_over(agenda, [kept("a", 2, -3.5)], {"a": before})
    assert registration.anchor == NOW - 3.5 * MINUTE
    assert [due for due, *_ in send_all(agenda, NOW + MINUTE)] == [0.5]


def test_an_edit_of_another_beat_that_is_stored_already_goes_on() -> None:
    agenda = Agenda("app")
    before = known(0.25, registered=1, revision=5)
    assert take_over(agenda, [kept("a", 5, -9)], {"a": before}) == []
    assert agenda.next_due_at == NOW + MINUTE / 4


def test_what_was_configured_until_now_counts_from_now() -> None:
    """It is in the database for long, but nothing of it was due."""
    agenda = Agenda("app")
    before = known(0.25, schedule="daily", registered=None, revision=5)
    (registration,) = take_over(agenda, [kept("a", 5, -9)], {"a": before})
    assert (registration.anchor, registration.registered) == (NOW, 5)


def test_what_came_back_with_the_same_schedule_begins_anew() -> None:
    agenda = Agenda("app")
    before = known(-30, registered=3, revision=7)
    (registration,) = take_over(agenda, [kept("a", 7, -0.5, added=7)], {"a": before})
    assert (registration.anchor, registration.registered) == (NOW - MINUTE / 2, 7)
    assert [due for due, *_ in send_all(agenda, NOW + MINUTE)] == [0.5]


def test_an_edit_that_lies_beyond_now_counts_from_now() -> None:
    """The server's clock was set back."""
    agenda = Agenda("app")
    stored = {"a": known(None, schedule="", due_at=None, registered=0, revision=1)}
    (registration,) = take_over(agenda, [kept("a", 1, 90)], stored)
    assert registration.anchor == NOW


def test_an_occurrence_says_by_which_edit_it_was_planned() -> None:
    agenda = Agenda("app")
    take_over(agenda, [kept("a", 4, -9)], {"a": known(0, registered=4, revision=4)})
    (occurrence,) = agenda.pop(NOW, 9)
    assert occurrence.revision == 4
    assert agenda.knows(kept("a", 4, -9))
    assert not agenda.knows(kept("a", 5, -1))


def test_another_task_is_stored_although_its_entry_goes_on() -> None:
    agenda = Agenda("app")
    stored = {"a": known(0.5, task="before")}
    (registration,) = take_over(agenda, [planned("a")], stored)
    assert (registration.task, registration.anchor) == ("report", stored["a"].anchor)
    assert agenda.next_due_at == registration.next_due_at == NOW + MINUTE / 2

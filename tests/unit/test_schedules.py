"""Celery's schedule objects: one text for one schedule, and due instants that stay the same."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, Final
from zoneinfo import ZoneInfo

import celery
import pytest
from celery import schedules as celery_schedules
from celery.schedules import crontab
from typing_extensions import override

from celery_pglock import errors, occurrences, schedules

UTC: Final = dt.UTC
BERLIN: Final = ZoneInfo("Europe/Berlin")
ANCHOR: Final = dt.datetime(2026, 11, 29, 12, tzinfo=UTC)
SECOND: Final = dt.timedelta(seconds=1)
DAY: Final = dt.timedelta(days=1)


@pytest.fixture(scope="module")
def app() -> celery.Celery:
    return celery.Celery("schedules", set_as_current=False)


def in_zone(schedule: Any, zone: dt.tzinfo) -> Any:
    schedule.tz = zone
    return schedule


def cron(**fields: Any) -> Any:
    return in_zone(crontab(**fields), BERLIN)


# --- the canonical text ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (cron(minute=30, hour=2), "crontab 30 2 * * * Europe/Berlin"),
        (cron(minute="*/15"), "crontab */15 * * * * Europe/Berlin"),
        (
            cron(minute=[5, 3], hour="9-11", day_of_week="mon,sun", day_of_month="1"),
            "crontab 3,5 9,10,11 1 * 0,1 Europe/Berlin",
        ),
        (celery_schedules.schedule(30), "every 30.000000 s"),
        (celery_schedules.schedule(dt.timedelta(days=1, microseconds=1)), "every 86400.000001 s"),
        (celery_schedules.schedule(1 / 3), "every 0.333333 s"),
    ],
)
def test_golden_texts(schedule: Any, text: str) -> None:
    assert schedules.canonical(schedule, UTC) == text


@pytest.mark.parametrize(
    "same",
    [
        [
            cron(minute=m)
            for m in ("1,2,30", [30, 2, 1], {2, 1, 30}, (1, 2, 30), "30,2,1", "1-2,30")
        ],
        [cron(hour=h) for h in (7, "7", [7], {7})],
        [cron(day_of_week=d) for d in ("sun", "0", 0, {0}, "sunday")],
        [celery_schedules.schedule(s) for s in (60, 60.0, dt.timedelta(minutes=1))],
    ],
)
def test_one_schedule_has_one_text_however_it_is_written(same: list[Any]) -> None:
    assert len({schedules.canonical(schedule, UTC) for schedule in same}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # They match the same minutes, but one follows elapsed time where clocks are changed.
        (cron(minute="*/30"), cron(minute="0,30", hour="0-23")),
        (cron(minute=0), in_zone(crontab(minute=0), UTC)),
        (cron(minute=0, day_of_week=1), cron(minute=0, day_of_month=1)),
        # `repr` rounds: both are "<freq: 1.00 second>".
        (celery_schedules.schedule(1.0001), celery_schedules.schedule(1.0002)),
        (celery_schedules.schedule(60), celery_schedules.schedule(60, relative=True)),
    ],
)
def test_different_schedules_have_different_texts(one: Any, other: Any) -> None:
    assert schedules.canonical(one, UTC) != schedules.canonical(other, UTC)


class Business(celery_schedules.schedule):
    """A user's own class, which takes functions and objects."""


def make_clock() -> Callable[[], dt.datetime]:
    return lambda: dt.datetime.now(UTC)


def test_the_text_does_not_tell_where_an_object_lies_in_memory() -> None:
    """Else each process would take the entry for an edited one, and forget what is due."""
    both: list[Any] = [
        Business(dt.timedelta(minutes=5), relative=True, nowfun=make_clock()) for _ in range(2)
    ]
    one, other = both
    assert repr(one.nowfun) != repr(other.nowfun)
    assert schedules.canonical(one, UTC) == schedules.canonical(other, UTC)
    assert "make_clock" in schedules.canonical(one, UTC)


def test_a_class_of_ones_own_is_named_with_its_arguments() -> None:
    texts = {
        schedules.canonical(Business(seconds, relative=True), UTC) for seconds in (60, 60.0, 61)
    }
    assert len(texts) == 2
    assert all(text.startswith(f"{__name__}.Business ") for text in texts)


# --- what is read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "elapsed"),
    [
        ({"minute": "*/15"}, True),
        ({"minute": "0"}, True),  # the hour is "*"
        ({"minute": "*", "hour": "2"}, True),
        ({"minute": "0", "hour": "*/2"}, True),
        ({"minute": "30", "hour": "2"}, False),
        ({"minute": [0, 30], "hour": {2, 3}}, False),
        ({"minute": "0-59", "hour": "0-23"}, False),
        ({"minute": 0, "hour": 0, "day_of_week": "*"}, False),
    ],
)
def test_a_star_in_minute_or_hour_follows_elapsed_time(
    fields: dict[str, Any], *, elapsed: bool
) -> None:
    read = schedules.read(cron(**fields), UTC, ANCHOR)
    assert isinstance(read, occurrences.Crontab)
    assert read.elapsed is elapsed
    assert read.zone is BERLIN


def test_the_applications_zone_counts_where_the_schedule_has_none(app: celery.Celery) -> None:
    app.conf.update(timezone="Europe/Berlin")
    schedule = celery_schedules.maybe_schedule(crontab(minute=30, hour=2), app=app)
    read = schedules.read(schedule, UTC, ANCHOR)
    assert read.after(ANCHOR) == dt.datetime(2026, 11, 30, 1, 30, tzinfo=UTC)


def test_a_plain_interval_counts_from_its_anchor() -> None:
    read = schedules.read(celery_schedules.schedule(90), UTC, ANCHOR)
    assert read == occurrences.Interval(dt.timedelta(seconds=90), ANCHOR)


@pytest.mark.parametrize("seconds", [0, -5])
def test_an_interval_that_is_due_at_every_moment_is_refused(seconds: float) -> None:
    with pytest.raises(
        errors.ConfigurationError,
        match=rf"entry 'sync' in beat_schedule is every {seconds} s; an interval must be longer",
    ):
        schedules.check("sync", celery_schedules.schedule(seconds))


@pytest.mark.parametrize("schedule", [celery_schedules.schedule(0.001), cron(minute=0)])
def test_any_other_schedule_is_not(schedule: Any) -> None:
    schedules.check("sync", schedule)


# --- classes that are asked for their own estimate --------------------------------------------


class Sunrise(celery_schedules.BaseSchedule):
    """As solar does: the same event differs a little with the instant one looks from."""

    @override
    def remaining_estimate(self, last_run_at: dt.datetime) -> dt.timedelta:
        midnight = last_run_at.replace(hour=0, minute=0, second=0, microsecond=0)
        rises = midnight + dt.timedelta(hours=6)
        if last_run_at > rises + dt.timedelta(milliseconds=20):
            rises += DAY
        noise = dt.timedelta(microseconds=(hash(last_run_at) % 40_000) - 20_000)
        return rises + noise - self.now()


def test_a_sunrise_comes_once_a_day(app: celery.Celery) -> None:
    """Asked from the instant it has just told, it must not find the same sunrise again."""
    read = schedules.read(Sunrise(app=app), UTC, ANCHOR)
    found = list(occurrences.between(read, ANCHOR, ANCHOR + 30 * DAY))
    assert [f"{moment + SECOND:%d %H:%M}" for moment in found] == [
        f"{ANCHOR + day * DAY:%d} 06:00" for day in range(1, 31)
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda app: celery_schedules.schedule(900, relative=True, app=app),
        lambda app: celery_schedules.schedule(dt.timedelta(days=1), relative=True, app=app),
        lambda app: Sunrise(app=app),
    ],
    ids=["minutes", "days", "own class"],
)
def test_every_call_finds_the_same_instant(app: celery.Celery, make: Callable[..., Any]) -> None:
    """An estimate counts from now, and now goes on between two looks at the clock."""
    schedule = make(app)
    found = {schedules.read(schedule, UTC, ANCHOR).after(ANCHOR) for _ in range(200)}
    assert len(found) == 1
    (moment,) = found
    assert moment is not None
    assert ANCHOR < moment <= ANCHOR + DAY


def test_a_relative_interval_is_rounded_as_celery_rounds_it(app: celery.Celery) -> None:
    read = schedules.read(celery_schedules.schedule(900, relative=True, app=app), UTC, ANCHOR)
    assert read.after(ANCHOR + dt.timedelta(seconds=61)) == ANCHOR + dt.timedelta(minutes=16)


def test_an_estimate_does_not_change_the_users_schedule(app: celery.Celery) -> None:
    schedule: Any = Sunrise(app=app, nowfun=make_clock())
    clock = schedule.nowfun
    schedules.read(schedule, UTC, ANCHOR).after(ANCHOR)
    assert schedule.nowfun is clock


class Overdue(celery_schedules.BaseSchedule):
    """One that always says: now."""

    @override
    def remaining_estimate(self, last_run_at: dt.datetime) -> dt.timedelta:
        return dt.timedelta(0)


def test_time_goes_on_for_a_class_that_is_always_due(app: celery.Celery) -> None:
    read = schedules.read(Overdue(app=app), UTC, ANCHOR)
    assert read.after(ANCHOR) == ANCHOR + SECOND

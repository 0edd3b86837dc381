"""Celery's schedule objects: one text for one schedule, and due instants that stay the same."""

from __future__ import annotations

import datetime as dt
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, Final
from zoneinfo import ZoneInfo

import celery
import pytest
from celery import schedules as celery_schedules
from celery.schedules import crontab
from celery.utils.time import ffwd
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from celery_pglock import errors, occurrences, schedules
from tests.support.requirements import require
from tests.support.versions import FROM_5_7

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


def test_the_applications_zone_counts_where_the_schedule_has_none() -> None:
    app = celery.Celery("zoned", set_as_current=False)
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


@pytest.mark.parametrize(
    "fields",
    [{"day_of_month": {31}, "month_of_year": {4, 6}}, {"minute": set[int]()}],
    ids=str,
)
def test_a_crontab_that_never_comes_is_told_at_the_start(
    fields: dict[str, set[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Newer releases of Celery refuse some of them; others search for ever, or send nothing."""
    schedule = cron(minute=0)
    vars(schedule).update(fields)
    schedules.check("sync", schedule)
    (message,) = caplog.messages
    assert "entry 'sync' in beat_schedule never comes: <crontab: 0 " in message


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


class Shifted(celery_schedules.schedule):
    """An interval with an argument more, which it is not made from when it is copied."""

    def __init__(self, every: dt.timedelta, shift: dt.timedelta, app: celery.Celery) -> None:
        super().__init__(every, app=app)
        self.shift = shift

    @override
    def remaining_estimate(self, last_run_at: dt.datetime) -> dt.timedelta:
        assert self.app.main == "schedules"
        assert str(self.tz) == "Europe/Berlin"
        return super().remaining_estimate(last_run_at) + self.shift


def test_a_schedule_is_asked_with_all_that_it_keeps(app: celery.Celery) -> None:
    schedule = in_zone(Shifted(DAY, SECOND, app), BERLIN)
    assert schedules.read(schedule, UTC, ANCHOR).after(ANCHOR) == ANCHOR + DAY + SECOND


class Overdue(celery_schedules.BaseSchedule):
    """One that always says: now."""

    @override
    def remaining_estimate(self, last_run_at: dt.datetime) -> dt.timedelta:
        return dt.timedelta(0)


def test_time_goes_on_for_a_class_that_is_always_due(app: celery.Celery) -> None:
    read = schedules.read(Overdue(app=app), UTC, ANCHOR)
    assert read.after(ANCHOR) == ANCHOR + SECOND


class Erratic(celery_schedules.BaseSchedule):
    """One that makes no sense."""

    @override
    def remaining_estimate(self, last_run_at: dt.datetime) -> dt.timedelta:
        return dt.timedelta(seconds=hash(last_run_at) % 200_000 - 100_000)


class Once(celery_schedules.BaseSchedule):
    """Due at one instant, as the ``clocked`` of django-celery-beat."""

    at: ClassVar[dt.datetime] = ANCHOR + DAY

    @override
    def remaining_estimate(self, last_run_at: dt.datetime) -> dt.timedelta:
        return self.at - self.now()


class Never(celery_schedules.BaseSchedule):
    """One that says never as far as a timedelta goes."""

    @override
    def remaining_estimate(self, last_run_at: dt.datetime) -> dt.timedelta:
        return dt.timedelta.max


class MonthEnd(celery_schedules.BaseSchedule):
    """At 23:00 on the last day of a month, by the arithmetic that Celery's crontab uses."""

    @override
    def remaining_estimate(self, last_run_at: dt.datetime) -> dt.timedelta:
        last: Any = ffwd(day=31, hour=23, minute=0, second=0, microsecond=0)
        due: dt.datetime = last_run_at + last
        if due <= last_run_at:
            due = last_run_at + DAY + last
        return due - self.now()


class Workdays(crontab):
    """A crontab that estimates in its own way: not on Christmas Day."""

    @override
    def remaining_estimate(self, last_run_at: dt.datetime, ffwd: type = ffwd) -> dt.timedelta:
        left = super().remaining_estimate(last_run_at, ffwd=ffwd)
        due = self.now() + left
        if (due.month, due.day) == (12, 25):
            left = super().remaining_estimate(due)
        return left


class Zoned(crontab):
    """A crontab with a zone of its own that counts as crontabs do, as django-celery-beat's."""

    @override
    def is_due(self, last_run_at: dt.datetime) -> Any:
        zone: Any = self.tz
        return super().is_due(last_run_at.astimezone(zone))


def test_what_is_due_once_comes_once(app: celery.Celery) -> None:
    read = schedules.read(Once(app=app), UTC, ANCHOR)
    for before in (10 * DAY, SECOND, SECOND / 2, SECOND / 1000):
        assert read.after(Once.at - before) == Once.at
    # Else it would be due at each second from then on.
    for late in (dt.timedelta(0), SECOND / 1000, 10 * DAY):
        assert read.after(Once.at + late) is None


def test_a_class_that_says_never_is_believed(app: celery.Celery) -> None:
    assert schedules.read(Never(app=app), UTC, ANCHOR).after(ANCHOR) is None


def test_what_was_due_once_does_not_keep_a_beat_from_starting(app: celery.Celery) -> None:
    class Past(Once):
        at = dt.datetime(2020, 1, 1, tzinfo=UTC)

    schedules.check("sync", Past(app=app))
    schedules.check("sync", Never(app=app))


def test_the_last_day_of_each_month_by_celerys_arithmetic(app: celery.Celery) -> None:
    since = dt.datetime(2028, 1, 1, tzinfo=UTC)
    read = schedules.read(MonthEnd(app=app), UTC, since)
    found = list(occurrences.between(read, since, since + 366 * DAY))
    assert [f"{due:%d %H}" for due in found] == [
        f"{day} 23" for day in (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
    ]


def test_a_crontab_that_estimates_in_its_own_way_is_asked(app: celery.Celery) -> None:
    schedule = in_zone(Workdays(minute=0, hour=12, app=app), UTC)
    since = dt.datetime(2026, 12, 23, tzinfo=UTC)
    read = schedules.read(schedule, UTC, since)
    found = list(occurrences.between(read, since, since + 5 * DAY))
    assert [due.day for due in found] == [23, 24, 26, 27]
    # And it is not the same schedule as the crontab with its fields.
    text = schedules.canonical(schedule, UTC)
    assert text.startswith(f"{__name__}.Workdays ")
    assert text != schedules.canonical(in_zone(Workdays(minute=0, hour=12), BERLIN), UTC)


def test_a_crontab_that_counts_as_crontabs_do_is_read_by_its_fields() -> None:
    read = schedules.read(in_zone(Zoned(minute=30, hour=2), BERLIN), UTC, ANCHOR)
    assert read == schedules.read(cron(minute=30, hour=2), UTC, ANCHOR)


def test_an_estimate_that_stands_still_in_a_repeated_hour_does_not_flood(
    app: celery.Celery,
) -> None:
    """Celery's own, which the class builds on, names an instant in the past there."""
    schedule = in_zone(Workdays(minute="*/20", app=app), BERLIN)
    # In the second pass, which ends at 02:00Z.
    since = dt.datetime(2026, 10, 25, 1, 5, tzinfo=UTC)
    schedule.nowfun = lambda: since.astimezone(BERLIN)
    stands_still = schedule.remaining_estimate(since) < dt.timedelta(0)
    assert stands_still is FROM_5_7
    found = list(
        occurrences.between(schedules.read(schedule, UTC, since), since, since + 3 * DAY / 24)
    )
    before = [] if stands_still else ["01:20", "01:40", "02:00"]
    assert [f"{due:%H:%M}" for due in found] == [
        *before,
        "02:20",
        "02:40",
        "03:00",
        "03:20",
        "03:40",
        "04:00",
    ]


def test_a_subclass_of_an_interval_counts_from_the_one_before(app: celery.Celery) -> None:
    read = schedules.read(Business(dt.timedelta(hours=7), app=app), UTC, ANCHOR)
    assert isinstance(read, schedules.Estimated)
    # After a downtime as well, whenever it ended.
    for days in (8, 9.5, 10):
        found = occurrences.newest(read, ANCHOR, ANCHOR + days * DAY, 3)
        assert [(due - ANCHOR) % dt.timedelta(hours=7) for due in found] == [dt.timedelta(0)] * 3
    # From elsewhere it finds others.
    elsewhere = read.after(ANCHOR + DAY)
    assert elsewhere is not None
    assert (elsewhere - ANCHOR) % dt.timedelta(hours=7) != dt.timedelta(0)


# --- classes that cannot say ------------------------------------------------------------------


class Holidays(celery_schedules.BaseSchedule):
    """One that reads a file which is not there."""

    @override
    def remaining_estimate(self, last_run_at: dt.datetime) -> dt.timedelta:
        raise FileNotFoundError(2, "No such file or directory", "holidays.csv")


class Forgetful(celery_schedules.BaseSchedule):
    """One that returns nothing."""

    @override
    def remaining_estimate(self, last_run_at: dt.datetime) -> dt.timedelta:
        nothing: Any = None
        return nothing  # type: ignore[no-any-return]


class Bare:
    """One that is no schedule."""


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (Holidays(), r"Holidays raised FileNotFoundError: .*holidays\.csv"),
        (celery_schedules.BaseSchedule(), "BaseSchedule raised NotImplementedError"),
        (Forgetful(), "Forgetful raised TypeError: .*NoneType"),
        (Bare(), "Bare raised AttributeError: .*remaining_estimate"),
    ],
)
def test_a_schedule_that_cannot_say_when_it_is_due_is_refused(
    app: celery.Celery, schedule: Any, told: str
) -> None:
    schedule.app = app
    with pytest.raises(
        errors.ConfigurationError,
        match=f"entry 'sync' in beat_schedule cannot say when it is due: .*{told}",
    ):
        schedules.check("sync", schedule)


# --- the sun ----------------------------------------------------------------------------------

PLACES: Final = {
    "Berlin": (52.52, 13.4),
    "Sydney": (-33.87, 151.21),
    # On the other side of the globe from Greenwich.
    "Taveuni": (-16.8, 179.97),
    # The sun does not rise from October to February, and does not set from April to August.
    "Longyearbyen": (78.22, 15.65),
}
# By how much a day in which it comes at most once begins after the place's midnight.
EVENTS: Final = {
    "dawn_astronomical": -6,
    "dawn_nautical": -6,
    "dawn_civil": -6,
    "sunrise": -6,
    "solar_noon": 0,
    "sunset": 6,
    "dusk_civil": 6,
    "dusk_nautical": 6,
    "dusk_astronomical": 6,
}


def event_of_the_sun(app: celery.Celery, name: Any, lat: float, lon: float) -> Any:
    require(importlib.util.find_spec("ephem"), "ephem, which Celery's `solar` extra brings")
    return celery_schedules.solar(name, lat, lon, app=app)


def by_celery(schedule: Any, since: dt.datetime, until: dt.datetime) -> list[dt.datetime]:
    """Return what Celery's own estimates lead to, one after the other."""
    estimated = schedules.Estimated(schedule)
    return list(occurrences.between(estimated, since, until))


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_year_of_an_event_of_the_sun(app: celery.Celery, place: str, event: str) -> None:
    lat, lon = PLACES[place]
    schedule = event_of_the_sun(app, event, lat, lon)
    since = dt.datetime(2026, 1, 1, tzinfo=UTC) - dt.timedelta(hours=lon / 15)
    until = since + 365 * DAY
    found = list(occurrences.between(schedules.read(schedule, UTC, since), since, until))
    # One for each date of the place. (In June dusk is after midnight: that belongs to the evening.)
    own = dt.timedelta(hours=lon / 15 - EVENTS[event])
    dates = [(due + own).date() for due in found]
    assert len(set(dates)) == len(dates)
    assert all(other - one > 20 / 24 * DAY for one, other in itertools.pairwise(found))
    if FROM_5_7:
        theirs = by_celery(schedule, since, until)
        assert len(found) == len(theirs) > 100
        assert all(
            abs(one - other) < 1.1 * SECOND for one, other in zip(found, theirs, strict=True)
        )
    if event == "solar_noon" or place in {"Sydney", "Taveuni"}:
        assert len(found) == 365
    if place == "Longyearbyen" and event in {"sunrise", "sunset"}:
        assert len(found) == 126


def test_when_the_sun_rises(app: celery.Celery) -> None:
    """As almanacs have it: 04:43 in Berlin on 21 June, and on Svalbard not in summer or winter."""
    berlin = schedules.read(event_of_the_sun(app, "sunrise", 52.52, 13.4), UTC, ANCHOR)
    found = berlin.after(dt.datetime(2026, 6, 21, tzinfo=UTC))
    assert found is not None
    assert f"{found.astimezone(BERLIN):%d %H:%M}" == "21 04:43"
    svalbard = schedules.read(event_of_the_sun(app, "sunrise", 78.22, 15.65), UTC, ANCHOR)
    for month, following in ((5, "08"), (12, "02")):
        risen = svalbard.after(dt.datetime(2026, month, 1, tzinfo=UTC))
        assert risen is not None
        assert f"{risen:%m}" == following


@pytest.mark.parametrize("event", ["sunrise", "solar_noon", "sunset", "dusk_nautical"])
@pytest.mark.parametrize("place", PLACES)
def test_an_event_is_the_same_instant_from_wherever_one_looks(
    app: celery.Celery, place: str, event: str
) -> None:
    """Else who takes over, or ends a pause, would find another period for the same sunrise."""
    schedule = event_of_the_sun(app, event, *PLACES[place])
    read = schedules.read(schedule, UTC, ANCHOR)
    due = read.after(dt.datetime(2026, 9, 20, tzinfo=UTC))
    assert due is not None
    looks = [due - SECOND / 1000 - look * DAY / 200 for look in range(180)]
    assert {read.after(look) for look in looks} == {due}
    # Celery's differ by some milliseconds.
    assert len({schedules.Estimated(schedule).after(look) for look in looks}) > 1
    following = read.after(due)
    assert following is not None
    assert following - due > 20 / 24 * DAY
    assert read.after(due + SECOND / 1000) == read.after(due + 2 * SECOND) == following


class Observer:
    """ephem's, which counts how often it is asked."""

    def __init__(self, observer: Any) -> None:
        self.observer = observer
        self.asked = 0

    def copy(self) -> Observer:
        return self

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self.observer, name)


@pytest.mark.parametrize("event", ["sunrise", "sunset", "dusk_astronomical"])
def test_at_the_pole_an_event_that_does_not_come_is_told_after_two_years_of_search(
    app: celery.Celery, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = event_of_the_sun(app, event, 90, 0)
    # Celery's own goes on where its search ends, or fails there.
    if FROM_5_7:
        assert schedules.Estimated(schedule).after(ANCHOR) is not None
    else:
        with pytest.raises(TypeError):
            schedules.Estimated(schedule).after(ANCHOR)
    schedule.cal = Observer(schedule.cal)
    assert schedules.read(schedule, UTC, ANCHOR).after(ANCHOR) is None
    assert schedule.cal.asked == 2 * 366
    schedules.check("dawn", schedule)
    (message,) = caplog.messages
    assert f"entry 'dawn' in beat_schedule never comes: <solar: {event} at latitude 90" in message


# --- all of them ------------------------------------------------------------------------------

ALL: Final[dict[str, Callable[[celery.Celery], Any]]] = {
    "wall clock": lambda _: cron(minute="10,35", hour="1-3"),
    "elapsed": lambda _: cron(minute="*/20"),
    "interval": lambda app: celery_schedules.schedule(7.5, app=app),
    "relative": lambda app: celery_schedules.schedule(900, relative=True, app=app),
    "relative days": lambda app: in_zone(
        celery_schedules.schedule(DAY, relative=True, app=app), BERLIN
    ),
    "subclass of interval": lambda app: Business(dt.timedelta(hours=7), app=app),
    "subclass of crontab": lambda app: in_zone(Workdays(minute="*/20", app=app), BERLIN),
    "sun": lambda app: event_of_the_sun(app, "sunset", *PLACES["Longyearbyen"]),
    "estimated sun": lambda app: Sunrise(app=app),
    "month end": lambda app: MonthEnd(app=app),
    "once": lambda app: Once(app=app),
    "never": lambda app: Never(app=app),
    "overdue": lambda app: Overdue(app=app),
    "erratic": lambda app: Erratic(app=app),
}
# Around changes of clocks, and around the instant at which `Once` is due.
moments = st.one_of(
    st.datetimes(dt.datetime(2026, 1, 1), dt.datetime(2027, 1, 1)),  # noqa: DTZ001
    *(
        st.timedeltas(-dt.timedelta(hours=4), dt.timedelta(hours=4)).map(at.__add__)
        for at in (
            dt.datetime(2026, 3, 29, 1),  # noqa: DTZ001
            dt.datetime(2026, 10, 25, 1),  # noqa: DTZ001
            Once.at.replace(tzinfo=None),
        )
    ),
).map(lambda moment: moment.replace(tzinfo=UTC))


@pytest.mark.parametrize("kind", ALL)
@given(moment=moments)
def test_time_always_goes_on(app: celery.Celery, kind: str, moment: dt.datetime) -> None:
    read = schedules.read(ALL[kind](app), BERLIN, ANCHOR)
    last = moment
    for _ in range(5):
        due = read.after(last)
        if due is None:
            assert kind in {"once", "never", "erratic"}
            return
        assert due > last
        assert due.tzinfo is not None
        # Whoever looks again finds the same.
        assert read.after(last) == due
        last = due

"""The definition of an entry as JSON: what is accepted, and the sentence for what is not."""

from __future__ import annotations

import datetime as dt
import json
import sys
from typing import Any, Final
from zoneinfo import ZoneInfo

import celery
import pytest
from celery.schedules import crontab, schedule, solar

from celery_pglock import Entry, definitions, errors, schedule_json, schedules

APP: Final = celery.Celery("definitions", set_as_current=False)
UTC: Final = dt.UTC
GOOD: Final[dict[str, Any]] = {
    "version": 1,
    "task": "proj.report",
    "schedule": {"type": "interval", "seconds": 60},
    "args": [1, "two", None, {"three": [3.5]}],
    "kwargs": {"deep": True},
    "options": {"queue": "slow", "expires": 60, "priority": 5, "headers": {"x": "y"}},
}
CRONTAB: Final = {"type": "crontab", "minute": "0", "hour": 7, "zone": "Europe/Berlin"}
SOLAR: Final = {"type": "solar", "event": "sunset", "latitude": 52.5, "longitude": 13}


def changed(path: str, value: object) -> dict[str, Any]:
    """Return a good definition with one field changed; `schedule.x` goes into a crontab's."""
    definition = json.loads(json.dumps(GOOD))
    *parents, field = path.split(".")
    target = definition
    for parent in parents:
        target = target[parent]
    target[field] = value
    return dict(definition)


def scheduled(**fields: object) -> dict[str, Any]:
    return {**GOOD, "schedule": fields}


# --- what is accepted -------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [GOOD["schedule"], CRONTAB, SOLAR])
def test_what_is_written_is_read_as_it_was(fields: dict[str, Any]) -> None:
    found = definitions.checked("a", {**GOOD, "schedule": fields})
    assert definitions.read("a", found.text()) == found
    assert json.loads(found.text()) == {**GOOD, "schedule": fields}


def test_only_task_and_schedule_and_the_version_have_to_be_there() -> None:
    least = {name: GOOD[name] for name in ("version", "task", "schedule")}
    found = definitions.read("a", json.dumps(least))
    assert (found.args, found.kwargs, found.options) == ([], {}, {})


@pytest.mark.parametrize(
    ("given", "zone", "canonical"),
    [
        (90, None, "every 90.000000 s"),
        (0.001, None, "every 0.001000 s"),
        (dt.timedelta(days=1, microseconds=1), None, "every 86400.000001 s"),
        (schedule(60), None, "every 60.000000 s"),
        (crontab(minute="*/15", hour=[2, 1]), None, "crontab */15 1,2 * * * UTC"),
        (crontab(minute=0, hour=7, day_of_week="mon-fri"), "Europe/Berlin",
         "crontab 0 7 * * 1,2,3,4,5 Europe/Berlin"),
        (crontab("0 ", day_of_month=[15, 1], month_of_year="3-5"), None,
         "crontab 0 * 1,15 3,4,5 * UTC"),
    ],
)  # fmt: skip
def test_a_schedule_in_python_is_the_same_when_it_was_in_json(
    given: Any, zone: str | None, canonical: str
) -> None:
    fields = json.loads(json.dumps(schedule_json.written("a", given, zone)))
    found = definitions.checked("a", {**GOOD, "schedule": fields})
    assert schedules.canonical(schedule_json.made("a", found.schedule, APP), UTC) == canonical


def test_the_sun_is_the_same_when_it_was_in_json() -> None:
    fields = schedule_json.written("a", solar("sunset", 52.5, 13.4, app=APP), None)
    made = schedule_json.made(
        "a", definitions.checked("a", {**GOOD, "schedule": fields}).schedule, APP
    )
    assert isinstance(made, solar)
    assert (made.event, made.lat, made.lon) == ("sunset", 52.5, 13.4)


def test_a_schedule_that_celery_cannot_make_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = definitions.checked("dusk", {**GOOD, "schedule": SOLAR}).schedule
    # As where the library is not installed.
    monkeypatch.setitem(sys.modules, "ephem", None)
    with pytest.raises(
        errors.ConfigurationError, match=r"entry 'dusk': .* cannot be made: .*ephem"
    ):
        schedule_json.made("dusk", found, APP)


def test_a_crontab_keeps_a_zone_of_its_own_and_not_that_of_its_application() -> None:
    """Celery keeps the application's in the crontab, too, once it was asked for it."""
    own, asked = crontab(hour=7, app=APP), crontab(hour=7, app=APP)
    vars(own)["tz"] = ZoneInfo("Asia/Tokyo")
    assert str(asked.tz) == "UTC"
    assert schedule_json.written("a", own, None)["zone"] == "Asia/Tokyo"
    assert schedule_json.written("a", own, "Europe/Berlin")["zone"] == "Europe/Berlin"
    assert "zone" not in schedule_json.written("a", asked, None)


def test_options_that_are_not_celerys_go_to_the_broker() -> None:
    given = changed("options", {"message_group": "g"})
    assert definitions.checked("a", given).options == {"message_group": "g"}


# --- what is not ------------------------------------------------------------------------------

NESTED: Final[list[Any]] = []
NESTED.append(NESTED)
DEEP: Final = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("definition", "sentence"),
    [
        ([], "its definition must be an object with texts as keys; got []"),
        ("text", "its definition must be an object with texts as keys; got 'text'"),
        ({}, "version must be 1; got None"),
        (changed("version", 2), "version must be 1; got 2, which a newer release has written"),
        (changed("version", value=True), "version must be 1; got True"),
        (changed("version", "1"), "version must be 1; got '1'"),
        (changed("tusk", 1), "tusk is not known; did you mean 'task'?"),
        (changed("xyz", 1), "xyz is not known; known: version, task, schedule, args, kwargs, options"),
        (changed("task", None), "task must be the name of a task, a text that is not empty; got None"),
        (changed("task", " "), "task must be the name of a task, a text that is not empty; got ' '"),
        (changed("args", "ab"), "args must be a list; got 'ab'"),
        (changed("args", {"a": 1}), "args must be a list; got {'a': 1}"),
        (changed("kwargs", []), "kwargs must be an object with texts as keys; got []"),
        (changed("options", None), "options must be an object with texts as keys; got None"),
        (changed("options.queue", ""), "options.queue must be a text; got ''"),
        (changed("options.expires", "soon"),
         "options.expires must be a number of seconds, 0 or more; got 'soon'"),
        (changed("options.countdown", -1),
         "options.countdown must be a number of seconds, 0 or more; got -1"),
        (changed("options.priority", 1.5),
         "options.priority must be a whole number from 0 to 255; got 1.5"),
        (changed("options.priority", value=True),
         "options.priority must be a whole number from 0 to 255; got True"),
        (changed("options.ignore_result", 1), "options.ignore_result must be true or false; got 1"),
        (changed("options.headers", []), "options.headers must be an object; got []"),
        (changed("options.expire", 1), "options.expire is not known; did you mean 'expires'?"),
        (changed("options.task_id", "x"), "options.task_id cannot be set: each occurrence has its own"),
        (changed("options.eta", "2026-12-01"),
         "options.eta cannot be set: it names one instant, and an entry has many; use countdown"),
        (changed("options.retry", value=True),
         "options.retry cannot be set: what the broker does not take is sent again by the beat"),
        (changed("schedule", None), "schedule must be an object with texts as keys; got None"),
        (scheduled(), "schedule.type must be one of 'interval', 'crontab', 'solar'; got None"),
        (scheduled(type=[]), "schedule.type must be one of 'interval', 'crontab', 'solar'; got []"),
        (scheduled(type="interval"),
         "schedule.seconds must be a number above 0, at most 3153600000; got None"),
        (scheduled(type="interval", seconds=0),
         "schedule.seconds must be a number above 0, at most 3153600000; got 0"),
        (scheduled(type="interval", seconds=True),
         "schedule.seconds must be a number above 0, at most 3153600000; got True"),
        (scheduled(type="interval", seconds=float("nan")),
         "schedule.seconds must be a number above 0, at most 3153600000; got nan"),
        (scheduled(type="interval", seconds=1, zone="UTC"),
         "schedule.zone is not known; known: type, seconds"),
        (scheduled(type="crontab", minutes="0"), "schedule.minutes is not known; did you mean 'minute'?"),
        (scheduled(type="crontab", minute="61"),
         "schedule.minute must be a field of a crontab, such as '*/5'; got '61'"),
        (scheduled(type="crontab", hour="x"),
         "schedule.hour must be a field of a crontab, such as '*/5'; got 'x'"),
        (scheduled(type="crontab", day_of_week=None),
         "schedule.day_of_week must be a field of a crontab, such as '*/5'; got None"),
        (scheduled(type="crontab", day_of_month=[1]),
         "schedule.day_of_month must be a field of a crontab, such as '*/5'; got [1]"),
        (scheduled(type="crontab", zone="Mars/Phobos"),
         "schedule.zone must be the name of a time zone, such as 'UTC'; got 'Mars/Phobos'"),
        (scheduled(type="crontab", zone="../../etc/passwd"),
         "schedule.zone must be the name of a time zone, such as 'UTC'; got '../../etc/passwd'"),
        (scheduled(type="crontab", zone=3),
         "schedule.zone must be the name of a time zone, such as 'UTC'; got 3"),
        (scheduled(**{**SOLAR, "event": "moonrise"}), "schedule.event must be one of "),
        (scheduled(**{**SOLAR, "latitude": 91}),
         "schedule.latitude must be a number from -90 to 90; got 91"),
        (scheduled(**{**SOLAR, "longitude": "13"}),
         "schedule.longitude must be a number from -180 to 180; got '13'"),
        (scheduled(**{**SOLAR, "height": 1}), "schedule.height is not known; "),
    ],
)  # fmt: skip
def test_each_wrong_field_is_told_in_one_sentence(definition: Any, sentence: str) -> None:
    """Read from the table: somebody has written it there by hand."""
    with pytest.raises(errors.ConfigurationError) as caught:
        definitions.read("nightly", json.dumps(definition))
    told = str(caught.value)
    assert told.startswith(f"entry 'nightly': {sentence}")
    assert len(told) < 300
    assert "\n" not in told


def test_the_control_what_is_good_is_not_refused() -> None:
    assert definitions.read("nightly", json.dumps(GOOD)).task == "proj.report"


@pytest.mark.parametrize("text", ["", "{", DEEP])
def test_what_is_no_json_is_told(text: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"no JSON that can be read|an object"):
        definitions.read("nightly", text)


def test_a_value_that_is_long_is_not_told_in_full() -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        definitions.read("nightly", json.dumps(changed("task", ["x" * 10_000] * 1000)))
    assert len(str(caught.value)) < 1000


# --- in Python --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"args": [object()]}, "args must be what JSON can hold, "),
        ({"args": [dt.date(2026, 1, 1)]}, "args must be what JSON can hold, "),
        ({"args": [float("inf")]}, "args must be what JSON can hold, "),
        ({"args": NESTED}, "args must be what JSON can hold, "),
        ({"args": ["a\0b"]}, "args must hold no NUL and no half of a surrogate pair"),
        ({"kwargs": {"a\0b": 1}}, "kwargs must hold no NUL and no half of a surrogate pair"),
        ({"kwargs": {"a": "\ud800"}}, "kwargs must hold no NUL and no half of a surrogate pair"),
        ({"kwargs": {1: 2}}, "kwargs must be an object with texts as keys; got {1: 2}"),
        ({"options": {"headers": {"x": b"y"}}}, "options must be what JSON can hold, "),
        ({"task": "a\0"}, "task must be the name of a task, a text that is not empty; got "),
        ({"schedule": "daily"}, "its schedule must be a number of seconds, a timedelta, or Celery's"),
        ({"schedule": True}, "its schedule must be a number of seconds, a timedelta, or Celery's"),
        ({"schedule": schedule(60, relative=True)}, "its schedule must be a number of seconds, "),
        ({"schedule": dt.timedelta(0)}, "schedule.seconds must be a number above 0, "),
        ({"schedule": crontab(nowfun=dt.datetime.now)}, "its schedule has a nowfun, which cannot "),
        ({"zone": "Europe/Berlin"}, "schedule.zone is not known; known: type, seconds"),
        ({"schedule": crontab(), "zone": "Berlin"}, "schedule.zone must be the name of a time zone"),
    ],
)  # fmt: skip
def test_an_entry_that_cannot_be_kept_is_refused_when_it_is_made(
    more: dict[str, Any], sentence: str
) -> None:
    given: dict[str, Any] = {"name": "nightly", "schedule": 60, "task": "report", **more}
    with pytest.raises(errors.ConfigurationError) as caught:
        Entry(**given)
    assert str(caught.value).startswith(f"entry 'nightly': {sentence}")


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 501, None, 3, "\ud800"])
def test_a_name_that_cannot_be_one_is_refused(name: Any) -> None:
    with pytest.raises(errors.ConfigurationError, match="the name of an entry must be a text of"):
        Entry(name, 60, "report")


def test_a_zone_without_a_name_cannot_be_kept() -> None:
    own = crontab(hour=7, app=APP)
    vars(own)["tz"] = dt.timezone(dt.timedelta(hours=5))
    with pytest.raises(errors.ConfigurationError, match="must have a name, as in zoneinfo"):
        Entry("a", own, "report")


def test_a_backslash_before_a_u_is_no_nul() -> None:
    assert Entry("a", 60, "report", ["\\u0000"]).args == ["\\u0000"]


def test_tuples_are_lists_when_they_come_back() -> None:
    entry = Entry("a", 60, "report", (1, (2, 3)), {"x": (4,)})
    found = definitions.read("a", entry._definition().text())  # noqa: SLF001
    assert (found.args, found.kwargs) == ([1, [2, 3]], {"x": [4]})

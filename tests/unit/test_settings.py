"""Settings: what is refused, with which words, and that a password is in none of them."""

from __future__ import annotations

import datetime as dt
import logging
import traceback
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery

from celery_pglock import connections, errors, lending, sessions, settings

SECRET = "tops3cret"
URL = f"postgresql://app:{SECRET}@db.example:5433/proj"


def app_with(**conf: Any) -> Celery:
    app = Celery("proj", set_as_current=False)
    app.conf.update(conf)
    return app


def refusal(**conf: Any) -> str:
    with pytest.raises(errors.ConfigurationError) as caught:
        settings.of(app_with(**conf))
    return str(caught.value)


def test_without_any_setting_the_defaults_hold() -> None:
    read = settings.of(app_with())
    assert (read.namespace, read.schema, read.enabled) == ("proj", "pglock", True)
    assert read.lost_after == 10.0
    assert dict(read.options) == {
        "lock_level": "session",
        "lock_wait": 0.0,
        "lock_conflict": "skip",
        "skip_state": "REVOKED",
        "once_per": "occurrence",
        "max_crash_retries": 3,
        "lock_lost": "raise",
        "lock_unavailable": "postpone",
        "catchup": 1,
    }


def test_without_a_database_the_sentence_names_the_setting_and_the_way_out() -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        settings.of(app_with()).target()
    assert "pglock_database_url is not set" in str(caught.value)
    assert "pglock_enabled = False" in str(caught.value)


@pytest.mark.parametrize("alias", [7, "", ["default"], True])
def test_an_alias_that_is_no_name(alias: object) -> None:
    sentence = refusal(pglock_django_alias=alias)
    assert sentence.startswith("pglock_django_alias must be the name of a database in DATABASES")


def test_a_url_and_an_alias_cannot_both_be_the_database() -> None:
    sentence = refusal(pglock_database_url=URL, pglock_django_alias="default")
    assert "are both set, and only one database can hold the locks" in sentence
    assert SECRET not in sentence


def test_an_alias_without_django_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "_registered", [])
    read = settings.of(app_with(pglock_django_alias="default"))
    with pytest.raises(errors.ConfigurationError, match="to INSTALLED_APPS"):
        read.target()


def test_settings_are_read_once() -> None:
    app = app_with(pglock_schema="one")
    first = settings.of(app)
    app.conf.pglock_schema = "other"
    assert settings.of(app) is first
    assert first.schema == "one"


def test_the_zone_is_the_applications() -> None:
    assert settings.of(app_with(timezone="Europe/Berlin")).zone == ZoneInfo("Europe/Berlin")


def test_nothing_can_be_changed_afterwards() -> None:
    read = settings.of(app_with())
    with pytest.raises(AttributeError):
        read.schema = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        read.options["lock_wait"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("pglock_databse_url", "pglock_database_url"),
        ("pglock_lock_waits", "pglock_lock_wait"),
        ("pglock_name_space", "pglock_namespace"),
        ("pglock_django_alais", "pglock_django_alias"),
        ("pglock_max_crash_retry", "pglock_max_crash_retries"),
        ("PGLOCK_DATABASE_URI", "pglock_database_url"),
    ],
)
def test_an_unknown_setting_is_refused_and_the_nearest_suggested(misspelt: str, meant: str) -> None:
    sentence = refusal(**{misspelt: "x"})
    assert sentence == f"unknown setting {misspelt}; did you mean {meant}?"


def test_where_none_is_near_all_settings_are_listed() -> None:
    sentence = refusal(pglock_zzz=1)
    assert sentence.startswith("unknown setting pglock_zzz; known: pglock_database_url, ")


def test_settings_of_others_are_left_alone() -> None:
    assert settings.of(app_with(pg_lock=1, pglocks_url=2, mypglock_x=3)).schema == "pglock"


def test_an_upper_case_name_that_celery_does_not_read_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "celery_pglock"):
        read = settings.of(app_with(PGLOCK_DATABASE_URL=URL))
    assert read.database_url is None  # the fault that the warning is about
    (record,) = caplog.records
    assert record.getMessage() == (
        "setting PGLOCK_DATABASE_URL is not read by Celery here; write pglock_database_url"
    )
    assert record.__dict__["event"] == "setting_not_read"


@pytest.mark.parametrize(
    ("namespace", "url", "wait"),
    [
        ("CELERY", "CELERY_PGLOCK_DATABASE_URL", "CELERY_PGLOCK_LOCK_WAIT"),
        ("PROJ", "PROJ_PGLOCK_DATABASE_URL", "PROJ_PGLOCK_LOCK_WAIT"),
        ("celery", "celery_pglock_database_url", "celery_pglock_lock_wait"),
    ],
)
def test_a_configuration_with_a_namespace_is_read(
    namespace: str, url: str, wait: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object({url: URL, wait: 4}, namespace=namespace)
    with caplog.at_level(logging.WARNING, "celery_pglock"):
        read = settings.of(app)
    assert read.database_url == URL
    assert read.options["lock_wait"] == 4.0
    assert not caplog.records


@pytest.mark.parametrize(
    ("namespace", "given", "right"),
    [
        ("CELERY", "PGLOCK_DATABASE_URL", "CELERY_PGLOCK_DATABASE_URL"),
        ("celery", "celery_PGLOCK_DATABASE_URL", "celery_pglock_database_url"),
    ],
)
def test_a_name_that_the_configurations_namespace_hides_is_a_warning(
    namespace: str, given: str, right: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object({given: URL}, namespace=namespace)
    with caplog.at_level(logging.WARNING, "celery_pglock"):
        read = settings.of(app)
    assert read.database_url is None
    assert f"setting {given} is not read by Celery here; write {right}" in caplog.text
    follows = Celery("proj", set_as_current=False)
    follows.config_from_object({right: URL}, namespace=namespace)
    assert settings.of(follows).database_url == URL


def test_a_misspelt_name_in_a_configuration_with_a_namespace_is_refused() -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object({"CELERY_PGLOCK_LOCK_WAITS": 1}, namespace="CELERY")
    with pytest.raises(errors.ConfigurationError, match="unknown setting CELERY_PGLOCK_LOCK_WAITS"):
        settings.of(app)


@pytest.mark.parametrize("main", ["__main__"])
def test_an_application_that_is_main_is_refused(main: str) -> None:
    with pytest.raises(errors.ConfigurationError, match='the namespace would be "__main__"'):
        settings.of(Celery(main, set_as_current=False))


def test_a_namespace_of_ones_own_replaces_main() -> None:
    app = Celery("__main__", set_as_current=False)
    app.conf.pglock_namespace = "proj"
    assert settings.of(app).namespace == "proj"


def test_a_namespace_with_a_colon_is_refused() -> None:
    assert "pglock_namespace 'a:b'" in refusal(pglock_namespace="a:b")


@pytest.mark.parametrize("schema", ["", "1st", "a b", "a" * 64, 'a"b', 5, None])
def test_a_schema_that_is_no_name_is_refused(schema: object) -> None:
    assert refusal(pglock_schema=schema).startswith("pglock_schema must be the name of a Postgr")


@pytest.mark.parametrize("value", ["false", 0, 1, None, "yes"])
def test_enabled_is_true_or_false_and_no_text(value: object) -> None:
    assert refusal(pglock_enabled=value) == f"pglock_enabled must be True or False; got {value!r}"


@pytest.mark.parametrize(
    ("value", "seconds"), [(1, 1.0), (2.5, 2.5), (dt.timedelta(minutes=1), 60.0)]
)
def test_a_duration_is_seconds_or_a_timedelta(value: object, seconds: float) -> None:
    read = settings.of(app_with(pglock_lost_after=value, pglock_lock_wait=value))
    assert (read.lost_after, read.options["lock_wait"]) == (seconds, seconds)


@pytest.mark.parametrize(
    "value",
    [-1, 0.5, "10", True, None, float("nan"), float("inf"), dt.timedelta(seconds=-1), [1]],
)
def test_a_duration_that_is_none_is_refused_with_its_setting_and_what_was_given(
    value: object,
) -> None:
    assert refusal(pglock_lost_after=value) == (
        f"pglock_lost_after must be a number of seconds or a timedelta, at least 1; got {value!r}"
    )


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("lock_level", ["session", "transaction"], ["sessions", "", None, 1]),
        ("lock_wait", [0, 5, dt.timedelta(seconds=1)], [-1, "5", None, True]),
        ("lock_conflict", ["skip", "postpone", "raise"], ["Skip", "wait", None]),
        ("skip_state", ["REVOKED", "SUCCESS"], ["revoked", "FAILURE", None]),
        (
            "once_per",
            ["occurrence", "minute", "hour", "day", "week", "month", None, str],
            ["days", "", 1, "year"],
        ),
        ("max_crash_retries", [0, 3, 100], [-1, 1.0, "3", None, True]),
        ("lock_lost", ["raise", "warn"], ["ignore", None]),
        ("lock_unavailable", ["postpone", "raise"], ["skip", None]),
        ("catchup", [0, 1, 5], [-1, 1.5, "all", None, False]),
    ],
)
def test_every_option_default_is_validated(
    name: str, good: list[object], bad: list[object]
) -> None:
    for value in good:
        assert settings.of(app_with(**{f"pglock_{name}": value})).options[name] == (
            value.total_seconds() if isinstance(value, dt.timedelta) else value
        )
    for value in bad:
        sentence = refusal(**{f"pglock_{name}": value})
        assert sentence.startswith(f"pglock_{name} must be ")
        assert repr(value) in sentence


@pytest.mark.parametrize("name", ["pglock_standby_poll", "pglock_leader_lease"])
@pytest.mark.parametrize("value", [0, -1, "1", None, True])
def test_poll_and_lease_are_durations(name: str, value: object) -> None:
    assert refusal(**{name: value}).startswith(f"{name} must be a number of seconds or a timedel")


def test_a_poll_that_would_starve_the_lease_is_refused() -> None:
    assert settings.of(app_with(pglock_standby_poll=2.5)).leader_lease == 10.0
    sentence = "pglock_standby_poll (2.6 s) must be at most a quarter of pglock_leader_lease (10 s)"
    assert refusal(pglock_standby_poll=2.6) == sentence
    assert "pglock_leader_lease (1 s)" in refusal(pglock_leader_lease=dt.timedelta(seconds=1))


def test_no_option_default_goes_without_a_validator() -> None:
    assert settings.OPTION_DEFAULTS.keys() == settings.OPTION_VALIDATORS.keys()
    for name, value in settings.OPTION_DEFAULTS.items():
        assert settings.OPTION_VALIDATORS[name](value, name) == value


def test_a_wrong_word_is_answered_with_the_nearest_right_one() -> None:
    assert "(did you mean 'transaction'?)" in refusal(pglock_lock_level="transactions")


# --- The database and its password ------------------------------------------------------------

READABLE = [
    URL,
    f"postgres://app:{SECRET}@db.example:5433/proj",
    f"postgresql+psycopg://app:{SECRET}@db.example:5433/proj",
    f"postgresql+psycopg2://app:{SECRET}@db.example:5433/proj",
    f"postgresql+asyncpg://app:{SECRET}@db.example:5433/proj",
    f"host=db.example port=5433 dbname=proj user=app password={SECRET}",
    f"postgresql://app@db.example:5433/proj?password={SECRET}",
    f"postgresql://app:{SECRET}%40%2F%3A@db.example:5433/proj",
]
UNREADABLE = [
    "",
    "  ",
    f"mysql://app:{SECRET}@db.example/proj",
    f"app:{SECRET}@db.example/proj",
    f"//app:{SECRET}@db.example/proj",
    f"postgresql:/app:{SECRET}@db.example/proj",
    f" postgresql://app:{SECRET}@db.example/proj",
    f"postgresql://app:{SECRET}%zz@db.example/proj",
    f"postgresql://app:{SECRET}@db.example/proj?passcode={SECRET}",
    f"postgresql://app:{SECRET}@db.example/proj?{SECRET}",
    f"postgresql+asyncpg://app:{SECRET}@db.example/proj?ssl=require",
    f"postgresql://app:{SECRET}@db.example:54x/proj",
    f"postgresql+psycopg://app:{SECRET}@db.example:54x/proj",
    f"postgresql://app:{SECRET}@[::1/proj",
    f"host=db.example passwd={SECRET}",
    f"host=db.example password=a {SECRET}=b",
    f"host=db.example password='{SECRET}",
    f"host=db.example port=x password={SECRET}",
    # A password whose @ or / is not percent-encoded is cut by every parser, and its end taken
    # for the host, the port or the database.
    f"postgresql://app:a@{SECRET}@db.example/proj",
    f"postgresql://app:a/{SECRET}@db.example/proj",
    f"postgresql://app:{SECRET}/a@db.example/proj",
    f"postgresql://app:5432/{SECRET}@db.example/proj",
    f"postgresql://app:a@b/{SECRET}@db.example/proj",
    f"postgresql://app:a?b/{SECRET}@db.example/proj",
    f"postgresql+psycopg://app:a@{SECRET}@db.example/proj",
    f"postgresql+psycopg://app:a@{SECRET}/b@db.example/proj",
    f"postgresql+psycopg://app:a@b/{SECRET}@db.example/proj",
    f"postgresql+psycopg2://app:a?b@{SECRET}@db.example/proj",
    f"dbname=postgresql://app:{SECRET}@db.example/proj",
]


@pytest.mark.parametrize("url", READABLE)
def test_a_database_can_be_named_in_many_ways(url: str) -> None:
    assert settings.of(app_with(pglock_database_url=url)).target() == url
    parameters = connections.parameters(url)
    assert connections.describe(parameters) == "db.example:5433/proj"
    assert str(parameters["password"]).startswith(SECRET)


@pytest.mark.parametrize("url", READABLE)
def test_no_description_and_no_repr_of_a_database_holds_the_password(url: str) -> None:
    read = settings.of(app_with(pglock_database_url=url))
    plan = sessions.Plan(target=read.target(), level="session", application="test")
    shown = [
        repr(read),
        str(read),
        repr(plan),
        connections.describe(connections.parameters(url)),
    ]
    assert not [text for text in shown if SECRET in text]


@pytest.mark.parametrize("url", UNREADABLE)
def test_what_is_no_connection_string_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        settings.of(app_with(pglock_database_url=url))
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert "pglock_database_url" in str(caught.value)
    assert SECRET not in told


@pytest.mark.parametrize("url", UNREADABLE)
def test_a_function_that_returns_no_connection_string_gets_the_same_sentence(url: str) -> None:
    read = settings.of(app_with(pglock_database_url=lambda: url))
    with pytest.raises(errors.ConfigurationError) as caught:
        connections.parameters(read.target())
    assert "pglock_database_url" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_function_is_asked_anew_for_each_connection() -> None:
    tokens = iter(["one", "two"])
    target = settings.of(
        app_with(pglock_database_url=lambda: f"host=h password={next(tokens)}")
    ).target()
    passwords = [connections.parameters(target)["password"] for _ in range(2)]
    assert passwords == ["one", "two"]


@pytest.mark.parametrize("value", [5, b"postgresql://h/db", ["postgresql://h/db"]])
def test_a_database_that_is_no_text_is_refused(value: object) -> None:
    assert refusal(pglock_database_url=value) == (
        "pglock_database_url must be a text or a function that returns one"
    )


def test_several_hosts_and_a_socket_are_described_too() -> None:
    several = connections.parameters("postgresql://app@a:5432,b:5433/proj")
    assert connections.describe(several) == "a,b:5432,5433/proj"
    socket = connections.parameters("host=@pg dbname=a@b")
    assert connections.describe(socket) == "@pg:5432/a@b"


@pytest.mark.parametrize("url", [URL.replace("db.example:5433", "127.0.0.1:1"),
                                 f"host=127.0.0.1 port=1 user=app password={SECRET}"])  # fmt: skip
def test_a_server_that_does_not_answer_is_named_without_the_password(url: str) -> None:
    with pytest.raises(errors.DatabaseUnavailable) as caught:
        connections.connect(url, application="test")
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert "cannot use PostgreSQL at 127.0.0.1:1/" in str(caught.value)
    assert SECRET not in told


def test_celery_report_masks_the_database() -> None:
    assert SECRET not in app_with(pglock_database_url=URL).bugreport()

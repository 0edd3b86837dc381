"""`manage.py check` finds what is set wrongly, each fault under its own number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import celery
import pytest

from celery_pglock import migrating, settings
from tests.support.databases import Database
from tests.support.django_site import environment, manage, pointed
from tests.support.pgbouncer import StartPgBouncer
from tests.support.processes import Processes

pytestmark = pytest.mark.usefixtures("migrated")

NOWHERE = "postgresql://nobody:tops3cret@127.0.0.1:1/nothing"


def found(*, database: str | None = None) -> list[Any]:
    """Return what the package's own checks say, as `manage.py check` would."""
    from django.core.checks import run_checks

    databases = None if database is None else [database]
    return [
        message
        for message in run_checks(databases=databases)
        if str(message.id).startswith("celery_pglock.")
    ]


def ids(messages: list[Any]) -> list[str]:
    for message in messages:
        # One sentence, its remedy, and nothing that is secret.
        assert message.msg.endswith(".")
        assert "\n" not in message.msg
        assert message.hint
        assert "tops3cret" not in message.msg
    return [message.id.removeprefix("celery_pglock.") for message in messages]


@contextmanager
def configured(app: celery.Celery, **conf: Any) -> Iterator[None]:
    """Have the application read other settings for the length of a block."""
    before = settings._read.pop(app, None)  # noqa: SLF001 - as if it had just started
    # By the names of Django's settings: before Celery 5.7 those win over the plain ones.
    given = {f"CELERY_{name.upper()}": value for name, value in conf.items()}
    changes: Any = app.conf.changes
    assert given.keys().isdisjoint(changes)
    changes.update(given)
    try:
        yield
    finally:
        for name in given:
            del changes[name]
        settings._read.pop(app, None)  # noqa: SLF001
        if before is not None:
            settings._read[app] = before  # noqa: SLF001


@pytest.fixture
def migrated(site: celery.Celery, shared_site_database: Database) -> Database:
    assert site.main == "site"
    return shared_site_database


def test_a_healthy_project_gives_none() -> None:
    assert found() == found(database="default") == []


def test_a_project_without_its_celery_application(monkeypatch: pytest.MonkeyPatch) -> None:
    from celery import _state

    from celery_pglock.contrib.django import project

    monkeypatch.setattr(project, "_found", [])
    thread: Any = vars(_state)["_tls"]
    monkeypatch.setattr(thread, "current_app", None)
    monkeypatch.setattr(_state, "default_app", None)
    assert ids(found()) == ["E001"]


@pytest.mark.parametrize(
    ("conf", "told"),
    [
        ({"pglock_schemma": "x"}, "did you mean pglock_schema?"),
        ({"pglock_database_url": NOWHERE}, "are both set"),
        ({"pglock_django_alias": 7}, "must be the name of a database in DATABASES"),
        ({"pglock_lost_after": "soon"}, "must be a number of seconds"),
    ],
)
def test_a_setting_that_is_wrong(site: celery.Celery, conf: dict[str, Any], told: str) -> None:
    with configured(site, **conf):
        messages = found()
        assert ids(messages) == ["E002"]
        assert told in messages[0].msg
        assert found(database="default") == messages


def test_an_alias_that_is_unknown(site: celery.Celery) -> None:
    with settings.replaced(site, django_alias="defaults"):
        messages = found()
    assert ids(messages) == ["E003"]
    assert "did you mean 'default'?" in messages[0].msg


def test_an_alias_that_is_not_postgresql(
    site: celery.Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import connections

    monkeypatch.setattr(connections["other"], "vendor", "sqlite")
    with settings.replaced(site, django_alias="other"):
        messages = found()
    assert ids(messages) == ["E003"]
    assert "only PostgreSQL has advisory locks" in messages[0].msg


def test_no_database_at_all(site: celery.Celery) -> None:
    with settings.replaced(site, django_alias=None, database_url=None):
        assert ids(found()) == ["E003"]
    with settings.replaced(site, django_alias=None, database_url=None, enabled=False):
        assert found() == []


def test_autocommit_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import connections

    monkeypatch.setitem(connections["default"].settings_dict, "AUTOCOMMIT", 0)
    messages = found()
    assert ids(messages) == ["E004"]
    assert "books.save, " in messages[0].msg
    assert "books.save_at_session_level" not in messages[0].msg


def test_a_url_where_models_are_meant_to_be_part_of_the_run(
    site: celery.Celery, migrated: Database
) -> None:
    with settings.replaced(site, django_alias=None, database_url=migrated.url):
        assert ids(found()) == ["W001"]


def test_models_that_are_written_elsewhere(site: celery.Celery, migrated: Database) -> None:
    with settings.replaced(site, django_alias="other"), pointed(other=migrated.url):
        messages = found()
    assert ids(messages) == ["W002"]
    assert "written to 'default'" in messages[0].msg


def test_without_tasks_at_transaction_level_it_does_not_matter(
    site: celery.Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery_pglock.contrib.django import checks

    monkeypatch.setattr(checks, "_locked", lambda _: [])
    with settings.replaced(site, django_alias="other"):
        assert found() == []


# --- with `--database` ------------------------------------------------------------------------


def test_only_the_database_of_the_locks_is_asked() -> None:
    with pointed(default=NOWHERE, other=NOWHERE):
        assert found() == found(database="other") == []
        messages = found(database="default")
    assert ids(messages) == ["W004"]


def test_tables_that_are_missing_or_old(blank_database: Database) -> None:
    with pointed(default=blank_database.url):
        (missing,) = found(database="default")
        assert ids([missing]) == ["W003"]
        assert missing.hint == "Run: manage.py migrate."

        migrating.migrate(blank_database.url)
        assert found(database="default") == []
        blank_database.rows("DELETE FROM pglock.schema_version WHERE number = 2")
        (old,) = found(database="default")
        assert ids([old]) == ["W003"]
        assert "is older than this release needs" in old.msg


def test_a_pooler_in_transaction_mode(migrated: Database, pgbouncer: StartPgBouncer) -> None:
    url = pgbouncer(migrated, "transaction", default_pool_size=5).url
    with pointed(default=url):
        assert ids(found(database="default")) == ["E005"]


def test_a_database_that_takes_no_writes(blank_database: Database) -> None:
    name = blank_database.name
    blank_database.rows(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pointed(default=blank_database.url):
        messages = found(database="default")
    assert ids(messages) == ["E007"]
    assert "default_transaction_read_only is on" in messages[0].msg


def test_the_command_says_it(processes: Processes, migrated: Database) -> None:
    """In a process of its own, as it is used; of a healthy project `test_example.py` says so."""
    env = environment(migrated.url, CELERY_PGLOCK_DJANGO_ALIAS="defaults")
    faulty = manage(processes, env, "check")
    assert faulty.wait() == 1
    assert "(celery_pglock.E003) pglock_django_alias names 'defaults'" in faulty.output()


def test_control_there_are_tasks_of_both_levels_to_be_found(
    site: celery.Celery,
) -> None:
    from celery_pglock.contrib.django import checks

    config, locked = settings.of(site), checks._locked(site)  # noqa: SLF001 - what they look at
    levels = {name: chosen.value("lock_level", config.options) for name, chosen in locked}
    assert levels["books.save"] == "transaction"
    assert levels["books.save_at_session_level"] == "session"

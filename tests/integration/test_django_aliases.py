"""The database of an alias, reached as Django would reach it, by connections that are not Django's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import celery
import psycopg
import pytest
from psycopg import conninfo

from celery_pglock import (
    LockedTask,
    advisory_lock,
    connections,
    errors,
    idle_sessions,
    lending,
    settings,
)
from tests.integration.workbench import advisory_locks
from tests.support.commands import told
from tests.support.databases import Database

pytestmark = pytest.mark.usefixtures("shared_site_database")


@pytest.fixture
def options(site: celery.Celery, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The OPTIONS of the alias, for the length of a test."""
    from django.db import connections

    given: dict[str, Any] = {}
    assert site.main == "site"
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", given)
    return given


def said() -> dict[str, Any]:
    return conninfo.conninfo_to_dict(lending.lender().conninfo("default"))


def test_all_that_libpq_knows_is_said_as_django_says_it(
    options: dict[str, Any], shared_site_database: Database
) -> None:
    options |= {
        "sslmode": "prefer",
        "connect_timeout": 3,
        "options": "-c search_path=x",
        "pool": False,
        "isolation_level": 1,
        "server_side_binding": True,
        "prepare_threshold": 5,
    }
    wanted = conninfo.conninfo_to_dict(shared_site_database.url)
    assert said() == {
        **{name: str(value) for name, value in wanted.items()},
        "sslmode": "prefer",
        "connect_timeout": "3",
        "options": "-c search_path=x",
        "client_encoding": "UTF8",
    }


def test_a_service_is_the_services(
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    shared_site_database: Database,
) -> None:
    from django.db import connections as aliases

    parts = conninfo.conninfo_to_dict(shared_site_database.url)
    text = "\n".join(f"{name}={value}" for name, value in parts.items())
    (tmp_path / "services").write_text(f"[here]\n{text}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    options["service"] = "here"
    for name in ("NAME", "HOST", "PORT", "USER", "PASSWORD"):
        monkeypatch.setitem(aliases["default"].settings_dict, name, "")
    with psycopg.connect(lending.lender().conninfo("default")) as connection:
        assert connection.info.dbname == shared_site_database.name


def test_a_role_that_is_assumed_is_assumed(
    options: dict[str, Any], site: celery.Celery, shared_site_database: Database
) -> None:
    role = "the role"
    shared_site_database.rows(f'DROP ROLE IF EXISTS "{role}"')
    shared_site_database.rows(f'CREATE ROLE "{role}"')
    options["assume_role"] = role
    try:
        target = settings.of(site).target()
        connection = connections.connect(target, application="test")
        with connection:
            assert connection.execute("SELECT current_user").fetchone() == (role,)
        connection.close()
    finally:
        shared_site_database.rows(f'DROP ROLE "{role}"')


def test_what_is_not_there_is_named(options: dict[str, Any], monkeypatch: Any) -> None:
    from django.db import connections as aliases

    with pytest.raises(errors.ConfigurationError, match="did you mean 'default'"):
        lending.lender().conninfo("defaults")
    monkeypatch.setitem(aliases["default"].settings_dict, "NAME", "")
    with pytest.raises(errors.ConfigurationError, match=r"DATABASES\['default'\] cannot be used"):
        lending.lender().conninfo("default")
    assert options == {}


def test_an_examination_names_the_alias_and_not_the_url_that_is_not_set(
    site: celery.Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = celery.Celery("examined", broker="memory://", set_as_current=False)
    app.conf.update(pglock_django_alias="defaults", result_expires=None)
    assert site.main == "site"
    _, found = told(app, "doctor")
    (finding,) = (each for each in found["findings"] if each["code"] == "database_url")
    assert finding["reason"] == "pglock_django_alias names 'defaults', which is not in DATABASES"
    assert finding["remedy"] == "did you mean 'default'?"
    # No framework has started that could lend one.
    monkeypatch.setattr(lending, "_registered", [])
    _, found = told(app, "doctor")
    (finding,) = (each for each in found["findings"] if each["code"] == "database_url")
    assert "Django does not lend its connections" in f"{finding['reason']} {finding['remedy']}"
    assert "INSTALLED_APPS" in finding["remedy"]


def test_lock_sessions_are_not_djangos(site: celery.Celery, shared_site_database: Database) -> None:
    """Neither close_old_connections() nor connections.close_all() knows of them."""
    from django.db import close_old_connections
    from django.db import connections as aliases

    with advisory_lock("script", app=site) as held:
        aliases["default"].ensure_connection()
        aliases["default"].close_at = 0.0
        close_old_connections()
        aliases.close_all()
        assert len(advisory_locks(shared_site_database)) == 1
        held.check()


def test_a_database_that_does_not_answer_is_unavailable(
    site: celery.Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import connections as aliases

    make: Any = site.task
    levels = {
        level: make(base=LockedTask, name=f"unavailable.{level}", lock_level=level)(
            lambda_of(level)
        )
        for level in ("session", "transaction")
    }
    aliases["default"].close()
    idle_sessions.close_idle()
    monkeypatch.setitem(aliases["default"].settings_dict, "PORT", "1")
    for task in levels.values():
        with pytest.raises(errors.DatabaseUnavailable, match=r"127\.0\.0\.1:1/"):
            task()


def lambda_of(name: str) -> Any:
    def body() -> None:
        raise AssertionError(name)

    return body


def test_the_package_itself_imports_no_django() -> None:
    """Also with an alias set: only INSTALLED_APPS brings it."""
    code = (
        "import sys, celery, celery_pglock\n"
        "app = celery.Celery('x')\n"
        "app.conf.pglock_django_alias = 'default'\n"
        "@app.task(base=celery_pglock.LockedTask)\n"
        "def task(): pass\n"
        "try:\n"
        "    task()\n"
        "except celery_pglock.ConfigurationError as error:\n"
        "    print(error)\n"
        # kombu looks for a class of texts in django.utils.
        "print([name for name in sys.modules if name.startswith(('django.db', 'django.conf'))])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    told, modules = done.stdout.splitlines()
    assert 'add "celery_pglock.contrib.django" to INSTALLED_APPS' in told
    assert modules == "[]"

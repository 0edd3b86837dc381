"""The Django project of `tests.apps.django_site`, in this process and in others.

Django is set up once in a process. What that changes for Celery (the fixup that an environment
variable switches on, the current application) is put back: other tests know of no Django.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import celery
import pytest
from celery import _state

from celery_pglock import idle_sessions
from tests.support.databases import Database, _database
from tests.support.processes import Process, Processes
from tests.support.servers import TestedPostgres

SETTINGS: Final = "tests.apps.django_site.settings"
MANAGE: Final = "tests.apps.django_site.manage"
_VARIABLE: Final = "DJANGO_SETTINGS_MODULE"


def set_up() -> celery.Celery:
    """Set Django up in this process, if it is not, and return the project's application."""
    state: Any = _state
    current, default = state._tls.current_app, state.default_app  # noqa: SLF001
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = SETTINGS
    try:
        import django

        from tests.apps import django_site

        django.setup()
        return django_site.celery_app
    finally:
        state._set_current_app(current)  # noqa: SLF001
        state.set_default_app(default)
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def environment(url: str, *, other: str = "", **settings: object) -> dict[str, str]:
    """Return the variables with which the project is started on a database."""
    return {
        _VARIABLE: SETTINGS,
        "SITE_DATABASE_URL": url,
        "SITE_OTHER_URL": other or url,
        "SITE_SETTINGS": json.dumps(settings),
    }


def manage(processes: Processes, env: Mapping[str, str], *arguments: str) -> Process:
    """Start a command of the project's `manage.py`."""
    return processes.python("-m", MANAGE, *arguments, env=env, name=f"manage-{arguments[0]}")


@contextmanager
def pointed(**urls: str) -> Iterator[None]:
    """Point databases of the project, by alias, at others for the length of a block."""
    from django.db import connections

    def point(alias: str, parts: Mapping[str, Any]) -> dict[str, Any]:
        # What is open, here or idle as a lock session, is of the database of before.
        connections[alias].close()
        idle_sessions.close_idle()
        known = connections[alias].settings_dict
        before = {name: known[name] for name in parts}
        known.update(parts)
        return before

    before = {}
    for alias, url in urls.items():
        found = urlsplit(url)
        parts = {
            "HOST": found.hostname or "",
            "PORT": str(found.port or ""),
            "USER": found.username or "",
            "PASSWORD": found.password or "",
            "NAME": found.path.removeprefix("/"),
        }
        before[alias] = point(alias, parts)
    try:
        yield
    finally:
        for alias, parts in before.items():
            point(alias, parts)


@pytest.fixture(scope="session")
def site() -> celery.Celery:
    """The project's Celery application; Django is set up."""
    return set_up()


@pytest.fixture(scope="session")
def site_template(postgres_server: TestedPostgres, site: celery.Celery) -> Iterator[str]:
    """The name of a database in which the project has been migrated."""
    assert site.main == "site"
    from django.core.management import call_command

    with _database(postgres_server, template="template1") as template:
        with pointed(default=template.url):
            call_command("migrate", verbosity=0)
        yield template.name


@pytest.fixture
def site_database(postgres_server: TestedPostgres, site_template: str) -> Iterator[Database]:
    """A migrated database of this test's own, which is the project's `default` in this process."""
    with (
        _database(postgres_server, template=site_template) as database,
        pointed(default=database.url),
    ):
        yield database


@pytest.fixture(scope="module")
def shared_site_database(postgres_server: TestedPostgres, site_template: str) -> Iterator[Database]:
    """A migrated database of the module's tests, which is the project's `default` for them."""
    with (
        _database(postgres_server, template=site_template) as database,
        pointed(default=database.url),
    ):
        yield database

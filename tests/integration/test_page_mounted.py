"""The page inside of other applications: as docs/howto/monitor.md mounts it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import celery
import httpx
import pytest

from tests.support.databases import Database
from tests.support.guides import blocks
from tests.support.history import History

NAMESPACE = "proj"
FILES = {name: "".join(parts) for name, parts in blocks("monitor.md", "python").items()}


@pytest.fixture
def app(database: Database) -> celery.Celery:
    app = celery.Celery(NAMESPACE, broker="memory://", set_as_current=False)
    app.conf.pglock_database_url = database.url
    History(database.url, NAMESPACE).row("nightly", "done")
    return app


@pytest.fixture
def proj(app: celery.Celery, monkeypatch: pytest.MonkeyPatch) -> celery.Celery:
    """What the files of the guide import as `proj`."""
    import sys
    import types

    module = types.ModuleType("proj")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "proj", module)
    return app


def run(name: str) -> dict[str, Any]:
    """Run a file of the guide; return what it has made."""
    found: dict[str, Any] = {"__name__": name.removesuffix(".py")}
    exec(compile(FILES[name], name, "exec"), found)  # noqa: S102 - what the guide shows
    return found


def expect_page(get: Any, *paths: str) -> None:
    """Expect the page below `/pglock`, by a function that returns status, headers and text."""
    for path in ("/pglock/", *paths):
        status, headers, text = get(path)
        assert status == 200, (path, text)
        assert 'data-job="nightly"' in text
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    status, _, text = get("/pglock/metrics")
    assert status == 200
    assert 'pglock_job_consecutive_skips{job="nightly"} 0.0' in text
    assert get("/pglock/healthz")[0] == 200
    assert get("/pglock/nowhere")[0] == 404


@pytest.mark.usefixtures("proj")
def test_in_flask() -> None:
    client = run("website.py")["website"].test_client()

    def get(path: str) -> tuple[int, Any, str]:
        answer = client.get(path)
        return answer.status_code, answer.headers, answer.get_data(as_text=True)

    expect_page(get, "/pglock")
    assert client.post("/pglock/").status_code == 405


@pytest.mark.usefixtures("proj")
def test_in_fastapi() -> None:
    transport = httpx.ASGITransport(app=run("api.py")["api"])

    async def ask(method: str, path: str) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://site", follow_redirects=True
        ) as client:
            return await client.request(method, path)

    def get(path: str) -> tuple[int, Any, str]:
        answer = asyncio.run(ask("GET", path))
        return answer.status_code, answer.headers, answer.text

    expect_page(get, "/pglock")
    assert asyncio.run(ask("POST", "/pglock/")).status_code == 405


class InDjango:
    @pytest.fixture(autouse=True)
    def rows(self, site: celery.Celery, shared_site_database: Database) -> Iterator[None]:
        self.app = site
        shared_site_database.rows("TRUNCATE pglock.job_runs")
        History(shared_site_database.url, "site").row("nightly", "done")
        yield
        shared_site_database.rows("TRUNCATE pglock.job_runs")

    def client(self, **user: bool) -> Any:
        from django.contrib.auth.models import User
        from django.test import Client

        client = Client(raise_request_exception=False)
        if user:
            found, _ = User.objects.update_or_create(username="ann", defaults=user)
            client.force_login(found)
        return client


class TestInDjango(InDjango):
    def test_those_who_may_see_runs_see_it(self) -> None:
        client = self.client(is_staff=True, is_superuser=True)

        def get(path: str) -> tuple[int, Any, str]:
            answer = client.get(path, follow=True)
            return answer.status_code, answer.headers, answer.content.decode()

        expect_page(get)
        assert client.post("/pglock/").status_code == 405
        assert client.head("/pglock/").content == b""

    def test_nobody_else_does(self) -> None:
        answer = self.client().get("/pglock/")
        assert answer.status_code == 302
        assert re.match(r"/admin/login/\?next=/pglock/", answer["Location"])
        for path in ("/pglock/", "/pglock/metrics"):
            assert self.client(is_staff=True, is_superuser=False).get(path).status_code == 403
            assert self.client(is_staff=False, is_superuser=False).get(path).status_code == 302

"""docs/howto/fastapi-and-flask.md: what a web process sees of a run, and of one that is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_pglock.demo.servers import ValkeyServer
from tests.acceptance.bench import redis_database
from tests.support.databases import _database
from tests.support.guides import TABLES, WORK, Project, Shell, blocks
from tests.support.processes import Processes, eventually
from tests.support.servers import TestedPostgres

FILES = {name: "".join(parts) for name, parts in blocks("fastapi-and-flask.md", "python").items()}
FASTAPI = (
    "from fastapi.testclient import TestClient",
    "from api import api",
    "client = TestClient(api)",
    "def ask(method, path): r = getattr(client, method)(path); return r.status_code, r.json()",
)
FLASK = (
    "from website import website",
    "client = website.test_client()",
    "def ask(method, path): r = getattr(client, method)(path); return r.status_code, r.json",
)


@pytest.fixture(scope="module")
def project(
    postgres_server: TestedPostgres,
    template_database: str,
    valkey_server: ValkeyServer,
    shared_processes: Processes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Project]:
    """The page's files, and one worker."""
    with _database(postgres_server, template=template_database) as database:
        database.rows(TABLES)
        broker = valkey_server.url(next(redis_database))
        project = Project(tmp_path_factory.mktemp("web"), database, broker, shared_processes)
        for name, text in {**FILES, "work.py": WORK}.items():
            project.write(name, text)
        project.worker("-P", "threads")
        yield project
        project.close()


def become(shell: Shell, task_id: str, state: str) -> dict[str, Any]:
    """Wait until a call's state is this one; return what the page answers."""

    def answer() -> dict[str, Any] | None:
        status, found = shell.ask(f"ask('get', '/reports/calls/{task_id}')")
        assert status == 200
        return found if found["state"] == state else None

    found = eventually(answer, 30, f"{task_id} is {state}")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("imports", "tenant"),
    [pytest.param(FASTAPI, 1, id="fastapi"), pytest.param(FLASK, 2, id="flask")],
)
def test_a_page_starts_a_task_and_shows_what_becomes_of_it(
    project: Project, imports: tuple[str, ...], tenant: int
) -> None:
    shell = project.shell(*imports, "from direct import at_once")
    what = f"report {tenant}"
    project.shut(what)
    status, first = shell.ask(f"ask('post', '/reports/{tenant}')")
    assert status == 202
    project.began(what)
    _, second = shell.ask(f"ask('post', '/reports/{tenant}')")
    reason = become(shell, second["id"], "skipped")["reason"]
    assert reason.startswith("skipped: lock ")
    assert f'report{{"tenant":{tenant}}}' in reason
    assert first["id"] in reason
    assert become(shell, first["id"], "waiting") == {"state": "waiting"}

    # Waiting for it: the skip is told at once, though the run goes on.
    status, answer = shell.ask(f"ask('post', '/reports/{tenant}/now')")
    assert (status, answer["state"]) == (409, "skipped")
    status, answer = shell.ask(f"at_once({tenant})")
    assert (status, answer["state"]) == (409, "skipped")

    project.open(what)
    assert isinstance(become(shell, first["id"], "done")["result"], int)
    status, answer = shell.ask(f"ask('post', '/reports/{tenant}/now')")
    assert (status, answer["state"]) == (200, "done")
    status, answer = shell.ask(f"at_once({tenant})")
    assert (status, answer["state"]) == (200, "done")
    assert project.times(what) == 3
    # A call of which nobody knows anything.
    assert shell.ask("ask('get', '/reports/calls/none')") == [200, {"state": "waiting"}]


def test_a_body_has_flask_s_context_and_a_skipped_call_opens_none(project: Project) -> None:
    shell = project.shell(
        "from flask import current_app",
        "from context import FlaskTask",
        "from proj import app",
        "from website import website",
        "opened = []",
        "website.teardown_appcontext(opened.append)",
        "def name(): return current_app.name",
        "name = app.task(name, name='name', base=FlaskTask, once_per='month')",
    )
    assert shell.ask("name()") == "website"
    assert shell.ask("name()").startswith("JobSkipped: ")
    assert shell.ask("len(opened)") == 1

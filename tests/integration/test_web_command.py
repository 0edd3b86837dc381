"""`pglock web`: where it listens, what it says of that, and how it ends."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import urllib.request
from pathlib import Path

import celery
import pytest

from celery_pglock.cli import web
from tests.support.commands import pglock
from tests.support.databases import Database
from tests.support.processes import Process, Processes

APP = """
import os
from celery import Celery
app = Celery("proj", broker="memory://")
app.conf.pglock_database_url = os.environ["APP_DATABASE_URL"]
"""


def serve(processes: Processes, database: Database, directory: Path, *arguments: str) -> Process:
    (directory / "proj.py").write_text(APP)
    env = {"APP_DATABASE_URL": database.url, "PYTHONPATH": str(directory)}
    return processes.celery("proj", "pglock", "web", *arguments, env=env, name="web")


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_at_loopback_and_ends_at_a_signal(
    database: Database, processes: Processes, tmp_path: Path, signum: signal.Signals
) -> None:
    serving = serve(processes, database, tmp_path, "--port", "0")
    url = serving.wait_for_line(r"^proj is at (http://127\.0\.0\.1:\d+/) \(Ctrl\+C ends it\)$")[1]
    # A browser that opened a connection beforehand and says nothing keeps nobody.
    port = int(url.rpartition(":")[2].rstrip("/"))
    with socket.create_connection(("127.0.0.1", port)):
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own
            assert answer.status == 200
            assert b"celery-pglock" in answer.read()
        # Nor does a site whose name somebody has led here get to see it.
        for host, status in (("localhost:1", 200), ("[::1]", 200), ("evil.example", 421)):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("HEAD", "/", headers={"Host": host})
            assert connection.getresponse().status == status
            connection.close()
        serving.send(signum)
        assert serving.wait(10) == 0
    assert serving.output().splitlines()[-1] == "ended"
    assert "Warning" not in serving.output()
    assert "Traceback" not in serving.output()


@pytest.mark.slow
def test_another_address_than_loopback_is_a_warning(
    database: Database, processes: Processes, tmp_path: Path
) -> None:
    serving = serve(processes, database, tmp_path, "--host", "0.0.0.0", "--port", "0")  # noqa: S104
    serving.wait_for_line("^proj is at ")
    assert (
        "Warning: the page has no login, and with --host 0.0.0.0 everybody who can reach that "
        "address can see it." in serving.output()
    )


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("192.0.2.1", False), ("web1", False),  # noqa: S104
    ],
)  # fmt: skip
def test_which_addresses_are_loopback(host: str, *, loopback: bool) -> None:
    assert web._is_loopback(host) is loopback  # noqa: SLF001


@pytest.fixture
def app() -> celery.Celery:
    app = celery.Celery("proj", broker="memory://", set_as_current=False)
    app.conf.pglock_database_url = "postgresql://127.0.0.1:1/nowhere"
    return app


def test_a_port_that_is_taken_is_one_sentence(app: celery.Celery) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = pglock(app, "web", "--port", str(port))
    assert ended.code == 2
    assert f"cannot listen at 127.0.0.1 port {port} (" in ended.output
    assert "choose another with --host or --port" in ended.output


def test_an_address_that_is_none_is_one_sentence(app: celery.Celery) -> None:
    ended = pglock(app, "web", "--host", "no.such.host.invalid", "--port", "0")
    assert ended.code == 2
    assert "cannot listen at no.such.host.invalid" in ended.output


def test_without_a_database_there_is_nothing_to_serve_or_write(
    app: celery.Celery, tmp_path: Path
) -> None:
    ended = pglock(app, "web", "-o", str(tmp_path / "page.html"))
    assert ended.code == 69
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - names are enough
    app = celery.Celery("proj", broker="memory://", set_as_current=False)
    ended = pglock(app, "web")
    assert ended.code == 2
    assert "pglock_database_url is not set" in ended.output


def test_without_its_libraries_the_remedy_is_told(
    app: celery.Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("celery_pglock.page")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("celery_pglock.page", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    ended = pglock(app, "web")
    assert ended.code == 2
    assert "the page needs jinja2; run: pip install 'celery-pglock[web]'" in ended.output

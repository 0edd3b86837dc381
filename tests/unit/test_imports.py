"""What processes import of us, and by us: an import is paid at every start of every process."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

# What workers and beats have of Celery's own, and what kombu finds.
_CELERY: Final = """
import sys
import celery, celery.apps.beat, celery.apps.worker, celery.worker.consumer
import celery.concurrency.prefork, celery.backends.redis, click, typing_extensions
before = set(sys.modules)
"""
_APPLICATION: Final = """
from celery_pglock import LockedTask, settings
app = celery.Celery("app")
app.conf.pglock_database_url = "postgresql://user@db.example/app"
@app.task(base=LockedTask)
def job(): ...
app.finalize()
settings.of(app).target()
"""
_TOLD: Final = "\nprint(*sorted(set(sys.modules) - before))"


def imported(statements: str) -> set[str]:
    """Return the modules that a new process imports by some statements, over Celery's own."""
    done = subprocess.run(
        [sys.executable, "-c", _CELERY + statements + _TOLD],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(done.stdout.split())


def third_party(modules: set[str]) -> set[str]:
    """Return the packages among modules, but Python's, Celery's and psycopg's faster parts."""
    # Cython's own, which compiled parts bring along.
    packages = {module.partition(".")[0] for module in modules if not module.startswith("_cython_")}
    return packages - sys.stdlib_module_names - {"celery", "psycopg_binary", "psycopg_c"}


def test_a_worker_and_a_beat_import_psycopg_and_nothing_else_over_celery() -> None:
    found = imported(_APPLICATION + "from celery_pglock import LeaderScheduler")
    assert {"celery_pglock.task", "celery_pglock.leading"} <= found
    assert third_party(found) == {"celery_pglock", "psycopg"}


def test_the_package_alone_imports_nothing_and_the_command_group_only_itself() -> None:
    assert imported("import celery_pglock") == {"celery_pglock"}
    found = imported("import celery_pglock.cli")
    ours = {"celery_pglock.cli", "celery_pglock.cli.groups", "celery_pglock.cli.main"}
    assert found == {"celery_pglock", *ours}


def test_a_worker_does_without_the_scheduler_and_a_beat_without_the_tasks() -> None:
    assert not imported(_APPLICATION) & {"celery_pglock.beat", "celery_pglock.leading"}
    found = imported("from celery_pglock import LeaderScheduler")
    assert "celery_pglock.leading" in found
    assert "celery_pglock.task" not in found


def test_control_what_needs_sqlalchemy_imports_it() -> None:
    url = '"postgresql+asyncpg://user@db.example/app"'
    for statements in (
        f"from celery_pglock import connections; connections.parameters({url})",
        "from celery_pglock import transaction_runs; transaction_runs.preload()",
        "from celery_pglock import tables",
    ):
        assert third_party(imported(statements)) >= {"celery_pglock", "sqlalchemy"}

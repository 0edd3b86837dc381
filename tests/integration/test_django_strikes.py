"""A time limit that strikes at any line of a run on Django's own connection: whole, or nothing.

Each run is struck one line later than the one before, from its first line to its last.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import celery
import django.db.transaction
import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from django.db.backends.base import base

from celery_pglock import LockedTask, transaction_locks
from celery_pglock.contrib.django import aliases, borrowed
from tests.integration.workbench import advisory_locks
from tests.support.databases import Database
from tests.support.processes import eventually

# At one line in so many; in all of them by `make chaos-tests`.
STRIDE = 7


class Striker:
    """Raises in a certain line of those that are run in certain files."""

    def __init__(self, line: int) -> None:
        from celery_pglock.contrib.django import atomic_runs

        self.left = line
        self.struck: str | None = None
        modules = (
            aliases, atomic_runs, base, borrowed, django.db.transaction, transaction_locks,
        )  # fmt: skip
        self._files = {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        # In the last line of a "with lock" a trace function strikes where no signal does.
        if (
            frame.f_code.co_filename not in self._files
            or frame.f_code.co_name == "allow_thread_sharing"
        ):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.struck = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise SoftTimeLimitExceeded
        return self


@pytest.fixture
def task(site: celery.Celery, shared_site_database: Database) -> Iterator[Any]:
    shared_site_database.rows("TRUNCATE pglock.job_runs, books_row, books_shelf")
    make: Any = site.task

    def body(number: int) -> None:
        from tests.apps.django_site.books.models import Row

        Row(job="struck", number=number).save()

    name = "site.struck"
    # Not shared: applications of other tests would have it twice, once from each test here.
    yield make(base=LockedTask, name=name, lock_level="transaction", shared=False)(body)
    site.tasks.unregister(name)


def strike_all(task: Any, database: Database, stride: int) -> Counter[str]:
    """Strike runs, each one later; return what became of them."""
    connection = django.db.connections["default"]
    became: Counter[str] = Counter()
    line = 1
    while True:
        striker = Striker(line)
        before = sys.gettrace()
        sys.settrace(striker)
        try:
            result = task.apply(args=[line], task_id=f"struck-{line}")
        finally:
            sys.settrace(before)
        where = f"line {line}, {striker.struck}"
        eventually(lambda: not advisory_locks(database), what=f"no lock is left ({where})")
        assert not connection.in_atomic_block, where
        assert connection.connection is None or connection.get_autocommit(), where
        rows = database.rows("SELECT 1 FROM books_row WHERE number = %s", line)
        found = database.rows(
            "SELECT status FROM pglock.job_runs WHERE task_id = %s", f"struck-{line}"
        )
        status = found[0][0] if found else "none"
        assert len(rows) == (status == "done"), f"{where}: {len(rows)} rows, {status}"
        if striker.struck is None:
            assert result.state == "SUCCESS"
            return became
        if status == "running":
            # Between the claim and the transaction there is nobody yet who could record it: that
            # counts as a crash, and the next attempt takes over.
            assert "AtomicTransaction.__init__" in where, where
        became[status] += 1
        line += stride


def test_wherever_it_strikes_the_rows_and_the_outcome_agree(
    task: Any, shared_site_database: Database
) -> None:
    became = strike_all(task, shared_site_database, STRIDE)
    print(dict(became))
    # Before the claim, in the run, and after the commit.
    assert became.keys() >= {"none", "failed", "done"}


@pytest.mark.chaos
def test_at_every_line(task: Any, shared_site_database: Database) -> None:
    print(dict(strike_all(task, shared_site_database, 1)))

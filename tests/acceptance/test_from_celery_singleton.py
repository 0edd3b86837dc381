"""docs/howto/from-celery-singleton.md, step by step: what it comes from works, and what it makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.support.guides import PATIENCE, Project, Shell, blocks, sides
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(400)
PAGE = "from-celery-singleton.md"
_FIRST, _SECOND = blocks(PAGE, "diff")["proj.py"]
BEFORE, BOTH = sides(_FIRST)
AGAIN, AFTER = sides(_SECOND)
CHANGING = {"changing.py": blocks(PAGE, "python")["changing.py"][0]}
IMPORTS = ("from proj import app, import_feed, report",)


def test_the_second_change_begins_where_the_first_one_ends() -> None:
    assert AGAIN == BOTH
    assert "singleton" not in AFTER


@pytest.fixture
def before(make_project: Any) -> Project:
    project: Project = make_project("before", {"proj.py": BEFORE})
    return project


@pytest.fixture
def after(make_project: Any) -> Project:
    # The entry of the schedule comes more often than on the page.
    text = AFTER.replace('"schedule": 600.0', '"schedule": 1.0')
    assert text != AFTER
    project: Project = make_project("after", {"proj.py": text})
    return project


def keys(project: Project) -> list[object]:
    with redis.Redis.from_url(project.broker) as client:
        return list(client.scan_iter("SINGLETONLOCK_*"))


def expect_one_message(project: Project, shell: Shell) -> None:
    """With celery-singleton: a second call is not sent, and answers with the first one's result."""
    project.shut("report 7")
    shell.do("first = report.delay(7)")
    project.began("report 7")
    assert shell.ask("report.delay(7).id == first.id")
    project.open("report 7")
    shell.do("first.get(timeout=60)")
    eventually(lambda: not keys(project), 10, "its key is deleted")
    shell.do("again = report.delay(7)")
    assert shell.ask("again.id != first.id")
    project.ended("report 7", 2)


def test_before_and_after(before: Project, after: Project) -> None:
    workers = [before.start_worker(), after.start_worker()]
    beats = [after.beat("-S", "pglock") for _ in range(2)]
    shells = [project.shell(*IMPORTS) for project in (before, after)]
    for worker in workers:
        worker.wait_for_line(r"ready\.", PATIENCE)
    expect_one_message(before, shells[0])
    after.expect_runs_kept_apart(shells[1])
    # A retry is taken for a duplicate before: it never comes, and the key stays for ever.
    shells[0].do("import_feed.delay('a', 1)")
    workers[0].wait_for_line("Retry in 0s")
    shells[1].do("import_feed.delay('b', 1).get(timeout=60)")
    assert after.times("feed b 1") == 2
    with redis.Redis.from_url(before.broker) as client:
        assert [client.ttl(key) for key in keys(before)] == [-1]
    assert before.times("feed a 1") == 1
    after.expect_each_once(beats, "index")


@pytest.mark.chaos
def test_during_the_change_old_and_new_workers_keep_apart(
    before: Project, make_project: Any
) -> None:
    """A worker with celery-singleton alone and one with both, on one queue; then back again."""
    both: Project = make_project("both", {"proj.py": BOTH, **CHANGING}, broker=before.broker)
    old, new = before.worker(), both.worker()
    shells = [project.shell(*IMPORTS) for project in (before, both)]
    both.shut("report 1")
    shells[0].do("first = report.delay(1)")
    both.began("report 1")
    assert shells[1].ask("report.delay(1).id") == shells[0].ask("first.id")
    both.open("report 1")
    shells[0].do("first.get(timeout=60)")
    eventually(lambda: not keys(both), 10, "its key is deleted")
    # Both of them clear the key, whoever has set it.
    tenants = range(100, 120)
    for shell in shells:
        shell.do(f"r = [report.delay(t) for t in {list(tenants)}]; [a.get(timeout=60) for a in r]")
        eventually(lambda: not keys(both), 10, "their keys are deleted")
    assert all(both.times(f"report {tenant}") == 2 for tenant in tenants)
    for worker in (old, new):
        assert "succeeded" in worker.output()
    # With both locks a retry comes, and what gets past the key is kept apart by the run's own.
    old.terminate()
    old.wait()
    shells[1].do("import_feed.delay('b', 1).get(timeout=60)")
    assert both.times("feed b 1") == 2
    expect_one_message(both, shells[1])
    both.shut("report 2")
    shells[1].do("first = report.delay(2)")
    both.began("report 2")
    both.expect_skipped_by_name(shells[1], 2)
    both.open("report 2")
    shells[1].do("first.get(timeout=60)")
    # And back.
    new.terminate()
    new.wait()
    before.worker()
    eventually(lambda: not keys(before), 10, "a worker that starts has deleted all keys")
    expect_one_message(before, shells[0])

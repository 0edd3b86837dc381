"""docs/howto/from-celery-once.md, step by step: what it comes from works, and so does what it makes of it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.support.guides import PATIENCE, Project, blocks, sides
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(400)
PAGE = "from-celery-once.md"
_FIRST, _SECOND = blocks(PAGE, "diff")["proj.py"]
BEFORE, BOTH = sides(_FIRST)
AGAIN, AFTER = sides(_SECOND)
CHANGING = {"changing.py": blocks(PAGE, "python")["changing.py"][0]}
IMPORTS = (
    "from proj import app, import_feed, rebuild_index, report",
    "from celery.exceptions import TaskRevokedError",
)


def test_the_second_change_begins_where_the_first_one_ends() -> None:
    assert AGAIN == BOTH
    assert "celery_once" not in AFTER


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


def expect_queueing_refused(project: Project) -> None:
    """With celery-once: a second call is not sent, whoever makes it, until the first has ended."""
    shell = project.shell(*IMPORTS)
    project.shut("report 7")
    shell.do("first = report.delay(7)")
    project.began("report 7")
    assert shell.ask("report.delay(7)").startswith("AlreadyQueued")
    project.open("report 7")
    shell.do("first.get(timeout=60)")
    eventually(lambda: "AlreadyQueued" not in str(shell.ask("report.delay(7)")), 10, "it is sent")
    project.ended("report 7", 2)


def test_before_and_after(before: Project, after: Project) -> None:
    workers = [before.start_worker(), after.start_worker()]
    beats = [after.beat("-S", "pglock") for _ in range(2)]
    for worker in workers:
        worker.wait_for_line(r"ready\.", PATIENCE)
    expect_queueing_refused(before)
    after.expect_runs_kept_apart(after.shell(*IMPORTS))
    after.expect_each_once(beats, "index")


@pytest.mark.chaos
def test_a_killed_worker_leaves_a_key_before_and_nothing_after(
    before: Project, after: Project
) -> None:
    workers = [before.start_worker(), after.start_worker()]
    shells = [project.shell(*IMPORTS) for project in (before, after)]
    for worker, shell, what in zip(workers, shells, ("feed a 1", "feed b 1"), strict=True):
        worker.wait_for_line(r"ready\.", PATIENCE)
        before.shut(what)
        shell.do(f"import_feed.delay({what[5]!r}, 1)")
        before.began(what)
        worker.kill(group=True)
        before.open(what)
    # For an hour.
    assert shells[0].ask("import_feed.delay('a', 1)").startswith("AlreadyQueued")
    shells[1].do("again = import_feed.delay('b', 1)")
    after.worker()
    shells[1].do("again.get(timeout=60)")
    assert after.times("feed b 1") == 2


@pytest.mark.chaos
def test_during_the_change_old_and_new_workers_keep_apart(
    before: Project, make_project: Any
) -> None:
    """A worker with celery-once alone and one with both, on one queue; then back again."""
    both: Project = make_project("both", {"proj.py": BOTH, **CHANGING}, broker=before.broker)
    old, new = before.worker(), both.worker()
    shells = [project.shell(*IMPORTS) for project in (before, both)]
    both.shut("report 1")
    shells[0].do("r = [report.delay(1)]")
    both.began("report 1")
    for shell in shells:
        assert shell.ask("report.delay(1)").startswith("AlreadyQueued")
    both.open("report 1")
    shells[0].do("r[0].get(timeout=60)")
    # Both of them clear the key, whoever has set it.
    tenants = range(100, 120)
    for shell in shells:
        shell.do(f"r = [report.delay(t) for t in {list(tenants)}]; [a.get(timeout=60) for a in r]")
    assert all(both.times(f"report {tenant}") == 2 for tenant in tenants)
    for worker in (old, new):
        assert "succeeded" in worker.output()
    # With both locks, what gets past the key is kept apart by the run's own.
    old.send(signal.SIGTERM)
    old.wait()
    expect_queueing_refused(both)
    both.shut("report 2")
    shells[1].do("first = report.delay(2)")
    both.began("report 2")
    both.expect_skipped_by_name(shells[1], 2)
    both.open("report 2")
    shells[1].do("first.get(timeout=60)")
    # And back.
    new.send(signal.SIGTERM)
    new.wait()
    before.worker()
    expect_queueing_refused(before)


@pytest.mark.chaos
def test_with_both_a_postponed_message_passes_the_key(make_project: Any) -> None:
    """The control of what `apply_async` in `changing.py` is for."""
    text = BOTH.replace('lock_by=["tenant"]', 'lock_by=["tenant"], lock_conflict="postpone"')
    assert text != BOTH
    naive = {"changing.py": CHANGING["changing.py"].partition("    def ")[0] + "    pass\n"}
    for name, changing, passes in (("both", CHANGING, True), ("naive", naive, False)):
        project: Project = make_project(name, {"proj.py": text, **changing})
        worker = project.worker()
        shell = project.shell(*IMPORTS)
        what = f"report {name}"
        project.shut(what)
        # Sent by name, so that it has the lock and no key.
        shell.do(f"first = app.send_task('proj.report', ({name!r},))")
        project.began(what)
        shell.do(f"second = report.delay({name!r})")
        if passes:
            worker.wait_for_line("postponed")
            project.open(what)
            assert shell.ask("second.get(timeout=60)") is None
            assert project.times(what) == 2
        else:
            assert "AlreadyQueued" in shell.ask("second.get(timeout=60)")
            project.open(what)

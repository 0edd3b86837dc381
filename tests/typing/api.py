"""Everything that users may write, as a type checker sees it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, assert_type

import celery.beat
import sqlalchemy as sa
from celery import Celery
from celery.app.task import Context
from celery.schedules import crontab, solar
from typing_extensions import override

import celery_pglock
from celery_pglock import (
    Entry,
    EntryChanged,
    JobSkipped,
    LeaderMixin,
    LeaderScheduler,
    LockedTask,
    LockLost,
    LockNotAcquired,
    PGLockError,
    Run,
    advisory_lock,
    current_run,
    leadership_gained,
    leadership_lost,
    lock_lost,
    occurrence_missed,
    occurrence_sent,
    run_finished,
    run_postponed,
    run_skipped,
    run_started,
)

app = Celery("proj")
app.conf.pglock_database_url = "postgresql://user@host/db"


@app.task(base=LockedTask)
def plain() -> None:
    """Have no option at all."""


@app.task(
    base=LockedTask,
    lock_level="transaction",
    lock_name="nightly",
    lock_by=("tenant",),
    lock_wait=dt.timedelta(seconds=2),
    lock_conflict="raise",
    skip_state="SUCCESS",
    once_per="day",
    max_crash_retries=0,
    lock_lost="warn",
    lock_unavailable="raise",
    catchup=2,
)
def report(tenant: str, day: str = "") -> str:
    """Have all of them."""
    run = current_run()
    rows = run.connection.execute(sa.text("select 1")).scalar_one()
    return f"{tenant} {day} {rows}"


def tenant_lock(arguments: Mapping[str, Any], request: Context) -> str:
    """Name the lock of a call."""
    return f"{arguments['tenant']} {request.id}"


def half_day(moment: dt.datetime) -> str:
    """Name the period of a moment."""
    return f"{moment:%Y-%m-%d %p}"


@app.task(base=LockedTask, lock_name=tenant_lock, once_per=half_day)
def with_functions(tenant: str) -> None:
    """Have functions for options."""


@app.task(base=LockedTask, lock_name=4711, once_per=None)
def lock_only() -> None:
    """Have a key for a lock name and no period."""


@app.task(base=LockedTask, bind=True, max_retries=3)
def bound(self: LockedTask, number: int) -> None:
    """Have itself for its first parameter."""
    if self.job_run is not None:
        assert_type(self.job_run, Run)
        self.job_run.check()
    raise self.retry(countdown=number)


class Report(LockedTask):
    """Be written as a class."""

    name = "proj.report"
    lock_by = ("tenant",)
    lock_wait = 1.5

    @override
    def run(self, tenant: str) -> None:
        """Report."""


def call_them() -> None:
    """Call tasks in every way that Celery knows."""
    assert_type(plain, LockedTask)
    plain.delay()
    report.apply_async(("a",), {"day": "x"}, countdown=3)
    report.s("a").apply_async()
    try:
        report("a")
    except JobSkipped as skipped:
        assert_type(skipped.job, str)
        assert_type(skipped.period, str | None)
        assert_type(skipped.reason, str)
    except LockNotAcquired as refused:
        assert_type(refused.reason, str)
    except LockLost as lost:
        assert_type(lost.period, str | None)
    except PGLockError as error:
        assert_type(error.args, tuple[Any, ...])


def look_at_the_run() -> None:
    """Read all that a run says."""
    run = current_run()
    assert_type(run, Run)
    assert_type(run.name, str)
    assert_type(run.key, int)
    assert_type(run.job, str)
    assert_type(run.period, str | None)
    assert_type(run.due, dt.datetime | None)
    assert_type(run.attempt, int)
    assert_type(run.term, int | None)
    assert_type(run.lost_attempts, int)
    assert_type(run.held, bool)
    assert_type(run.connection, sa.Connection)
    if run.level == "session":
        run.check()


@run_started.connect
def on_started(sender: Any, run: Run, **_: Any) -> None:
    """Hear that a body begins."""


@run_finished.connect
def on_finished(
    sender: Any, run: Run, status: str, exception: BaseException | None, **_: Any
) -> None:
    """Hear that a body has ended."""


@run_skipped.connect
def on_skipped(
    sender: Any, *, job: str, period: str | None, reason: str, task_id: str | None, **_: Any
) -> None:
    """Hear that a call does not run."""


def on_others(**fields: Any) -> None:
    """Hear of the rest."""


run_postponed.connect(on_others)
lock_lost.connect(on_others, weak=False)
leadership_gained.connect(on_others)
leadership_lost.connect(on_others)
occurrence_sent.connect(on_others)
occurrence_missed.connect(on_others)


class Beat(LeaderScheduler):
    """Be a scheduler of one's own."""

    @override
    def close(self) -> None:
        """Say good-bye."""
        super().close()


def keep_entries() -> None:
    """Keep entries in the database."""
    Entry("a", 60, "proj.report").save()
    Entry("b", dt.timedelta(hours=1), "proj.report", ["x"], {"layout": "A4"}).save(app=app)
    Entry(
        name="c",
        schedule=crontab(minute=0, hour=7),
        task="proj.report",
        args=("x", 1),
        kwargs={"layout": "A4"},
        options={"queue": "slow"},
        zone="Europe/Berlin",
    ).save()
    entry = Entry.get("a")
    assert_type(entry, Entry | None)
    if entry is not None:
        entry.schedule = solar("sunset", 52.5, 13.4)
        entry.args = [1]
        try:
            entry.save()
        except EntryChanged as changed:
            assert_type(changed.entry, str)
        assert_type(entry.delete(app=app), bool)
        assert_type(entry.revision, int | None)
    assert_type(Entry.all(), list[Entry])


class Mixed(LeaderMixin, celery.beat.PersistentScheduler):
    """Be another scheduler, gated."""

    own_tick = False

    @override
    def on_takeover(self) -> None:
        """Read anew."""
        super().on_takeover()


VERSION: str = celery_pglock.__name__


with advisory_lock("nightly", wait=5) as lock:
    assert_type(lock, Run)
    assert_type(lock.held, bool)
    lock.check()
with advisory_lock(42, app=app):
    pass

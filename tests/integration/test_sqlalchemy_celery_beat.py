"""sqlalchemy-celery-beat under LeaderMixin, without a line about it in the package."""

from __future__ import annotations

from typing import Any

import celery
from sqlalchemy_celery_beat.models import (  # type: ignore[import-untyped]
    IntervalSchedule,
    Period,
    PeriodicTask,
)
from sqlalchemy_celery_beat.schedulers import DatabaseScheduler  # type: ignore[import-untyped]
from typing_extensions import override

from celery_pglock import LeaderMixin
from tests.support.databases import Database
from tests.support.processes import eventually


class Gated(LeaderMixin, DatabaseScheduler):  # type: ignore[misc]
    """As the documentation shows it."""

    @override
    def on_takeover(self) -> None:
        super().on_takeover()
        self._dirty: set[str] = set()
        self._initial_read = True


def test_its_entries_are_claimed_taken_up_and_told(database: Database) -> None:
    app = celery.Celery("alchemy", broker="memory://", set_as_current=False)
    app.conf.update(
        pglock_database_url=database.url,
        pglock_standby_poll=0.05,
        beat_dburi=database.url.replace("postgresql://", "postgresql+psycopg://"),
        beat_schema=None,
        beat_max_loop_interval=0.5,
        beat_schedule={"one": {"task": "report", "schedule": 1.0}},
        result_expires=None,
    )

    def leads(scheduler: Any) -> bool:
        scheduler.tick()
        return bool(scheduler._leadership.leading)  # noqa: SLF001

    def stored() -> dict[Any, Any]:
        return dict(database.rows("select entry, total_run_count from pglock.beat_entries"))

    def shown(name: str) -> Any:
        (row,) = database.rows(
            "select enabled, total_run_count from celery_periodictask where name = %s", name
        )
        return row

    first, second = Gated(app=app), Gated(app=app)
    assert database.rows("select name from celery_periodictask") == []
    eventually(lambda: leads(first) and stored().get("one", 0) >= 2, 20, "it is sent")
    assert not leads(second)
    with first.Session() as session:
        every = IntervalSchedule(every=1, period=Period.SECONDS)
        session.add(every)
        session.commit()
        task = PeriodicTask(name="once", task="report", schedule_model=every, one_off=True)
        session.add(task)
        session.commit()
    eventually(lambda: leads(first) and shown("once")[0] is False, 20, "it has run once")
    first.close()
    assert shown("one")[1] == stored()["one"]
    before = stored()["one"]
    eventually(lambda: leads(second) and stored()["one"] > before, 20, "the other goes on")
    second.close()
    assert shown("one")[1] == stored()["one"]
    assert stored()["once"] == 1
    for scheduler in (first, second):
        scheduler.engine.dispose()

"""What a refusal leaves for Celery to format: each frame of its traceback costs time, unread."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery
import pytest
from celery.exceptions import Ignore

import celery_pglock
from celery_pglock import LockedTask, idle_sessions, outcomes
from tests.support.databases import Database

PACKAGE = Path(celery_pglock.__file__).parent


@pytest.fixture
def app(database: Database) -> Iterator[Any]:
    app: Any = celery.Celery("refusal_traceback", set_as_current=False, broker="memory://")
    app.conf.pglock_database_url = database.url
    yield app
    idle_sessions.close_idle()
    app.close()


@contextlib.contextmanager
def delivery(task: Any, task_id: str) -> Iterator[None]:
    """Have the task's request be that of a message of one occurrence, as in a worker."""
    headers = {"pglock_job": "refusal_traceback:job", "pglock_due": "2026-11-30T10:00:00+00:00"}
    task.push_request(id=task_id, headers=headers, called_directly=False)
    try:
        yield
    finally:
        task.pop_request()


def delivered(task: Any, task_id: str) -> Ignore:
    """Call a task in a delivery, and return what ended it."""
    with delivery(task, task_id), pytest.raises(Ignore) as ended:
        task()
    return ended.value


def places(error: Ignore) -> list[str]:
    """Return the functions of its traceback, from this package's on, and those of its contexts."""
    told = traceback.TracebackException.from_exception(error)
    assert told.__cause__ is None
    assert told.__context__ is None or told.__suppress_context__
    frames = [frame for frame in told.stack if Path(frame.filename).name != Path(__file__).name]
    return [frame.name for frame in frames if PACKAGE in Path(frame.filename).parents]


def test_a_refusal_has_one_frame_of_ours(app: Any) -> None:
    @app.task(base=LockedTask, shared=False, lazy=False, name="refused")  # type: ignore[untyped-decorator]
    def task() -> None: ...

    with delivery(task, "first"):
        task()
    skipped, dropped = delivered(task, "second"), delivered(task, "first")
    assert isinstance(skipped, outcomes.Skipped)
    assert not isinstance(dropped, outcomes.Skipped)
    assert places(skipped) == places(dropped) == ["__call__"]


def test_what_a_body_raises_keeps_its_traceback(app: Any) -> None:
    @app.task(base=LockedTask, shared=False, lazy=False, name="ignoring")  # type: ignore[untyped-decorator]
    def task() -> None:
        raise Ignore

    ignored = delivered(task, "first")
    assert traceback.extract_tb(ignored.__traceback__)[-1].name == "task"
    assert len(places(ignored)) > 1

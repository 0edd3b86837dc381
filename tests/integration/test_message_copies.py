"""A postponed copy, as it lies in the broker."""

from __future__ import annotations

import datetime as dt
from typing import Any

import kombu
from celery import Celery

from celery_pglock import LockedTask, claims, messages

WORK = claims.Work(
    job="proj:nightly",
    period="2026-11-03T02:00:00.000000+00:00",
    name="proj.t",
    name_key=5,
    run_key=6,
    task="proj.t",
    task_id="abc",
    due_at=dt.datetime(2026, 11, 3, 2, tzinfo=dt.UTC),
    entry="nightly",
    term=7,
)


def body(*args: Any, **kwargs: Any) -> None:
    """Take anything."""


def test_a_copy_is_the_same_message_with_its_number_and_without_the_mark_of_redelivery(
    broker_url: str, queue_name: str
) -> None:
    app: Any = Celery("proj", set_as_current=False, broker=broker_url)
    app.conf.task_default_queue = queue_name
    task = app.task(body, base=LockedTask, shared=False, lazy=False, name="proj.t")
    since = dt.datetime(2026, 11, 3, 2, 1, tzinfo=dt.UTC)
    task.push_request(
        id="abc",
        called_directly=False,
        retries=2,
        args=(1,),
        kwargs={"b": 2},
        headers={"theirs": 1, "redelivered": True, "pglock_postponed": 2},
        delivery_info={"redelivered": True},
    )
    try:
        messages.send(task, (1,), {"b": 2}, WORK, messages.Copy(3, 4.0, since))
    finally:
        task.pop_request()
    with kombu.Connection(broker_url) as connection, connection.SimpleQueue(queue_name) as queue:
        message = queue.get(timeout=10)
        message.ack()
    app.close()
    assert message.payload[:2] == [[1], {"b": 2}]
    headers: dict[str, Any] = message.headers
    assert (headers["id"], headers["retries"], headers["task"]) == ("abc", 2, "proj.t")
    ours = {name: value for name, value in headers.items() if name.startswith("pglock_")}
    assert ours == {
        "pglock_job": WORK.job,
        "pglock_period": WORK.period,
        "pglock_due": "2026-11-03T02:00:00+00:00",
        "pglock_entry": "nightly",
        "pglock_term": 7,
        "pglock_fixed": True,
        "pglock_postponed": 3,
        "pglock_postponed_since": "2026-11-03T02:01:00+00:00",
    }
    assert headers["theirs"] == 1
    assert "redelivered" not in headers
    eta = dt.datetime.fromisoformat(headers["eta"])
    assert 0 < (eta - dt.datetime.now(dt.UTC)).total_seconds() <= 4

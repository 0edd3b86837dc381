"""The application that is hurt: bodies that tell what they do, and beats that tell what they send.

Each body reads a counter, works, and writes it back, so that two at a time lose an update; and it
leaves a row in a table without constraints. At session level these are on a server that nothing
hurts, as a payment or a letter would be; at transaction level they are in the transaction.

What the environment says: `CHAOS_DATABASE`, `CHAOS_BROKER`, `CHAOS_HISTORY`, `CHAOS_DIRECTORY`,
`CHAOS_NAME`, `CHAOS_VERSION` (of the lock names), `CHAOS_ENTRIES`, `CHAOS_SETTINGS` and
`CHAOS_TRANSPORT` (JSON), and `CHAOS_WITHOUT`: which rule of the package is taken away.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import json
import os
import random
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import celery
import psycopg
import sqlalchemy as sa
from celery import signals

import celery_pglock
from celery_pglock import LockedTask, errors, runs
from celery_pglock.demo import redelivery
from tests.chaos import history, without
from tests.chaos.evidence import label

NAMESPACE: Final = "chaos"

# The counter is written as the value that was read, and one more: two at a time lose an update.
_READ: Final = "SELECT coalesce(max(value), 0) FROM counters WHERE name = "
_WRITE: Final = """
WITH c AS (UPDATE counters SET value = {value} WHERE name = {name} RETURNING 1),
 d AS (INSERT INTO counters SELECT {name}, {value} WHERE NOT EXISTS (SELECT FROM c))
INSERT INTO effects VALUES ({job}, {period}, {name}, {attempt})
"""
_EFFECT: Final = ("value", "name", "job", "period", "attempt")
_HISTORY_WRITE: Final = _WRITE.format(**{name: f"%({name})s" for name in _EFFECT}).encode()
_COMMIT: Final = sa.text(_WRITE.format(**{name: f":{name}" for name in _EFFECT}))

_SECOND: Final = "chaos_second"

_place = Path(os.environ["CHAOS_DIRECTORY"])
_version = os.environ.get("CHAOS_VERSION", "1")
_storm = _place / "storm"
scribe = history.Scribe(os.environ["CHAOS_HISTORY"], _place, os.environ["CHAOS_NAME"])

redelivery.look_each_second()

app = celery.Celery(NAMESPACE, broker=os.environ["CHAOS_BROKER"])
app.conf.update(
    beat_schedule=json.loads(os.environ.get("CHAOS_ENTRIES", "{}")),
    broker_connection_retry_on_startup=True,
    broker_transport_options=json.loads(os.environ.get("CHAOS_TRANSPORT", "{}")),
    result_expires=None,
    task_default_queue=NAMESPACE,
    task_ignore_result=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_prefetch_multiplier=1,
    pglock_database_url=os.environ["CHAOS_DATABASE"],
    **json.loads(os.environ.get("CHAOS_SETTINGS", "{}")),
)


class _Doing(threading.local):
    """What this thread is doing: the run of its body, and the delivery of its message."""

    run: str | None = None
    delivery: str | None = None


_doing = _Doing()
_forked: list[int] = []


def lock_name(arguments: Mapping[str, Any], request: Any) -> str:
    """Return a name of the job's own, or the one that some jobs share; a release has its own."""
    job = (request.headers or {}).get("pglock_job", f"{NAMESPACE}:{request.task}")
    return f"{arguments.get('share') or job} v{_version}"


def _identity(task: Any, share: str | None) -> dict[str, Any]:
    run = runs.in_progress()
    headers = task.request.headers or {}
    fields = {
        "run": uuid.uuid4().hex,
        "job": headers.get("pglock_job"),
        "period": headers.get("pglock_period") or headers.get("pglock_due"),
        "name": lock_name({"share": share}, task.request) if run is None else run.name,
        "level": "session" if run is None else run.level,
        "attempt": 1 if run is None else run.attempt,
        "task_id": task.request.id,
    }
    if _SECOND in headers:
        # Sent by a stock beat.
        fields.update(job=f"{NAMESPACE}:{task.name}", period=headers[_SECOND])
    elif run is not None:
        fields.update(job=run.job, period=run.period)
    return fields


def work(
    self: Any,
    seconds: float | None = None,
    *,
    share: str | None = None,
    gate: str | None = None,
    check: bool = False,
    fork: bool = False,
) -> None:
    """Read, work, and write; tell of it before and afterwards.

    Args:
        self: the task.
        seconds: how long it works.
        share: the lock name that it has together with others.
        gate: a file for which it waits.
        check: ask for the lock before writing.
        fork: have a child that outlives it.
    """
    fields = _identity(self, share)
    _doing.run = fields["run"]
    scribe.tell("begin", **fields)
    try:
        _act(fields, seconds, gate, check=check, fork=fork)
    except BaseException as error:
        scribe.tell("end", **fields, detail={"raised": type(error).__name__})
        raise
    scribe.tell("end", **fields)


def _act(
    fields: dict[str, Any], seconds: float | None, gate: str | None, *, check: bool, fork: bool
) -> None:
    run = runs.in_progress()
    name = fields["name"]
    connection = run.connection if run is not None and run.level == "transaction" else None
    if connection is None:
        ((value,),) = scribe.rows(f"{_READ} %s".encode(), name)
    else:
        value = connection.execute(sa.text(f"{_READ} :name"), {"name": name}).scalar_one()
    if _storm.exists():
        _fork_all()
    if fork:
        _fork(_linger, 60.0)
    time.sleep(_duration() if seconds is None else seconds)
    while gate is not None and not (_place / gate).exists():
        time.sleep(0.01)
    if check and run is not None:
        run.check()
    effect = {"value": value + 1, **{key: fields[key] for key in _EFFECT[1:]}}
    if connection is None:
        scribe.execute("effect", fields, _HISTORY_WRITE, effect)
    else:
        connection.execute(_COMMIT, effect)


def _duration() -> float:
    return random.choice((0.0, 0.02, 0.05, 0.1, 0.2, 0.2, 0.2, 0.8))  # noqa: S311 - only a pace


# --- children -------------------------------------------------------------------------------


def _fork_all() -> None:
    for pid in list(_forked):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                _forked.remove(pid)
    _fork(_linger, 0.0)
    _fork(_linger, 3.0)
    _fork(_close_all, 0.5)


def _fork(act: Any, seconds: float) -> None:
    pid = os.fork()
    if pid:
        _forked.append(pid)
        return
    try:
        act(seconds)
    finally:
        os._exit(0)


def _linger(seconds: float) -> None:
    time.sleep(seconds)


def _close_all(seconds: float) -> None:
    """Close every connection that was inherited, as a clean-up in a child would."""
    for thing in gc.get_objects():
        if (
            isinstance(thing, psycopg.Connection)
            and thing.info.get_parameters().get("application_name") != "history"
        ):
            thing.close()
    time.sleep(seconds)


# --- tasks ----------------------------------------------------------------------------------

COMMON: Final[dict[str, Any]] = {
    "base": LockedTask,
    "bind": True,
    "acks_late": True,
    "catchup": 1_000_000,
    "lock_conflict": "postpone",
    "lock_name": lock_name,
    "max_crash_retries": 1_000,
    "reject_on_worker_lost": True,
}
RETRYING: Final[dict[str, Any]] = {
    "autoretry_for": (errors.PGLockError, psycopg.Error, sa.exc.SQLAlchemyError),
    "default_retry_delay": 1,
    "max_retries": None,
    "retry_backoff": False,
}
TASKS: Final[dict[str, dict[str, Any]]] = {
    "own": RETRYING,
    "atomic": {**RETRYING, "lock_level": "transaction"},
    "early": {**RETRYING, "acks_late": False},
    "fragile": {"max_crash_retries": 0},
    "warned": {"lock_lost": "warn"},
}
register: Any = app.task
for _name, _options in TASKS.items():
    register(name=_name, **{**COMMON, **_options})(work)


# --- what is told -----------------------------------------------------------------------------


def _finished(run: runs.Run, status: str, **_: object) -> None:
    fields = {"job": run.job, "period": run.period, "name": run.name, "attempt": run.attempt}
    scribe.tell("finished", run=_doing.run, **fields, detail={"status": status})


def _lost(job: str, period: str | None, reason: str, **_: object) -> None:
    scribe.tell("lost", job=job, period=period, detail={"reason": reason})


def _delivered(task_id: str, **_: object) -> None:
    _doing.delivery = uuid.uuid4().hex
    scribe.tell("delivered", run=_doing.delivery, task_id=task_id)


def _answered(task_id: str, state: str | None = None, **_: object) -> None:
    scribe.tell("answered", run=_doing.delivery, task_id=task_id, detail={"state": state})


def _gained(term: int, node: str, **_: object) -> None:
    scribe.tell("gained", term=term, detail={"node": node})


def _ousted(term: int, reason: str, **_: object) -> None:
    scribe.tell("ousted", term=term, detail={"reason": reason})


def _publishing(headers: dict[str, Any], **_: object) -> None:
    if headers.get("pglock_job") is None:
        # A stock beat says nothing of periods: this is the one by the clock, as people do it.
        headers[_SECOND] = label(dt.datetime.now(dt.UTC).replace(microsecond=0))
    scribe.tell(
        "publish",
        term=headers.get("pglock_term"),
        job=headers.get("pglock_job"),
        period=headers.get("pglock_period"),
        task_id=headers.get("id"),
    )


if scribe.who.startswith("beat"):
    celery_pglock.leadership_gained.connect(_gained, weak=False)
    celery_pglock.leadership_lost.connect(_ousted, weak=False)
    signals.before_task_publish.connect(_publishing, weak=False)
else:
    celery_pglock.run_finished.connect(_finished, weak=False)
    celery_pglock.lock_lost.connect(_lost, weak=False)
    signals.task_prerun.connect(_delivered, weak=False)
    signals.task_postrun.connect(_answered, weak=False)

without.take_away(os.environ.get("CHAOS_WITHOUT", ""), app)

"""What a worker checks once, in the parent process, before it takes its first message.

What is wrong for good (a setting, the schema, a standby, a pooler) ends the worker with one
sentence: a task would otherwise fail at night. What may be over in a moment (the database
does not answer) is a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from celery import bootsteps

from celery_pglock import errors, keys, options, schema, sessions, settings

if TYPE_CHECKING:
    from celery import Celery

_log: Final = logging.getLogger("celery_pglock.startup")

_EVENTLET: Final = "celery.concurrency.eventlet"


class StartupCheck(bootsteps.StartStopStep):
    """A worker bootstep: one that raises ends the worker, where a signal receiver would not."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        """Check the worker's application.

        Raises:
            SystemExit: with the sentence that says what to do.
        """
        super().__init__(parent, **kwargs)
        try:
            refuse_eventlet(parent.app, parent.pool_cls)
            check(parent.app)
        except errors.PGLockError as error:
            raise SystemExit(f"celery-pglock: {error}") from None


def register(app: Celery) -> None:
    """Have the workers of an application make the check."""
    app.steps["worker"].add(StartupCheck)


def refuse_eventlet(app: Celery, pool: object) -> None:
    """Refuse a pool on which a lock session would stop all other tasks while it waits.

    Raises:
        ConfigurationError: the pool is eventlet's.
    """
    if settings.of(app).enabled and getattr(pool, "__module__", "") == _EVENTLET:
        msg = (
            "the eventlet pool is not supported, because psycopg blocks its hub; start the worker "
            "with --pool=gevent, threads or prefork"
        )
        raise errors.ConfigurationError(msg)


def check(app: Celery) -> None:
    """Check settings, lock names, database and schema of an application.

    Raises:
        ConfigurationError: a setting or a lock name is wrong.
        SchemaError: tables are missing, older, or without their UNIQUE constraint.
        ServerInRecovery, TransactionPooler: the server cannot hold the locks.
    """
    config = settings.of(app)
    if not config.enabled:
        return
    target = config.target()
    locked = dict(_locked(app))
    _refuse_equal_keys(config.namespace, locked)
    levels = {chosen.value("lock_level", config.options) for chosen in locked.values()}
    recorded = any(
        chosen.value("once_per", config.options) is not None for chosen in locked.values()
    )
    try:
        for level in sorted(levels):
            plan = sessions.Plan(
                target=target,
                level=level,
                application="pglock:startup",
                lost_after=config.lost_after,
            )
            sessions.open_session(plan).close()
        if recorded:
            schema.verify(target, config.schema)
    except errors.DatabaseUnavailable as error:
        _warn_unavailable(error)


def check_beat(app: Celery) -> None:
    """Check settings, database and schema for a beat, which needs the tables in any case.

    Raises:
        ConfigurationError, SchemaError, ServerInRecovery, TransactionPooler: as ``check``.
    """
    config = settings.of(app)
    target = config.target()
    try:
        plan = sessions.Plan(target=target, level="session", application="pglock:startup")
        sessions.open_session(plan).close()
        schema.verify(target, config.schema)
    except errors.DatabaseUnavailable as error:
        _warn_unavailable(error)


def warn_of_shared_periods(app: Celery, entries: Mapping[str, str]) -> None:
    """Say which schedule entries are one job, so that only one of them runs per period.

    That is what a calendar rule means, but seldom what two entries of one task are for.

    Args:
        app: the application.
        entries: entry name to task name.
    """
    config = settings.of(app)
    sharing: dict[str, list[str]] = {}
    for entry, task in sorted(entries.items()):
        chosen = getattr(app.tasks.get(task), "_pglock_options", None)
        if not isinstance(chosen, options.Options):
            continue
        by_calendar = chosen.value("once_per", config.options) not in (None, "occurrence")
        name = chosen.given.get("lock_name", task)
        if by_calendar and not callable(name) and not chosen.given.get("lock_by"):
            sharing.setdefault(str(name), []).append(entry)
    for name, sharers in sharing.items():
        if len(sharers) > 1:
            _log.warning(
                "schedule entries %s share job %s and its calendar periods, so only the first of "
                "them runs in each; tell them apart with lock_by, or give them tasks or lock "
                'names of their own, or use once_per="occurrence"',
                " and ".join(sharers),
                name,
                extra={"event": "shared_period", "job": name, "entries": sharers},
            )


def _warn_unavailable(error: errors.DatabaseUnavailable) -> None:
    _log.warning(
        "starting although %s; nothing that is locked runs until it answers",
        error,
        extra={"event": "database_unavailable"},
    )


def _locked(app: Celery) -> Iterator[tuple[str, options.Options]]:
    for name, task in app.tasks.items():
        chosen = getattr(task, "_pglock_options", None)
        if isinstance(chosen, options.Options) and not name.startswith("celery."):
            yield name, chosen


def _refuse_equal_keys(namespace: str, locked: dict[str, options.Options]) -> None:
    named: dict[int, tuple[str, str]] = {}
    for task, chosen in sorted(locked.items()):
        name = chosen.given.get("lock_name", task)
        if callable(name):
            continue
        key = name if isinstance(name, int) else keys.from_name(namespace, "task", name)
        other, by = named.setdefault(key, (str(name), task))
        if other != str(name):
            msg = (
                f"lock names {other!r} (task {by!r}) and {name!r} (task {task!r}) have the same "
                f"key {key}; rename one of them"
            )
            raise errors.ConfigurationError(msg)

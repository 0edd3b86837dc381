"""What a worker checks once, in the parent process, before it takes its first message.

What is wrong for good (a setting, the schema, a standby, a pooler) ends the worker with one
sentence: a task would otherwise fail at night. What may be over in a moment (the database
does not answer) is a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import psycopg
from celery import bootsteps

from celery_pglock import errors, options, schema, sessions, settings, stacks, transaction_runs

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
    locked = locked_tasks(app)
    refuse_equal_keys(config.namespace, locked)
    levels = {chosen.value("lock_level", config.options) for chosen in locked.values()}
    if "transaction" in levels and config.django_alias is None:
        # Here, before the pool forks.
        transaction_runs.preload()
    recorded = any(chosen.recorded(config.options) for chosen in locked.values())
    try:
        where = {
            _open(
                sessions.Plan(
                    target=target,
                    level=level,
                    application="pglock:startup",
                    lost_after=config.lost_after,
                )
            )
            for level in sorted(levels)
        }
        if recorded:
            schema.verify(target, config.schema)
    except errors.DatabaseUnavailable as error:
        _warn_unavailable(error)
        return
    for place in where:
        _tell_database(config.namespace, place)


def check_beat(app: Celery) -> None:
    """Check settings, database and schema for a beat, which needs the tables in any case.

    Raises:
        ConfigurationError, SchemaError, ServerInRecovery, TransactionPooler: as ``check``.
    """
    config = settings.of(app)
    target = config.target()
    try:
        place = _open(sessions.Plan(target=target, level="session", application="pglock:startup"))
        schema.verify(target, config.schema)
    except errors.DatabaseUnavailable as error:
        _warn_unavailable(error)
        return
    _tell_database(config.namespace, place)


def warn_of_shared_periods(app: Celery, entries: Mapping[str, str]) -> None:
    """Say which schedule entries are one job, so that only one of them runs per period.

    That is what a calendar rule means, but seldom what two entries of one task are for.

    Args:
        app: the application.
        entries: entry name to task name.
    """
    for name, sharers in shared_periods(app, entries).items():
        _log.warning(
            "schedule entries %s share job %s and its calendar periods, so only the first of "
            "them runs in each; tell them apart with lock_by, or give them tasks or lock "
            'names of their own, or use once_per="occurrence"',
            " and ".join(sharers),
            name,
            extra={"event": "shared_period", "job": name, "entries": sharers},
        )


def shared_periods(app: Celery, entries: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the jobs that several schedule entries share, with the names of these entries.

    Args:
        app: the application.
        entries: entry name to task name.
    """
    config = settings.of(app)
    sharing: dict[str, list[str]] = {}
    for entry, task in sorted(entries.items()):
        chosen = options.locked(app.tasks.get(task))
        if chosen is None:
            continue
        by_calendar = chosen.value("once_per", config.options) not in (None, "occurrence")
        name = chosen.given.get("lock_name", task)
        if by_calendar and not callable(name) and not chosen.given.get("lock_by"):
            sharing.setdefault(str(name), []).append(entry)
    return {name: sharers for name, sharers in sharing.items() if len(sharers) > 1}


def _open(plan: sessions.Plan) -> tuple[str, str]:
    """Open a session and close it again; return where it was: the database and its server."""
    session = stacks.open_session(plan)
    try:
        row = session.execute(
            b"select pg_catalog.current_database() as name,"
            b" pg_catalog.host(pg_catalog.inet_server_addr()) as host,"
            b" pg_catalog.inet_server_port() as port"
        )
    except psycopg.Error as error:
        raise errors.DatabaseUnavailable(session.target, " ".join(str(error).split())) from None
    finally:
        session.close()
    # A socket in the file system has no address; what the client calls it is left.
    told = session.target.rpartition("/")[0]
    return row.name, told if row.host is None else f"{row.host}:{row.port}"


def _tell_database(namespace: str, place: tuple[str, str]) -> None:
    """Say where the locks are: they exclude nobody who uses another database."""
    database, address = place
    _log.info(
        "locks of namespace %s are in database %s of the server at %s",
        namespace,
        database,
        address,
        extra={
            "event": "database",
            "namespace": namespace,
            "database": database,
            "address": address,
        },
    )


def _warn_unavailable(error: errors.DatabaseUnavailable) -> None:
    _log.warning(
        "starting although %s; nothing that is locked runs until it answers",
        error,
        extra={"event": "database_unavailable"},
    )


def locked_tasks(app: Celery) -> dict[str, options.Options]:
    """Return the tasks that take locks, by their names."""
    found = {name: options.locked(task) for name, task in sorted(app.tasks.items())}
    return {name: chosen for name, chosen in found.items() if chosen is not None}


def refuse_equal_keys(namespace: str, locked: Mapping[str, options.Options]) -> None:
    """Refuse two lock names that have one key.

    Raises:
        ConfigurationError: it names both.
    """
    named: dict[int, tuple[str, str]] = {}
    for task, chosen in sorted(locked.items()):
        lock = chosen.plain_lock(namespace, task)
        if lock is None:
            continue
        name, key = lock
        other, by = named.setdefault(key, (name, task))
        if other != name:
            msg = (
                f"lock names {other!r} (task {by!r}) and {chosen.given.get('lock_name', task)!r} "
                f"(task {task!r}) have the same key {key}; rename one of them"
            )
            raise errors.ConfigurationError(msg)

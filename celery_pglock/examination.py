"""The examination of a set-up, from its settings to what its ledger says: what is checked when.

It changes nothing, takes no lock and needs no broker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import click
import psycopg

from celery_pglock import (
    connections,
    diagnoses,
    errors,
    findings,
    inspections,
    options,
    schedules,
    sessions,
    settings,
    startup,
)

if TYPE_CHECKING:
    from celery import Celery

# How far back the ledger is asked.
_OF_LATE: Final = dt.timedelta(days=1)
#: What is checked, in this order; ``transaction_level`` only where a task has it.
CHECKS: Final = (
    "database_url",
    "settings",
    "application",
    "enabled",
    "lock_keys",
    "redelivery",
    "schedule",
    "tasks_of_entries",
    "periods_of_entries",
    "expiry_of_entries",
    "database",
    "server_version",
    "clocks",
    "session_level",
    "transaction_level",
    "rights",
    "tables",
    "unique",
    "tasks_of_namespace",
    "leader_of_namespace",
    "stock_beat",
)
# By which a setting may name our scheduler.
_OURS: Final = ("pglock", "celery_pglock.beat:LeaderScheduler", "celery_pglock:LeaderScheduler")


@dataclasses.dataclass(frozen=True, slots=True)
class Examined:
    """What came of an examination.

    Attributes:
        namespace: of the application; None if its settings cannot be read.
        database: ``host:port/database``, or None if it was not reached.
        examination: the checks and their findings.
    """

    namespace: str | None
    database: str | None
    examination: findings.Examination


def examine(
    app: Celery, wall_clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC)
) -> Examined:
    """Make all checks.

    Args:
        app: the application.
        wall_clock: this host's.
    """
    made = findings.Examination()
    made.check("database_url", lambda: _database_url(app))
    made.check("settings", lambda: _settings(app), needs=["database_url"])
    if made.failed:
        for name in CHECKS[2:]:
            made.skip(name, "the settings cannot be read")
        return Examined(None, None, made)
    config = settings.of(app)
    entries = _of_application(app, config, made)
    with contextlib.ExitStack() as stack:
        connection = _connect(config, made, stack)
        database = None if connection is None else connections.describe_open(connection)
        _of_database(app, config, connection, made, wall_clock)
        _of_ledger(app, config, connection, entries, made)
    return Examined(config.namespace, database, made)


def _database_url(app: Celery) -> Iterator[findings.Finding]:
    try:
        settings.database_url(app)
    except errors.ConfigurationError as error:
        yield findings.of_error("database_url", error)


def _settings(app: Celery) -> Iterator[findings.Finding]:
    try:
        settings.of(app)
    except errors.ConfigurationError as error:
        yield _wrong(str(error))


def _wrong(reason: str) -> findings.Finding:
    return findings.Finding(
        severity="error", code="settings", reason=reason, remedy="correct the setting or the option"
    )


def _locked(app: Celery, made: findings.Examination) -> dict[str, options.Options]:
    # An application that cannot be loaded cannot be asked for its tasks.
    return startup.locked_tasks(app) if "application" in made.made else {}


def _of_application(
    app: Celery, config: settings.Settings, made: findings.Examination
) -> Mapping[str, Any]:
    entries: dict[str, Any] = {}

    def read() -> Iterator[findings.Finding]:
        try:
            entries.update(schedules.configured(app))
        except click.ClickException as error:  # so a command is told of an option that is wrong
            yield _wrong(error.message)
        except Exception as error:  # noqa: BLE001 - whatever a thing that is no entry raises
            yield findings.Finding(
                severity="error",
                code="entry_unusable",
                reason=f"the application or its beat_schedule cannot be loaded: it raises "
                f"{type(error).__name__}",
                remedy="correct it; celery -A <your app> beat shows where it fails",
            )

    made.check("application", read)
    locked = _locked(app, made)
    made.check("enabled", lambda: inspections.enabled(config))
    of_tasks: dict[str, Callable[[], Iterator[findings.Finding]]] = {
        "lock_keys": lambda: inspections.lock_keys(config, locked),
        "redelivery": lambda: inspections.redelivery(app, locked),
        "schedule": lambda: inspections.usable_entries(entries),
        "tasks_of_entries": lambda: inspections.tasks_of_entries(app, entries),
        "periods_of_entries": lambda: inspections.periods_of_entries(app, entries),
        "expiry_of_entries": lambda: inspections.expiry_of_entries(app, config, entries),
    }
    for name, make in of_tasks.items():
        made.check(name, make, needs=["application"])
    return entries


def _connect(
    config: settings.Settings, made: findings.Examination, stack: contextlib.ExitStack
) -> psycopg.Connection[Any] | None:
    opened: list[psycopg.Connection[Any]] = []

    def reach() -> Iterator[findings.Finding]:
        try:
            opened.append(
                stack.enter_context(contextlib.closing(diagnoses.connected(config.target())))
            )
        except errors.DatabaseUnavailable as error:
            yield findings.of_error("database_unreachable", error)
        except errors.ConfigurationError as error:
            yield findings.of_error("database_url", error)

    made.check("database", reach)
    return opened[0] if opened else None


def _of_database(
    app: Celery,
    config: settings.Settings,
    connection: Any,
    made: findings.Examination,
    wall_clock: Callable[[], dt.datetime],
) -> None:
    locked = _locked(app, made)
    levels = {chosen.value("lock_level", config.options) for chosen in locked.values()}
    beat = app.conf.beat_scheduler in _OURS
    made.check("server_version", lambda: diagnoses.version(connection), needs=["database"])
    made.check("clocks", lambda: diagnoses.clock(connection, wall_clock), needs=["database"])

    def session(level: sessions.Level) -> Iterator[findings.Finding]:
        plan = sessions.Plan(
            target=config.target(),
            level=level,
            application=diagnoses.APPLICATION,
            lost_after=config.lost_after,
        )
        # Where all tasks are at transaction level, only a beat needs more.
        needed = level in levels or beat or not levels
        return diagnoses.session(plan, refused="error" if needed else "warning")

    made.check("session_level", lambda: session("session"), needs=["database"])
    if "transaction" in levels:
        made.check("transaction_level", lambda: session("transaction"), needs=["database"])
    if not beat and locked and not any(c.recorded(config.options) for c in locked.values()):
        for name in ("rights", "tables", "unique"):
            made.skip(name, "no task keeps rows, so only celery beat -S pglock would need tables")
        return
    made.check("rights", lambda: diagnoses.rights(connection, config.schema), needs=["database"])
    made.check(
        "tables", lambda: diagnoses.tables_there(connection, config.schema), needs=["database"]
    )
    made.check("unique", lambda: diagnoses.unique(connection, config.schema), needs=["tables"])


def _of_ledger(
    app: Celery,
    config: settings.Settings,
    connection: Any,
    entries: Mapping[str, Any],
    made: findings.Examination,
) -> None:
    where = (connection, config.schema, config.namespace)
    locked = _locked(app, made)
    asked: dict[str, Callable[[], Iterator[findings.Finding]]] = {
        "tasks_of_namespace": lambda: inspections.strangers(
            app, config, diagnoses.recent_tasks(*where, _OF_LATE)
        ),
        "leader_of_namespace": lambda: inspections.leader_of_another(
            config, entries, diagnoses.leader(*where)
        ),
        "stock_beat": lambda: inspections.stock_beat(
            config, locked, entries, diagnoses.unscheduled_starts(*where, _OF_LATE)
        ),
    }
    for name, make in asked.items():
        needs = ["application", "tables", "rights"]
        made.check(name, make, needs=[*needs, "schedule"] if name == "stock_beat" else needs)

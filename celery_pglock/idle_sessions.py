"""The idle lock sessions of this process, by application and lock level."""

from __future__ import annotations

from celery import signals

from celery_pglock import (
    lending,
    sessions,
    settings,
    stacks,
    transaction_runs,
    transactions,
)

_stacks: dict[tuple[int, str, sessions.Level], tuple[settings.Settings, stacks.Stack]] = {}


def plan(config: settings.Settings, level: sessions.Level, node: str) -> sessions.Plan:
    """Return how the lock sessions of an application are opened in this process."""
    return sessions.Plan(
        target=config.target(),
        level=level,
        application=f"pglock:idle@{node}",
        lost_after=config.lost_after,
    )


def stack(config: settings.Settings, level: sessions.Level, node: str) -> stacks.Stack:
    """Return this process's idle sessions of a level, on the database of these settings."""
    # The settings are kept beside the stack, so that their id() is not given to others.
    key = (id(config), config.schema, level)
    found = _stacks.get(key)
    if found is None:
        made = stacks.Stack(plan(config, level, node))
        found = _stacks.setdefault(key, (config, made))
    return found[1]


def lent(config: settings.Settings, level: sessions.Level) -> str | None:
    """Return by which alias a framework lends its connection to the runs of a level, or None."""
    return config.django_alias if level == "transaction" else None


def source(
    config: settings.Settings, level: sessions.Level, node: str
) -> tuple[stacks.Stack, transactions.Begin]:
    """Return where the runs of a level get their sessions, and how their transactions are made.

    Raises:
        ConfigurationError: the alias that the settings name is of no use.
    """
    if (alias := lent(config, level)) is not None:
        lender = lending.lender()
        return lender.stack(alias, plan(config, level, node)), lender.transact
    return stack(config, level, node), transaction_runs.on_own_connection


def close_idle(**_: object) -> None:
    """Close the idle lock sessions of this process; also a receiver of Celery's signals."""
    for _config, stack in list(_stacks.values()):
        stack.close()


# Billiard ends its processes by os._exit, so nothing else would say good-bye to the server.
signals.worker_process_shutdown.connect(close_idle, weak=False)
signals.worker_shutdown.connect(close_idle, weak=False)

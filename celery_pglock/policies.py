"""What is the same for all calls of a task in one process, made once.

A call reads it instead of asking for each option, and uses the executor that was made for the
first one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from celery_pglock import (
    attempts,
    events,
    execution,
    identity,
    idle_sessions,
    ledger,
    locks,
    options,
    outcomes,
    refusals,
    sessions,
    settings,
)

if TYPE_CHECKING:
    import celery

_NAME_LOCK_ONLY = locks.NameLockOnly()


class Policy:
    """The options of a task, with the application's where it has none, and who acts on them.

    Args:
        task: the task.
        config: the application's settings.
        chosen: the task's options.
    """

    def __init__(
        self,
        task: celery.Task[..., Any],
        config: settings.Settings,
        chosen: options.Options,
    ) -> None:
        value = functools.partial(chosen.value, defaults=config.options)
        self.task: celery.Task[..., Any] = task
        self.config = config
        self.chosen = chosen
        self.once_per: options.OncePer = value("once_per")
        self.level: sessions.Level = value("lock_level")
        self.lock_wait: float = value("lock_wait")
        self.lock_conflict: refusals.Conflict = value("lock_conflict")
        self.lock_unavailable: str = value("lock_unavailable")
        self.skip_state: str = value("skip_state")
        self.max_crash_retries: int = value("max_crash_retries")
        self.records: ledger.Ledger | locks.NameLockOnly = (
            _NAME_LOCK_ONLY
            if self.once_per is None
            else ledger.Ledger(config.schema, config.retention)
        )
        self._terms = attempts.Terms(
            classify=outcomes.verdict,
            started=functools.partial(events.started, task),
            lost=functools.partial(events.lost, task),
            long=events.long,
            tolerate_loss=value("lock_lost") == "warn",
            interrupt=value("lock_lost") == "raise",
        )
        self._made: tuple[execution.Executor, identity.Identifier] | None = None

    def made_for(self, config: settings.Settings, chosen: options.Options) -> bool:
        """Whether these are its settings and options still."""
        return self.config is config and self.chosen is chosen

    def machinery(self, node: str) -> tuple[execution.Executor, identity.Identifier]:
        """Return what runs bodies, and what finds the period of a call.

        Args:
            node: this worker, as its idle sessions are named.

        Raises:
            ConfigurationError: no database is set, or the alias that is set is of no use.
        """
        made = self._made
        if made is None:
            made = self._make(node)
            # What a framework lends is asked for each time: its connections are per thread.
            if idle_sessions.lent(self.config, self.level) is None:
                self._made = made
        return made

    def _make(self, node: str) -> tuple[execution.Executor, identity.Identifier]:
        stack, transact = idle_sessions.source(self.config, self.level, node)
        executor = execution.Executor(
            stack=stack, transact=transact, records=self.records, terms=self._terms
        )
        return executor, self._identifier(executor)

    def _identifier(self, executor: execution.Executor) -> identity.Identifier:
        def period_of(job: str, task_id: str | None) -> str | None:
            records = self.records
            if not isinstance(records, ledger.Ledger) or task_id is None:
                return None
            return executor.tell(lambda session: records.period_of(session, job, task_id))

        return identity.Identifier(
            namespace=self.config.namespace,
            zone=self.config.zone,
            task=self.task.name,
            rule=self.once_per,
            period_of=period_of,
            server_now=lambda: executor.tell(sessions.server_now),
        )

"""What users rely on, frozen: to change one of these lists is to change what they may write."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from celery.bin.celery import celery
from celery.utils.dispatch import Signal

import celery_pglock
from celery_pglock import cli, metrics, options, outcomes, page, runs, settings, task, testing

NAMES = [
    "ConfigurationError",
    "CrashRetriesExhausted",
    "DatabaseUnavailable",
    "Entry",
    "EntryChanged",
    "JobSkipped",
    "LeaderMixin",
    "LeaderScheduler",
    "LeadershipLost",
    "LockLost",
    "LockNotAcquired",
    "LockedTask",
    "NoCurrentRun",
    "OutcomeUnknown",
    "PGLockError",
    "ReadOnlyByDefault",
    "RerunRefused",
    "Run",
    "SchemaError",
    "ServerInRecovery",
    "TransactionEnded",
    "TransactionPooler",
    "advisory_lock",
    "current_run",
    "leadership_gained",
    "leadership_lost",
    "lock_lost",
    "occurrence_missed",
    "occurrence_sent",
    "run_finished",
    "run_postponed",
    "run_skipped",
    "run_started",
]
TESTING = {
    "Database",
    "Elsewhere",
    "ExpectedSkip",
    "Message",
    "Outcome",
    "Row",
    "State",
    "at",
    "dead_attempt",
    "deliver",
    "expect_skipped",
    "holding",
    "lose_lock",
    "pglock_app",
    "pglock_database",
    "pglock_server_url",
    "run_occurrence",
    "running",
}
OPTIONS = {
    "lock_level": "session",
    "lock_wait": 0.0,
    "lock_conflict": "skip",
    "skip_state": "REVOKED",
    "once_per": "occurrence",
    "max_crash_retries": 3,
    "lock_lost": "raise",
    "lock_unavailable": "postpone",
    "catchup": 1,
}
SETTINGS = {
    "catchup",
    "catchup_window",
    "database_url",
    "django_alias",
    "enabled",
    "heartbeat_file",
    "leader_lease",
    "lock_conflict",
    "lock_level",
    "lock_lost",
    "lock_unavailable",
    "lock_wait",
    "lost_after",
    "max_crash_retries",
    "namespace",
    "once_per",
    "rescue_lost_after",
    "rescue_sent_after",
    "retention",
    "schema",
    "skip_state",
    "standby_poll",
    "warn_after_skips",
}
SIGNALS = {
    "leadership_gained": {"namespace", "term", "node", "before"},
    "leadership_lost": {"namespace", "term", "node", "reason"},
    "lock_lost": {"job", "period", "reason"},
    "occurrence_missed": {"entry", "task", "dues"},
    "occurrence_sent": {"entry", "task", "due", "task_id"},
    "run_finished": {"run", "status", "exception"},
    "run_postponed": {"job", "period", "reason", "number", "countdown", "task_id"},
    "run_skipped": {"job", "period", "reason", "kind", "task_id", "skips"},
    "run_started": {"run"},
}
EVENTS = {
    "copy_dropped",
    "database",
    "database_unavailable",
    "disabled",
    "entry_broken",
    "entry_configured_too",
    "entry_paused",
    "foreign_namespace",
    "guard_not_set",
    "heartbeat_failed",
    "host_clock_differs",
    "leadership_gained",
    "leadership_handed_over",
    "leadership_lost",
    "leadership_resigned",
    "lock_lost",
    "lock_lost_untold",
    "monitor_failed",
    "occurrence_missed",
    "occurrence_not_sent",
    "outcome_unknown",
    "pruned",
    "revocation_not_recorded",
    "run_finished",
    "run_given_up",
    "run_not_rescued",
    "run_postponed",
    "run_rescued",
    "run_skipped",
    "run_started",
    "run_taken_over",
    "schedule_differs",
    "setting_not_read",
    "schedule_failed",
    "scheduler_failed",
    "server_clock_set",
    "schedule_never_comes",
    "shared_period",
    "skip_not_stored",
    "standby",
    "stock_beat",
    "transaction_long",
    "transaction_long_untold",
}
COMMANDS = {
    "doctor": {"--json"},
    "locks": {"--all", "--utc", "--json"},
    "entries": {"--utc", "--json"},
    "entries add": {
        "entry",
        "task",
        "--every",
        "--crontab",
        "--solar",
        "--zone",
        "--args",
        "--kwargs",
        "--options",
        "--replace",
        "--dry-run",
        "--json",
    },
    "entries remove": {"entry", "--dry-run", "--yes", "--json"},
    "migrate": {"--sql", "--check", "--verbose", "--json"},
    "pause": {"entry", "--for", "--reason", "--dry-run", "--utc", "--json"},
    "prune": {"--dry-run", "--yes", "--verbose", "--json"},
    "rerun": {
        "job",
        "period",
        "--force",
        "--args",
        "--kwargs",
        "--dry-run",
        "--yes",
        "--json",
    },
    "resign": {"--dry-run", "--json"},
    "resume": {"entry", "--dry-run", "--json"},
    "runs": {"--job", "--status", "--since", "--limit", "--utc", "--json"},
    "status": {"--utc", "--json"},
    "trigger": {"entry", "--dry-run", "--json"},
    "web": {"--host", "--port", "-o", "--output"},
}


def test_the_names_that_the_package_offers() -> None:
    assert sorted(celery_pglock.__all__) == sorted(NAMES)
    assert [name for name in NAMES if not hasattr(celery_pglock, name)] == []


def test_what_the_tests_of_users_import_and_read() -> None:
    assert set(testing.__all__) == TESTING
    assert [name for name in TESTING if not hasattr(testing, name)] == []
    assert {name for name in _fields(testing.Outcome) if not name.startswith("_")} == {
        "state", "value", "error", "reason", "kind", "message", "sent",
    }  # fmt: skip
    assert testing.ExpectedSkip.__annotations__.keys() == {
        "job", "period", "reason", "kind", "task_id",
    }  # fmt: skip
    signature = inspect.signature(testing.run_occurrence)
    assert {name: parameter.kind.name for name, parameter in signature.parameters.items()} == {
        "task": "POSITIONAL_OR_KEYWORD", "due": "POSITIONAL_OR_KEYWORD", "entry": "KEYWORD_ONLY",
        "args": "KEYWORD_ONLY", "kwargs": "KEYWORD_ONLY",
    }  # fmt: skip


def test_nothing_else_can_be_imported_by_accident() -> None:
    modules = {path.stem for path in Path(celery_pglock.__file__).parent.iterdir()}
    others = {
        name
        for name, value in vars(celery_pglock).items()
        if not name.startswith("_") and name not in modules and not inspect.ismodule(value)
    }
    assert others <= set(NAMES) | {"annotations"}


def test_current_run_takes_nothing_and_returns_a_run() -> None:
    signature = inspect.signature(celery_pglock.current_run, eval_str=True)
    assert (dict(signature.parameters), signature.return_annotation) == ({}, celery_pglock.Run)


def test_the_parameters_of_advisory_lock() -> None:
    signature = inspect.signature(celery_pglock.advisory_lock)
    assert {name: parameter.kind.name for name, parameter in signature.parameters.items()} == {
        "name": "POSITIONAL_OR_KEYWORD", "app": "KEYWORD_ONLY", "wait": "KEYWORD_ONLY",
    }  # fmt: skip


def test_the_attributes_of_a_run() -> None:
    public = {name: field for name, field in _fields(runs.Run).items() if not name.startswith("_")}
    assert list(public) == [
        "name", "key", "level", "job", "period", "due", "attempt", "term", "lost_attempts",
    ]  # fmt: skip
    others = {name for name in vars(runs.Run) if not name.startswith("_")} - public.keys()
    assert others == {"connection", "held", "check"}


def _fields(cls: Any) -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(cls)}


def test_a_run_cannot_be_changed() -> None:
    run = runs.Run(
        name="n", key=1, level="session", job="j", period=None, due=None, attempt=1, term=None,
        _held=lambda: True, _prove=lambda: None,
    )  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.attempt = 2  # type: ignore[misc]
    with pytest.raises(AttributeError, match='its lock_level is "session"'):
        _ = run.connection


def test_the_options_of_a_task_and_their_defaults() -> None:
    assert dict(settings.OPTION_DEFAULTS) == OPTIONS
    assert set(options.NAMES) == {"lock_name", "lock_by", *OPTIONS}


def test_the_settings() -> None:
    assert set(settings._NAMES) == SETTINGS  # noqa: SLF001 - what is accepted


def test_what_a_task_offers_beside_celerys_own() -> None:
    own = {name for name in vars(task.LockedTask) if not name.startswith("_")}
    # Request is where a task class of Celery says what a worker makes of its messages.
    assert own == {"on_bound", "apply", "on_replace", "job_run", "Request"}


def test_the_result_of_a_skip_that_counts_as_success() -> None:
    assert outcomes.SkippedResult.__annotations__.keys() == {"skipped", "job", "period", "reason"}


def test_the_signals_and_their_arguments() -> None:
    named = [getattr(celery_pglock, name) for name in celery_pglock.__all__]
    offered: list[Any] = [value for value in named if isinstance(value, Signal)]
    found = {signal.name: set(signal.providing_args) for signal in offered}
    assert found == SIGNALS


def test_the_events_by_which_log_records_are_known() -> None:
    assert set(_events()) == EVENTS


def _events() -> Iterator[str]:
    for path in Path(celery_pglock.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Name(id="_fields" | "_once") | ast.Attribute(attr="warn"),
                    args=[ast.Constant(value=str(event)), *_],
                ):
                    yield event
                case ast.Dict(keys=keys, values=values):
                    for key, value in zip(keys, values, strict=True):
                        match key, value:
                            case ast.Constant(value="event"), ast.Constant(value=str(event)):
                                yield event


def test_the_commands_and_their_options() -> None:
    assert dict(_commands(cli.pglock)) == COMMANDS


def _commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        assert command.name == name
        yield prefix + name, {word for option in command.params for word in option.opts}
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix}{name} ")


def test_what_serves_and_measures() -> None:
    assert page.__all__ == ["wsgi"]
    for function, names in (
        (page.wsgi, ["app"]),
        (metrics.LedgerCollector, ["config"]),
        (metrics.exposition, ["config"]),
    ):
        assert list(inspect.signature(function).parameters) == names


def test_the_commands_belong_to_the_celery_command() -> None:
    assert isinstance(celery, click.Group)
    assert celery.commands["pglock"] is cli.pglock

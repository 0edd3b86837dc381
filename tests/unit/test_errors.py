"""Errors: each survives its way through Celery, and its sentence with it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.backends.base import BaseBackend

import celery_pglock
from celery_pglock import errors

SAMPLES: dict[type[errors.PGLockError], errors.PGLockError] = {
    sample.__class__: sample
    for sample in (
        errors.PGLockError("anything"),
        errors.ConfigurationError("pglock_schema must be a name"),
        errors.ReadOnlyByDefault("default_transaction_read_only is on; turn it off"),
        errors.DatabaseUnavailable("db:5432/proj", "connection refused"),
        errors.ServerInRecovery("db:5432/proj"),
        errors.TransactionPooler("db:6432/proj"),
        errors.SchemaError("pglock", "has no tables", "run: migrate"),
        errors.LockNotAcquired("proj:t", "2026-11-03", "held by somebody"),
        errors.JobSkipped("proj:t", None, "held by somebody"),
        errors.LockLost("proj:t", "2026-11-03", "its session ended"),
        errors.TransactionEnded("proj:t", "2026-11-03", "the body called commit()"),
        errors.OutcomeUnknown("proj:t", "2026-11-03", "done", "no answer"),
        errors.CrashRetriesExhausted("proj:t", "2026-11-03", 4),
        errors.LeadershipLost("proj", 7, "its session ended"),
        errors.RerunRefused("proj:t", "2026-11-03", "it is being run"),
        errors.EntryChanged("nightly"),
        errors.NoCurrentRun(),
    )
}


def all_classes(of: type[errors.PGLockError] = errors.PGLockError) -> Iterator[Any]:
    yield of
    for child in of.__subclasses__():
        if child.__module__.startswith("celery_pglock"):
            yield from all_classes(child)


def test_there_is_a_sample_of_every_error() -> None:
    assert set(SAMPLES) == set(all_classes())


def test_every_error_can_be_imported_from_the_package_and_caught_by_one_name() -> None:
    for cls in SAMPLES:
        assert getattr(celery_pglock, cls.__name__) is cls
        assert issubclass(cls, celery_pglock.PGLockError)


def test_no_error_of_ours_is_outside_errors_py() -> None:
    assert {cls.__module__ for cls in SAMPLES} == {"celery_pglock.errors"}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", SAMPLES.values(), ids=lambda error: type(error).__name__)
def test_an_error_survives_pickle(error: errors.PGLockError, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("error", SAMPLES.values(), ids=lambda error: type(error).__name__)
def test_an_error_survives_celerys_json_result(error: errors.PGLockError) -> None:
    backend: Any = BaseBackend(Celery("proj", set_as_current=False))
    stored = json.loads(json.dumps(backend.prepare_exception(error, serializer="json")))
    again = backend.exception_to_python(stored)
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


@pytest.mark.parametrize("error", SAMPLES.values(), ids=lambda error: type(error).__name__)
def test_a_sentence_holds_every_argument_and_is_one_line(error: errors.PGLockError) -> None:
    assert "\n" not in str(error)
    assert not str(error).endswith(".")
    for argument in error.args:
        assert argument is None or str(argument) in str(error)


@pytest.mark.parametrize(
    ("cls", "remedy"),
    [
        (errors.DatabaseUnavailable, "check pglock_database_url"),
        (errors.ServerInRecovery, "target_session_attrs=read-write"),
        (errors.TransactionPooler, 'lock_level="transaction"'),
        (errors.TransactionEnded, "must not commit, roll back or close current_run().connection"),
        (errors.OutcomeUnknown, "max_crash_retries"),
        (errors.CrashRetriesExhausted, "max_crash_retries"),
        (errors.EntryChanged, "read it again with Entry.get('nightly')"),
        (errors.NoCurrentRun, "base=LockedTask"),
    ],
)
def test_a_sentence_names_the_remedy(cls: type[errors.PGLockError], remedy: str) -> None:
    assert remedy in str(SAMPLES[cls])


def test_a_period_is_named_where_there_is_one() -> None:
    assert str(errors.JobSkipped("proj:t", None, "busy")) == 'job "proj:t" did not run: busy'
    assert str(errors.JobSkipped("proj:t", "2026-W45", "busy")) == (
        'job "proj:t", period "2026-W45", did not run: busy'
    )


def test_what_belongs_together_is_caught_together() -> None:
    assert issubclass(errors.JobSkipped, errors.LockNotAcquired)
    assert issubclass(errors.TransactionEnded, errors.LockLost)
    assert issubclass(errors.NoCurrentRun, LookupError)


def test_no_error_takes_an_argument_that_could_be_a_password() -> None:
    taken = {name for error in SAMPLES.values() for name in vars(error)}
    assert taken == {
        "entry", "fault", "job", "lost_attempts", "namespace", "outcome", "period", "reason", "remedy",
        "schema", "target", "term",
    }  # fmt: skip

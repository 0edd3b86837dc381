"""What Prometheus is told, computed from PostgreSQL when it asks.

Nothing is counted in a process, so it does not matter which of several is asked, nor since when
it runs. A job is a label, and so are outcomes; nothing else is, lest their number grow without
end, and of jobs there are as many as the page shows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import exposition as formats
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from typing_extensions import override

from celery_pglock import errors, overview, settings, snapshots

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

# As many as the page has, by which skips in a row are counted.
_PERIODS: Final = snapshots.PERIODS
_OUTCOMES: Final = ("done", "failed", "skipped", "missed")


class LedgerCollector(Collector):
    """Collects the metrics of one namespace; register it where you have a registry of your own.

    Args:
        config: the application's settings.
    """

    def __init__(self, config: settings.Settings) -> None:
        self._config = config

    @override
    def collect(self) -> Iterator[Metric]:
        """Read the database and yield the metrics; without it there is one, which says so."""
        config = self._config
        up = _gauge("database_up", "Whether the database can be used (1) or not (0).")
        reader = snapshots.Reader(config.target(), config.schema, config.namespace)
        try:
            seen, tally = reader.read_tally(periods=_PERIODS)
        except errors.PGLockError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield InfoMetricFamily(
            "pglock", "Whose metrics these are.", value={"namespace": seen.namespace}
        )
        yield from _of_beats(seen)
        yield from _of_jobs(seen)
        yield _of_outcomes(seen, tally)

    def describe(self) -> list[Metric]:
        """Return nothing: to be registered needs no look at the database."""
        return []


def exposition(config: settings.Settings) -> str:
    """Return the metrics of an application as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(LedgerCollector(config))
    return formats.generate_latest(registry).decode()


def _of_beats(seen: overview.Overview) -> Iterator[Metric]:
    recovery = _gauge(
        "database_in_recovery",
        "Whether the database is a standby (1), which knows of no locks, or the primary (0).",
    )
    recovery.add_metric([], int(seen.in_recovery))
    yield recovery
    leader = _gauge("leader", "Whether a beat leads (1) or not (0); only of the primary.")
    standbys = _gauge("standbys", "How many beats stand by; only of the primary.")
    if not seen.in_recovery:
        leader.add_metric([], int(seen.leader is not None))
        standbys.add_metric([], len(seen.standbys))
    yield leader
    term = _gauge("leader_term", "The number of the last leadership.")
    tick = _gauge("leader_tick_age_seconds", "How long ago a leader showed its last sign of life.")
    if seen.last_term is not None and seen.last_tick_at is not None:
        term.add_metric([], seen.last_term)
        tick.add_metric([], _since(seen, seen.last_tick_at))
    yield term
    yield tick
    yield standbys
    omitted = _gauge("jobs_omitted", "How many jobs are too many to have metrics.")
    omitted.add_metric([], seen.omitted)
    yield omitted


def _of_jobs(seen: overview.Overview) -> Iterator[Metric]:
    done = _gauge(
        "job_last_success_timestamp_seconds", "When a run of the job was last done.", "job"
    )
    due = _gauge("job_next_due_timestamp_seconds", "When the job is due next.", "job")
    overdue = _gauge(
        "job_overdue_seconds",
        "For how long the oldest of the job's newest periods has been due and is not settled; "
        "0: none is.",
        "job",
    )
    late = _gauge(
        "job_lateness_seconds", "How long after it was due the job's newest run began.", "job"
    )
    held = _gauge(
        "job_lock_held_seconds", "For how long the job's lock name has been held at most.", "job"
    )
    skips = _gauge(
        "job_consecutive_skips",
        "How many periods in a row were skipped since one was run, the newest included; at most "
        f"{_PERIODS}.",
        "job",
    )
    paused = _gauge(
        "job_paused", "Whether the job's schedule entry is paused (1) or not (0).", "job"
    )
    for job in seen.jobs:
        labels = [_name(job, seen)]
        if job.last_done_at is not None:
            done.add_metric(labels, job.last_done_at.timestamp())
        if job.next_due_at is not None:
            due.add_metric(labels, job.next_due_at.timestamp())
        overdue.add_metric(labels, _overdue(job, seen))
        started = next((row for row in job.rows if row.started_at and row.due_at), None)
        if started is not None and started.started_at and started.due_at:
            late.add_metric(labels, max(0.0, (started.started_at - started.due_at).total_seconds()))
        if job.holder is not None and job.holder.since is not None:
            held.add_metric(labels, _since(seen, job.holder.since))
        skips.add_metric(labels, job.skips)
        paused.add_metric(labels, int(job.paused_until is not None and job.paused_until > seen.now))
    yield from (done, due, overdue, late, held, skips, paused)


def _of_outcomes(seen: overview.Overview, tally: dict[str, Any]) -> Metric:
    runs = GaugeMetricFamily(
        "pglock_runs_last_hour",
        "How many periods were settled in the last hour, by their outcome.",
        labels=["job", "outcome"],
    )
    for job in seen.jobs:
        counts = tally.get(job.name, {})
        for outcome in _OUTCOMES:
            runs.add_metric([_name(job, seen), outcome], counts.get(outcome, 0))
    return runs


def _overdue(job: overview.Job, seen: overview.Overview) -> float:
    # A period that was settled as anything is not overdue: whether it was run is another metric.
    open_since = [
        row.due_at
        for row in job.rows
        if row.due_at is not None and row.status in ("sent", "running", "retrying")
    ]
    paused = job.paused_until is not None and job.paused_until > seen.now
    unsent = None if paused else job.unconfirmed or job.next_due_at
    dues = [*open_since, *([unsent] if unsent is not None else [])]
    return max((_since(seen, due) for due in dues), default=0.0)


def _since(seen: overview.Overview, moment: dt.datetime) -> float:
    return max(0.0, (seen.now - moment).total_seconds())


def _name(job: overview.Job, seen: overview.Overview) -> str:
    return job.name.removeprefix(f"{seen.namespace}:")


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"pglock_{name}", documentation, labels=labels)

"""What can be wrong with an application and its schedule: one small check for each.

Those that ask the ledger are given what it says. Several entries or tasks with the same fault
are one finding, in which some of them are named.
"""

from __future__ import annotations

import datetime as dt
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from celery_pglock import (
    bounds,
    errors,
    findings,
    headers,
    messages,
    options,
    schedules,
    settings,
    startup,
    stock_beats,
)

if TYPE_CHECKING:
    from celery import Celery

_NAMED: Final = 5
# Brokers that deliver a message again which is not acknowledged for a while, and kombu's default
# for that, in seconds.
_VISIBILITY: Final = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}


def enabled(config: settings.Settings) -> Iterator[findings.Finding]:
    """Find that locks are switched off."""
    if not config.enabled:
        yield _warning(
            "disabled",
            "pglock_enabled is False, so LockedTasks run without locks and without a ledger",
            "leave pglock_enabled out wherever tasks are to be locked",
        )


def lock_keys(
    config: settings.Settings, locked: Mapping[str, options.Options]
) -> Iterator[findings.Finding]:
    """Find two lock names that have one key."""
    try:
        startup.refuse_equal_keys(config.namespace, locked)
    except errors.ConfigurationError as error:
        yield findings.of_error("equal_keys", error)


def usable_entries(entries: Mapping[str, Any]) -> Iterator[findings.Finding]:
    """Find schedules that a beat refuses, and those that never come."""
    for name, entry in sorted(entries.items()):
        try:
            comes = schedules.comes(name, entry.schedule)
        except errors.ConfigurationError as error:
            yield findings.of_error("entry_unusable", error)
        else:
            if not comes:
                yield _warning(
                    "schedule_never_comes",
                    f"the schedule of entry {name} never comes: {entry.schedule!r}",
                    "give it a date that exists, or take the entry out",
                )


def tasks_of_entries(app: Celery, entries: Mapping[str, Any]) -> Iterator[findings.Finding]:
    """Find entries whose task this application does not have, or which takes no lock."""
    plain = []
    for name, entry in sorted(entries.items()):
        task = str(entry.task)
        if task not in app.tasks:
            nearest = difflib.get_close_matches(task, list(app.tasks), n=1)
            hint = f"did you mean {nearest[0]}, or is" if nearest else "is"
            yield findings.Finding(
                severity="error",
                code="unknown_task",
                reason=f"entry {name} sends task {task}, which this application does not have, so "
                f"its workers throw the message away",
                remedy=f"correct its name or have its module imported ({hint} it missing in "
                f"imports, include or autodiscover_tasks()?)",
            )
        elif options.locked(app.tasks[task]) is None and not task.startswith("celery."):
            plain.append(name)
    if plain:
        yield _warning(
            "plain_task",
            f"{_these('entry', 'entries', plain)} {'sends' if len(plain) == 1 else 'send'} a task "
            f"without base=LockedTask, so each message is sent at least once and nothing keeps it "
            f"from running twice",
            "give the task base=LockedTask, unless it may run twice",
        )


def periods_of_entries(app: Celery, entries: Mapping[str, Any]) -> Iterator[findings.Finding]:
    """Find entries that share the calendar periods of one job."""
    tasks = {name: str(entry.task) for name, entry in entries.items()}
    for job, sharers in startup.shared_periods(app, tasks).items():
        yield _warning(
            "shared_period",
            f"entries {_some(sharers)} share job {job} and its calendar periods, so only the first "
            f"of them runs in each",
            "tell them apart with lock_by, or give them tasks or lock names of their own, or use "
            'once_per="occurrence"',
        )


def expiry_of_entries(
    app: Celery, config: settings.Settings, entries: Mapping[str, Any]
) -> Iterator[findings.Finding]:
    """Find messages that stay valid for longer than history is kept."""
    if config.retention is None:
        return
    keep = dt.timedelta(seconds=config.retention)
    now = dt.datetime.now(dt.UTC)
    beyond = []
    for name, entry in sorted(entries.items()):
        task = app.tasks.get(str(entry.task))
        chosen = options.locked(task)
        if chosen is None or not chosen.recorded(config.options):
            continue
        expires = (entry.options or {}).get("expires", getattr(task, "expires", None))
        if isinstance(expires, int | float | dt.timedelta | dt.datetime) and not headers.expired(
            expires, now, now + keep, config.zone
        ):
            beyond.append(name)
    if beyond:
        yield _warning(
            "expires_beyond_retention",
            f"a message of {_these('entry', 'entries', beyond)} is valid for longer after it is due "
            f"than pglock_retention ({keep}) keeps its history, and one without a row is refused",
            f"set its expires to at most {config.retention:g} s, or raise pglock_retention",
        )


def redelivery(app: Celery, locked: Mapping[str, options.Options]) -> Iterator[findings.Finding]:
    """Find runs that may last longer than the broker waits for their acknowledgement."""
    transport = _transport(app)
    if transport not in _VISIBILITY:
        return
    visibility = messages.visibility_timeout(app, _VISIBILITY[transport])
    longer, unlimited = [], []
    for name in locked:
        task = app.tasks[name]
        if not task.acks_late:
            continue
        limit = task.time_limit or app.conf.task_time_limit
        if limit is None:
            unlimited.append(name)
        elif limit > visibility:
            longer.append(name)
    again = (
        f"the broker delivers its message again {visibility:g} s after a worker took it "
        f"(visibility_timeout), which uses up a worker's time though not a second run"
    )
    remedy = "raise visibility_timeout in broker_transport_options above"
    if longer:
        yield _warning(
            "redelivery",
            f"{_these('task', 'tasks', longer)} with acks_late may run for longer than the broker "
            f"waits, by time_limit: {again}",
            f"{remedy} the time limit, or lower that",
        )
    if unlimited:
        yield _warning(
            "redelivery",
            f"{_these('task', 'tasks', unlimited)} with acks_late and without time_limit may run "
            f"for longer than the broker waits: {again}",
            f"set time_limit (or task_time_limit) to what a run may take, and {remedy} it",
        )


def strangers(
    app: Celery, config: settings.Settings, recent: Iterable[tuple[str, dt.datetime | None]]
) -> Iterator[findings.Finding]:
    """Find that tasks which this application does not have ran under its namespace.

    Args:
        app: the application.
        config: its settings.
        recent: the tasks that ran of late, and when.
    """
    others = {
        task: moment
        for task, moment in recent
        if task not in app.tasks and not task.startswith("celery.")
    }
    if others:
        newest = max((moment for moment in others.values() if moment is not None), default=None)
        when = "" if newest is None else f", the last at {_told(newest, config.zone)}"
        yield _warning(
            "namespace_shared",
            f"of late {_these('task', 'tasks', list(others))}, which this application does not "
            f"have, ran under its namespace {config.namespace}{when}: another application's, or "
            f"another release's",
            "give each application a pglock_namespace of its own; what an earlier release ran is "
            "forgotten in a day",
        )


def leader_of_another(
    config: settings.Settings, entries: Mapping[str, Any], leader: tuple[str, str | None] | None
) -> Iterator[findings.Finding]:
    """Find that the beat which leads has another schedule than this application.

    Args:
        config: the application's settings.
        entries: its schedule entries.
        leader: node and fingerprint of the beat that leads, or None.
    """
    if leader is None or leader[1] in (None, bounds.fingerprint(entries, config.zone)):
        return
    yield _warning(
        "namespace_shared",
        f"the beat that leads namespace {config.namespace}, {leader[0]}, has another schedule than "
        f"this application: it is another application's, or another release's",
        "give each application a pglock_namespace of its own, and deploy the same release to all "
        "beats of one",
    )


def stock_beat(
    config: settings.Settings,
    locked: Mapping[str, options.Options],
    entries: Mapping[str, Any],
    starts: Mapping[str, Sequence[dt.datetime]],
) -> Iterator[findings.Finding]:
    """Find runs that look as if another beat than ours had sent them, by the same schedule.

    Args:
        config: the application's settings.
        locked: its tasks that take locks.
        entries: its schedule entries.
        starts: when runs began that no beat of ours has sent, by their task.
    """
    for name, entry in sorted(entries.items()):
        task = str(entry.task)
        if task not in starts or task not in locked:
            continue
        if locked[task].value("once_per", config.options) != "occurrence":
            continue  # under a calendar rule any number of beats does no harm
        due = schedules.read(entry.schedule, config.zone, starts[task][0])
        if count := stock_beats.matches(due, starts[task]):
            yield _warning(
                "stock_beat",
                f"{count} runs of task {task} of late began by the schedule of entry {name}, but "
                f"without an occurrence: a beat without -S pglock seems to send them",
                "start every beat with -S pglock (or set beat_scheduler to it), or give the task a "
                'calendar rule like once_per="day"',
            )


def _transport(app: Celery) -> str:
    # Not by way of a connection, which needs the transport's modules: a host that only runs
    # commands may lack them.
    url = app.conf.broker_read_url or ""
    first = url if isinstance(url, str) else next(iter(url), "")
    return str(app.conf.broker_transport or first).lower().partition(":")[0].partition("+")[0]


def _warning(code: findings.Code, reason: str, remedy: str) -> findings.Finding:
    return findings.Finding(severity="warning", code=code, reason=reason, remedy=remedy)


def _told(moment: dt.datetime, zone: dt.tzinfo) -> str:
    return moment.astimezone(zone).isoformat(sep=" ", timespec="seconds")


def _these(one: str, many: str, names: Sequence[str]) -> str:
    return f"{one if len(names) == 1 else many} {_some(names)}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    told = [*names[:_NAMED], *([f"{more} more"] if more > 0 else [])]
    return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"

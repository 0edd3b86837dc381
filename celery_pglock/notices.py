"""What is said once in a process, however often it is found."""

from __future__ import annotations

from celery_pglock import events, messages, options

_told: set[tuple[str, str]] = set()


def disabled() -> None:
    """Say that tasks run without locks."""
    _once(
        "disabled",
        "",
        "pglock_enabled is False: LockedTasks run without locks and without a ledger",
    )


def of_delivery(
    namespace: str, task: str, delivery: messages.Delivery, rule: options.OncePer
) -> None:
    """Say what a message tells of its sender: a stock beat, or another namespace."""
    if delivery.stock_beat and rule == "occurrence":
        _once(
            "stock_beat",
            task,
            "task %s is sent by a beat that does not say for which occurrence: two such beats "
            "are kept from overlapping, but not from running it twice; start beat with "
            '-S pglock, or give the task a calendar rule like once_per="day"',
            task,
        )
    if delivery.job and not delivery.job.startswith(f"{namespace}:"):
        _once(
            "foreign_namespace",
            delivery.job,
            "message of job %s comes from another namespace than %s, whose locks differ; "
            "give both applications the same pglock_namespace",
            delivery.job,
            namespace,
        )


def _once(event: str, about: str, text: str, *args: str) -> None:
    if (event, about) not in _told:
        _told.add((event, about))
        events.warn(event, text, *args)

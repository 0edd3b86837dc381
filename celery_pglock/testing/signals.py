"""Listening to what is told of runs, for the length of a block."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import celery
from celery.utils.dispatch import Signal

from celery_pglock import events


@contextlib.contextmanager
def listening(
    task: celery.Task[..., Any] | None,
    *,
    skipped: Callable[..., None],
    postponed: Callable[..., None],
    finished: Callable[..., None],
) -> Iterator[None]:
    """Have these functions called with the signals of a task, or of all tasks."""
    receivers: list[tuple[Signal, Callable[..., Any]]] = [
        (events.run_skipped, skipped),
        (events.run_postponed, postponed),
        (events.run_finished, finished),
    ]
    # Before Celery 5.7 the same method of two objects is one receiver to it: of two listeners, one
    # within the other or each in its thread, the second would not be called, and end the first.
    uid = str(uuid.uuid4())
    for signal, receiver in receivers:
        signal.connect(receiver, sender=task, weak=False, dispatch_uid=uid)
    try:
        yield
    finally:
        for signal, _ in receivers:
            signal.disconnect(sender=task, dispatch_uid=uid)

"""Listening to what is told of runs, for the length of a block."""

from __future__ import annotations

import contextlib
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
    for signal, receiver in receivers:
        signal.connect(receiver, sender=task, weak=False)
    try:
        yield
    finally:
        for signal, receiver in receivers:
            signal.disconnect(receiver, sender=task)

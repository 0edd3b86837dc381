"""The expectation that a run is skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import celery

from celery_pglock import claims, errors
from celery_pglock.testing import signals


class ExpectedSkip:
    """What ``expect_skipped`` has seen, once its block has ended.

    Attributes:
        job: the job of the run that was skipped.
        period: its period, or None.
        reason: why, as a sentence.
        kind: ``closed``, ``running``, ``held`` or ``stale``.
        task_id: its message; None for a direct call.
    """

    job: str
    period: str | None
    reason: str
    kind: claims.Refusal
    task_id: str | None


@contextlib.contextmanager
def expect_skipped(
    task: celery.Task[..., Any] | None = None, *, kind: claims.Refusal | None = None
) -> Iterator[ExpectedSkip]:
    """Expect that exactly one run is skipped while a block lasts, in this process.

    However it is called: by ``run_occurrence``, ``apply()``, a worker in another thread, or
    directly; the ``JobSkipped`` of a direct call then ends the block and goes no further.

    Args:
        task: only runs of this task count; by default those of all tasks.
        kind: why: ``"closed"``: its period is settled, ``done`` mostly; ``"running"``: this very
            period is being run; ``"held"``: another run has its lock name; ``"stale"``: it was
            due longer ago than history is kept. By default any of them.

    Yields:
        What was skipped, once the block has ended.

    Raises:
        AssertionError: none was skipped, or several, or for another reason; it says what
            happened instead.
    """
    __tracebackhide__ = True
    told = _Told()
    expected = ExpectedSkip()
    with signals.listening(
        task, skipped=told.skipped, postponed=told.postponed, finished=told.finished
    ):
        try:
            yield expected
        except errors.JobSkipped as skipped:
            if not told.skips or told.skips[-1]["reason"] != skipped.reason:
                raise
    if len(told.skips) != 1 or kind not in (None, told.skips[0]["kind"]):
        wanted = "one skipped run" if kind is None else f"one skipped run of kind {kind!r}"
        of = "" if task is None else f" of task {task.name}"
        raise AssertionError(
            f"expected exactly {wanted}{of}; instead: {'; '.join(told.sentences) or 'no run at all'}"
        )
    vars(expected).update(told.skips[0])


class _Told:
    """The skips that were told, and a sentence for everything that was."""

    def __init__(self) -> None:
        self.skips: list[dict[str, Any]] = []
        self.sentences: list[str] = []

    def skipped(self, *, sender: Any, kind: str, reason: str, **told: Any) -> None:
        told.pop("signal")
        told.pop("skips")  # of the history, not of this run
        self.skips.append({"kind": kind, "reason": reason, **told})
        self.sentences.append(f"{sender.name} was skipped (kind {kind!r}: {reason})")

    def postponed(self, *, sender: Any, reason: str, **_: Any) -> None:
        self.sentences.append(f"{sender.name} was postponed ({reason})")

    def finished(
        self, *, sender: Any, run: Any, status: str, exception: BaseException | None, **_: Any
    ) -> None:
        raised = "" if exception is None else f", {type(exception).__name__}: {exception}"
        period = "" if run.period is None else f" {run.period}"
        self.sentences.append(f"{sender.name} ran: {status} ({run.job}{period}{raised})")

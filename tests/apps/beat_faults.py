"""Schedulers at which something happens at one step of an occurrence, or that lack a guard.

The step is the third of its kind, so that there is a history on both sides, or the one that
`APP_STRIKE_AT` says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from typing_extensions import override

from celery_pglock import answers, beat, confirms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery_pglock import elections

_steps = itertools.count(1)


def _now() -> bool:
    return next(_steps) == int(os.environ.get("APP_STRIKE_AT", "3"))


def _die_once() -> None:
    if _now():
        os.kill(os.getpid(), signal.SIGKILL)


def _nothing() -> None:
    pass


class _Struck(beat.LeaderScheduler):
    """Calls a function before or after a statement on its entries."""

    def _around(
        self,
        statement: str,
        *,
        before: Callable[[], None] = _nothing,
        after: Callable[[], None] = _nothing,
    ) -> None:
        store = self._leading.store
        original = getattr(store, statement)

        def struck(*arguments: Any) -> Any:
            before()
            begun = original(*arguments)
            recording = isinstance(begun, answers.Answer)
            wait = begun.rows if recording else begun

            def answered() -> Any:
                answer = wait()
                after()
                return answer

            return answers.Answer(answered) if recording else answered

        setattr(store, statement, struck)


class DiesBeforeClaiming(_Struck):
    """Killed as soon as it knows what it would claim."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        self._around("begin_claim", before=_die_once)


class ForgetsDowntimes(beat.LeaderScheduler):
    """Knows of no time in which nobody led but the one that it finds itself: a control."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        begin = self._leading.begin

        def forget(elected: elections.Elected) -> None:
            begin(dataclasses.replace(elected, missed_until=None))

        self._leading.begin = forget  # type: ignore[method-assign]


class DiesAfterClaiming(_Struck):
    """Killed as soon as the claim was committed."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        self._around("begin_claim", after=_die_once)


class DiesBeforePublishing(beat.LeaderScheduler):
    """Killed after the claim was committed and before its message was handed over."""

    @override
    def _hand_over(self, entry: Any, task_id: str, ours: Mapping[str, Any]) -> BaseException | None:
        _die_once()
        return super()._hand_over(entry, task_id, ours)


class DiesAfterPublishing(beat.LeaderScheduler):
    """Killed as soon as the message was handed over."""

    @override
    def _hand_over(self, entry: Any, task_id: str, ours: Mapping[str, Any]) -> BaseException | None:
        failure = super()._hand_over(entry, task_id, ours)
        _die_once()
        return failure


class DiesBeforeConfirming(_Struck):
    """Killed after the message was handed over and before that was recorded."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        self._around("begin_confirm", before=_die_once)


class DiesAfterConfirming(_Struck):
    """Killed as soon as it was recorded that the message was handed over."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        self._around("begin_confirm", after=_die_once)


class ConfirmsTooEarly(DiesBeforePublishing):
    """Records a message as handed over when it is claimed, as Celery's own does: a control."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        store = self._leading.store
        claim = store.begin_claim

        def claim_and_confirm(due: Any, term: int) -> Callable[[], set[str]]:
            claimed = claim(due, term)()
            store.confirm([occurrence for occurrence in due if occurrence.entry in claimed])
            return lambda: claimed

        store.begin_claim = claim_and_confirm  # type: ignore[method-assign, assignment]


class Waits(beat.LeaderScheduler):
    """In the middle of a burst it makes the file `APP_MARKER`, and waits until that is gone."""

    @override
    def _hand_over(self, entry: Any, task_id: str, ours: Mapping[str, Any]) -> BaseException | None:
        failure = super()._hand_over(entry, task_id, ours)
        if _now():
            marker = Path(os.environ["APP_MARKER"])
            marker.touch()
            while marker.exists():
                time.sleep(0.01)
        return failure


class KillsTheBroker(beat.LeaderScheduler):
    """Kills the process `APP_VICTIM` as soon as the broker has taken one message."""

    @override
    def _hand_over(self, entry: Any, task_id: str, ours: Mapping[str, Any]) -> BaseException | None:
        failure = super()._hand_over(entry, task_id, ours)
        if failure is None and _now():
            os.kill(int(os.environ["APP_VICTIM"]), signal.SIGKILL)
        return failure


class KillsTheBrokerUnasked(KillsTheBroker):
    """The broker is not asked to confirm what it takes: a control."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        # Without it each publication returns as soon as it is written to the socket.
        confirms.Confirms.__init__ = lambda *_: None  # type: ignore[method-assign]
        confirms.Confirms.together = lambda _: contextlib.nullcontext()  # type: ignore[method-assign, assignment, return-value]


class Timed(beat.LeaderScheduler):
    """Leaves in the file `APP_MARKER` how many seconds its longest tick took."""

    _longest = 0.0

    @override
    def tick(self, *args: Any, **kwargs: Any) -> float:
        started = time.monotonic()
        try:
            return super().tick(*args, **kwargs)
        finally:
            took = time.monotonic() - started
            if took > self._longest:
                self._longest = took
                Path(os.environ["APP_MARKER"]).write_text(str(took))


class WaitsForEver(Timed):
    """Its connections to Redis have no time-outs: a control."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        original: Callable[..., None] = redis.Connection.__init__

        def patient(self: redis.Connection, *args: Any, **kwargs: Any) -> None:
            kwargs.update(socket_timeout=None, socket_connect_timeout=None)
            original(self, *args, **kwargs)

        redis.Connection.__init__ = patient  # type: ignore[method-assign]

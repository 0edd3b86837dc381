"""Schedulers that lack one rule each, to show what the rule is for; and some that are slow."""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from celery_pglock import (
    beat,
    beat_events,
    beat_rows,
    schedule_statements,
    schedules,
    sessions,
    settings,
)

if TYPE_CHECKING:
    import datetime as dt

GATE = 424242


class ResignsInTheHandler(beat.LeaderScheduler):
    """Resigns as soon as it is told to, whatever was struck in the middle."""

    @override
    def close(self) -> None:
        self._closing = True
        leadership = self._leadership
        if leadership is not None and leadership.term is not None:
            beat_events.resigned(leadership, leadership.term)
            leadership.resign()


class InAStatement(beat.LeaderScheduler):
    """Its main loop is in a statement for as long as the test holds a lock."""

    @override
    def setup_schedule(self) -> None:
        # A test takes a moment to open its gate.
        sessions._LAST_ANSWER = 10.0  # type: ignore[misc]  # noqa: SLF001
        super().setup_schedule()
        leading, candidate = self._leading, self._leadership
        work = leading.work

        def after_the_gate(at_most: float) -> float:
            assert candidate is not None
            query = b"select pg_advisory_xact_lock_shared(%d), clock_timestamp() as now" % GATE
            candidate.execute(query)
            return work(at_most)

        leading.work = after_the_gate  # type: ignore[method-assign]


class InAStatementWhoseSessionEnds(InAStatement):
    """The session ends with the statement in which it was stopped, as that of a run does."""

    @override
    def setup_schedule(self) -> None:
        never = property(lambda _: False, lambda *_: None)
        sessions.Session.outlives_exit = never  # type: ignore[assignment]
        super().setup_schedule()


class ForgetsWhatIsUnconfirmed(beat.LeaderScheduler):
    """Takes each claim for a message, and claims the next occurrence over it."""

    @override
    def setup_schedule(self) -> None:
        condition = "e.published_at is not null and "
        assert schedule_statements.CLAIM.count(condition) == 1
        claim = schedule_statements.CLAIM.replace(condition, "")
        schedule_statements.CLAIM = claim  # type: ignore[misc]
        super().setup_schedule()
        load = self._leading.store.load

        def as_if_confirmed(only: Any = None) -> dict[str, beat_rows.Stored]:
            return {
                name: dataclasses.replace(stored, published_at=stored.published_at or stored.anchor)
                for name, stored in load(only).items()
            }

        self._leading.store.load = as_if_confirmed  # type: ignore[method-assign]


class NewIdEachTime(beat.LeaderScheduler):
    """Gives each message an id of its own, as Celery does."""

    @override
    def setup_schedule(self) -> None:
        def random(namespace: str, entry: str, due_at: dt.datetime) -> str:  # noqa: ARG001
            return str(uuid.uuid4())

        beat_rows.task_id = random
        super().setup_schedule()


class CountsFromTheLastRun(beat.LeaderScheduler):
    """An edited entry is due when its new schedule says so after its last occurrence."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        load = self._leading.store.load
        zone = settings.of(self.app).zone

        def edited(name: str, stored: beat_rows.Stored) -> Any:
            entry = self.schedule.get(name)
            text = None if entry is None else schedules.canonical(entry.schedule, zone)
            if entry is None or text is None or text == stored.schedule or stored.due_at is None:
                return stored
            due = schedules.read(entry.schedule, zone, stored.due_at)
            return dataclasses.replace(stored, schedule=text, next_due_at=due.after(stored.due_at))

        def load_edited(only: Any = None) -> dict[str, beat_rows.Stored]:
            return {name: edited(name, stored) for name, stored in load(only).items()}

        self._leading.store.load = load_edited  # type: ignore[method-assign]

"""The checker of the chaos test: it finds each thing that must not be, and nothing else."""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos import checker
from tests.chaos.evidence import EPOCH, Effect, Entry, Evidence, Limits, Period, Row, label
from tests.chaos.history import Event

JOB = "chaos:entry"
EVERY = dt.timedelta(seconds=1)
LIMITS = Limits(window=2.0, takeover=3.0)


class Past:
    """Writes a history as the processes would, event by event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.rows: dict[Period, Row] = {}
        self.effects: list[Effect] = []
        self.committed: list[Effect] = []
        self.counters: Counter[str] = Counter()
        self.committed_counters: Counter[str] = Counter()
        self.by_hand: set[Period] = set()
        self.fragile: set[str] = set()
        self.locks = 0
        self.dues = 0
        self.now = 0.0
        self._faults = 0

    def tell(self, kind: str, pid: int = 1, **fields: Any) -> Event:
        self.now += 0.01
        seq = len(self.events) + 1
        event = Event(
            kind=kind, who=f"actor{pid}", pid=pid, seq=seq, at=self.now, mono=seq * 10_000_000,
            uid=str(seq), **fields,
        )  # fmt: skip
        self.events.append(event)
        return event

    def due(self) -> Period:
        """Let the next occurrence fall due."""
        self.dues += 1
        return Period(JOB, label(EPOCH + EVERY * self.dues))

    def strike(self, fault: str, harm: str, *victims: int, leader: bool = False) -> int:
        self._faults += 1
        detail = {
            "id": self._faults, "fault": fault, "harm": harm, "victims": list(victims) or None,
            "leader": leader, "ready": int(leader),
        }  # fmt: skip
        self.tell("strike", 0, detail=detail)
        return self._faults

    def over(self, number: int) -> None:
        self.tell("over", 0, detail={"id": number})

    def begin(self, period: Period, pid: int = 1, *, attempt: int = 1, **fields: Any) -> Run:
        return Run(self, period, pid, attempt, **fields)

    def ran(self, period: Period, pid: int = 1, **fields: Any) -> Run:
        run = self.begin(period, pid, **fields)
        run.work()
        run.end()
        run.done()
        return run

    def row(self, period: Period, status: str, **fields: Any) -> None:
        fields = {"attempts": 1, "due_at": 0.0, "sent_at": 0.0, **fields}
        self.rows[period] = Row(job=period.job, period=period.label, status=status, **fields)

    def evidence(self, **changes: Any) -> Evidence:
        evidence = Evidence(
            events=self.events,
            local=sorted(self.events, key=lambda event: event.mono),
            rows=list(self.rows.values()),
            entries=[Entry(JOB, EPOCH, EVERY)],
            until=EPOCH + EVERY * self.dues,
            by_hand=frozenset(self.by_hand),
            fragile=frozenset(self.fragile),
            effects=self.effects,
            committed=self.committed,
            counters=self.counters,
            committed_counters=self.committed_counters,
            locks=self.locks,
            limits=LIMITS,
        )
        return dataclasses.replace(evidence, **changes)

    def findings(self, **changes: Any) -> set[str]:
        verdict = checker.check(self.evidence(**changes))
        print(*verdict.findings, sep="\n")
        return {finding.kind for finding in verdict.findings}


class Run:
    """One body."""

    def __init__(
        self,
        past: Past,
        period: Period,
        pid: int,
        attempt: int,
        *,
        name: str = "",
        level: str = "session",
    ) -> None:
        self.past, self.period, self.pid, self.attempt, self.level = (
            past,
            period,
            pid,
            attempt,
            level,
        )
        self.name = name or period.job
        self.run = f"run{len(past.events)}"
        self._tell("begin")

    def _tell(self, kind: str, **fields: Any) -> None:
        self.past.tell(
            kind, self.pid, run=self.run, job=self.period.job, period=self.period.label,
            name=self.name, level=self.level, attempt=self.attempt, **fields,
        )  # fmt: skip

    def work(self) -> None:
        self.past.counters[self.name] += 1
        self.past.effects.append(Effect(*self.period, self.name, self.attempt))
        self._tell("effect")

    def commit(self) -> None:
        self.past.committed_counters[self.name] += 1
        self.past.committed.append(Effect(*self.period, self.name, self.attempt))

    def end(self) -> None:
        self._tell("end")

    def done(self) -> None:
        self._tell("finished", detail={"status": "done"})
        self.past.row(self.period, "done", attempts=self.attempt)

    def failed(self) -> None:
        self._tell("finished", detail={"status": "failed"})


@pytest.fixture
def past() -> Past:
    """A history in which one occurrence has been run."""
    past = Past()
    past.ran(past.due())
    return past


def test_a_history_without_faults_holds(past: Past) -> None:
    past.ran(past.due(), 2)
    verdict = checker.check(past.evidence())
    assert verdict.findings == []
    assert (verdict.periods, verdict.runs) == (2, 2)
    assert verdict.outcomes == {"done": 2}


# --- overlaps --------------------------------------------------------------------------------


def test_two_runs_under_one_lock_name_that_interleave_are_an_overlap(past: Past) -> None:
    first, second = past.begin(past.due()), past.begin(past.due(), 2)
    for run in (first, second):
        run.work()
        run.end()
        run.done()
    assert past.findings() == {"overlap"}


def test_two_runs_of_one_period_under_two_lock_names_are_an_overlap(past: Past) -> None:
    period = past.due()
    first = past.begin(period, name="old")
    second = past.begin(period, 2, attempt=2, name="new")
    second.work()
    second.end()
    second.done()
    first.end()
    assert past.findings() == {"overlap"}


def test_runs_under_two_names_may_interleave(past: Past) -> None:
    first, second = past.begin(past.due(), name="a"), past.begin(past.due(), 2, name="b")
    for run in (first, second):
        run.work()
        run.end()
        run.done()
    assert past.findings() == set()


def test_a_run_that_was_killed_lasts_until_it_was_struck(past: Past) -> None:
    first = past.begin(past.due())
    past.ran(past.due(), 2)
    past.strike("kill", "death", 1)
    past.row(first.period, "failed", reason="exhausted")
    assert past.findings() == {"overlap"}


@pytest.mark.parametrize("killed", [1, 3])
def test_a_run_that_was_killed_before_its_row_was_written_is_excused_by_its_own_death(
    past: Past, killed: int
) -> None:
    period = past.due()
    message = {"job": period.job, "period": period.label, "task_id": "message"}
    past.tell("publish", 2, **message)
    past.tell("delivered", 1, task_id="message", run="delivery")
    past.strike("kill child", "death", killed)
    begun = past.tell("begin", 1, run="body", attempt=1, **message)
    past.row(period, "failed", reason="exhausted")
    # The line is in the file: it was killed before it could write the row.
    rows = [event for event in past.events if event is not begun]
    found = past.findings(events=rows, local=past.events)
    assert found == (set() if killed == 1 else {"lost", "unanswered", "witnesses"})


def test_a_run_that_was_killed_is_over_then(past: Past) -> None:
    first = past.begin(past.due())
    past.strike("kill", "death", 1)
    past.ran(first.period, 2, attempt=2)
    assert past.findings() == set()


def test_a_run_that_only_the_clock_shows_to_overlap_does(past: Past) -> None:
    first = past.begin(past.due())
    first.work()
    first.end()
    first.done()
    past.ran(past.due(), 2)
    ended = next(event for event in past.events if event.kind == "end" and event.run == first.run)
    later = dataclasses.replace(ended, mono=ended.mono + 10**9)
    events = [later if event is ended else event for event in past.events]
    assert past.findings(events=events, local=()) == {"overlap"}


def _lost_session(past: Past, seconds: float) -> Run:
    first = past.begin(past.due())
    past.over(past.strike("terminate", "session", 1))
    past.ran(past.due(), 2)
    past.now += seconds
    return first


def test_a_run_whose_session_was_ended_may_overlap_for_a_moment(past: Past) -> None:
    first = _lost_session(past, 1.0)
    first.end()
    first.failed()
    past.row(first.period, "failed", reason="lock lost")
    verdict = checker.check(past.evidence())
    assert verdict.findings == []
    (overlap,) = verdict.overlaps
    assert 1.0 < overlap.seconds < 2.0


def test_a_run_whose_session_was_ended_may_not_go_on_for_ever(past: Past) -> None:
    first = _lost_session(past, 3.0)
    first.end()
    first.failed()
    past.row(first.period, "failed", reason="lock lost")
    assert past.findings() == {"overlap"}


def test_a_run_that_was_frozen_has_that_much_longer_to_notice(past: Past) -> None:
    first = past.begin(past.due())
    freeze = past.strike("freeze", "freeze", 1)
    past.over(past.strike("terminate", "session", 1))
    past.ran(past.due(), 2)
    past.now += 3.0
    past.over(freeze)
    first.end()
    first.failed()
    past.row(first.period, "failed", reason="lock lost")
    assert past.findings() == set()


def test_the_end_of_another_session_explains_nothing(past: Past) -> None:
    first = past.begin(past.due())
    past.over(past.strike("terminate", "session", 7))
    past.ran(past.due(), 2)
    first.work()
    first.end()
    first.done()
    assert past.findings() == {"overlap"}


def test_a_session_that_ended_before_the_run_explains_nothing(past: Past) -> None:
    past.over(past.strike("restart", "session"))
    first = past.begin(past.due())
    past.ran(past.due(), 2)
    first.work()
    first.end()
    first.done()
    assert past.findings() == {"overlap"}


# --- doubles ---------------------------------------------------------------------------------


def test_a_period_that_is_done_twice_is_doubled(past: Past) -> None:
    period = past.due()
    past.ran(period)
    past.ran(period, 2, attempt=2)
    assert past.findings() == {"doubled"}


def test_an_effect_that_is_repeated_for_no_reason_is_doubled(past: Past) -> None:
    period = past.due()
    first = past.begin(period)
    first.work()
    first.end()
    first.failed()
    past.ran(period, 2, attempt=2)
    assert past.findings() == {"doubled"}


@pytest.mark.parametrize("harm", ["death", "session"])
def test_an_effect_whose_outcome_was_not_recorded_may_be_repeated(past: Past, harm: str) -> None:
    first = past.begin(past.due())
    first.work()
    past.over(past.strike("fault", harm, 1))
    past.ran(first.period, 2, attempt=2)
    assert past.findings() == set()


def test_a_freeze_is_no_reason_to_repeat_an_effect(past: Past) -> None:
    first = past.begin(past.due())
    first.work()
    past.over(past.strike("freeze", "freeze", 1))
    past.ran(first.period, 2, attempt=2)
    first.failed()
    assert past.findings() == {"doubled"}


def test_a_run_that_begins_after_its_period_was_done_is_one_too_many(past: Past) -> None:
    run = past.ran(past.due())
    past.over(past.strike("kill", "death", 2))
    again = past.begin(run.period, 2, attempt=2)
    again.failed()
    past.row(run.period, "done", attempts=2)
    assert "doubled" in past.findings()


def test_what_is_at_most_once_is_not_begun_again(past: Past) -> None:
    past.fragile.add(JOB)
    first = past.begin(past.due())
    past.strike("kill", "death", 1)
    past.ran(first.period, 2, attempt=2)
    assert past.findings() == {"doubled"}


def test_what_is_at_most_once_may_be_begun_again_when_it_has_failed(past: Past) -> None:
    past.fragile.add(JOB)
    first = past.begin(past.due())
    past.over(past.strike("terminate", "session", 1))
    first.failed()
    past.ran(first.period, 2, attempt=2)
    assert past.findings() == set()


def test_two_rows_for_one_period_are_doubled(past: Past) -> None:
    rows = list(past.rows.values())
    assert past.findings(rows=rows * 2) == {"doubled"}


def _atomic(past: Past) -> Run:
    run = past.begin(past.due(), level="transaction")
    run.end()
    run.commit()
    run.done()
    return run


def test_at_transaction_level_what_was_committed_counts(past: Past) -> None:
    first = past.begin(past.due(), level="transaction")
    past.over(past.strike("terminate", "session", 1))
    first.failed()
    again = past.begin(first.period, 2, attempt=2, level="transaction")
    again.commit()
    again.done()
    assert past.findings() == set()


def test_at_transaction_level_nothing_excuses_a_second_commit(past: Past) -> None:
    run = _atomic(past)
    past.strike("kill", "death", 1)
    run.commit()
    assert past.findings() == {"doubled"}


def test_what_was_committed_without_being_done_is_found(past: Past) -> None:
    run = _atomic(past)
    past.strike("restart", "session")
    past.row(run.period, "failed", reason="lock lost", finished_at=past.now)
    assert past.findings() == {"sums"}


# --- losses ----------------------------------------------------------------------------------


def test_an_occurrence_without_a_row_is_lost(past: Past) -> None:
    past.due()
    assert past.findings() == {"lost"}


def test_a_message_sent_by_hand_that_never_ran_is_lost(past: Past) -> None:
    past.by_hand.add(Period("chaos:by hand", "7"))
    assert past.findings() == {"lost"}


@pytest.mark.parametrize("status", ["sent", "running", "retrying"])
def test_a_period_that_is_not_settled_is_lost(past: Past, status: str) -> None:
    past.row(past.due(), status)
    assert past.findings() == {"lost"}


def test_a_row_has_to_say_why_it_did_not_run(past: Past) -> None:
    past.strike("restart", "session")
    past.row(past.due(), "failed", finished_at=past.now)
    assert past.findings() == {"lost"}


def test_a_reason_needs_a_fault_that_explains_it(past: Past) -> None:
    past.row(past.due(), "skipped", reason="held", finished_at=past.now)
    assert past.findings() == {"lost"}


def test_a_fault_and_a_reason_explain_what_did_not_run(past: Past) -> None:
    past.over(past.strike("restart", "session"))
    past.row(past.due(), "failed", reason="lock lost", finished_at=past.now)
    assert past.findings() == set()


def test_a_fault_of_another_time_explains_nothing(past: Past) -> None:
    past.over(past.strike("restart", "session"))
    past.row(past.due(), "failed", reason="lost", sent_at=past.now + 5, finished_at=past.now + 6)
    assert past.findings() == {"lost"}


def test_done_without_an_effect_is_lost(past: Past) -> None:
    run = past.begin(past.due())
    run.done()
    assert past.findings() == {"lost"}


def test_done_with_the_effect_of_another_attempt_is_lost(past: Past) -> None:
    run = past.ran(past.due())
    past.row(run.period, "done", attempts=2)
    assert past.findings() == {"lost"}


def test_a_run_for_an_instant_at_which_nothing_was_due_is_found(past: Past) -> None:
    period = Period(JOB, label(EPOCH + EVERY / 2))
    past.ran(period)
    assert past.findings() == {"undue"}


# --- sums and the rest -----------------------------------------------------------------------


def test_an_update_that_was_lost_is_found(past: Past) -> None:
    past.counters[JOB] -= 1
    assert past.findings() == {"sums"}


def test_a_session_that_was_lost_may_cost_an_update(past: Past) -> None:
    first = _lost_session(past, 0.5)
    first.work()
    past.counters[JOB] -= 1
    first.failed()
    past.row(first.period, "failed", reason="lock lost")
    assert past.findings() == set()


def test_at_transaction_level_no_update_may_be_lost(past: Past) -> None:
    _atomic(past)
    past.committed_counters[JOB] -= 1
    past.strike("restart", "session")
    assert past.findings() == {"sums"}


def test_an_effect_that_nobody_told_of_is_found(past: Past) -> None:
    past.effects.append(Effect(*past.due(), JOB, 1))
    past.counters[JOB] += 1
    assert "sums" in past.findings()


def test_a_lock_that_is_left_is_found(past: Past) -> None:
    past.locks = 1
    assert past.findings() == {"leftover"}


def test_attempts_have_to_increase(past: Past) -> None:
    first = past.begin(past.due())
    past.strike("kill", "death", 1)
    past.ran(first.period, 2, attempt=1)
    assert past.findings() == {"attempts"}


def test_a_row_counts_all_its_attempts(past: Past) -> None:
    first = past.begin(past.due())
    past.strike("kill", "death", 1)
    past.begin(first.period, 2, attempt=2)
    past.strike("kill", "death", 2)
    past.row(first.period, "failed", reason="exhausted", attempts=1)
    assert past.findings() == {"attempts"}


def test_terms_have_to_increase(past: Past) -> None:
    past.tell("gained", 5, term=2)
    past.tell("gained", 6, term=2)
    assert past.findings() == {"terms"}


def test_one_message_of_a_term_that_is_over_may_have_been_on_its_way(past: Past) -> None:
    for term in (1, 2, 1):
        past.tell("publish", term, term=term)
    assert past.findings() == set()


def test_a_leader_that_goes_on_after_its_term_is_found(past: Past) -> None:
    for term in (1, 2, 1, 1):
        past.tell("publish", term, term=term)
    assert past.findings() == {"terms"}


def _dead_leader(past: Past, seconds: float) -> None:
    past.now += 10.0
    past.over(past.strike("kill", "death", 5, leader=True))
    past.now += seconds
    past.tell("gained", 6, term=3)


def test_how_long_a_takeover_took_is_measured(past: Past) -> None:
    _dead_leader(past, 0.7)
    (takeover,) = checker.check(past.evidence()).takeovers
    assert takeover.clean
    assert 0.7 < takeover.seconds < 0.8
    assert past.findings() == set()


def test_a_takeover_that_took_too_long_is_found(past: Past) -> None:
    _dead_leader(past, 4.0)
    assert past.findings() == {"takeover"}


def test_without_a_standby_a_takeover_may_take_longer(past: Past) -> None:
    past.tell("strike", 0, detail={"id": 99, "harm": "death", "victims": [5], "leader": True})
    past.over(99)
    past.now += 30.0
    past.tell("gained", 6, term=3)
    assert past.findings() == set()


def test_a_freeze_that_was_over_before_anybody_took_over_is_no_takeover(past: Past) -> None:
    past.now += 10.0
    freeze = past.strike("freeze", "freeze", 5, leader=True)
    past.now += 1.0
    past.over(freeze)
    past.now += 60.0
    past.tell("gained", 6, term=3)
    assert checker.check(past.evidence()).takeovers == []


def test_a_takeover_while_the_database_is_away_may_take_longer(past: Past) -> None:
    past.now += 10.0
    past.over(past.strike("kill", "death", 5, leader=True))
    past.over(past.strike("restart", "session"))
    past.now += 4.0
    past.tell("gained", 6, term=3)
    assert past.findings() == set()


def test_a_message_that_a_living_worker_never_answered_is_found(past: Past) -> None:
    past.tell("delivered", 3, run="a")
    past.tell("answered", 3, run="a")
    past.tell("delivered", 3, run="b")
    assert past.findings() == {"unanswered"}
    past.strike("kill", "death", 3)
    assert past.findings() == set()


def test_a_row_that_is_missing_in_the_history_is_found(past: Past) -> None:
    run = past.begin(past.due())
    past.ran(run.period, 2, attempt=2)
    events = [event for event in past.events if event.run != run.run]
    assert past.findings(events=events) == {"witnesses"}


def test_what_a_process_had_no_time_to_send_is_in_its_file_alone(past: Past) -> None:
    run = past.begin(past.due())
    past.strike("kill", "death", 1)
    past.ran(run.period, 2, attempt=2)
    events = [event for event in past.events if event.run != run.run]
    assert past.findings(events=events) == set()


def test_a_file_that_is_missing_is_found(past: Past) -> None:
    assert past.findings(local=past.events[1:]) == {"witnesses"}


# --- histories that are as they should be ------------------------------------------------------


class World:
    """Processes that do as they should, hurt at random; what they leave has to pass."""

    def __init__(self, seed: int) -> None:
        self.past = Past()
        self.chance = random.Random(seed)  # noqa: S311 - it only has to be repeatable
        self.pids = iter(range(10, 10_000))
        self.attempts: Counter[Period] = Counter()
        self.term = 0

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self.chance.choice(
                [self.run, self.run, self.run, self.lead, self.broker, self.by_hand, self.deploy]
            )()

    def run(self, period: Period | None = None, name: str = "") -> None:
        past = self.past
        period = period or past.due()
        level = self.chance.choice(["session", "transaction"])
        while not self._try(period, name, level):
            pass

    def _try(self, period: Period, name: str, level: str) -> bool:
        past, pid = self.past, next(self.pids)
        self.attempts[period] += 1
        past.tell("delivered", pid, run=f"delivery{pid}")
        run = past.begin(period, pid, attempt=self.attempts[period], name=name, level=level)
        worked = self.chance.random() < 0.5
        if worked and level == "session":
            run.work()
        match self.chance.choice(["kill", "terminate", "restart", "freeze", "well"]):
            case "kill":
                past.over(past.strike("kill", "death", pid))
                return False
            case "terminate" | "restart" as fault:
                past.over(past.strike(fault, "session", *([pid] if fault == "terminate" else [])))
                if self.chance.random() < 0.5:
                    self.run(name=name)
                run.failed()
                past.tell("answered", pid, run=f"delivery{pid}")
                if self.chance.random() < 0.3:
                    past.row(
                        period, "failed", attempts=run.attempt, reason="lock lost",
                        finished_at=past.now,
                    )  # fmt: skip
                    return True
                return False
            case "freeze":
                freeze = past.strike("freeze", "freeze", pid)
                past.now += self.chance.uniform(0, 20)
                past.over(freeze)
        if level == "transaction":
            run.commit()
        elif not worked:
            run.work()
        run.end()
        run.done()
        past.tell("answered", pid, run=f"delivery{pid}")
        return True

    def lead(self) -> None:
        self.term += 1
        self.past.now += 10.0
        if self.chance.random() < 0.5:
            self.past.over(self.past.strike("kill", "death", next(self.pids), leader=True))
        self.past.now += self.chance.uniform(0, 2.9)
        self.past.tell("gained", next(self.pids), term=self.term)
        for _ in range(self.chance.randrange(3)):
            self.past.tell("publish", term=self.term)

    def broker(self) -> None:
        number = self.past.strike("restart of the broker", "broker")
        self.past.now += self.chance.uniform(0, 3)
        self.past.over(number)

    def by_hand(self) -> None:
        period = Period("chaos:by hand", str(len(self.past.by_hand)))
        self.past.by_hand.add(period)
        self.run(period)

    def deploy(self) -> None:
        old = self.past.begin(period := self.past.due(), next(self.pids), name="old")
        self.run(name="new")
        self.attempts[period] += 1
        old.work()
        old.end()
        old.done()


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 25))
def test_whatever_is_done_to_processes_that_do_as_they_should_nothing_is_found(
    seed: int, steps: int
) -> None:
    world = World(seed)
    world.live(steps)
    verdict = checker.check(world.past.evidence())
    assert verdict.findings == []
    assert sum(verdict.outcomes.values()) == verdict.periods


def _without_an_end(past: Past) -> None:
    # Another process works under the lock name of the first run, all the time.
    first = next(event for event in past.events if event.kind == "begin")
    other = dataclasses.replace(
        first, pid=9_999_999, uid="other", run="other", period="other", seq=first.seq - 1, mono=0
    )
    past.events.insert(0, other)
    past.events.append(
        dataclasses.replace(other, kind="end", uid="the end", seq=10**6, at=past.now, mono=10**15)
    )


def _without_a_row(past: Past) -> None:
    del past.rows[next(iter(past.rows))]


def _with_a_second_effect(past: Past) -> None:
    period = next(period for period, row in past.rows.items() if row.status == "done")
    past.committed += [Effect(*period, "again", 1), Effect(*period, "again", 2)]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    spoil=st.sampled_from(
        [(_without_an_end, "overlap"), (_without_a_row, "lost"), (_with_a_second_effect, "doubled")]
    ),
)
def test_whatever_else_is_done_what_must_not_be_is_found(
    seed: int, spoil: tuple[Callable[[Past], None], str]
) -> None:
    world = World(seed)
    world.past.ran(world.past.due())
    world.live(15)
    spoil[0](world.past)
    found = checker.check(world.past.evidence(local=())).findings
    assert spoil[1] in {finding.kind for finding in found}

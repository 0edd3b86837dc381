"""The chaos test in short: a few faults of each kind and some of the controls; `make chaos` is long."""

from __future__ import annotations

import os
import random

import pytest

from tests.chaos import checker, conductor, controls, plan
from tests.chaos.evidence import Limits
from tests.chaos.stage import Stage

FAULTS = int(os.environ.get("PGLOCK_TEST_FAULTS", "15"))
# Other tests run beside this one; `make chaos` has the machine to itself and the tight bounds.
LIMITS = Limits(window=30.0, takeover=60.0)
# Those that need the fewest processes; each run of `make chaos` plays them all.
SHORT = ("the lock is off", "finish without the fence")


def played(seed: int, without: str = "") -> tuple[conductor.Performance, checker.Verdict]:
    print(f"\nseed {seed}")
    with Stage(conductor.ENTRIES) as stage:
        impossible = conductor.people(stage, without)
        faults = plan.draw(seed, FAULTS, FAULTS, without=impossible)
        result = conductor.Conductor(stage, print, LIMITS).perform(faults, FAULTS)
    verdict = checker.check(result.evidence)
    print(f"{result.done} faults, {verdict.periods} periods, {verdict.runs} runs")
    return result, verdict


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_is_done_to_beats_workers_and_servers_each_period_is_done_once() -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    result, verdict = played(seed)
    assert verdict.findings == []
    assert result.settled
    # It has seen something: the schedule alone makes more than ten periods a second.
    assert verdict.periods > 10 * FAULTS
    assert verdict.runs >= verdict.outcomes["done"] > 0.9 * verdict.periods
    assert result.done >= FAULTS / 2


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_rule_the_checker_finds_what_it_is_for() -> None:
    chosen = [control for control in controls.CONTROLS if control.name in SHORT]
    with Stage(controls.ENTRIES, settings=controls.SETTINGS, far=False, clocks_off=False) as stage:
        outcomes = list(controls.play_all(stage, chosen))
    assert [outcome.name for outcome in outcomes if outcome.proves] == list(SHORT), outcomes


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_seed_that_fails_fails_again_in_the_same_way() -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    first, second = (
        {finding.kind for finding in played(seed, "fixed key")[1].findings} for _ in range(2)
    )
    print(f"seed {seed}: {sorted(first)}, {sorted(second)}")
    assert "overlap" in first & second
    # And it was the rule that was missing: with it the seed holds.
    assert played(seed)[1].findings == []

"""The plan of the chaos test can be repeated, and leaves nothing out."""

from __future__ import annotations

import inspect
import re
import typing
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos import deeds, plan


@settings(deadline=None)
@given(seed=st.integers(), faults=st.integers(0, 80), seconds=st.floats(1, 600))
def test_the_same_seed_gives_the_same_plan(seed: int, faults: int, seconds: float) -> None:
    planned = plan.draw(seed, faults, seconds)
    assert planned == plan.draw(seed, faults, seconds)
    assert len(planned) == faults
    assert planned == sorted(planned, key=lambda fault: fault.at)
    assert all(0 <= fault.at <= seconds for fault in planned)


def test_another_seed_gives_another_plan() -> None:
    assert plan.draw(1, 20, 10.0) != plan.draw(2, 20, 10.0)


def test_every_kind_of_fault_is_in_a_plan() -> None:
    kinds = Counter(fault.kind for fault in plan.draw(7, 100, 60.0, promotions=2))
    assert set(kinds) == set(typing.get_args(plan.Kind))
    assert kinds["promote standby server"] == 2
    assert kinds.total() == 100


def test_what_a_machine_cannot_do_is_left_out() -> None:
    planned = plan.draw(7, 100, 60.0, without=("drop packets", "step clock"))
    assert len(planned) == 100
    assert not {"drop packets", "step clock"} & {fault.kind for fault in planned}


def test_freezes_and_silences_are_shorter_and_longer_than_what_is_waited() -> None:
    planned = plan.draw(7, 2000, 60.0)
    freezes = [fault.lasts for fault in planned if fault.kind == "freeze leader"]
    silences = [fault.lasts for fault in planned if fault.kind == "drop packets"]
    assert min(freezes) < plan.LEASE / 2
    assert max(freezes) > plan.LEASE + 0.5
    assert min(silences) < plan.LOST_AFTER / 2
    assert max(silences) > 3 * plan.LOST_AFTER


def test_no_target_is_named_by_its_process() -> None:
    assert not re.search(r"\bpid\b", inspect.getsource(plan.Fault))


def test_each_kind_of_fault_can_be_done() -> None:
    assert set(deeds.DEEDS) == set(typing.get_args(plan.Kind))

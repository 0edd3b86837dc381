"""The server's clock: carried on between two readings, and what a reading tells of a change."""

from __future__ import annotations

import datetime as dt
from typing import Final

import pytest

from celery_pglock.clocks import TOLERATED, ServerClock

NOON: Final = dt.datetime(2026, 11, 30, 12, tzinfo=dt.UTC)
SECOND: Final = dt.timedelta(seconds=1)


class World:
    """A server's clock, a host's and the monotonic one, under the test's hand."""

    def __init__(self) -> None:
        self.server = self.host = NOON
        self.monotonic = 100.0
        self.told: list[float] = []
        self.clock = ServerClock(lambda: self.monotonic, lambda: self.host)
        self.clock.host_differs = lambda ahead: self.told.append(ahead.total_seconds())

    def wait(self, seconds: float) -> None:
        self.server += seconds * SECOND
        self.host += seconds * SECOND
        self.monotonic += seconds

    def ask(self, before: float = 0.0, after: float = 0.0) -> None:
        """Ask the server, whose answer is of so long after the question and before its end."""
        started = self.monotonic
        self.wait(before)
        moment = self.server
        self.wait(after)
        self.clock.read(moment, started)


def test_it_is_carried_on_by_the_monotonic_clock_whatever_the_host_says() -> None:
    world = World()
    world.host -= 3 * SECOND
    assert world.clock.now() == world.host, "before it was ever asked"
    world.ask()
    world.host += 7200 * SECOND
    world.monotonic += 2.5
    assert world.clock.now() == NOON + 2.5 * SECOND
    assert world.clock.step() is None


@pytest.mark.parametrize("seconds", [-7200.0, -5.5, 5.5, 7200.0])
def test_a_clock_that_was_set_is_told_once(seconds: float) -> None:
    world = World()
    world.ask()
    world.wait(3)
    world.server += seconds * SECOND
    world.ask()
    assert world.clock.step() == seconds * SECOND
    assert world.clock.step() is None
    assert world.clock.now() == world.server
    world.wait(3)
    world.ask()
    assert world.clock.step() is None


def test_a_clock_that_was_set_and_set_right_again_has_not_changed() -> None:
    world = World()
    world.ask()
    for seconds in (-7200, 7200):
        world.server += seconds * SECOND
        world.ask()
    assert world.clock.step() is None


@pytest.mark.parametrize("seconds", [-4.5, 4.5])
def test_a_small_change_is_followed_without_a_word(seconds: float) -> None:
    world = World()
    world.ask()
    world.server += seconds * SECOND
    world.ask()
    assert world.clock.step() is None
    assert world.clock.now() == world.server


@pytest.mark.parametrize(("before", "after"), [(60.0, 0.0), (0.0, 60.0)])
def test_a_slow_answer_is_no_change_of_the_clock(before: float, after: float) -> None:
    world = World()
    world.ask()
    for _ in range(3):
        world.ask(before, after)
        world.ask()
    assert world.clock.step() is None
    assert world.told == []


def test_a_slow_answer_does_not_hide_a_change() -> None:
    world = World()
    world.ask()
    world.server -= 7200 * SECOND
    world.ask(60.0, 60.0)
    step = world.clock.step()
    assert step is not None
    assert abs(step + 7200 * SECOND) <= 60 * SECOND


@pytest.mark.parametrize("seconds", [-600.0, 600.0])
def test_a_host_that_differs_is_told_once_and_again_after_it_agreed(seconds: float) -> None:
    world = World()
    world.ask()
    world.host += seconds * SECOND
    for _ in range(3):
        world.ask()
    assert world.told == [seconds]
    world.host -= seconds * SECOND
    world.ask()
    world.host -= seconds * SECOND
    world.ask()
    assert world.told == [seconds, -seconds]


def test_a_host_that_differs_by_little_is_not_told() -> None:
    world = World()
    for seconds in (4.5, -4.5):
        world.host = world.server + seconds * SECOND
        world.ask()
    assert world.told == []
    assert TOLERATED == 5 * SECOND

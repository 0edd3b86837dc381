"""What the figures are held against: ratios, because they depend less on the machine.

Nothing fails when one is not met: it is written on the page. A test that is timed fails on a busy
machine, and says nothing on a fast one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final, Literal

from tests.benchmarks import beats, guards, tasks
from tests.benchmarks.measuring import Figures

FLAT: Final = 1.2


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A ratio, and what it should be.

    Attributes:
        what: of what to what.
        ratio: as measured.
        sense: whether it may not be more, or not be less.
        limit: than this.
    """

    what: str
    ratio: float
    sense: Literal["at most", "at least"]
    limit: float

    @property
    def met(self) -> bool:
        return self.ratio <= self.limit if self.sense == "at most" else self.ratio >= self.limit


def verdicts(parts: Figures) -> Iterator[Verdict]:
    """Yield what can be said of the parts that were measured."""
    if "guards" in parts:
        yield from _of_guards(parts["guards"])
    if "beats" in parts:
        yield from _of_beats(parts["beats"])
    if "claims" in parts:
        yield from _of_claims(parts["claims"])


def _of_guards(found: Figures) -> Iterator[Verdict]:
    near, far = found["near"], found["far"]

    def ratio(name: str, base: str, figures: Figures = near) -> float:
        return float(_cost(figures[name]) / _cost(figures[base]))

    yield Verdict(
        "guarded run, lock only, to two bare `SELECT 1` on its connection",
        ratio(tasks.LOCK_ONLY, guards.SELECTS),
        "at most",
        1.3,
    )
    for peer in (tasks.SINGLETON, tasks.ONCE):
        yield Verdict(
            f"guarded run, lock only, to the guard of {peer}",
            ratio(tasks.LOCK_ONLY, peer),
            "at most",
            1.0,
        )
    yield Verdict(
        "guarded run, with ledger, to two bare prepared writes",
        ratio(tasks.LEDGER, guards.WRITES),
        "at most",
        1.5,
    )
    yield Verdict(
        "a run that is refused, to one round trip",
        ratio(guards.REFUSED, guards.SELECT),
        "at most",
        1.2,
    )
    for name in (tasks.LOCK_ONLY, tasks.LEDGER):
        yield Verdict(
            f"guarded run, {name}, {1000 * found['round_trip']:g} ms away, in round trips",
            ratio(name, guards.SELECT, far),
            "at most",
            2.2,
        )


def _of_beats(found: Figures) -> Iterator[Verdict]:
    compared = found["sizes"][str(found["compared"])]
    for peer, limit in ((beats.LOOP, 1.5), (beats.STOCK, 30.0), (beats.REDBEAT, 3.0)):
        yield Verdict(
            f"a burst of {found['compared']:,} on Redis, messages a second, to {peer}",
            compared[beats.OURS]["rate"] / compared[peer]["rate"],
            "at least",
            limit,
        )
    least, *_, most = found["sizes"]
    idle = {size: found["sizes"][size][beats.OURS]["idle"]["p50"] for size in (least, most)}
    yield Verdict(
        f"an idle tick with {int(most):,} entries, to one with {int(least):,}",
        idle[most] / idle[least],
        "at most",
        FLAT,
    )


def _of_claims(found: Figures) -> Iterator[Verdict]:
    least, *_, most = found["claims"]
    yield Verdict(
        f"a claim beside {int(most):,} rows, to one beside {int(least):,}",
        found["claims"][most]["claim"]["p50"] / found["claims"][least]["claim"]["p50"],
        "at most",
        1.2,
    )


def _cost(figure: Any) -> float:
    """Return what a guard costs, or what a bare statement takes."""
    return float(figure["p50"] if figure["guard"] is None else figure["guard"])

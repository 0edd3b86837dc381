"""The plot: what is killed and sent twice, and when, drawn from a seed; pure.

The same seed gives the same plot. What it meets is not the same each time: a plot says "a
worker, 0.31 s after it has begun to write", and who that is depends on the machine.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Final, Literal

Kind = Literal[
    "leader", "leader at work", "worker", "process", "double while it runs", "double afterwards"
]

#: Nothing happens in this last part, so that everybody is up again when the curtain falls.
QUIET: Final = 2.5
_FIRST: Final = 1.0
_EVERY_LEADER: Final = 9.0
_INTO: Final = (0.05, 0.75)
_INTO_SENDING: Final = (0.0, 0.02)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        at: seconds after the beginning.
        kind: ``leader``: the beat that leads is killed; ``leader at work``: while it sends;
            ``worker``: a worker with its pool; ``process``: one process of its pool;
            ``double …``: an occurrence is sent again.
        into: so many seconds after the worker has begun to write, or an occurrence was due.
        absent: after so many seconds what was killed is started again.
        choice: from 0 to 1; which one, where there are several.
    """

    at: float
    kind: Kind
    into: float
    absent: float
    choice: float


def draw(seed: int, seconds: float) -> list[Fault]:
    """Return the faults of a play of this length, in their order."""
    chance = random.Random(seed)  # noqa: S311 - it only has to be repeatable
    eventful = seconds - QUIET

    def fault(at: float, kind: Kind) -> Fault:
        return Fault(
            at=round(at, 3),
            kind=kind,
            into=round(chance.uniform(*(_INTO_SENDING if kind == "leader at work" else _INTO)), 3),
            absent=round(chance.uniform(1.0, 2.0), 3),
            choice=chance.random(),
        )

    leaders = max(2, round(eventful / _EVERY_LEADER))
    part = eventful / leaders
    faults = []
    for number in range(leaders):
        # Never close to the next one: the other beat has to be up again, or nobody could lead.
        at = part * (number + chance.uniform(0.1, 0.45))
        faults.append(fault(at, "leader at work" if number % 2 else "leader"))
    at = _FIRST + chance.uniform(0, 1)
    kinds: list[Kind] = ["process", "worker"]
    chance.shuffle(kinds)
    while at < eventful:
        # The first two are one of each, whatever the seed.
        kind = kinds.pop() if kinds else chance.choice(("process", "process", "worker"))
        faults.append(fault(at, kind))
        at += chance.uniform(2.5, 4.5)
    faults.append(fault(chance.uniform(0.15, 0.5) * eventful, "double while it runs"))
    faults.append(fault(chance.uniform(0.5, 0.85) * eventful, "double afterwards"))
    return sorted(faults, key=lambda planned: planned.at)

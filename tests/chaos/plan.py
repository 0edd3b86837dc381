"""The plan: what goes wrong and when, drawn from a seed; pure.

The same seed and the same figures give the same plan. Targets are named by role and number, and
never by process id: who that is, and in the middle of what it is struck, depends on the machine.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping
from typing import Final, Literal

Kind = Literal[
    "kill child", "kill parent", "kill worker", "stop worker", "freeze child", "freeze worker",
    "kill leader", "kill standby", "stop leader", "freeze leader", "freeze standby",
    "end session of a run", "end session of the leader", "end session of nobody",
    "end all sessions", "restart database fast", "restart database immediate",
    "promote standby server", "drop packets", "restart broker", "kill broker", "flush broker",
    "send again", "deliver again", "step clock", "fork storm",
]  # fmt: skip

# How often each happens, of all that happen at random. A process that has to be started again
# costs a second of a processor, so those are the rarer ones.
WEIGHTS: Final[Mapping[Kind, float]] = {
    "kill child": 20,
    "kill parent": 2,
    "kill worker": 3,
    "stop worker": 4,
    "freeze child": 12,
    "freeze worker": 4,
    "kill leader": 6,
    "kill standby": 2,
    "stop leader": 3,
    "freeze leader": 5,
    "freeze standby": 2,
    "end session of a run": 18,
    "end session of the leader": 7,
    "end session of nobody": 5,
    "end all sessions": 2,
    "restart database fast": 1.2,
    "restart database immediate": 1.2,
    "drop packets": 3,
    "restart broker": 0.8,
    "kill broker": 0.8,
    "flush broker": 0.8,
    "send again": 8,
    "deliver again": 8,
    "step clock": 4,
    "fork storm": 3,
}

#: Seconds: a leader that does nothing for so long is replaced.
LEASE: Final = 4.0
#: Seconds: a run that cannot reach the server for so long gives its lock up; after three times
#: as long the server does.
LOST_AFTER: Final = 3.0
_SHORT: Final = (0.1, 1.5)
_LONG: Final = (LEASE + 1.0, LEASE + 4.0)
_LONG_SILENCE: Final = (LOST_AFTER + 1.0, 3 * LOST_AFTER + 3.0)
_ABSENT: Final = (0.2, 2.0)
_CLOCK: Final = (-7200.0, 7200.0)
_HOLES: Final = ("both ways", "to server", "to client")


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        at: seconds after the beginning.
        kind: what.
        index: which one, where there are several; counted round.
        lasts: for how many seconds, or after how many what was ended is started again; for
            a clock, by how many it is set off.
        into: seconds after a run has begun, where a run in progress is looked for.
        detail: which way packets are dropped.
    """

    at: float
    kind: Kind
    index: int
    lasts: float
    into: float
    detail: str = ""


def draw(
    seed: int, faults: int, seconds: float, *, without: Iterable[Kind] = (), promotions: int = 0
) -> list[Fault]:
    """Return so many faults within so many seconds, in their order.

    Args:
        seed: the same one gives the same plan.
        faults: how many.
        seconds: within which time.
        without: kinds that this machine cannot do.
        promotions: how many of them make a standby server the primary.
    """
    chance = random.Random(seed)  # noqa: S311 - it only has to be repeatable
    left_out = set(without)
    kinds = [kind for kind in WEIGHTS if kind not in left_out]
    weights = [WEIGHTS[kind] for kind in kinds]
    # Each kind once, before chance decides.
    drawn = kinds[: max(0, faults - promotions)]
    drawn += chance.choices(kinds, weights, k=max(0, faults - promotions - len(drawn)))
    chance.shuffle(drawn)
    moments = sorted(chance.uniform(0.0, seconds) for _ in drawn)
    planned = [_fault(chance, at, kind) for at, kind in zip(moments, drawn, strict=True)]
    for number in range(promotions):
        at = seconds * (number + chance.uniform(0.3, 0.7)) / promotions
        planned.append(_fault(chance, at, "promote standby server"))
    return sorted(planned, key=lambda fault: fault.at)


def _fault(chance: random.Random, at: float, kind: Kind) -> Fault:
    low, high = _ABSENT
    detail = ""
    if kind == "step clock":
        low, high = _CLOCK
    elif kind == "drop packets":
        detail = chance.choice(_HOLES)
        low, high = chance.choice([_SHORT, _LONG_SILENCE])
    elif kind.startswith("freeze"):
        low, high = chance.choice([_SHORT, _SHORT, _LONG])
    return Fault(
        at=round(at, 3),
        kind=kind,
        index=chance.randrange(1000),
        lasts=round(chance.uniform(low, high), 3),
        into=round(chance.uniform(0.0, 0.2), 3),
        detail=detail,
    )

"""The controls: with a rule taken away, the checker has to find what the rule is for.

Each is a scene that brings it about for certain, and each is also played with the rule in its
place: then nothing may be found, or it would be the scene that is found and not the rule.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from celery_pglock.demo.servers import children
from tests.chaos import checker, scenes
from tests.chaos.evidence import Evidence, Limits
from tests.chaos.scenes import Scene
from tests.chaos.stage import Stage, until

#: What the stage of the controls is made with.
ENTRIES: Final = {"each second": {"task": "own", "schedule": 1.0}}
SETTINGS: Final = {"pglock_rescue_sent_after": None}

_FAULTS: Final = "tests.apps.beat_faults"
_SCHEDULERS: Final = {"stock beat": "celery.beat:PersistentScheduler"}


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """What is taken away, and what has to be found without it.

    Attributes:
        name: for people.
        without: the rule that is taken away.
        finds: one of these kinds of findings has to be among what is found.
        play: the scene.
        limits: for the checker.
    """

    name: str
    without: str
    finds: frozenset[str]
    play: Callable[[Scene], Evidence]
    limits: Limits | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a control.

    Attributes:
        name: of the control.
        caught: whether it was found what has to be found.
        sound: what was found with the rule in its place: nothing, if the scene is right.
        found: what was found without the rule.
        seconds: how long it took.
    """

    name: str
    caught: bool
    sound: list[str]
    found: list[str]
    seconds: float

    @property
    def proves(self) -> bool:
        """Whether it was caught, and the rule alone was the reason."""
        return self.caught and not self.sound


# --- the scenes ---------------------------------------------------------------------------------


def _twice(scene: Scene) -> Evidence:
    """Two messages for one period, at one time."""
    scene.worker()
    period = scene.send("once", seconds=1.0)
    scene.send_again(period, seconds=1.0)
    scene.wait("begin")
    return scene.evidence()


def _deploy(scene: Scene) -> Evidence:
    """Two messages for one period, for workers of two releases, whose lock names differ."""
    old, new = scene.worker(version=1), scene.worker(version=2)
    period = scene.send("once", to=old, gate="gate")
    scene.wait("begin")
    scene.send_again(period, to=new, seconds=0.0)
    scene.wait("delivered", 2)
    scene.wait("answered", patience=4.0)
    scene.open("gate")
    return scene.evidence()


def _threads(scene: Scene) -> Evidence:
    """Two periods of one job, in two threads of one process."""
    scene.worker("-P", "threads")
    scene.send("job", gate="gate")
    scene.wait("begin")
    scene.send("job", seconds=0.0)
    scene.wait("answered", patience=4.0)
    scene.open("gate")
    return scene.evidence()


def _two_processes(scene: Scene) -> Evidence:
    """Two jobs that share a lock name, in workers that were started apart."""
    first, second = scene.worker(), scene.worker()
    scene.send("one", to=first, share="chaos:shared", gate="gate")
    scene.wait("begin")
    scene.send("other", to=second, share="chaos:shared", seconds=0.0)
    scene.wait("answered", patience=4.0)
    scene.open("gate")
    return scene.evidence()


def _killed(scene: Scene) -> Evidence:
    """A child is killed while it works, and its message is delivered again."""
    scene.worker()
    scene.send("job", gate="gate")
    (begin, *_) = scene.wait("begin")
    scene.kill(begin.pid)
    scene.wait("begin", 2)
    scene.open("gate")
    return scene.evidence()


def _late_finisher(scene: Scene) -> Evidence:
    """A run that has lost its session comes to its end after another has done its period."""
    scene.worker()
    period = scene.send("job", "warned", gate="gate")
    (begin, *_) = scene.wait("begin")
    scene.end_session(begin.pid)
    scene.send_again(period, "warned", seconds=0.0)
    scene.wait("finished")
    scene.open("gate")
    return scene.evidence()


def _goes_on(scene: Scene) -> Evidence:
    """A run whose session was ended is at work for longer than it may be."""
    scene.worker()
    scene.send("job", gate="gate")
    (begin, *_) = scene.wait("begin")
    scene.end_session(begin.pid)
    scene.send("job", seconds=0.0)
    scene.wait("begin", 2)
    if scene.without:
        time.sleep(scene.limits.window + 1.0)
    scene.open("gate")
    return scene.evidence()


def _orphan(scene: Scene) -> Evidence:
    """A child is killed that has forked one of its own, which lives on."""
    scene.worker()
    scene.send("job", gate="gate", fork=True)
    (begin, *_) = scene.wait("begin")
    if not until(lambda: children.child_pids(begin.pid), 10.0):
        raise AssertionError("the child has not forked")
    scene.kill(begin.pid)
    scene.wait("begin", 2, patience=4.0)
    scene.open("gate")
    return scene.evidence(5.0)


def _two_beats(scene: Scene) -> Evidence:
    """Two beats, one entry each second."""
    scene.worker()
    scheduler = _SCHEDULERS.get(scene.without, "pglock")
    scene.beat(scheduler)
    scene.beat(scheduler)
    if not scene.without:
        scene.remember_anchors()
    scene.wait("finished", 8)
    scene.stop_beats()
    return scene.evidence()


def _dies_between(scene: Scene) -> Evidence:
    """A leader dies after it has claimed an occurrence; the next one takes over."""
    scene.worker()
    step = "ConfirmsTooEarly" if scene.without else "DiesBeforePublishing"
    doomed = scene.beat(f"{_FAULTS}:{step}")
    scene.remember_anchors()
    scene.beat("pglock")
    scene.come(lambda: not doomed.alive)
    scene.wait("gained", 2)
    published = len(scene.wait("publish"))
    scene.wait("publish", published + 3)
    scene.stop_beats()
    return scene.evidence()


CONTROLS: Final = (
    Control("the lock is off", "lock", frozenset({"overlap", "doubled"}), _twice),
    Control("one key instead of two", "run lock", frozenset({"overlap"}), _deploy),
    Control("lock on a pooled connection", "own session", frozenset({"overlap"}), _threads),
    Control("key from hash()", "fixed key", frozenset({"overlap"}), _two_processes),
    Control("UNIQUE dropped", "unique", frozenset({"doubled"}), _killed),
    Control(
        "finish without the fence",
        "fence",
        frozenset({"doubled"}),
        _late_finisher,
        Limits(window=60.0),
    ),
    Control("loss detector off", "detector", frozenset({"overlap"}), _goes_on),
    Control("no at-fork hook", "fork hook", frozenset({"leftover"}), _orphan),
    Control("stock beat, two of them", "stock beat", frozenset({"doubled"}), _two_beats),
    Control("confirm before publish", "order", frozenset({"lost"}), _dies_between),
)


def play(stage: Stage, control: Control) -> Outcome:
    """Play a control, without its rule and with it."""
    began = time.monotonic()
    found = _found(stage, control, control.without)
    sound = _found(stage, control, "")
    return Outcome(
        name=control.name,
        caught=not control.finds.isdisjoint(finding.partition(":")[0] for finding in found),
        sound=sound,
        found=found,
        seconds=time.monotonic() - began,
    )


def play_all(stage: Stage, chosen: Iterable[Control] = CONTROLS) -> Iterator[Outcome]:
    """Play controls, one after the other."""
    for control in chosen:
        yield play(stage, control)


def _found(stage: Stage, control: Control, without: str) -> list[str]:
    with scenes.on(stage, without, control.limits) as scene:
        evidence = control.play(scene)
    return [f"{finding.kind}: {finding.text}" for finding in checker.check(evidence).findings]

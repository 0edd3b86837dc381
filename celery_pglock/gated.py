"""A scheduler with a ``tick()`` of its own, called while this beat leads, and not otherwise.

Its store is its own, and so are its due times: which occurrences it sends, and whether one that
it could not send is sent later, is what it makes of them. What it gets here is the gate: a
leader that is replaced within a poll after its death, and that asks before each message whether
it leads still. There is no claim. So a leader that dies between noting an occurrence in its
store and handing it over loses it, as it would alone; and messages carry no due instant.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import celery.beat

from celery_pglock import beat_events, errors, leadership, retention, settings

# How often it listens to what others tell it.
_LISTEN_EVERY: Final = 1.0


def has_own_tick(scheduler: type, mixin: type, *, chosen: bool | None) -> bool:
    """Return whether the ``tick()`` of the scheduler behind the mixin is to be called.

    Args:
        scheduler: the class that has both among its bases.
        mixin: what gates it.
        chosen: what the class says itself: its ``own_tick``.

    Raises:
        ConfigurationError: it has one, and does not say whether that is what finds its entries.
    """
    behind = scheduler.__mro__[scheduler.__mro__.index(mixin) + 1 :]
    owner = next(base for base in behind if "tick" in vars(base))
    if chosen is None and owner is not celery.beat.Scheduler:
        msg = (
            f"{owner.__name__} has a tick() of its own, which LeaderMixin would never call; write "
            f"own_tick = True in {scheduler.__name__} to have it called while this beat leads, or "
            f"own_tick = False to have the entries of its schedule sent without it"
        )
        raise errors.ConfigurationError(msg)
    return bool(chosen)


class Gate:
    """The gate of one beat.

    Args:
        candidate: the leadership.
        config: the application's settings.
        tick: the scheduler's own.
    """

    def __init__(
        self,
        candidate: leadership.Leadership,
        config: settings.Settings,
        tick: Callable[[], float],
    ) -> None:
        self._candidate = candidate
        self._tick = tick
        self._lost: errors.LeadershipLost | None = None
        self._upkeep = retention.Upkeep(
            candidate.execute,
            config.schema,
            config.namespace,
            config.retention,
            lambda removed: beat_events.pruned(candidate, removed),
        )

    def begin(self) -> None:
        """Begin to lead."""
        self._lost = None
        self._upkeep.begin()

    def work(self, at_most: float) -> float:
        """Have the scheduler do what is to be done now; return for how many seconds nothing is.

        Raises:
            LeadershipLost: the session is gone or the lease has run out.
        """
        candidate = self._candidate
        candidate.listen()
        self.pass_through()
        again_at = time.monotonic() + self._tick()
        if self._lost is not None:
            raise self._lost
        candidate.feed()
        rest = max(0.0, min(at_most, _LISTEN_EVERY, again_at - time.monotonic()))
        if rest > 0:
            rest = self._upkeep.work(rest)
        return min(rest, candidate.feed_in)

    def pass_through(self) -> None:
        """Make sure that this beat leads; before each message.

        Raises:
            LeadershipLost: it does not. The scheduler may swallow it; ``work`` does not.
        """
        candidate = self._candidate
        try:
            candidate.ensure()
        except errors.LeadershipLost as lost:
            self._lost = self._lost or lost
            raise

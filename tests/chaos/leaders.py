"""Terms and take-overs: who led when, who sent in which term, and how long nobody led."""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tests.chaos.evidence import Finding, Limits
from tests.chaos.history import Event
from tests.chaos.strikes import Strikes

# Seconds: what was struck just before is perhaps not over yet for those that it struck.
_RECENT: Final = 1.0
_MOMENT: Final = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Takeover:
    """How long nobody led after a fault struck the leader.

    Attributes:
        fault: which.
        seconds: until the next leader was there.
        clean: another beat stood by, and nothing else that keeps beats from leading happened.
    """

    fault: str
    seconds: float
    clean: bool


def terms(events: Iterable[Event]) -> Iterator[Finding]:
    """Find terms that do not grow, and leaders that went on sending in a term that was over.

    One message may have been on its way to the broker when its sender was frozen or cut off.
    """
    highest = 0
    published = 0
    stale: Counter[int] = Counter()
    for event in events:
        term = event.term or 0
        if event.kind == "gained":
            if term <= highest:
                yield Finding("terms", f"term {term} of {event.who} after term {highest}")
            highest = max(highest, term)
        elif event.kind == "publish":
            if term < published:
                stale[term] += 1
            published = max(published, term)
    for term, count in stale.items():
        if count > 1:
            yield Finding("terms", f"{count} messages of term {term} after those of a later one")


def takeovers(events: Sequence[Event], strikes: Strikes) -> list[Takeover]:
    """Return how long it took each time that the leader was killed, frozen or cut off."""
    gained = [event for event in events if event.kind == "gained"]
    numbers = [event.seq for event in gained]
    found = []
    for strike in strikes:
        following = bisect.bisect(numbers, strike.first)
        if not strike.leader or following == len(gained):
            continue
        at = gained[following].at
        # A freeze or a silence that is shorter than the lease changes nothing.
        lasting = strike.harm != "death" and strike.over_at - strike.at > _MOMENT
        if lasting and at > strike.over_at:
            continue
        disturbed = strikes.disturbed(strike.at - _RECENT, at, but=strike)
        clean = strike.ready > 0 and not disturbed
        found.append(Takeover(strike.fault, at - strike.at, clean))
    return found


def slow(found: Iterable[Takeover], limits: Limits) -> Iterator[Finding]:
    """Find those that took longer than they may."""
    for takeover in found:
        if takeover.clean and takeover.seconds > limits.takeover:
            yield Finding("takeover", f"{takeover.fault}: {takeover.seconds:.2f} s")

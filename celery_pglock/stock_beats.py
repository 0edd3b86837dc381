"""Whether runs look as if a beat that knows nothing of celery-pglock had sent their messages.

Such a message has no due instant, and neither has one that the application sends itself: a row
does not say which it was. What tells them apart is when they come. A stock beat sends at the due
instants of its schedule, again and again; people and programs do so by chance. So a pattern is
evidence, and no pattern is none: messages that wait for a worker start when there is one.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Sequence
from typing import Final

from celery_pglock import occurrences

# What a beat and an idle worker take from the due instant to the start of the run.
_SOON: Final = dt.timedelta(seconds=2)
# By chance one in thirty starts of a task is so close to a full minute; three of them in a row
# of which most are, are hardly chance.
_LEAST: Final = 3
# How far two starts may be from one interval apart, of its length, and at most.
_JITTER: Final = 0.05
_MOST_JITTER: Final = dt.timedelta(seconds=1)


def matches(due: occurrences.Schedule, starts: Sequence[dt.datetime]) -> int:
    """Return how many starts of a task, in order, fit its schedule; 0 if they may be chance.

    Args:
        due: the due instants. Those of an interval count from an anchor of the beat's own, so
            there the distance from one start to the next is looked at.
        starts: when runs began that no beat of ours has sent.
    """
    if isinstance(due, occurrences.Interval):
        fits = [_apart(due.every, *pair) for pair in itertools.pairwise(starts)]
    else:
        fits = [_begins_soon(due, start) for start in starts]
    count = sum(fits)
    return count if count >= _LEAST and 2 * count >= len(fits) else 0


def _begins_soon(due: occurrences.Schedule, start: dt.datetime) -> bool:
    instant = due.after(start - _SOON)
    return instant is not None and instant <= start


def _apart(every: dt.timedelta, before: dt.datetime, after: dt.datetime) -> bool:
    return abs(after - before - every) <= min(every * _JITTER, _MOST_JITTER)

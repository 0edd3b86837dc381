"""Another instant for the periods of calls that have none of their own."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator

from celery_pglock import identity


@contextlib.contextmanager
def at(instant: dt.datetime) -> Iterator[None]:
    """Count calendar periods as if it were another instant, for the length of a block.

    For calls without a due instant (a direct call, ``apply()``, a message sent by hand) of tasks
    with a calendar rule or function as ``once_per``; otherwise the server's clock says in which
    period they are. In all threads of this process. What a body reads from the wall clock, and
    the times in the row, stay as they are; an occurrence keeps the period of its due instant,
    and a redelivered message the one of its first claim.

    Args:
        instant: with its time zone.

    Raises:
        ValueError: the instant has no time zone.
    """
    before, identity.Clock.instant = identity.Clock.instant, aware(instant)
    try:
        yield
    finally:
        identity.Clock.instant = before


def aware(instant: dt.datetime) -> dt.datetime:
    """Return an instant that says in which time zone it is.

    Raises:
        ValueError: it does not.
    """
    if instant.tzinfo is None:
        raise ValueError(
            f"{instant!r} has no time zone, so it is another instant on another machine: write "
            f"for instance datetime(2026, 11, 29, 2, tzinfo=UTC)"
        )
    return instant

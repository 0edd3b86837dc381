"""Redelivery within seconds over Redis, with a kombu that has no option for it.

Its Redis transport looks for messages that nobody has acknowledged. Since 5.7 how often is an option;
before, it is every 100 s.
"""

from __future__ import annotations

import kombu
import kombu.transport


def look_each_second() -> None:
    """Have this process look once a second where kombu has no option for it.

    To be called before there is a connection.
    """
    if kombu.VERSION < (5, 7):  # type: ignore[attr-defined] # not in the stubs
        # By its name: to import it needs redis-py, and who lacks that is told so elsewhere.
        kombu.transport.TRANSPORT_ALIASES["redis"] = "celery_pglock.demo.restoring:Transport"

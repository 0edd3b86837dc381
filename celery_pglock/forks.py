"""What a forked child does with the connections of lock sessions that it inherits: nothing.

A fork hands the child a copy of the socket. A child that closed it would end its parent's
session; a child that only kept it would keep the lock alive after its parent's death. The
hook below lays ``/dev/null`` over the inherited descriptors, which does neither. It knows of
connections that are watched, not of one that another thread is just opening: whoever opens one
asks ``kept_away()`` before and after, and opens another when the number has changed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import psycopg


class Owner(Protocol):
    """What has a connection of its own."""

    connection: psycopg.Connection[Any]


_watched: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


def watch(owner: Owner) -> None:
    """Have its connection blinded in each child that inherits it, as long as there is an owner."""
    _watched[id(owner)] = owner


def forget(owner: Owner) -> None:
    """Leave its connection alone: it is closed, or belongs to somebody else."""
    _watched.pop(id(owner), None)


def watched() -> list[Owner]:
    """Return whoever is watched."""
    return list(_watched.values())


def blind(connection: psycopg.Connection[Any]) -> None:
    """Lay ``/dev/null`` over an inherited copy of a connection; never raises."""
    with contextlib.suppress(psycopg.Error, OSError, ValueError):
        null = os.open(os.devnull, os.O_RDWR)
        try:
            os.dup2(null, connection.fileno(), inheritable=False)
        finally:
            os.close(null)


@contextlib.contextmanager
def kept_away() -> Iterator[int]:
    """Keep this process from forking for the length of a block; how many times it has forked."""
    with _Forks.mutex:
        yield _Forks.number


class _Forks:
    """The forks of this process.

    The mutex is reentrant because a signal's handler may fork in the very thread that has it.
    """

    number: ClassVar[int] = 0
    mutex: ClassVar[threading.RLock] = threading.RLock()


def _begin() -> None:
    _Forks.mutex.acquire()
    _Forks.number += 1


def _end_in_parent() -> None:
    _Forks.mutex.release()


def _end_in_child() -> None:
    # It is held by the fork, which ends here.
    _Forks.mutex = threading.RLock()
    for owner in watched():
        blind(owner.connection)
    _watched.clear()


os.register_at_fork(before=_begin, after_in_parent=_end_in_parent, after_in_child=_end_in_child)

"""Django's own connection, borrowed as a session for the length of a run at transaction level.

It stays Django's: nothing is set on it for longer than a transaction, and it is given back in
autocommit, as it was found. When anything goes wrong it is closed, as any other session, and
Django opens another when it needs one.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

import django.db
import psycopg
from django.core.exceptions import ImproperlyConfigured
from psycopg.rows import namedtuple_row
from psycopg.types.datetime import TimestamptzLoader
from typing_extensions import override

from celery_pglock import connections, errors, guards, sessions, stacks
from celery_pglock.contrib.django import aliases

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

# What each open connection was found to be, so that it is asked once.
_vetted: weakref.WeakKeyDictionary[psycopg.Connection[Any], tuple[int, bool]] = (
    weakref.WeakKeyDictionary()
)


class BorrowedSession(sessions.Session):
    """The connection of an alias in this thread, as a session.

    Attributes:
        wrapper: Django's object around the connection.
    """

    def __init__(self, wrapper: BaseDatabaseWrapper, plan: sessions.Plan) -> None:
        super().__init__(wrapper.connection, plan)
        self.wrapper = wrapper
        self._thread = threading.get_ident()

    @override
    def cursor(self) -> psycopg.Cursor[Any]:
        """Return a cursor without what Django has taught the connection.

        Its own cursors write parameters into the text of a statement, and with ``USE_TZ = False``
        they return moments without a zone.
        """
        cursor = psycopg.Cursor(self.connection, row_factory=namedtuple_row)
        cursor.adapters.register_loader("timestamptz", TimestamptzLoader)
        return cursor

    @override
    def close(self) -> None:
        """Close the connection, and have Django know of it; never raises."""
        still_django = self.wrapper.connection is self.connection
        if still_django:
            super().close()
        else:
            # Closed by Django already; or given back to its pool, where it is somebody else's.
            self.held.clear()
            self.leave()
        # Django refuses to be called from another thread; there it finds out by itself.
        if threading.get_ident() == self._thread and (
            still_django or self.wrapper.closed_in_transaction
        ):
            _forget(self.wrapper)


class BorrowedStack(stacks.Stack):
    """Where runs at transaction level get the connection of an alias in this thread.

    Args:
        alias: the name in ``DATABASES``.
        plan: for what, and how a lost one is recognised.
    """

    def __init__(self, alias: str, plan: sessions.Plan) -> None:
        super().__init__(plan)
        self._alias = alias

    @override
    def take(self) -> sessions.Session:
        """Return Django's connection, opened if it was not.

        Raises:
            ConfigurationError: it cannot carry a transaction of ours, because one of the
                caller's is open on it or because Django is told not to manage them.
            DatabaseUnavailable, ServerInRecovery: as ``stacks.Stack.take``.
        """
        wrapper = aliases.wrapper(self._alias)
        _refuse_open_block(wrapper)
        session = self._opened(wrapper)
        if not session.alive:
            # Ended by the server while it was idle, for as long as CONN_MAX_AGE has kept it.
            session.close()
            session = self._opened(wrapper)
        try:
            if session.connection not in _vetted:
                guards.vet(session)
                _vetted[session.connection] = (session.pid, session.pooled)
            session.pid, session.pooled = _vetted[session.connection]
        except psycopg.Error as error:
            session.close()
            raise errors.DatabaseUnavailable(session.target, _told(error)) from None
        except BaseException:
            session.close()
            raise
        return session

    @override
    def give(self, session: sessions.Session) -> None:
        """Leave the connection to Django, open as it is."""
        session.leave()

    @override
    def close(self) -> None:
        """Close the connection of this thread, which may have died unseen."""
        wrapper = aliases.wrapper(self._alias)
        if not wrapper.in_atomic_block:
            with contextlib.suppress(django.db.Error):
                wrapper.close()

    def _opened(self, wrapper: BaseDatabaseWrapper) -> BorrowedSession:
        try:
            wrapper.close_if_health_check_failed()
            wrapper.ensure_connection()
        except django.db.Error as error:
            where = connections.describe(connections.parameters(self._plan.target))
            raise errors.DatabaseUnavailable(where, _told(error)) from None
        except ImproperlyConfigured as error:
            msg = f"DATABASES[{self._alias!r}] cannot be used: {error}"
            raise errors.ConfigurationError(msg) from None
        return BorrowedSession(wrapper, self._plan)


def _refuse_open_block(wrapper: BaseDatabaseWrapper) -> None:
    if wrapper.in_atomic_block:
        msg = (
            f'a task with lock_level="transaction" was called inside transaction.atomic() on '
            f"{wrapper.alias!r}, where its outcome would not be committed on its own; send it with "
            f"delay(), call it from transaction.on_commit(), or (in tests) use TransactionTestCase"
        )
        raise errors.ConfigurationError(msg)
    if not wrapper.settings_dict["AUTOCOMMIT"]:
        msg = (
            f"DATABASES[{wrapper.alias!r}] has AUTOCOMMIT off, so a task with "
            f'lock_level="transaction" cannot have a transaction of its own there; turn it on, or '
            f'set lock_level="session"'
        )
        raise errors.ConfigurationError(msg)


def _forget(wrapper: BaseDatabaseWrapper) -> None:
    """Have Django forget a closed connection, and the blocks that it thinks it is in.

    A time limit may have struck inside ``atomic()``, and no block of anybody else is open: see
    ``_refuse_open_block``. The rest Django resets itself when it connects.
    """
    with contextlib.suppress(django.db.Error):
        wrapper.close()
    wrapper.connection = None
    wrapper.in_atomic_block = wrapper.closed_in_transaction = wrapper.needs_rollback = False
    wrapper.savepoint_ids, wrapper.atomic_blocks = [], []


def _told(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__

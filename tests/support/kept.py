"""A connection that is kept for what is asked or told many times.

A test that waits asks up to fifty times in a second. Each new connection costs the server a
process, which would leave little of two cores to the processes that are waited for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import psycopg
from psycopg.rows import TupleRow


class KeptConnection:
    """Runs single statements in autocommit; opened when it is needed, and again when it was lost.

    Args:
        url: the libpq URL of a database.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[TupleRow] | None = None
        self._owner = os.getpid()
        # Tests ask in several threads: two that open it at once would leave one open for ever.
        self._asking = threading.Lock()

    def rows(self, query: str, *parameters: object) -> list[TupleRow]:
        """Run a statement and return its rows (none: an empty list)."""
        if self._owner != os.getpid():
            # A forked child: of its parent's threads, one may have held the lock.
            self._asking = threading.Lock()
        with self._asking:
            connection = self._connection
            if connection is not None and self._owner == os.getpid():
                try:
                    return self._ask(connection, query, parameters)
                except psycopg.OperationalError:
                    # Its session was ended: by the test, or with the server.
                    pass
            return self._ask(self._open(), query, parameters)

    def close(self) -> None:
        """Close it; it is opened again if it is asked again."""
        with self._asking:
            self._close()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        # A forked child would say good-bye for its parent.
        if connection is not None and self._owner == os.getpid():
            connection.close()

    def _open(self) -> psycopg.Connection[TupleRow]:
        self._close()
        # Not prepared: what is asked in the same words may have other columns by then.
        connection = psycopg.connect(self._url, autocommit=True, prepare_threshold=None)
        self._connection, self._owner = connection, os.getpid()
        return connection

    def _ask(
        self, connection: psycopg.Connection[TupleRow], query: str, parameters: Sequence[object]
    ) -> list[TupleRow]:
        try:
            cursor = connection.execute(query.encode(), parameters or None)
            return cursor.fetchall() if cursor.rownumber is not None else []
        except BaseException as error:
            # A refused statement leaves it as it was; the end of its session, or whatever strikes
            # in the middle of an answer, does not.
            if not isinstance(error, psycopg.Error) or isinstance(error, psycopg.OperationalError):
                self._close()
            raise

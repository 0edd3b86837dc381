"""Our own short statements, in the form in which libpq takes them.

A guarded run is two statements, and what psycopg's cursor does around one (to convert the text, to
find how each parameter is written, to make the columns' description) takes longer than the server
needs for it. These statements never change, so all of that is done once: their parameters are cast
in the text, sent as text and in a fixed order, and their rows are named tuples of one class.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import functools
import itertools
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import generators
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ExecStatus

if TYPE_CHECKING:
    from psycopg import abc
    from psycopg.pq.abc import PGconn, PGresult

# As psycopg's cursors have it: a percent sign that is meant is written twice.
_PLACEHOLDER: Final = re.compile(rb"%(?:\((\w+)\)s|%)")


# As plain numbers: members of an enumeration are looked up by name each time.
_FINE: Final = (int(ExecStatus.TUPLES_OK), int(ExecStatus.COMMAND_OK))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """A statement whose parameters have numbers.

    Attributes:
        text: as the server takes it.
        parameters: their names, in the order of their numbers.
    """

    text: bytes
    parameters: tuple[str, ...]


@functools.cache
def statement(query: bytes) -> Statement:
    """Return a statement with ``%(name)s`` in it, each of them cast, as a numbered one."""
    numbers: dict[bytes, int] = {}

    def number(found: re.Match[bytes]) -> bytes:
        if found[1] is None:
            return b"%"
        return b"$%d" % numbers.setdefault(found[1], len(numbers) + 1)

    text = _PLACEHOLDER.sub(number, query)
    return Statement(text, tuple(name.decode() for name in numbers))


class Prepared:
    """The statements that one session has prepared, or would have.

    Args:
        connection: in autocommit mode.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._adapter = Transformer(connection)
        # What SQL_ASCII keeps is bytes: psycopg too writes UTF-8 there.
        encoding = connection.info.encoding
        self._encoding = "utf-8" if encoding == "ascii" else encoding
        self._writers = _Writers(self._adapter, self._encoding)
        self._numbers = itertools.count(1)
        self._names: dict[Statement, bytes] = {}
        self._rows: dict[Statement, Callable[[Sequence[Any]], Any]] = {}

    def rows(self, query: bytes, parameters: Mapping[str, Any] | None = None) -> list[Any]:
        """Run a statement and return its rows, as named tuples.

        It is kept by the server under a name where ``prepare_threshold`` is not None: behind a
        transaction pooler the next statement may meet another server process.

        Raises:
            psycopg.Error: as the cursor raises it.
        """
        ours = self._send(query, parameters)
        return self._read(ours, self._wait(generators.execute))

    def send(self, query: bytes, parameters: Mapping[str, Any] | None = None) -> Statement:
        """Send a statement and do not wait; nothing else may be sent before ``receive``.

        Raises:
            psycopg.Error: as the cursor raises it.
        """
        ours = self._send(query, parameters)
        self._connection.wait(generators.send(self._connection.pgconn))
        return ours

    def receive(self, sent: Statement) -> list[Any]:
        """Wait for the answer to what ``send`` has sent, and return its rows.

        Raises:
            psycopg.Error: as the cursor raises it.
        """
        return self._read(sent, self._wait(generators.fetch_many))

    def _send(self, query: bytes, parameters: Mapping[str, Any] | None) -> Statement:
        ours = statement(query)
        given, writers = parameters or {}, self._writers
        values = [writers[type(value := given[name])](value) for name in ours.parameters]
        libpq = self._connection.pgconn
        if self._connection.prepare_threshold is None:
            libpq.send_query_params(ours.text, values)
        else:
            libpq.send_query_prepared(self._names.get(ours) or self._prepare(ours), values)
        return ours

    def _read(self, ours: Statement, result: PGresult) -> list[Any]:
        if result.ntuples == 0:
            return []
        adapter = self._adapter
        adapter.set_pgresult(result)
        make = self._rows.get(ours)
        if make is None:
            make = self._rows[ours] = _maker(result)
        return adapter.load_rows(0, result.ntuples, make)

    def _prepare(self, ours: Statement) -> bytes:
        # A number of its own each time: one that was interrupted may have been prepared all the
        # same, and the server knows no name twice.
        name = b"pglock_%d" % next(self._numbers)
        self._connection.pgconn.send_prepare(name, ours.text)
        self._wait(generators.execute)
        self._names[ours] = name
        return name

    def _wait(self, generator: Callable[[PGconn], abc.PQGen[list[PGresult]]]) -> PGresult:
        results: list[PGresult] = self._connection.wait(generator(self._connection.pgconn))
        for result in results:
            if result.status not in _FINE:
                raise psycopg.errors.error_from_result(result, encoding=self._encoding)
        if not results:
            msg = "an answer was interrupted, and nobody knows what it was"
            raise psycopg.OperationalError(msg)
        return results[-1]


class _Writers(dict[type, Callable[[Any], bytes | None]]):
    """How a value of each type is written; of others psycopg is asked."""

    def __init__(self, adapter: abc.Transformer, encoding: str) -> None:
        super().__init__(_WRITERS)
        self[str] = functools.partial(_text, encoding)
        self._adapter = adapter

    def __missing__(self, kind: type) -> Callable[[Any], bytes | None]:
        return self._ask

    def _ask(self, value: Any) -> bytes | None:
        written = self._adapter.get_dumper(value, PyFormat.TEXT).dump(value)
        return None if written is None else bytes(written)


def _text(encoding: str, value: str) -> bytes:
    if "\0" in value:
        # libpq would end the text there.
        msg = "a text for PostgreSQL cannot hold NUL"
        raise psycopg.DataError(msg)
    return value.encode(encoding)


def _interval(value: dt.timedelta) -> bytes:
    return b"%d days %d seconds %d microseconds" % (value.days, value.seconds, value.microseconds)


_WRITERS: Final[Mapping[type, Callable[[Any], bytes | None]]] = {
    NoneType: lambda _: None,
    bool: lambda value: b"t" if value else b"f",
    int: b"%d".__mod__,
    float: lambda value: repr(value).encode(),
    uuid.UUID: lambda value: value.hex.encode(),
    dt.datetime: lambda value: value.isoformat().encode(),
    dt.timedelta: _interval,
}


def _maker(result: PGresult) -> Callable[[Sequence[Any]], Any]:
    names = [(result.fname(column) or b"").decode() for column in range(result.nfields)]
    # Not the typed one, whose names would have to be known beforehand. A column that nobody asks
    # for has no name of its own, or that of another.
    named_tuple: Any = collections.namedtuple  # noqa: PYI024 - see above
    make: Callable[[Sequence[Any]], Any] = named_tuple("Row", names, rename=True)._make
    return make

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
import hashlib
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
    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGresult

# As psycopg's cursors have it: a percent sign that is meant is written twice.
_PLACEHOLDER: Final = re.compile(rb"%(?:\((\w+)\)s|%)")


@dataclasses.dataclass(frozen=True, slots=True)
class Statement:
    """A statement whose parameters have numbers.

    Attributes:
        text: as the server takes it.
        name: under which a session keeps it.
        parameters: their names, in the order of their numbers.
    """

    text: bytes
    name: bytes
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
    digest = hashlib.sha256(text).hexdigest()[:16]
    return Statement(text, f"pglock_{digest}".encode(), tuple(name.decode() for name in numbers))


class Prepared:
    """The statements that one session has prepared, or would have.

    Args:
        connection: in autocommit mode.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._adapter = Transformer(connection)
        self._encoding = connection.info.encoding
        self._known: set[bytes] = set()
        self._rows: dict[bytes, Callable[[Sequence[Any]], Any]] = {}

    def rows(self, query: bytes, parameters: Mapping[str, Any] | None = None) -> list[Any]:
        """Run a statement and return its rows, as named tuples.

        It is kept by the server under a name where ``prepare_threshold`` is not None: behind a
        transaction pooler the next statement may meet another server process.

        Raises:
            psycopg.Error: as the cursor raises it.
        """
        ours = statement(query)
        given = parameters or {}
        values = [self._encode(given[name]) for name in ours.parameters]
        connection = self._connection
        libpq = connection.pgconn
        if connection.prepare_threshold is None:
            libpq.send_query_params(ours.text, values)
        else:
            if ours.name not in self._known:
                libpq.send_prepare(ours.name, ours.text)
                self._wait(generators.execute(libpq))
                self._known.add(ours.name)
            libpq.send_query_prepared(ours.name, values)
        result = self._wait(generators.execute(libpq))
        if result.ntuples == 0:
            return []
        adapter = self._adapter
        adapter.set_pgresult(result)
        make = self._rows.get(ours.name)
        if make is None:
            make = self._rows[ours.name] = _maker(result)
        return adapter.load_rows(0, result.ntuples, make)

    def _wait(self, waiting: PQGen[list[PGresult]]) -> PGresult:
        (result,) = self._connection.wait(waiting)
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            raise psycopg.errors.error_from_result(result, encoding=self._encoding)
        return result

    def _encode(self, value: Any) -> bytes | None:
        if isinstance(value, str):
            if "\0" in value:
                # libpq would end the text there.
                msg = "a text for PostgreSQL cannot hold NUL"
                raise psycopg.DataError(msg)
            return value.encode(self._encoding)
        if (encode := _ENCODERS.get(type(value))) is not None:
            return encode(value)
        dumped = self._adapter.get_dumper(value, PyFormat.TEXT).dump(value)
        return None if dumped is None else bytes(dumped)


def _interval(value: dt.timedelta) -> bytes:
    return b"%d days %d seconds %d microseconds" % (value.days, value.seconds, value.microseconds)


_ENCODERS: Final[Mapping[type, Callable[[Any], bytes | None]]] = {
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

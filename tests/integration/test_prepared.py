"""Our own statements as libpq takes them: what goes in comes out, and errors are psycopg's."""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from celery_pglock import prepared
from tests.support.databases import Database

ZONED = dt.datetime(2026, 3, 29, 1, 30, 15, 123456, dt.timezone(dt.timedelta(hours=5.5)))


@pytest.fixture
def connection(read_blank_database: Database) -> Iterator[psycopg.Connection[Any]]:
    with contextlib.closing(read_blank_database.connect(prepare_threshold=0)) as opened:
        yield opened


class Named(enum.StrEnum):
    VALUE = "value"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("text", "plain"),
        ("text", "Grüße, 世界 'quoted' \\ %s $1"),
        ("text", ""),
        ("text", None),
        ("bigint", -(2**63)),
        ("bigint", 0),
        ("int", None),
        ("bool", True),
        ("bool", False),
        ("double precision", 0.1),
        ("double precision", float("inf")),
        ("uuid", uuid.UUID("6ecd8c99-4036-403d-bf84-cf8400f67836")),
        ("timestamptz", ZONED),
        ("timestamptz", dt.datetime(9999, 12, 31, 23, 59, tzinfo=dt.UTC)),
        ("interval", dt.timedelta(days=400, seconds=3, microseconds=7)),
        ("interval", dt.timedelta(seconds=-1.5)),
        ("text[]", ["a", None, 'b"c']),
    ],
)
def test_a_value_comes_back_as_it_went(
    connection: psycopg.Connection[Any], kind: str, value: object
) -> None:
    query = f"select %(value)s::{kind} as back, %(value)s::{kind} is null as nothing".encode()
    (row,) = prepared.Prepared(connection).rows(query, {"value": value})
    assert row.back == value
    assert type(row.back) is type(value)
    assert row.nothing is (value is None)


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1", "SQL_ASCII"])
def test_a_text_is_written_as_the_connection_writes_it(
    read_blank_database: Database, encoding: str
) -> None:
    with contextlib.closing(
        read_blank_database.connect(client_encoding=encoding, prepare_threshold=0)
    ) as connection:
        query = b"select %(value)s::text = U&'Gr\\00FC\\00DFe' as same"
        (row,) = prepared.Prepared(connection).rows(query, {"value": "Grüße"})
    assert row.same


def test_one_whose_preparation_was_interrupted_is_prepared_again(
    connection: psycopg.Connection[Any],
) -> None:
    ours, query = prepared.Prepared(connection), b"select 'again' as word"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ours.rows(query)
    while connection.pgconn.is_busy():
        connection.pgconn.consume_input()
    while connection.pgconn.get_result() is not None:
        pass
    assert ours.rows(query)[0].word == "again"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("threshold", [0, None], ids=["prepared", "not prepared"])
def test_an_answer_may_be_waited_for_later(
    connection: psycopg.Connection[Any], threshold: int | None
) -> None:
    """More parameters than fit into the socket's buffer are sent all the same."""
    connection.prepare_threshold = threshold
    ours = prepared.Prepared(connection)
    query = b"select length(%(value)s::text) as length, pg_sleep(0.05)"
    for size in (10, 5_000_000):
        sent = ours.send(query, {"value": "x" * size})
        assert connection.info.transaction_status == TransactionStatus.ACTIVE
        assert ours.receive(sent)[0].length == size
    failing = ours.send(b"select 1 / %(value)s::integer", {"value": 0})
    with pytest.raises(psycopg.errors.DivisionByZero):
        ours.receive(failing)
    assert ours.rows(query, {"value": "x"})[0].length == 1


def test_an_answer_that_nobody_has_is_an_error(connection: psycopg.Connection[Any]) -> None:
    ours = prepared.Prepared(connection)
    sent = ours.send(b"select 1")
    assert len(ours.receive(sent)) == 1
    with pytest.raises(psycopg.OperationalError, match="nobody knows"):
        ours.receive(sent)


def test_what_is_a_kind_of_text_is_written_as_psycopg_writes_it(
    connection: psycopg.Connection[Any],
) -> None:
    query = b"select %(value)s::text as back"
    (row,) = prepared.Prepared(connection).rows(query, {"value": Named.VALUE})
    assert row.back == "value"


def test_a_text_that_libpq_would_cut_is_refused(connection: psycopg.Connection[Any]) -> None:
    ours = prepared.Prepared(connection)
    with pytest.raises(psycopg.DataError, match="NUL"):
        ours.rows(b"select %(value)s::text as back", {"value": "a\0b"})
    assert ours.rows(b"select 1 as one")[0].one == 1


def test_a_percent_sign_that_is_written_twice_is_one(
    connection: psycopg.Connection[Any],
) -> None:
    query = b"select '100%%' as much, 'a' like 'a%%' as so, %(n)s::int %% 4 as rest"
    (row,) = prepared.Prepared(connection).rows(query, {"n": 7})
    assert (row.much, row.so, row.rest) == ("100%", True, 3)


def test_rows_and_no_rows(connection: psycopg.Connection[Any]) -> None:
    ours = prepared.Prepared(connection)
    query = b"select n from generate_series(1, %(to)s::int) as n"
    assert [row.n for row in ours.rows(query, {"to": 3})] == [1, 2, 3]
    assert ours.rows(query, {"to": 0}) == []
    assert ours.rows(b"set application_name = 'other'") == []


def test_an_error_is_psycopgs_own_and_the_connection_goes_on(
    connection: psycopg.Connection[Any],
) -> None:
    ours = prepared.Prepared(connection)
    with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero") as raised:
        ours.rows(b"select 1 / %(by)s::int as never", {"by": 0})
    assert raised.value.sqlstate == "22012"
    assert ours.rows(b"select 1 / %(by)s::int as never", {"by": 1})[0].never == 1
    with pytest.raises(psycopg.errors.UndefinedTable):
        ours.rows(b"select from nothing_of_that_name")


@pytest.mark.parametrize(("threshold", "kept"), [(0, 1), (None, 0)])
def test_nothing_is_kept_on_a_server_where_the_next_statement_may_meet_another(
    connection: psycopg.Connection[Any], threshold: int | None, kept: int
) -> None:
    connection.prepare_threshold = threshold
    ours = prepared.Prepared(connection)
    for _ in range(3):
        ours.rows(b"select 'kept ' || %(n)s::text as text", {"n": "once"})
    found = connection.execute(
        "select from pg_prepared_statements where statement like 'select ''kept %'"
    )
    assert len(found.fetchall()) == kept

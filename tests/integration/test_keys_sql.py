"""The key of a name can be had from PostgreSQL too, in any database."""

from __future__ import annotations

import random
import uuid

import psycopg
import pytest
from psycopg import sql

from celery_pglock import keys
from tests.support.servers import TestedPostgres

# As operators find it in the manual: no extension, no function of ours.
IN_SQL = b"""
select ('x' || encode(substring(sha256(convert_to(
 'celery_pglock:v1:' || namespace || ':' || kind || ':' || name, 'UTF8')) from 1 for 8), 'hex')
)::bit(64)::bigint
from unnest(%s::text[], %s::text[], %s::text[]) with ordinality as t(namespace, kind, name, n)
order by n
"""
KINDS: list[keys.Kind] = ["task", "run", "beat", "migrate"]


def random_names(count: int, *, last: int = 0x10FFFF) -> list[str]:
    """Return names of all lengths; PostgreSQL knows no NUL and nobody lone surrogates."""
    chooser = random.Random(20261103)  # noqa: S311 - the same names each time

    def char() -> str:
        while True:
            code = chooser.choice((0x7F, 0xFF, 0xFFFF, last))
            found = chr(chooser.randint(1, min(code, last)))
            if not "\ud800" <= found <= "\udfff":
                return found

    return ["".join(char() for _ in range(chooser.choice((1, 8, 40, 300)))) for _ in range(count)]


def both(url: str, names: list[str]) -> tuple[list[int], list[int]]:
    namespaces = ["proj" if number % 2 else "A-Z_0.9" for number in range(len(names))]
    kinds = [KINDS[number % len(KINDS)] for number in range(len(names))]
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(IN_SQL, [namespaces, kinds, names]).fetchall()
    derived = [keys.from_name(*triple) for triple in zip(namespaces, kinds, names, strict=True)]
    return [key for (key,) in rows], derived


def test_python_and_sql_derive_the_same_keys_for_500_names(
    postgres_server: TestedPostgres,
) -> None:
    in_sql, in_python = both(postgres_server.url(), random_names(500))
    assert in_sql == in_python
    assert len(in_sql) == 500
    assert min(in_python) < 0 < max(in_python)


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_the_encoding_of_the_database_does_not_matter(
    postgres_server: TestedPostgres, encoding: str
) -> None:
    name = f"pglock_test_{uuid.uuid4().hex[:12]}"
    create = sql.SQL(
        "CREATE DATABASE {} TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C' ENCODING {}"
    )
    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        admin.execute(create.format(sql.Identifier(name), sql.Literal(encoding)))
        try:
            # In SQL_ASCII nothing is converted: there only ASCII is the same on both sides.
            names = random_names(100, last=0xFF if encoding == "LATIN1" else 0x7F)
            in_sql, in_python = both(f"{postgres_server.url(name)}", names)
        finally:
            admin.execute(drop)
    assert in_sql == in_python

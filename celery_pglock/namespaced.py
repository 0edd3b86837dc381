"""The tables of one namespace, for what people do to schedule entries."""

from __future__ import annotations

import dataclasses
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from celery_pglock import elections, table_names


@dataclasses.dataclass(frozen=True, slots=True)
class Namespaced:
    """Statements about one namespace, over one connection in autocommit.

    Attributes:
        connection: of a role that may update its entries.
        schema: where the tables are.
        namespace: of the application.
    """

    connection: psycopg.Connection[Any]
    schema: str
    namespace: str

    def run(self, template: str, **parameters: object) -> list[Any]:
        """Run a statement and return its rows, if it has any, as named tuples.

        It may name ``namespace``, ``channel``, on which its beats listen, and ``edited``, with
        which a notification begins that tells of a definition.
        """
        with self.connection.cursor(row_factory=namedtuple_row) as cursor:
            cursor.execute(
                table_names.statement(template, self.schema),
                {
                    **parameters,
                    "namespace": self.namespace,
                    "channel": elections.channel(self.namespace),
                    "edited": elections.EDITED,
                },
            )
            return cursor.fetchall() if cursor.rownumber is not None else []

"""A primary key for Django, of a table whose key is two columns.

The admin finds each row by one value, and wants it to be a column. This field is both columns
joined, where it is read, and both compared, where it is looked up, so that their index is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.db import models
from django.db.models.expressions import Col
from django.db.models.lookups import Exact
from typing_extensions import override

# The picture of a unit separator, which no name and no period has: browsers change control
# characters on their way through a form.
SEPARATOR: Final = "\u241f"


if TYPE_CHECKING:
    _TextField = models.TextField[str, str]
else:
    _TextField = models.TextField  # generic for type checkers alone


class PairField(_TextField):
    """Two columns as one read-only primary key.

    Args:
        first: the name of a column.
        second: the name of the other.
    """

    def __init__(self, first: str, second: str, **options: Any) -> None:
        self.first, self.second = first, second
        super().__init__(**{"primary_key": True, "editable": False, **options})

    @override
    def deconstruct(self) -> tuple[str, str, list[Any], dict[str, Any]]:
        name, path, _, options = super().deconstruct()
        return name or "", path, [self.first, self.second], options

    @override
    def get_col(self, alias: str, output_field: Any = None) -> Col:
        return _PairCol(alias, self, output_field)

    @property
    @override
    def cached_col(self) -> Col:
        """Return the expression for the table under its own name."""
        return _PairCol(self.model._meta.db_table, self)  # noqa: SLF001 - Django's public _meta


class _PairCol(Col):
    def columns(self, compiler: Any) -> tuple[str, str]:
        # The first is the newer name, since Django 6.1.
        quote = getattr(compiler, "quote_name", None) or compiler.quote_name_unless_alias
        pair: Any = self.target
        table, first, second = map(quote, (self.alias, pair.first, pair.second))
        return f"{table}.{first}", f"{table}.{second}"

    @override
    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        first, second = self.columns(compiler)
        return f"({first} || %s::text || {second})", (SEPARATOR,)


@PairField.register_lookup
class _PairExact(Exact):
    @override
    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        if not isinstance(self.lhs, _PairCol) or not isinstance(self.rhs, str):
            return super().as_sql(compiler, connection)
        first, second = self.lhs.columns(compiler)
        wanted = self.rhs.partition(SEPARATOR)
        return f"({first} = %s AND {second} = %s)", (wanted[0], wanted[2])

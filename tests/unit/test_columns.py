"""Lines that fit: nothing is wider than the terminal, names keep both ends, pipes get everything."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_pglock.cli import columns

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=120)
COLUMNS = (
    columns.Column("name", least=16),
    columns.Column("state"),
    columns.Column("moment", rank=1),
    columns.Column("node", least=8, rank=3),
    columns.Column("reason", least=12, rank=2),
)
MOMENT = "2026-11-30 04:00:00+01:00"


def text(lines: Iterable[columns.Line]) -> list[str]:
    return ["".join(piece for piece, _ in line) for line in lines]


def rows(*names: str) -> list[list[columns.Piece]]:
    return [
        [(name, ""), ("done", "done"), (MOMENT, ""), ("w1@host:1", ""), (name * 2, "")]
        for name in names
    ]


@pytest.mark.parametrize(
    ("name", "width", "expected"),
    [
        ("nightly", 7, "nightly"),
        ("nightly", 6, "ni…tly"),
        ("warehouse.export.customers", 15, "warehou…stomers"),
        ("warehouse.export.customers", 1, "…"),
        ("表表表表表表", 7, "表表…表"),
        ("", 1, ""),
    ],
)
def test_a_name_that_is_too_long_loses_its_middle(name: str, width: int, expected: str) -> None:
    assert columns.cut(name, width) == expected


@given(NAMES, st.integers(min_value=4, max_value=100))
def test_a_name_that_was_cut_fits_and_keeps_its_end(name: str, width: int) -> None:
    told = columns.printable(name).replace(columns.ELLIPSIS, "")
    found = columns.cut(told, width)
    assert columns.cells(found) <= width
    if found != told:
        beginning, _, end = found.partition(columns.ELLIPSIS)
        assert told.startswith(beginning)
        assert told.endswith(end)


@given(st.lists(NAMES, min_size=1, max_size=5), st.integers(min_value=40, max_value=200))
def test_every_line_of_a_table_fits(names: list[str], width: int) -> None:
    for line in text(columns.table(COLUMNS, rows(*names), width)):
        assert columns.cells(line) <= width
        assert line.isprintable()


@example("00\x1f\x1f\u2e80\U000111f5", 40)  # not all characters are of one width
@given(NAMES, st.integers(min_value=40, max_value=200))
def test_every_line_beside_a_label_fits(name: str, width: int) -> None:
    for line in text(columns.hanging("label", 11, f"held by {name}", name, width=width)):
        assert columns.cells(line) <= width


def test_a_wide_terminal_is_used() -> None:
    head, row = text(columns.table(COLUMNS, rows("n" * 30), 200))
    assert head.split() == [column.name for column in COLUMNS]
    assert re.split(" {2,}", row) == ["n" * 30, "done", MOMENT, "w1@host:1", "n" * 60]


def test_what_does_not_fit_is_cut_first_and_then_put_beneath_its_row() -> None:
    head, row = text(columns.table(COLUMNS, rows("n" * 30), 90))
    assert head.split() == ["name", "state", "moment", "node", "reason"]
    assert row.count(columns.ELLIPSIS) == 2
    head, row, *folded = text(columns.table(COLUMNS, rows("n" * 30), 60))
    assert head.split() == ["name", "state", "moment"]
    assert MOMENT in row
    assert " ".join(line.strip() for line in folded) == (
        f"node w1@host:1, reason {columns.cut('n' * 60, 58)}"
    )


def test_what_is_empty_is_not_put_beneath_a_row() -> None:
    row = [("a", ""), ("done", ""), (MOMENT, ""), ("", ""), ("", "")]
    lines = text(columns.table(COLUMNS, [row, *rows("n" * 30)], 60))
    assert lines[1].startswith("a ")
    assert lines[2].startswith("n")


def test_in_a_pipe_nothing_is_cut_or_broken() -> None:
    name = "a name " * 60
    _, row = text(columns.table(COLUMNS, rows(name), None))
    assert name in row
    (line,) = text(columns.hanging("label", 11, name, width=None))
    assert line == f"label      {name}"


def test_what_would_move_the_cursor_is_written_out() -> None:
    _, row = text(columns.table(COLUMNS[:1], [[("a\nb\x1b[2J", "")]], None))
    assert row == r"a\nb\x1b[2J"

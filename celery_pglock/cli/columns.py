"""Text laid out in lines: beside a label, or as a table, for a width or for any.

With a width every line fits it: a table folds columns beneath their rows, and a name that is
too long loses its middle, because the end tells names apart as often as the beginning does.
Without one, in a pipe or a file, nothing is cut or broken.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

# A text and what it is, for a terminal with colours: a status, a severity, a heading.
Piece = tuple[str, str]
Line = tuple[Piece, ...]

ELLIPSIS: Final = "…"
_GAP: Final = 2
_FOLDED: Final = "  "


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading.
        least: to how many characters its texts may be cut; None: they are not.
        rank: how dispensable it is: where the table is too wide, the columns of the highest
            rank go beneath their rows first; those of rank 0 stay.
    """

    name: str
    least: int | None = None
    rank: int = 0


def printable(text: str) -> str:
    """Return a text with what would move a terminal's cursor written out."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def cells(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(unicodedata.combining(each) > 0 for each in text)


def cut(text: str, width: int) -> str:
    """Return a text without its middle, if it is too long: beginning and end are kept."""
    if cells(text) <= width:
        return text
    end = _beginning(text[::-1], width // 2)[::-1]
    return f"{_beginning(text, width - 1 - cells(end))}{ELLIPSIS}{end}"


def wrapped(text: str, width: int | None) -> Iterator[Line]:
    """Yield the lines of a text."""
    for line in _wrapped(text, width, 0):
        yield ((line, ""),)


def hanging(
    label: str, indent: int, *texts: str, width: int | None, kind: str = ""
) -> Iterator[Line]:
    """Yield the lines of a label and of texts beside it, each beginning a line of its own."""
    for number, text in enumerate(texts):
        first = ("" if number else label).ljust(indent)
        for place, line in enumerate(_wrapped(text, width, indent)):
            yield ((" " * indent if place else first, kind), (line, ""))


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Piece]], width: int | None
) -> Iterator[Line]:
    """Yield the lines of a table with its headings."""
    body = [[(printable(text), kind) for text, kind in row] for row in rows]
    natural = [
        max([len(column.name), *(cells(row[place][0]) for row in body)])
        for place, column in enumerate(columns)
    ]
    shown, widths = _fitted(columns, natural, width)
    yield _row([(columns[place].name, "heading") for place in shown], widths)
    for row in body:
        yield _row([row[place] for place in shown], widths)
        folded = [
            f"{column.name} {row[place][0]}"
            for place, column in enumerate(columns)
            if place not in shown and row[place][0]
        ]
        if folded:
            for line in _wrapped(", ".join(folded), width, len(_FOLDED)):
                yield ((f"{_FOLDED}{line}", "folded"),)


def _fitted(
    columns: Sequence[Column], natural: Sequence[int], width: int | None
) -> tuple[list[int], list[int]]:
    """Return which columns stand in the table, and how wide each."""
    shown = list(range(len(columns)))
    if width is None:
        return shown, list(natural)

    def least(place: int) -> int:
        bound = columns[place].least
        return natural[place] if bound is None else min(natural[place], bound)

    def total(widths: Iterable[int]) -> int:
        return sum(widths) + _GAP * (len(shown) - 1)

    while total(map(least, shown)) > width:
        dispensable = [place for place in shown if columns[place].rank]
        if not dispensable:
            break
        shown.remove(max(dispensable, key=lambda place: (columns[place].rank, place)))
    widths = {place: natural[place] for place in shown}
    # Narrower than all that may be cut: then everything may.
    floor = {place: least(place) for place in shown}
    if total(floor.values()) > width:
        floor = dict.fromkeys(shown, 1)
    while total(widths.values()) > width:
        widest = max(shown, key=lambda place: widths[place] - floor[place])
        if widths[widest] <= floor[widest]:
            break
        widths[widest] -= 1
    return shown, list(widths.values())


def _row(row: Sequence[Piece], widths: Sequence[int]) -> Line:
    pieces = []
    for (text, kind), width in zip(row, widths, strict=True):
        told = cut(text, width)
        pieces += [(told, kind), (" " * (width - cells(told) + _GAP), "")]
    while pieces and not pieces[-1][0].strip():
        pieces.pop()
    return tuple(pieces)


def _wrapped(text: str, width: int | None, indent: int) -> list[str]:
    told = printable(text)
    if width is None:
        return [told]
    room = max(1, width - indent)
    lines = [""]
    # Not by textwrap, to which all characters are of one width.
    for word in (cut(word, room) for word in told.split()):
        longer = f"{lines[-1]} {word}".lstrip()
        if cells(longer) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _beginning(text: str, width: int) -> str:
    for place in range(len(text), 0, -1):
        if cells(text[:place]) <= width:
            return text[:place]
    return ""

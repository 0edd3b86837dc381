"""Lines that fit a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

_WIDTH: Final = 79


def hanging(label: str, width: int, *texts: str) -> Iterator[str]:
    """Yield the lines of a label and of texts beside it, each beginning a line of its own."""
    indent = " " * width
    for number, text in enumerate(texts):
        yield from textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=indent if number else label.ljust(width),
            subsequent_indent=indent,
            break_on_hyphens=False,
        )

"""How far long work is, on standard error: for whoever looks, or asks for it with ``--verbose``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

import click

from celery_pglock.cli import terminal

Tell = Callable[[str], None]

_BETWEEN_LINES: Final = 5.0
_ERASE_LINE: Final = "\r\x1b[K"


@contextlib.contextmanager
def shown(*, verbose: bool) -> Iterator[Tell]:
    """Yield a function that is told how far the work is."""
    if not terminal.is_one(sys.stderr):
        yield _line_by_line() if verbose else untold
    elif (console := terminal.console(sys.stderr)) is not None:
        with console.status("") as status:
            yield status.update
    else:
        with _one_line() as tell:
            yield tell


def untold(_: str) -> None:
    """Tell nobody, because nobody looks."""


def _line_by_line() -> Tell:
    last = float("-inf")

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _BETWEEN_LINES:
            last = time.monotonic()
            click.echo(text, err=True)

    return tell


@contextlib.contextmanager
def _one_line() -> Iterator[Tell]:
    try:
        yield lambda text: click.echo(f"{_ERASE_LINE}{text}", err=True, nl=False)
    finally:
        click.echo(_ERASE_LINE, err=True, nl=False)

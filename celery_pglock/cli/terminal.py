"""What standard output is: a terminal of some width and perhaps with colours, or a pipe."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from typing import IO, Any, Final

import click

from celery_pglock.cli import columns

_NARROWEST: Final = 40
_USUAL: Final = 80
_STYLES: Final = {
    "heading": "bold",
    "folded": "dim",
    "done": "green",
    "running": "cyan",
    "sent": "blue",
    "retrying": "yellow",
    "skipped": "magenta",
    "missed": "bold red",
    "failed": "red",
    "error": "bold red",
    "warning": "yellow",
    "foreign": "yellow",
    "label": "bold",
}


def is_one(stream: IO[str]) -> bool:
    """Return whether somebody looks at a stream, or types into it."""
    return not stream.closed and stream.isatty()


def width() -> int | None:
    """Return how wide lines may be; None in a pipe, where nothing is cut.

    ``COLUMNS`` says it for a terminal; exported by chance it must not cut what a script reads.
    """
    if not is_one(sys.stdout):
        return None
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told):
        return max(_NARROWEST, int(told))
    try:
        found = os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        found = 0
    return max(_NARROWEST, found or _USUAL)


def write(lines: Iterable[columns.Line]) -> None:
    """Print lines, in colours where rich is installed and the terminal has some."""
    console = _console()
    for line in lines:
        if console is None:
            click.echo(_encodable("".join(text for text, _ in line)))
        else:
            _write_coloured(console, line)


def say(text: str) -> None:
    """Print one sentence to standard output, as long as it is."""
    click.echo(_encodable(columns.printable(text)))


def _console() -> Any:
    context = click.get_current_context(silent=True)
    plain = os.environ.get("NO_COLOR") or getattr(getattr(context, "obj", None), "no_color", False)
    if plain or not is_one(sys.stdout):
        return None
    return console(sys.stdout)


def console(stream: IO[str]) -> Any:
    """Return rich's console for a terminal; None where rich is not installed."""
    try:
        import rich.console
        import rich.theme
    except ImportError:
        return None
    theme = rich.theme.Theme({f"pglock.{kind}": style for kind, style in _STYLES.items()})
    # Said here, because older ones take an empty NO_COLOR for a wish.
    no_color = bool(os.environ.get("NO_COLOR"))
    return rich.console.Console(
        file=stream, theme=theme, highlight=False, emoji=False, no_color=no_color
    )


def _write_coloured(console: Any, line: columns.Line) -> None:
    from rich.text import Text

    pieces = [
        (_encodable(text), f"pglock.{kind}" if kind in _STYLES else "") for text, kind in line
    ]
    # Each line fits already: rich is to break or cut none.
    console.print(Text.assemble(*pieces), soft_wrap=True)


def _encodable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return _for(encoding, text)


@functools.lru_cache(maxsize=1)
def _ellipsis(encoding: str) -> str:
    try:
        columns.ELLIPSIS.encode(encoding)
    except UnicodeEncodeError:
        return "~"
    return columns.ELLIPSIS


def _for(encoding: str, text: str) -> str:
    told = text.replace(columns.ELLIPSIS, _ellipsis(encoding))
    return told.encode(encoding, "backslashreplace").decode(encoding)

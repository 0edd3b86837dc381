"""What the pages of the documentation show, block by block."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt
from typing_extensions import override

from tests.support.processes import REPOSITORY

DOCS: Final = REPOSITORY / "docs"
PAGES: Final = (
    REPOSITORY / "README.md",
    *sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts),
)
_NAMED: Final = re.compile(r" ?# (\S+\.(?:py|sql|ini|conf))\n")
_MARK: Final = re.compile(r"^% (not run|run by): (.*)\Z", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: where it stands.
        line: in which line of it.
        language: of the fence.
        text: what is in it.
        file: the file that its first line names, if it does.
        mark: what the comment before it says: `not run` and a reason, `run by` and a test.
    """

    page: Path
    line: int
    language: str
    text: str
    file: str | None
    mark: tuple[str, str] | None

    @override
    def __str__(self) -> str:
        """Name it as compilers do."""
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


@functools.cache
def blocks() -> tuple[Block, ...]:
    """Return all blocks of all pages that are no directives."""
    found = []
    for page in PAGES:
        before = ""
        for token in MarkdownIt().parse(page.read_text()):
            if token.type == "fence" and not token.info.startswith("{"):
                named, mark = _NAMED.match(token.content), _MARK.match(before)
                assert token.map is not None
                found.append(
                    Block(
                        page=page,
                        line=token.map[0] + 1,
                        language=token.info.strip(),
                        text=token.content,
                        file=named[1] if named else None,
                        mark=(mark[1], " ".join(mark[2].split())) if mark else None,
                    )
                )
            if token.type in {"inline", "fence"}:
                before = token.content if token.type == "inline" else ""
    return tuple(found)


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a console block, each with the lines that are shown of its output."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found

"""docs/tutorial.md, followed to the letter by somebody who has a Python and nothing else."""

from __future__ import annotations

import datetime as dt
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from markdown_it import MarkdownIt

from tests.support import wheels
from tests.support.pages import commands
from tests.support.processes import REPOSITORY, eventually
from tests.support.terminals import Examples, Terminal, fresh_environment

PAGE = REPOSITORY / "docs/tutorial.md"
PATIENCE = 20.0
INSTALLING = 300.0
ORDINALS = ("first", "second", "third", "fourth", "fifth")
EVERY = dt.timedelta(seconds=3)


class Reader:
    """Does what the page says, from its first line to its last.

    Attributes:
        examples: what the page's ids, ports and names are here.
    """

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        self.examples = Examples()
        self._directory = directory
        self._env = env
        self._terminals: dict[str, Terminal] = {}
        self._at = "first"

    def read(self) -> None:
        """Read the whole page."""
        said = ""
        for token in MarkdownIt().parse(PAGE.read_text()):
            if token.type == "inline":
                said += f" {token.content}"
                if "Press Ctrl+C" in token.content:
                    self.expect_no_gap()
                    self._stop()
            elif token.type == "fence":
                self._look_at(said)
                getattr(self, f"_{token.info}")(token.content)
                said = ""

    def expect_no_gap(self) -> None:
        """Expect that what is said of the kill is true: each occurrence has been run once."""
        url = self.examples.substituted("postgresql://postgres@127.0.0.1:25948/postgres")
        query = (
            "SELECT due_at, status, attempts, term FROM pglock.job_runs WHERE entry = 'flowers'"
            " ORDER BY due_at"
        )
        with psycopg.connect(url, autocommit=True) as connection:

            def enough() -> list[Any]:
                rows = connection.execute(query).fetchall()
                return rows if len(rows) > 5 else []

            rows = eventually(enough, 10 * PATIENCE, "six occurrences")
        *settled, _latest = rows
        assert {(status, attempts) for _, status, attempts, _ in settled} == {("done", 1)}
        moments = [due for due, *_ in rows]
        assert {later - due for due, later in itertools.pairwise(moments)} == {EVERY}
        assert {term for *_, term in settled} == {1, 2}

    def close(self) -> None:
        for terminal in self._terminals.values():
            terminal.close()

    def _look_at(self, said: str) -> None:
        if named := re.findall(r"\b(\w+)\s+terminal\b", said):
            self._at = next(name for name in reversed(named) if name in ORDINALS)
        if self._at not in self._terminals:
            self._terminals[self._at] = Terminal(self._directory, self._env, self.examples)

    def _console(self, block: str) -> None:
        terminal = self._terminals[self._at]
        *ending, last = commands(block)
        for command, shown in ending:
            terminal.follow(command, shown, INSTALLING)
        if self._at == "first":
            # A command that looks may look in the middle of a run.
            terminal.follow(*last, INSTALLING, looks=5 if "pglock" in last[0] else 1)
        else:
            terminal.start(*last, PATIENCE)

    def _text(self, block: str) -> None:
        for line in block.splitlines():
            self._terminals[self._at].see(line, PATIENCE)

    def _python(self, block: str) -> None:
        name = block.partition("\n")[0].removeprefix("# ")
        (self._directory / name).write_text(block)

    def _stop(self) -> None:
        for name in ("fifth", "third", "second"):
            self._terminals[name].interrupt(3 * PATIENCE)  # a run is let end


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Has the wheel of this tree where pip looks, and a Python."""
    wheels.build(tmp_path)
    env = fresh_environment()
    env["PIP_FIND_LINKS"] = f"{env.get('PIP_FIND_LINKS', '')} {tmp_path}".strip()
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    directory = tmp_path / "flowers"
    directory.mkdir()
    reader = Reader(directory, env)
    yield reader
    reader.close()


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_the_tutorial_is_true_to_the_letter(reader: Reader) -> None:
    reader.read()


def test_control_what_is_not_seen_is_noticed() -> None:
    examples = Examples()
    assert examples.seen("laptop:4711 leads proj in term 1", "vm-3:91 leads proj in term 1")
    assert examples.substituted("kill -9 4711") == "kill -9 91"
    assert not examples.seen("laptop:4822 leads proj in term 2", "vm-3:92 leads proj in term 3")
    assert not examples.seen("laptop:4822 leads proj in term 2", "vm-4:92 leads proj in term 2")
    assert not examples.seen("laptop:4711 vanished", "vm-3:92 vanished")
    assert examples.seen("laptop:4822 vanished …", "vm-3:92 vanished in term 1")

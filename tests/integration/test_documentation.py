"""Each block of the documentation is executed, or tested elsewhere, or says why it is not.

Python is executed here, page by page, as if a page were one module of an application; where a block
begins with the name of a file, a test of that page runs it. Of commands it is checked here that
there are such ones, with these options.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import itertools
import re
import shlex
import sys
import tomllib
import types
from typing import Any, Final

import celery
import celery._state
import click
import pytest

import celery_pglock
from celery_pglock import definitions, keys, settings
from tests.support import pages
from tests.support.commands import BUILTINS, expect_parsed
from tests.support.databases import Database
from tests.support.processes import REPOSITORY

BLOCKS: Final = pages.blocks()
EXECUTED: Final = ("python", "diff", "console", "sql", "ini", "json")
# Output, drawings, and what is neither run nor configured.
SHOWN: Final = ("text",)
PROJECT: Final = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
# What a page leaves to its reader, at the top of whose module it may be.
PRELUDE: Final = """
import datetime as dt
from celery import Celery, shared_task
from celery.schedules import crontab
from sqlalchemy import insert, text
from celery_pglock import *
"""
# What else a page takes for granted.
READERS: Final = {
    "lock-a-script.md": "def parts(): return ()",
    "other-schedulers.md": "from celery.beat import Scheduler as TheirScheduler",
}
# A page that is followed as a whole.
FOLLOWED: Final = {"tutorial.md": "tests/acceptance/test_tutorial.py"}


def of(*languages: str) -> list[Any]:
    """Return blocks that are not marked and belong to no file, each as a parameter."""
    return [
        pytest.param(block, id=str(block))
        for block in BLOCKS
        if block.language in languages
        and block.mark is None
        and block.file is None
        and block.page.name not in FOLLOWED
    ]


def python_pages() -> list[Any]:
    found = itertools.groupby(
        (parameter.values[0] for parameter in of("python")), key=lambda block: block.page
    )
    return [pytest.param(list(each), id=page.stem) for page, each in found]


@functools.cache
def sources() -> dict[str, str]:
    tests = REPOSITORY / "tests"
    return {
        str(path.relative_to(REPOSITORY)): path.read_text()
        for path in tests.rglob("*.py")
        if path.name != "test_documentation.py"
    }


def test_no_block_escapes() -> None:
    languages = {block.language for block in BLOCKS}
    assert languages <= {*EXECUTED, *SHOWN}
    unexplained = [
        str(block)
        for block in BLOCKS
        if block.mark is not None and block.mark[0] == "not run" and len(block.mark[1]) < 20
    ]
    assert unexplained == []


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.file}))
def test_files_that_a_page_shows_are_run_by_a_test_of_that_page(page: Any) -> None:
    assert [name for name, source in sources().items() if f"{page.name}" in source]


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=str(block))
        for block in BLOCKS
        if block.mark is not None and block.mark[0] == "run by"
    ],
)
def test_the_test_that_a_mark_names_exists(block: pages.Block) -> None:
    assert block.mark is not None
    path, _, name = block.mark[1].strip("`").partition("::")
    assert f"def {name}(" in sources()[path]


@pytest.mark.parametrize("blocks", python_pages())
@pytest.mark.usefixtures("alone")
def test_the_python_of_a_page_is_executed(
    blocks: list[pages.Block], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: dict[str, Any] = {"__name__": "proj"}
    execute(PRELUDE + READERS.get(blocks[0].page.name, ""), module)
    # A page may show one task several times, each time with other options.
    with contextlib.ExitStack() as apps:
        for block in blocks:
            app = celery.Celery("proj", set_as_current=False, broker="memory://")
            apps.callback(app.close)
            app.conf.pglock_database_url = database.url
            app.set_current()
            module["app"] = app
            proj: Any = types.ModuleType("proj")
            proj.app = app
            monkeypatch.setitem(sys.modules, "proj", proj)
            execute("\n" * block.line + block.text, module, str(block.page))
            # Settings are read, and tasks registered with their options.
            settings.of(module["app"])
            module["app"].finalize()
            shared_by_all().difference_update(
                {each for each in shared_by_all() if each.__module__ != BUILTINS}
            )


def execute(text: str, module: dict[str, Any], page: str = "<prelude>") -> None:
    """Execute what the documentation, or this file, says; a traceback names page and line."""
    exec(compile(text, page, "exec"), module)  # noqa: S102 - that is what is tested


def shared_by_all() -> set[Any]:
    state: Any = celery._state  # noqa: SLF001 - as the fixture `alone`
    found: set[Any] = state._on_app_finalizers  # noqa: SLF001
    return found


@pytest.mark.parametrize("block", of("console"))
def test_the_commands_of_a_page_are_there(block: pages.Block) -> None:
    for command, _ in pages.commands(block.text):
        expect_command(command.partition("  #")[0])


def expect_command(command: str) -> None:
    words = list(
        itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), shlex.split(command))
    )
    match words:
        case ["celery", *_]:
            expect_parsed(words)
        case ["pip", "install", *packages]:
            for extra in re.findall(r"celery-pglock\[(.*?)\]", " ".join(packages)):
                assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"])
        case ["make", *targets]:
            makefile = (REPOSITORY / "Makefile").read_text()
            for target in targets:
                name, assigned, _ = target.partition("=")
                found = rf"^{name} \?=" if assigned else rf"^{name}:"
                assert re.search(found, makefile, re.MULTILINE), target
        case _:
            pytest.fail(f"nobody knows whether this works: {command}")


def test_control_a_command_that_is_not_there_is_refused() -> None:
    for command in ("celery -A proj pglock state", "celery -A proj pglock runs --stat done"):
        with pytest.raises(click.UsageError):
            expect_command(command)
    with pytest.raises(AssertionError):
        expect_command("pip install 'celery-pglock[all]'")
    with pytest.raises(AssertionError):
        expect_command("make everything")


def test_the_key_in_sql_is_the_key(database: Database) -> None:
    (block,) = (each for each in BLOCKS if each.page.name == "keys.md" and each.language == "sql")
    assert "'celery_pglock:v1:proj:task:proj.write_invoices'" in block.text
    with database.connect() as connection:
        # psycopg takes text that it has not seen for a statement only as a literal or as bytes.
        row = connection.execute(block.text.encode()).fetchone()
    assert row == (keys.from_name("proj", "task", "proj.write_invoices"),)


def test_the_fence_in_sql_refuses_who_is_older(database: Database) -> None:
    (block,) = (
        each for each in BLOCKS if each.page.name == "long-jobs.md" and each.language == "sql"
    )
    with database.connect() as connection:
        connection.execute("CREATE TABLE prices (period text, content text, fence integer)")
        connection.execute("INSERT INTO prices VALUES ('2026-11-29', 'none', 0)")
        statement = re.sub(r":(\w+)", r"%(\1)s", block.text).encode()
        changed = [
            connection.execute(
                statement, {"period": "2026-11-29", "content": f"of {attempt}", "attempt": attempt}
            ).rowcount
            for attempt in (1, 2, 1)
        ]
        assert changed == [1, 1, 0]
        assert connection.execute("SELECT content FROM prices").fetchall() == [("of 2",)]


def test_no_sql_escapes() -> None:
    pages_with_sql = [block.page.name for block in BLOCKS if block.language == "sql"]
    assert sorted(pages_with_sql) == ["keys.md", "long-jobs.md"]


@pytest.mark.parametrize("block", of("ini"))
def test_a_configuration_can_be_read(block: pages.Block) -> None:
    configparser.ConfigParser(strict=True).read_string(block.text)


@pytest.mark.parametrize("block", of("json"))
def test_a_definition_can_be_read(block: pages.Block) -> None:
    definitions.read("entry", block.text)


def test_the_prelude_has_what_the_package_offers() -> None:
    module: dict[str, Any] = {}
    execute(PRELUDE, module)
    assert set(celery_pglock.__all__) <= set(module)

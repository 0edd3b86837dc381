"""Each promise names a test, and that test exists."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.processes import REPOSITORY

PAGE = (REPOSITORY / "docs/explanation/guarantees.md").read_text()
CITED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def decorators(source: str, name: str) -> list[str] | None:
    """Return the marks of a module and of its function, or None if it has no such function."""
    module: list[ast.expr] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
            value = statement.value
            module += value.elts if isinstance(value, ast.List) else [value]
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return [ast.unparse(mark) for mark in (*module, *statement.decorator_list)]
    return None


def is_chaos(decorator: str) -> bool:
    """Whether all of a test is left out by default: not one case of it by `pytest.param`."""
    return decorator.startswith("pytest.mark.chaos")


@pytest.mark.parametrize(("path", "name"), CITED)
def test_a_cited_test_exists_and_is_among_those_that_always_run(path: str, name: str) -> None:
    source = (REPOSITORY / path).read_text()
    found = decorators(source, name)
    assert found is not None
    assert not any(map(is_chaos, found))


def test_control_a_test_that_does_not_always_run_is_told_apart() -> None:
    test = "def test_x():\n    pass\n"
    for marked in (
        f"@pytest.mark.slow\n@pytest.mark.chaos\n{test}",
        f"pytestmark = pytest.mark.chaos\n{test}",
        f"pytestmark = [pytest.mark.slow, pytest.mark.chaos]\n{test}",
    ):
        assert any(map(is_chaos, decorators(marked, "test_x") or []))
    assert decorators(test, "test_x") == []
    assert decorators(test, "test_y") is None


def test_every_promise_cites_a_test() -> None:
    parts = re.split(r"^\*\*(?=G\d )", PAGE.partition("## Not promised")[0], flags=re.MULTILINE)
    assert [part[:2] for part in parts[1:]] == [f"G{number}" for number in range(1, 8)]
    for part in parts[1:]:
        assert "`tests/" in part, part[:40]

"""Each promise names a test, and that test exists."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import REPOSITORY

PAGE = (REPOSITORY / "docs/explanation/guarantees.md").read_text()
CITED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("path", "name"), CITED)
def test_a_cited_test_exists(path: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (REPOSITORY / path).read_text(), re.MULTILINE)


def test_every_promise_cites_a_test() -> None:
    parts = re.split(r"^\*\*(?=G\d )", PAGE.partition("## Not promised")[0], flags=re.MULTILINE)
    assert [part[:2] for part in parts[1:]] == [f"G{number}" for number in range(1, 8)]
    for part in parts[1:]:
        assert "`tests/" in part, part[:40]

"""What versions are promised, in the four places that say so."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.processes import REPOSITORY

PROJECT: Final = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
# The tools that the tests use need newer ones of these.
NEWER: Final = {"typing-extensions"}


def floors() -> dict[str, Version]:
    """Return the lowest version of each package that users get, the demonstration's aside."""
    extras = PROJECT["optional-dependencies"]
    listed = [*PROJECT["dependencies"]]
    listed += (text for name, texts in extras.items() if name != "demo" for text in texts)
    found = {}
    for text in listed:
        wanted = Requirement(text)
        (floor,) = (each.version for each in wanted.specifier if each.operator == ">=")
        found[wanted.name] = Version(floor)
    return found


def pairs() -> list[dict[str, Any]]:
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())
    found: list[dict[str, Any]] = workflow["jobs"]["pair"]["strategy"]["matrix"]["include"]
    return found


def test_the_lowest_versions_are_the_ones_that_are_tested() -> None:
    lines = (REPOSITORY / "tests/lowest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    lowest = {name: floor for name, floor in floors().items() if name not in NEWER}
    assert {name: Version(version) for name, version in pinned.items()} == lowest


def test_the_pythons_are_those_of_the_classifiers() -> None:
    said = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert [pair["python"] for pair in pairs()] == said
    assert PROJECT["requires-python"] == f">={said[0]}"


def test_the_oldest_celery_is_among_the_pairs() -> None:
    oldest = floors()["celery"]
    assert pairs()[0]["celery"] == f"{oldest.major}.{oldest.minor}"


def test_the_pairs_are_those_of_the_documentation() -> None:
    page = (REPOSITORY / "docs/reference/compatibility.md").read_text()
    shown = re.findall(r"^\| (3\.\d+) \| (5\.\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert shown == [(pair["python"], pair["celery"], pair["postgresql"]) for pair in pairs()]
    table = dict(re.findall(r"^\| (\w+)(?:, .*)? \| ([\d.]+) \| ", page, re.MULTILINE))
    said = {name.lower(): version for name, version in table.items()}
    assert {"celery", "django", "psycopg", "sqlalchemy"} <= said.keys()
    for name, floor in floors().items():
        if name in said:
            assert Version(said[name]) == floor, name

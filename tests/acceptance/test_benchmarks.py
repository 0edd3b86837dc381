"""`make bench` in small: each part measures something, and the page says all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import benchmarks
from tests.support.processes import REPOSITORY, Processes

PARTS = {"a": ("guards", "deliveries"), "b": ("beats",), "c": ("failover",), "d": ("claims",)}
PARTS |= {"e": ("server",)}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "letters",
    ["d", pytest.param("a,b,c,e", marks=pytest.mark.chaos)],
)
def test_a_quick_run_measures_everything_and_writes_its_page(
    processes: Processes, tmp_path: Path, letters: str
) -> None:
    page = tmp_path / "performance.md"
    bench = processes.python(
        *("-m", benchmarks.__name__, "--quick", "--only", letters, "--page", page), name="bench"
    )
    assert bench.wait(280) == 0, bench.output()
    figures = json.loads(page.with_suffix(".json").read_text())
    wanted = [name for letter in letters.split(",") for name in PARTS[letter]]
    assert list(figures["parts"]) == wanted
    text = page.read_text()
    assert text.startswith("# What it costs\n")
    # A table row for each guard, size, kill and role; "nan" would be a figure that is none.
    assert "nan" not in text
    for name in _named(figures["parts"]):
        assert f"| {name} |" in text
    if "d" in letters:
        assert "| rows | 1 process | 2 processes |" in text
    plots = [line.partition("](")[2].rstrip(")") for line in text.splitlines() if "![" in line]
    assert plots
    assert all((tmp_path / plot).read_text().startswith("<?xml") for plot in plots)
    assert str(REPOSITORY) not in text


def _named(parts: dict[str, dict[str, object]]) -> list[str]:
    names: list[str] = []
    for part, place in (("guards", "near"), ("server", "idle"), ("server", "wal")):
        names += list(parts.get(part, {}).get(place, {}))  # type: ignore[call-overload]
    return names

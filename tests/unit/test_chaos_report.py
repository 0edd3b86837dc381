"""The page of evidence says what the figures say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos import controls, report


def _run(seed: int, **changes: Any) -> report.Run:
    return {
        "seed": seed, "seconds": 600, "machine": "2 cores", "python": "3", "celery": "5",
        "psycopg": "3", "faults": {"kill child": 100, "freeze leader": 20}, "fallen": 0,
        "periods": 1500, "runs": 1600, "doubled": 0, "lost": 0, "overlaps": 0, "other": 0,
        "outcomes": {"done": 1499, "failed: lock lost": 1},
        "deaths": {"killed": 3, "session lost": 2}, "explained": [0.25, 0.5],
        "takeovers": [["kill leader", 0.4], ["kill leader", 0.8]],
        "lateness": [0] * (len(report.BINS) + 1),
        "controls": {control.name: True for control in controls.CONTROLS}, **changes,
    }  # fmt: skip


def _line(page: str, beginning: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(f"| {beginning} |"))


def test_the_figures_of_all_runs_are_added() -> None:
    page = report.page([_run(1), _run(2)])
    assert _line(page, "periods lost") == "| periods lost | 0 | 3000 | 0.1 % |"
    assert _line(page, "kill child") == "| kill child | 200 |"
    assert _line(page, "kill leader").startswith("| kill leader | 4 | 0.60 s |")
    assert "the longest took 0.50 s" in page
    assert f"| {controls.CONTROLS[0].name} | 2 of 2 |" in page


def test_what_was_found_is_not_hidden() -> None:
    page = report.page([_run(1), _run(2, lost=1, controls={controls.CONTROLS[0].name: False})])
    assert _line(page, "periods lost") == "| periods lost | 1 | 3000 | (found) |"
    assert f"| {controls.CONTROLS[0].name} | 1 of 2 |" in page


@pytest.mark.parametrize(("n", "percent"), [(1_000, 0.299), (3_000, 0.0998), (30_000, 0.00999)])
def test_the_bound_of_none_in_n(n: int, percent: float) -> None:
    assert 100 * report.bound(n) == pytest.approx(percent, rel=0.01)

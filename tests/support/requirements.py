"""What a test needs from the machine: skipped without it, or failed where all must be there."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

REQUIRE_VARIABLE = "PGLOCK_TEST_REQUIRE"
_ANOTHER_VERSION = "of another version: "


def require(condition: object, what: str) -> None:
    """Skip the test unless the condition holds; with `PGLOCK_TEST_REQUIRE=all`, fail it.

    Args:
        condition: Whether it is there.
        what: What is missing, and how to get it.
    """
    if condition:
        return
    if everything_required():
        pytest.fail(f"required by {REQUIRE_VARIABLE}=all: {what}", pytrace=False)
    pytest.skip(f"needs {what}")


def since(condition: object, version: str) -> None:
    """Skip a test of what only later versions have; nothing is missing then.

    Args:
        condition: Whether the version is recent enough.
        version: The first one that has it.
    """
    if not condition:
        pytest.skip(f"{_ANOTHER_VERSION}{version}")


def everything_required() -> bool:
    return os.environ.get(REQUIRE_VARIABLE) == "all"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn skips that did not go through `require` into failures too."""
    report = yield
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and _ANOTHER_VERSION not in _reason(report)
        and everything_required()
    ):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} was skipped under {REQUIRE_VARIABLE}=all: {_reason(report)}"
        )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a skipped test file into a failure too."""
    report = yield
    if report.skipped and everything_required():
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid} was skipped under {REQUIRE_VARIABLE}=all: {_reason(report)}"
        )
    return report


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)

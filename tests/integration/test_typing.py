"""What users write has the same types to mypy and to pyright, the checkers that most of them have.

mypy reads the whole project with `make types`; here it reads the example alone. pyright fetches its
program from npm when it is first run.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.support.processes import REPOSITORY
from tests.support.requirements import require

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]
EXAMPLE: Final = REPOSITORY / "tests/typing/api.py"
WRONG: Final = """
from celery_pglock import advisory_lock, current_run

current_run().attempt.upper()
advisory_lock(4.5)
"""
CHECKERS: Final = {
    "mypy": ["mypy", "--strict", "--no-error-summary"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


def errors(checker: str, file: Path) -> list[str]:
    """Return what a checker has to say against a file."""
    require(find_spec(checker), f"{checker} (pip install {checker})")
    done = subprocess.run(
        [sys.executable, "-m", *CHECKERS[checker], str(file)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "error:" in line]


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_example_has_the_types_that_it_says(checker: str) -> None:
    assert errors(checker, EXAMPLE) == []


@pytest.mark.parametrize("checker", CHECKERS)
def test_control_what_is_wrong_is_told(checker: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    assert len(errors(checker, file)) == 2

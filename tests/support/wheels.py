"""The wheel of this tree, as somebody gets it who has nothing else of the project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

from tests.support.processes import REPOSITORY


def build(directory: Path, kind: Literal["wheel", "sdist"] = "wheel") -> Path:
    """Build a distribution into a directory and return its file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(directory)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    (built,) = directory.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built

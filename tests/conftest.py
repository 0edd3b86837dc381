"""The list of fixture plugins; nothing else."""

from __future__ import annotations

pytest_plugins = [
    "tests.support.requirements",
    "tests.support.servers",
    "tests.support.databases",
    "tests.support.processes",
    "tests.support.pgbouncer",
    "tests.support.stage",
]

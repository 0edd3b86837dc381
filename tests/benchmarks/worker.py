"""What `celery -A tests.benchmarks.worker worker` runs."""

from __future__ import annotations

from tests.benchmarks import tasks

app = tasks.from_environment()

"""Lock sessions for the tests of the engine room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.workbench import Sessions


@pytest.fixture
def lock_sessions() -> Iterator[Sessions]:
    """Opens lock sessions and stacks that are closed at the end of the test."""
    opened = Sessions()
    yield opened
    opened.close()

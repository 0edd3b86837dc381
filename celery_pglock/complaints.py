"""The same trouble, said at once and then ever more seldom."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

_LONGEST: Final = 60.0


class Complaint:
    """Something that is tried again and again, and fails.

    It is said again after 1, 2, 4 s, and then once a minute; another error at once.

    Args:
        tell: says it.
    """

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._said = ""
        self._again_at = self._every = 0.0

    def of(self, error: Exception) -> None:
        """Say what went wrong, if it is not the same as a moment ago."""
        now = time.monotonic()
        text = f"{type(error).__name__}: {error}"
        if text != self._said or now >= self._again_at:
            self._tell(error)
            self._said = text
            self._every = min(_LONGEST, max(1.0, self._every * 2))
            self._again_at = now + self._every

    def settled(self) -> None:
        """Forget it: it has worked."""
        self._said, self._every = "", 0.0

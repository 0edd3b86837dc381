"""Names that were misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest(name: str, known: Sequence[str]) -> str:
    """Return what to say of a name that is not among those that are known."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known[:10]) or 'none'}"

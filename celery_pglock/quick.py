"""Dataclasses that a run makes a dozen of."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # To the type checker they are frozen where they say so.
    from dataclasses import dataclass
else:

    def dataclass(**options: Any) -> Any:
        """Make a class of immutable values that does not enforce it at run time.

        A frozen one writes each field by a call of ``object.__setattr__``, which takes three
        times as long as an assignment.
        """
        return dataclasses.dataclass(**{**options, "frozen": False, "unsafe_hash": True})


__all__ = ["dataclass"]

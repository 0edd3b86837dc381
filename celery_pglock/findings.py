"""What an examination finds, what it could not look at, and how one check waits for another.

A finding is one sentence that says what is wrong and one that says what to do. A check whose
ground has been found missing is not made, and that is said: silence would pass for health.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal

from celery_pglock import errors

Severity = Literal["error", "warning"]

#: By which a finding is known; each is described in docs/howto/troubleshoot.md.
Code = Literal[
    "clock_differs",
    "database_unreachable",
    "database_url",
    "disabled",
    "entry_unusable",
    "equal_keys",
    "expires_beyond_retention",
    "limit_not_lifted",
    "namespace_shared",
    "plain_task",
    "pooler",
    "read_only",
    "redelivery",
    "rights_missing",
    "schedule_never_comes",
    "schema_missing",
    "schema_old",
    "server_in_recovery",
    "server_too_old",
    "settings",
    "shared_period",
    "stock_beat",
    "unique_missing",
    "unknown_task",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong, or looks so.

    Attributes:
        severity: ``error``: something does not work, or a promise does not hold.
        code: stable, for programs.
        reason: one sentence: what is wrong, with the name of the object.
        remedy: one sentence: what to do.
    """

    severity: Severity
    code: Code
    reason: str
    remedy: str


@dataclasses.dataclass(frozen=True, slots=True)
class NotMade:
    """A check that could not be made.

    Attributes:
        check: its name.
        because: why.
    """

    check: str
    because: str


def of_error(code: Code, error: errors.PGLockError, severity: Severity = "error") -> Finding:
    """Return an error as a finding: its remedy stands behind the last semicolon."""
    reason, found, remedy = str(error).rpartition("; ")
    if not found:
        reason, remedy = remedy, "correct it"
    return Finding(severity=severity, code=code, reason=reason, remedy=remedy)


class Examination:
    """The checks of one examination, in their order.

    Attributes:
        findings: what was found.
        made: the names of the checks that were made.
        not_made: those that could not be.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.made: list[str] = []
        self.not_made: list[NotMade] = []
        # Checks that found an error or were not made: what needs them has no ground.
        self._broken: dict[str, str] = {}

    def check(
        self, name: str, make: Callable[[], Iterable[Finding]], *, needs: Iterable[str] = ()
    ) -> None:
        """Make a check, unless one of those that it needs has found an error or was not made.

        A check that is broken off, because the database has gone in its middle for instance, has
        not been made either.
        """
        because = next((self._broken[need] for need in needs if need in self._broken), None)
        found: list[Finding] = []
        if because is None:
            try:
                found.extend(make())
            except errors.DatabaseUnavailable as error:
                found.append(of_error("database_unreachable", error))
                because = "the database has gone"
            except errors.PGLockError as error:
                because = str(error)
        # One and the same fault may stand in the way of two checks.
        self.findings += [finding for finding in found if finding not in self.findings]
        if because is not None:
            self.skip(name, because)
            return
        self.made.append(name)
        fault = next((finding.code for finding in found if finding.severity == "error"), None)
        if fault is not None:
            self._broken[name] = f"{fault} was found"

    def skip(self, name: str, because: str) -> None:
        """Say that a check is not made, and why."""
        self.not_made.append(NotMade(name, because))
        self._broken[name] = because

    @property
    def unreachable(self) -> bool:
        """Whether the database could not be reached."""
        return any(finding.code == "database_unreachable" for finding in self.findings)

    @property
    def failed(self) -> bool:
        """Whether there is an error."""
        return any(finding.severity == "error" for finding in self.findings)

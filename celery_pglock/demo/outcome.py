"""The outcome: the figures, what was done to bring them about, and what they mean; pure."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping, Sequence

from celery_pglock.demo import story, verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """How a play ended.

    Attributes:
        verdict: the figures.
        deeds: what was done to the cast.
        settled: whether everything had come to an end when the figures were taken.
        notes: what the ledger has about each period that is not as it should be.
    """

    verdict: verdict.Verdict
    deeds: story.Deeds
    settled: bool
    notes: Mapping[dt.datetime, Sequence[str]]

    @property
    def guarded(self) -> bool:
        """Whether there were locks and a ledger."""
        return self.verdict.done is not None

    @property
    def sentence(self) -> str:
        """What the figures mean."""
        counted = self.verdict.count
        kills = self.deeds.beats + self.deeds.workers + self.deeds.processes
        if self.guarded and counted.right:
            return (
                f"Each of {counted.due} periods was billed once to every customer, through {kills} "
                f"kills and {self.deeds.doubles} messages that were sent twice."
            )
        if counted.right:
            return (
                "Nothing was doubled this time, although nothing prevents it: play it longer, or "
                "with another seed."
            )
        wrong = f"{counted.doubles} invoices doubled, {counted.missing} missing"
        if counted.undue:
            wrong += f", {counted.undue} for periods that were not due"
        if not self.guarded:
            return f"{wrong}: this is what the locks prevent; make demo plays the same with them."
        if not self.settled:
            wrong += "; and not everything had come to an end in time"
        return (
            f"{wrong}: this must not happen; play the same seed with --logs DIR to keep the logs."
        )

    def lines(self) -> list[tuple[str, str, str]]:
        """Return the rows of the last table: what, how many, and how it was counted."""
        counted, deeds = self.verdict.count, self.deeds
        due = "anchor + k x every in beat_entries, until the last leader resigned"
        if not self.guarded:
            due = "all from the first to the last that was begun"
        killed = f"{deeds.beats} beats, {deeds.workers} workers, {deeds.processes} pool processes"
        lines = [
            ("kill -9", str(deeds.beats + deeds.workers + deeds.processes), killed),
            ("sent a second time", str(deeds.doubles), "the same occurrence, another task id"),
            ("periods due", str(counted.due), due),
            ("runs done", _or_dash(self.verdict.done), "rows of job_runs that say so"),
            ("attempts", str(self.verdict.attempts), "claims of a period, or beginnings to write"),
            ("lost attempts", _or_dash(self.verdict.lost), "died without an outcome"),
            ("invoices", str(counted.invoices), f"{counted.billed} periods billed as they should"),
            ("doubles", str(counted.doubles), "beyond a customer's first in a period"),
            ("missing", str(counted.missing), "customers without one, over all periods due"),
            ("not due", str(counted.undue), "invoices for other periods than those due"),
        ]
        how = "sent_at (confirmed) - due_at in job_runs: the first due after the kill"
        for number, late in enumerate(self.verdict.late, start=1):
            seconds = "never sent" if late.seconds is None else f"{late.seconds:.3f} s"
            lines.append((f"late after leader kill {number}", seconds, how if number == 1 else ""))
        if self.verdict.latest is not None:
            lines.append(("latest of all", f"{self.verdict.latest:.3f} s", "sent_at - due_at"))
        return lines


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)

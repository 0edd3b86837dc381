"""``pglock doctor``: what is wrong with a set-up, and what to do about it."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterable, Iterator

import click

from celery_pglock import examination, findings
from celery_pglock.cli import columns, documents, switches, terminal

_FAILED = 1
_UNAVAILABLE = 69
_WIDTH = 10


@click.command(name="doctor")
@switches.as_json
@click.pass_context
def command(ctx: click.Context, *, as_json: bool) -> None:
    """Examine settings, database, tables, tasks and schedule, and say what to do.

    Changes nothing and takes no lock. Exits 1 when there is an error, 69 when the database
    cannot be reached.
    """
    examined = examination.examine(ctx.obj.app)
    if as_json:
        documents.write(_object(examined), dt.UTC)
    else:
        terminal.write(_lines(examined, terminal.width()))
    made = examined.examination
    ctx.exit(_UNAVAILABLE if made.unreachable else _FAILED if made.failed else 0)


def _object(examined: examination.Examined) -> dict[str, object]:
    made = examined.examination
    return {
        "namespace": examined.namespace,
        "database": examined.database,
        "healthy": not made.findings,
        "findings": [dataclasses.asdict(finding) for finding in made.findings],
        "made": made.made,
        "not_made": [dataclasses.asdict(not_made) for not_made in made.not_made],
    }


def _lines(examined: examination.Examined, width: int | None) -> Iterator[columns.Line]:
    made = examined.examination

    def beside(label: str, *texts: str, kind: str = "label") -> Iterator[columns.Line]:
        return columns.hanging(label, _WIDTH, *texts, width=width, kind=kind)

    if examined.namespace is not None:
        where = examined.database or "a database that was not reached"
        yield from beside("namespace", f"{examined.namespace} in {where}")
    for finding in sorted(made.findings, key=lambda finding: finding.severity):
        texts = (finding.code, finding.reason, f"remedy: {finding.remedy}")
        yield from beside(finding.severity, *texts, kind=finding.severity)
    for because, checks in _by_cause(made.not_made).items():
        yield from beside("not made", ", ".join(checks), f"because {because}", kind="warning")
    if not made.findings:
        made_checks = _number(len(made.made), "check")
        yield from columns.wrapped(f"all is well: {made_checks} made, nothing found", width)
        return
    errors = sum(finding.severity == "error" for finding in made.findings)
    found = f"{_number(errors, 'error')}, {_number(len(made.findings) - errors, 'warning')}"
    told = f"{found}; each code is explained in the documentation, Troubleshoot"
    yield from columns.wrapped(told, width)


def _by_cause(not_made: Iterable[findings.NotMade]) -> dict[str, list[str]]:
    causes: dict[str, list[str]] = {}
    for each in not_made:
        causes.setdefault(each.because, []).append(each.check)
    return causes


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"

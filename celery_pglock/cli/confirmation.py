"""Asking before something is done that cannot be undone.

Only where somebody is there to answer: a script that has run for years must neither hang nor
fail because of a question.
"""

from __future__ import annotations

import sys

import click

from celery_pglock.cli import columns, terminal


def needed(*, yes: bool) -> bool:
    """Return whether somebody sits at a terminal who has not said yes already."""
    return not yes and terminal.is_one(sys.stdin) and terminal.is_one(sys.stderr)


def ask(question: str) -> None:
    """Ask on standard error, so that standard output holds the answer of the command alone.

    Raises:
        ClickException: the answer is no.
    """
    if not click.confirm(f"{columns.printable(question)}; go on?", err=True):
        raise click.ClickException("nothing was changed")

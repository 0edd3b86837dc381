"""What ``--json`` prints: one document on standard output, or none and a sentence on standard error."""

from __future__ import annotations

import datetime as dt
import functools
import json

import click


def write(document: object, zone: dt.tzinfo) -> None:
    """Print a document in one line, with moments in ISO 8601 in the zone, with the offset."""
    click.echo(json.dumps(document, default=functools.partial(_plain, zone)))


def _plain(zone: dt.tzinfo, value: object) -> str:
    return value.astimezone(zone).isoformat() if isinstance(value, dt.datetime) else str(value)

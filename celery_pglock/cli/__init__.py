"""``celery -A proj pglock …``: what an operator does from the command line.

Exit codes: 0 it is so; 1 it is not so, or could not be done; 2 the command or the
configuration is wrong; 69 the database cannot be used.
"""

from __future__ import annotations

from celery_pglock.cli.main import pglock

__all__ = ["pglock"]

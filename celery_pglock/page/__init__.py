"""A page that shows what ran, what did not, and who holds what: one WSGI callable, read-only.

Whoever can reach it can see it: there is no login. No arguments, results or error texts of tasks
are on it.
"""

from __future__ import annotations

from celery_pglock.page.application import wsgi

__all__ = ["wsgi"]

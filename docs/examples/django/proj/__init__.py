"""The project; it imports its Celery application, so that Django and the workers have the same."""

from __future__ import annotations

from .celery import app as celery_app

__all__ = ["celery_app"]

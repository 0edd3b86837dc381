"""A Django project for tests: one app that writes rows, the admin, and celery-pglock."""

from __future__ import annotations

from tests.apps.django_site.celery import app as celery_app

__all__ = ["celery_app"]

"""The page, to be included: ``path("pglock/", include("celery_pglock.contrib.django.urls"))``."""

from __future__ import annotations

from typing import Final

from django.urls import path

from celery_pglock.contrib.django import pages

app_name: Final = "pglock"
urlpatterns: Final = [
    path("", pages.page, name="page"),
    path("<path:path>", pages.page, name="parts"),
]

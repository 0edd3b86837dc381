"""The settings of the project; the environment says where things are, and may change any.

`SITE_DATABASE_URL` is a libpq URL, `SITE_OTHER_URL` that of a second database,
`SITE_BROKER_URL` the broker; `SITE_SETTINGS` is JSON and stands above all others.
"""

from __future__ import annotations

import json
import os
from typing import Any

from psycopg import conninfo


def database(variable: str) -> dict[str, Any]:
    """Return the database that a variable describes, as Django takes it."""
    parts = conninfo.conninfo_to_dict(os.environ.get(variable, "postgresql://127.0.0.1:1/site"))
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.get("dbname"),
        "USER": parts.get("user") or "",
        "PASSWORD": parts.get("password") or "",
        "HOST": parts.get("host") or "",
        "PORT": parts.get("port") or "",
    }


SECRET_KEY = "only for tests"
DEBUG = False
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.apps.django_site.urls"
USE_TZ = True
TIME_ZONE = "Europe/Berlin"
DATABASES: dict[str, Any] = {
    "default": database("SITE_DATABASE_URL"),
    "other": database("SITE_OTHER_URL"),
}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "celery_pglock.contrib.django",
    "tests.apps.django_site.books",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
CELERY_BROKER_URL = os.environ.get("SITE_BROKER_URL", "redis://127.0.0.1:1/0")
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_DEFAULT_QUEUE = os.environ.get("SITE_QUEUE", "site")
CELERY_PGLOCK_DJANGO_ALIAS: str | None = "default"
CELERY_BEAT_SCHEDULE = {
    "hourly": {"task": "books.save", "schedule": 3600.0, "args": ["hourly", 1]},
}
globals().update(json.loads(os.environ.get("SITE_SETTINGS", "{}")))

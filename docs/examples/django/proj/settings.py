"""The settings of the project: one database, which also holds the locks."""

from __future__ import annotations

import os

from celery.schedules import crontab

SECRET_KEY = os.environ.get("SECRET_KEY", "only for the example")
ALLOWED_HOSTS = ["localhost"]
ROOT_URLCONF = "proj.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": os.environ.get("PGDATABASE", "proj"),
        "HOST": os.environ.get("PGHOST", "localhost"),
        "PORT": os.environ.get("PGPORT", "5432"),
        "USER": os.environ.get("PGUSER", "proj"),
        "PASSWORD": os.environ.get("PGPASSWORD", ""),
    }
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "celery_pglock.contrib.django",
    "invoices",
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

CELERY_BROKER_URL = os.environ.get("BROKER_URL", "redis://localhost")
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_PGLOCK_DJANGO_ALIAS = "default"
CELERY_BEAT_SCHEDULE = {
    "invoices": {"task": "invoices.write", "schedule": crontab(hour="2", minute="30")}
}

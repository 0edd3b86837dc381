"""The Celery application of the project, as Celery's guide for Django has it."""

from __future__ import annotations

import os

from celery import Celery

from celery_pglock.demo import redelivery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.apps.django_site.settings")

if "unacked_restore_interval" in os.environ.get("SITE_SETTINGS", ""):
    redelivery.look_each_second()
app = Celery("site")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

"""The Celery application of the project, and what its settings say of the tables.

Django asks for it before anything of Celery is asked for: when it makes the models, migrates, or
shows the admin. It is the application that ``proj/__init__.py`` has imported by then.
"""

from __future__ import annotations

from typing import Any, Final

from celery import Celery, current_app

from celery_pglock import errors, settings

_DEFAULT_SCHEMA: Final = "pglock"
# Kept, because "current" is a word of one thread.
_found: list[Celery] = []


def celery_app() -> Celery | None:
    """Return the project's application, or None where only Celery's own stand-in is there."""
    if not _found:
        proxy: Any = current_app
        app: Celery = proxy._get_current_object()  # noqa: SLF001 - as Celery opens its proxies
        if app.main == "default":
            return None
        _found.append(app)
    return _found[0]


def config() -> settings.Settings:
    """Return the settings of the project's application.

    Raises:
        ConfigurationError: there is no application, or a setting is wrong.
    """
    app = celery_app()
    if app is None:
        msg = (
            "no Celery application is there when Django starts, so its pglock_ settings are not "
            'known; import it in the __init__.py of the project, as "from .celery import app"'
        )
        raise errors.ConfigurationError(msg)
    return settings.of(app)


def schema() -> str:
    """Return the PostgreSQL schema of the tables; what is wrong is left for the checks to say."""
    try:
        return config().schema
    except errors.ConfigurationError:
        return _DEFAULT_SCHEMA


def alias() -> str | None:
    """Return the alias that holds the tables, or None: whichever Django is working on."""
    try:
        return config().django_alias
    except errors.ConfigurationError:
        return None

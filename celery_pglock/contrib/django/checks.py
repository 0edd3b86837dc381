"""``manage.py check``: what is set so that locked tasks would fail, or promise less than they seem to.

Those that look into the database are asked for: ``manage.py check --database default``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import psycopg
from celery import Celery
from django.apps import apps
from django.core import checks
from django.db import router

from celery_pglock import connections, errors, options, schema, sessions, settings, stacks
from celery_pglock.contrib.django import aliases, project

_MIGRATE: Final = "run: manage.py migrate"


def register() -> None:
    """Have Django make these checks."""
    checks.register(configuration)
    checks.register(database, checks.Tags.database)


def configuration(**_: Any) -> list[checks.CheckMessage]:
    """Check what can be known without a connection."""
    app = project.celery_app()
    if app is None:
        return [
            checks.Error(
                "No Celery application is there when Django starts, so the pglock_ settings are "
                "not known.",
                hint='Import it in the __init__.py of the project: "from .celery import app".',
                id="celery_pglock.E001",
            )
        ]
    try:
        config = settings.of(app)
    except errors.ConfigurationError as error:
        return [_error(error, "E002", "Correct it in the Celery settings.")]
    if not config.enabled:
        return []
    try:
        config.target()
        if config.django_alias is not None:
            aliases.target(config.django_alias)
    except errors.ConfigurationError as error:
        return [_error(error, "E003", "See pglock_django_alias in the settings reference.")]
    return list(_of_tasks(config, _transactional(app, config)))


def database(databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """Check what the database of the locks says; only when it is among the given aliases."""
    app = project.celery_app()
    try:
        config = None if app is None else settings.of(app)
        alias = None if config is None else config.django_alias
        if config is None or not config.enabled or alias not in (databases or ()):
            return []
        return list(_of_database(app, config))
    except errors.ConfigurationError:
        return []  # what is wrong with the settings is said by the other check


def _of_tasks(config: settings.Settings, names: list[str]) -> Iterator[checks.CheckMessage]:
    if not names:
        return
    told = ", ".join(names)
    alias = config.django_alias
    if alias is None:
        yield checks.Warning(
            f'What models write in tasks with lock_level="transaction" ({told}) is not committed '
            f"together with their outcome, because pglock_database_url is another connection.",
            hint="Replace pglock_database_url by pglock_django_alias.",
            id="celery_pglock.W001",
        )
        return
    if not aliases.wrapper(alias).settings_dict["AUTOCOMMIT"]:
        yield checks.Error(
            f"DATABASES[{alias!r}] has AUTOCOMMIT off, so tasks with "
            f'lock_level="transaction" ({told}) cannot run.',
            hint="Remove AUTOCOMMIT from it.",
            id="celery_pglock.E004",
        )
    elsewhere = sorted(
        {
            written
            for model in apps.get_models()
            if model._meta.managed  # noqa: SLF001 - Django's public _meta
            and model._meta.app_label not in _DJANGOS_OWN  # noqa: SLF001
            and (written := router.db_for_write(model)) != alias
        }
    )
    if elsewhere:
        yield checks.Warning(
            f"Some models are written to {', '.join(map(repr, elsewhere))}, and what tasks with "
            f'lock_level="transaction" ({told}) write there is not committed together with their '
            f"outcome in {alias!r}.",
            hint="Name the alias that those tasks write to in pglock_django_alias, or silence "
            "this check where they write to no other.",
            id="celery_pglock.W002",
        )


_DJANGOS_OWN: Final = ("admin", "auth", "contenttypes", "sessions", "sites")


def _of_database(app: Any, config: settings.Settings) -> Iterator[checks.CheckMessage]:
    target = config.target()
    levels = {_level(chosen, config) for _, chosen in _locked(app)}
    for level in sorted(levels) or ["session"]:
        plan = sessions.Plan(target=target, level=level, application="pglock:check")
        try:
            stacks.open_session(plan).close()
        except errors.TransactionPooler as error:
            hint = 'Use an alias that leads around it, or lock_level="transaction".'
            yield _error(error, "E005", hint)
        except errors.ServerInRecovery as error:
            yield _error(error, "E006", "Name the alias of the primary in pglock_django_alias.")
            return
        except errors.DatabaseUnavailable as error:
            yield _unavailable(error)
            return
        except errors.ConfigurationError as error:
            yield _error(error, "E007", "Correct the role, the database or the pooler.")
            return
    try:
        with connections.connect(target, application="pglock check") as connection:
            schema.check(connection, config.schema)
    except errors.SchemaError as error:
        fault = f'schema "{error.schema}" {error.fault}'
        hint = error.remedy.replace(schema.MIGRATE_COMMAND, _MIGRATE)
        # No error: "manage.py migrate", which is the remedy, makes these checks too.
        yield checks.Warning(_sentence(fault), hint=_sentence(hint), id="celery_pglock.W003")
    except (errors.DatabaseUnavailable, psycopg.Error) as error:
        yield _unavailable(error)


def _transactional(app: Celery, config: settings.Settings) -> list[str]:
    return [name for name, chosen in _locked(app) if _level(chosen, config) == "transaction"]


def _level(chosen: options.Options, config: settings.Settings) -> sessions.Level:
    level: sessions.Level = chosen.value("lock_level", config.options)
    return level


_importing: list[Celery] = []


def _locked(app: Celery) -> list[tuple[str, options.Options]]:
    if not _importing:
        _importing.append(app)
        try:
            # Celery's Django fixup has the checks made once more before it imports anything.
            app.loader.import_default_modules()
        finally:
            _importing.clear()
    found = ((name, options.locked(task)) for name, task in sorted(app.tasks.items()))
    return [(name, chosen) for name, chosen in found if chosen is not None]


def _error(error: Exception, number: str, hint: str) -> checks.Error:
    return checks.Error(_sentence(str(error)), hint=hint, id=f"celery_pglock.{number}")


def _unavailable(error: Exception) -> checks.Warning:
    # As for a worker, which starts: it may be over in a moment.
    hint = "Start it, or correct its entry in DATABASES."
    return checks.Warning(_sentence(str(error)), hint=hint, id="celery_pglock.W004")


def _sentence(text: str) -> str:
    first, *_ = text.split()
    # The name of a setting stays as it is written.
    text = f"{text[0].upper()}{text[1:]}" if first.rstrip(":").isalpha() else text
    return f"{text.rstrip('.')}."

"""The ``pglock_*`` settings of a Celery application, read and validated once.

This is the only module that reads ``app.conf``. Nothing is ever added to the configuration:
``app.add_defaults`` would override what the user has set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import difflib
import functools
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from celery import Celery

from celery_pglock import connections, errors, keys, lending, values

_log = logging.getLogger("celery_pglock.settings")

_SCHEMA: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,62}")
_MISSING: Final = object()
_CENTURY: Final = 100 * 365.25 * 86400
_MONTH: Final = dt.timedelta(days=30)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What an application has set; every value is valid.

    Attributes:
        database_url: ``pglock_database_url``, or None when it is not set.
        django_alias: ``pglock_django_alias``, or None: the name of a database in ``DATABASES``.
        namespace: ``pglock_namespace``, or the application's name.
        schema: ``pglock_schema``.
        enabled: ``pglock_enabled``.
        lost_after: ``pglock_lost_after``, in seconds.
        standby_poll: ``pglock_standby_poll``, in seconds.
        leader_lease: ``pglock_leader_lease``, in seconds.
        heartbeat_file: ``pglock_heartbeat_file``, or None.
        catchup_window: ``pglock_catchup_window``, in seconds; None: there is none.
        retention: ``pglock_retention``, in seconds; None: nothing is ever deleted.
        rescue_sent_after: ``pglock_rescue_sent_after``, in seconds; None: never.
        rescue_lost_after: ``pglock_rescue_lost_after``, in seconds; None: never.
        warn_after_skips: ``pglock_warn_after_skips``; None: never.
        zone: the application's time zone, in which calendar periods are counted.
        options: the defaults of the task options.
    """

    database_url: connections.Target | None = dataclasses.field(repr=False)  # may hold a password
    namespace: str
    schema: str
    enabled: bool
    lost_after: float
    standby_poll: float
    leader_lease: float
    heartbeat_file: str | None
    catchup_window: float | None
    retention: float | None
    rescue_sent_after: float | None
    rescue_lost_after: float | None
    warn_after_skips: int | None
    zone: dt.tzinfo
    options: Mapping[str, Any]
    django_alias: str | None = None

    def target(self) -> connections.Target:
        """Return the database to lock in.

        Raises:
            ConfigurationError: ``pglock_database_url`` is not set. A task that asks for a lock
                must not run without one.
        """
        if self.django_alias is not None:
            # A function: what the framework says of the database may change.
            return functools.partial(lending.lender().conninfo, self.django_alias)
        if self.database_url is None:
            msg = (
                "pglock_database_url is not set, so a LockedTask has nowhere to take its lock; "
                'set it, for instance app.conf.pglock_database_url = "postgresql://user@host/db", '
                "or set pglock_enabled = False to run without locks"
            )
            raise errors.ConfigurationError(msg)
        return self.database_url


_read: weakref.WeakKeyDictionary[Celery, Settings] = weakref.WeakKeyDictionary()


def of(app: Celery) -> Settings:
    """Return the settings of an application.

    They are read when they are first needed; what is changed afterwards has no effect.

    Raises:
        ConfigurationError: a name is unknown, or a value is not valid; the sentence names it.
    """
    settings = _read.get(app)
    if settings is None:
        settings = _read[app] = _load(app)
    return settings


@contextlib.contextmanager
def replaced(app: Celery, **changes: Any) -> Iterator[Settings]:
    """Give an application other settings for the length of a block, whether it has read them or not.

    For tests, which point it at a database of their own. A scheduler keeps the settings that it
    was made with.

    Args:
        app: the application.
        changes: fields of ``Settings``; they are not validated.

    Raises:
        ConfigurationError: as ``of`` does; what the application itself sets has to be valid.
    """
    before = _read.get(app)
    _read[app] = settings = dataclasses.replace(of(app), **changes)
    try:
        yield settings
    finally:
        if before is None:
            _read.pop(app, None)
        else:
            _read[app] = before


# The task options that have a default of their own, which the setting "pglock_<option>" may
# change for a whole application.
OPTION_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "lock_level": "session",
        "lock_wait": 0.0,
        "lock_conflict": "skip",
        "skip_state": "REVOKED",
        "once_per": "occurrence",
        "max_crash_retries": 3,
        "lock_lost": "raise",
        "lock_unavailable": "postpone",
        "catchup": 1,
    }
)
OPTION_VALIDATORS: Final[Mapping[str, Callable[[object, str], Any]]] = MappingProxyType(
    {
        "lock_level": values.one_of("session", "transaction"),
        "lock_wait": values.seconds,
        "lock_conflict": values.one_of("skip", "postpone", "raise"),
        "skip_state": values.one_of("REVOKED", "SUCCESS"),
        "once_per": values.once_per,
        "max_crash_retries": values.whole,
        "lock_lost": values.one_of("raise", "warn"),
        "lock_unavailable": values.one_of("postpone", "raise"),
        "catchup": values.whole,
    }
)
_NAMES: Final = (
    "database_url",
    "django_alias",
    "namespace",
    "schema",
    "enabled",
    "lost_after",
    "standby_poll",
    "leader_lease",
    "heartbeat_file",
    "catchup_window",
    "retention",
    "rescue_sent_after",
    "rescue_lost_after",
    "warn_after_skips",
    *OPTION_DEFAULTS,
)


def _load(app: Celery) -> Settings:
    _refuse_unknown(app)

    def get(name: str, default: object) -> Any:
        return app.conf.get(f"pglock_{name}", default)

    def limit(name: str, default: object, least: float) -> float | None:
        value = get(name, default)
        if value is None:
            return None
        # Beyond it the server could not subtract it from today.
        return min(_CENTURY, values.seconds(value, f"pglock_{name}", least=least))

    url = database_url(app)
    alias = _django_alias(get("django_alias", None), url)
    schema = get("schema", "pglock")
    if not isinstance(schema, str) or not _SCHEMA.fullmatch(schema):
        msg = f"pglock_schema must be the name of a PostgreSQL schema; got {schema!r}"
        raise errors.ConfigurationError(msg)
    enabled = get("enabled", True)
    if not isinstance(enabled, bool):
        msg = f"pglock_enabled must be True or False; got {enabled!r}"
        raise errors.ConfigurationError(msg)
    poll = values.seconds(get("standby_poll", 0.5), "pglock_standby_poll", least=0.05)
    lease = values.seconds(get("leader_lease", 10.0), "pglock_leader_lease", least=1.0)
    if poll > lease / 4:
        # A standby's own session has the lease too, and only its polls feed it.
        msg = (
            f"pglock_standby_poll ({poll:g} s) must be at most a quarter of pglock_leader_lease "
            f"({lease:g} s)"
        )
        raise errors.ConfigurationError(msg)
    namespace = get("namespace", None)
    if namespace is None:
        namespace = app.main or "default"
    return Settings(
        database_url=url,
        django_alias=alias,
        namespace=keys.check_namespace(str(namespace)),
        schema=schema,
        enabled=enabled,
        lost_after=values.seconds(get("lost_after", 10.0), "pglock_lost_after", least=1.0),
        standby_poll=poll,
        leader_lease=lease,
        heartbeat_file=_path(get("heartbeat_file", None), "pglock_heartbeat_file"),
        catchup_window=limit("catchup_window", None, 1.0),
        retention=limit("retention", _MONTH, 60.0),
        rescue_sent_after=limit("rescue_sent_after", 900.0, 1.0),
        rescue_lost_after=limit("rescue_lost_after", 60.0, 1.0),
        warn_after_skips=_warn_after_skips(get("warn_after_skips", 3)),
        zone=app.timezone,
        options=MappingProxyType(
            {
                name: OPTION_VALIDATORS[name](get(name, default), f"pglock_{name}")
                for name, default in OPTION_DEFAULTS.items()
            }
        ),
    )


def database_url(app: Celery) -> connections.Target | None:
    """Return ``pglock_database_url`` of an application, or None when it is not set.

    Raises:
        ConfigurationError: it is no connection string; it is not repeated.
    """
    url = app.conf.get("pglock_database_url", None)
    if url is not None and not callable(url) and not isinstance(url, str):
        msg = "pglock_database_url must be a text or a function that returns one"
        raise errors.ConfigurationError(msg)
    if isinstance(url, str):
        connections.parameters(url)
    return url


def _django_alias(alias: object, url: connections.Target | None) -> str | None:
    if alias is None:
        return None
    if not isinstance(alias, str) or not alias:
        msg = f"pglock_django_alias must be the name of a database in DATABASES; got {alias!r}"
        raise errors.ConfigurationError(msg)
    if url is not None:
        msg = (
            f"pglock_database_url and pglock_django_alias ({alias!r}) are both set, and only one "
            f"database can hold the locks; remove one of them"
        )
        raise errors.ConfigurationError(msg)
    return alias


def _warn_after_skips(value: object) -> int | None:
    if value is None:
        return None
    if (number := values.whole(value, "pglock_warn_after_skips")) < 1:
        msg = "pglock_warn_after_skips must be at least 1, or None for no warning; got 0"
        raise errors.ConfigurationError(msg)
    return number


def _path(value: object, name: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        msg = f"{name} must be the path of a file; got {value!r}"
        raise errors.ConfigurationError(msg)
    return os.fspath(value)


def _refuse_unknown(app: Celery) -> None:
    config_namespace = _config_namespace(app)
    for key, name in _given(app):
        if name not in _NAMES:
            nearest = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"did you mean pglock_{nearest[0]}?" if nearest else f"known: {_known()}"
            msg = f"unknown setting {key}; {hint}"
            raise errors.ConfigurationError(msg)
        if app.conf.get(f"pglock_{name}", _MISSING) is _MISSING:
            prefix = f"{config_namespace}_" if config_namespace else ""
            # Celery reads the whole name in the case of the prefix.
            wanted = f"{prefix}pglock_{name}"
            wanted = wanted.upper() if prefix.isupper() else wanted.lower()
            _log.warning(
                "setting %s is not read by Celery here; write %s",
                key,
                wanted,
                extra={"event": "setting_not_read", "setting": key},
            )


def _given(app: Celery) -> Iterator[tuple[str, str]]:
    prefixes = ["pglock_"]
    if config_namespace := _config_namespace(app):
        prefixes.append(f"{config_namespace}_pglock_".lower())
    for key in list(app.conf):
        for prefix in prefixes:
            if str(key).lower().startswith(prefix):
                yield key, str(key).lower().removeprefix(prefix)


def _config_namespace(app: Celery) -> str:
    # What config_from_object(..., namespace="CELERY") was given.
    return str(getattr(app, "namespace", None) or "")


def _known() -> str:
    return ", ".join(f"pglock_{name}" for name in _NAMES)

"""The options of a LockedTask, validated when the task is registered.

Celery makes a class attribute of every option it does not know, so a misspelt one would be
silently without effect. Here it is an error that suggests the right name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import celery

from celery_pglock import errors, keys, settings

if TYPE_CHECKING:
    import datetime as dt

    from celery.app.task import Context

LockName = str | int | Callable[[Mapping[str, Any], "Context"], str | int]
OncePer = str | Callable[["dt.datetime"], str] | None

NAMES: Final = ("lock_name", "lock_by", *settings.OPTION_DEFAULTS)
_PREFIXES: Final = ("lock", "once", "skip", "max_crash", "catchup", "pglock")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options of one task; every value is valid.

    Attributes:
        given: what the task sets itself; the rest comes from the settings.
        signature: the parameters of the task's body, without ``self``.
    """

    given: Mapping[str, Any]
    signature: inspect.Signature

    def value(self, name: str, defaults: Mapping[str, Any]) -> Any:
        """Return an option of this task, or the application's default."""
        return self.given[name] if name in self.given else defaults[name]

    def recorded(self, defaults: Mapping[str, Any]) -> bool:
        """Whether the runs of this task have rows in the ledger."""
        return self.value("once_per", defaults) is not None

    def plain_lock(self, namespace: str, task: str) -> tuple[str, int] | None:
        """Return the lock name and its key before any argument has its say.

        None where a function makes the name. With ``lock_by`` the name of a call is another.
        """
        name: LockName = self.given.get("lock_name", task)
        if callable(name):
            return None
        return str(name), name if isinstance(name, int) else keys.from_name(namespace, "task", name)

    def lock(
        self,
        namespace: str,
        task: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        request: Context,
    ) -> tuple[str, int]:
        """Return the lock name of one call and its key.

        Args:
            namespace: of the application.
            task: the registered name of the task, which is the lock name by default.
            args: the call's positional arguments.
            kwargs: the call's keyword arguments.
            request: the call's request, for a ``lock_name`` function.

        Raises:
            TypeError: the arguments do not fit the body, or one named in ``lock_by`` has no
                canonical form.
            ConfigurationError: a ``lock_name`` function returned something unusable.
        """
        name: object = self.given.get("lock_name", task)
        by: Sequence[str] = self.given.get("lock_by", ())
        if isinstance(name, str) and not by:
            return _plain(namespace, name, task)
        arguments: Mapping[str, Any] = {}
        if by or callable(name):
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
        if callable(name):
            name = name(arguments, request)
        what = f"lock_name of task {task!r}"
        if isinstance(name, int) and not isinstance(name, bool):
            if by:
                raise errors.ConfigurationError(_key_with_arguments(f"of task {task!r}"))
            return str(name), keys.check_key(name, what)
        if not isinstance(name, str):
            msg = f"{what} must be a text or a whole number; its function returned {name!r}"
            raise errors.ConfigurationError(msg)
        keys.check_name(name, what)
        if by:
            name = keys.with_arguments(name, {key: arguments[key] for key in by})
        return name, keys.from_name(namespace, "task", name)


@functools.lru_cache(maxsize=4096)
def _plain(namespace: str, name: str, task: str) -> tuple[str, int]:
    keys.check_name(name, f"lock_name of task {task!r}")
    return name, keys.from_name(namespace, "task", name)


def locked(task: object) -> Options | None:
    """Return the options of a task that takes locks, or None.

    ``task_cls=LockedTask`` makes LockedTasks of Celery's own tasks too, some of which run many
    times at once by design: they take none.
    """
    chosen = getattr(task, "_pglock_options", None)
    name = str(getattr(task, "name", ""))
    return chosen if isinstance(chosen, Options) and not name.startswith("celery.") else None


def of(cls: type[celery.Task[..., Any]]) -> Options:
    """Read and validate the options of a task's class.

    Raises:
        ConfigurationError: an option is unknown or has an unusable value; the sentence names
            the task and the option.
    """
    where = f"of task {cls.name or cls.__qualname__!r}"
    _refuse_misspelt(cls, where)
    signature = _signature(cls)
    given: dict[str, Any] = {}
    for name in NAMES:
        value = inspect.getattr_static(cls, name, _UNSET)
        # Statically, because a function that is a class attribute would become a method.
        if isinstance(value, staticmethod):
            value = value.__func__
        if value is _UNSET or (name == "lock_name" and value is None):
            continue
        if name == "lock_name":
            given[name] = _lock_name(value, f"{name} {where}")
        elif name == "lock_by":
            given[name] = _lock_by(value, signature, f"{name} {where}")
        else:
            given[name] = settings.OPTION_VALIDATORS[name](value, f"{name} {where}")
    if isinstance(given.get("lock_name"), int) and given.get("lock_by"):
        raise errors.ConfigurationError(_key_with_arguments(where))
    return Options(given, signature)


class _Unset:
    """The value of an option that a task does not set."""


_UNSET: Final = _Unset()


def _signature(cls: type[celery.Task[..., Any]]) -> inspect.Signature:
    run = inspect.getattr_static(cls, "run")
    if isinstance(run, staticmethod):
        return inspect.signature(run.__func__)
    # A bound task, or one that is written as a class: the first parameter is the task.
    signature = inspect.signature(run)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _key_with_arguments(where: str) -> str:
    return (
        f"lock_by {where} cannot be combined with a lock_name that is the key itself; "
        f"make lock_name a text"
    )


def _lock_name(value: object, what: str) -> LockName:
    if callable(value):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return keys.check_key(value, what)
    if isinstance(value, str):
        return keys.check_name(value, what)
    msg = f"{what} must be a text, a whole number or a function; got {value!r}"
    raise errors.ConfigurationError(msg)


def _lock_by(value: object, signature: inspect.Signature, what: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        msg = f'{what} must be a list of parameter names, like lock_by=("tenant",); got {value!r}'
        raise errors.ConfigurationError(msg)
    known = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    for name in value:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has: {', '.join(known)}"
            msg = f"{what} names {name!r}, which is not a parameter of the task; {hint}"
            raise errors.ConfigurationError(msg)
    return tuple(value)


def _refuse_misspelt(cls: type[celery.Task[..., Any]], where: str) -> None:
    known = dir(celery.Task)
    others = {*_of_other_bases(cls)}
    for base in cls.__mro__:
        if base.__module__.startswith(("celery.", "celery_pglock.")):
            continue
        for name, value in vars(base).items():
            if name in NAMES or name in known or name.startswith("_"):
                continue
            nearest = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.8)
            # A method of the user's own base class may well be called lock_something.
            is_option = name.startswith(_PREFIXES) and not callable(value) and name not in others
            if nearest or is_option:
                hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(NAMES)}"
                msg = f"unknown option {name} {where}; {hint}"
                raise errors.ConfigurationError(msg)


def _of_other_bases(cls: type[celery.Task[..., Any]]) -> Iterator[str]:
    # The options of a task class of another package: `class Both(Other, LockedTask)` may have an
    # `Other.lock_expiry`, and its tasks may set it.
    for base in cls.__mro__:
        if issubclass(base, celery.Task) and not hasattr(base, "_pglock_options"):
            yield from vars(base)

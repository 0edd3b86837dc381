"""Task options: refused when the task is registered, and what they make of a call's arguments."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

import celery
import click
import pytest
from celery import Celery
from celery.app.task import Context
from typing_extensions import override

from celery_pglock import LockedTask, errors, keys, options, settings


def an_app(**conf: Any) -> Celery:
    app = Celery("proj", set_as_current=False)
    app.conf.update(conf)
    return app


def three(a: Any, b: Any = 2, *, c: Any = 3) -> None:
    """Take three parameters, two of them with defaults."""


def register(fun: Any = three, *, base: Any = LockedTask, **given: Any) -> Any:
    app: Any = an_app()
    # Not shared: every other application would be given the task too.
    return app.task(fun, base=base, shared=False, lazy=False, name="proj.t", **given)


def refusal(fun: Any = three, **given: Any) -> str:
    with pytest.raises(errors.ConfigurationError) as caught:
        register(fun, **given)
    return str(caught.value)


def lock(task: Any, *args: Any, **kwargs: Any) -> tuple[str, int]:
    return options.of(type(task)).lock("proj", task.name, args, kwargs, Context())


def test_the_lock_name_is_the_tasks_registered_name() -> None:
    assert lock(register(), 1) == ("proj.t", keys.from_name("proj", "task", "proj.t"))


def test_a_text_replaces_the_name() -> None:
    assert lock(register(lock_name="other"), 1) == (
        "other",
        keys.from_name("proj", "task", "other"),
    )


def test_a_number_is_the_key_itself() -> None:
    assert lock(register(lock_name=-42), 1) == ("-42", -42)


def test_a_function_is_given_the_bound_arguments_and_the_request() -> None:
    seen: list[object] = []

    def name(arguments: Mapping[str, Any], request: Context) -> str:
        seen.append((dict(arguments), type(request)))
        return f"tenant-{arguments['a']}"

    assert lock(register(lock_name=name), 7)[0] == "tenant-7"
    assert seen == [({"a": 7, "b": 2, "c": 3}, Context)]


def test_a_function_may_return_the_key_itself() -> None:
    assert lock(register(lock_name=lambda arguments, _: arguments["a"]), 9) == ("9", 9)


@pytest.mark.parametrize("value", [None, 1.5, True, b"x", ["a"]])
def test_a_function_that_returns_no_name_is_an_error_of_the_call(value: object) -> None:
    task = register(lock_name=lambda *_: value)
    with pytest.raises(errors.ConfigurationError, match=r"lock_name of task 'proj\.t' must"):
        lock(task, 1)


@pytest.mark.parametrize(("value", "word"), [("", "empty"), ("a\0", "NUL"), (2**63, "64-bit")])
def test_a_function_that_returns_an_unusable_name_is_an_error_of_the_call(
    value: object, word: str
) -> None:
    task = register(lock_name=lambda *_: value)
    with pytest.raises(errors.ConfigurationError, match=word):
        lock(task, 1)


def test_the_same_call_has_one_lock_however_it_is_written() -> None:
    task = register(lock_by=("a", "b", "c"))
    calls = [lock(task, 1), lock(task, 1, 2), lock(task, a=1), lock(task, b=2, a=1, c=3)]
    assert len(set(calls)) == 1
    assert calls[0][0] == 'proj.t{"a":1,"b":2,"c":3}'


def test_only_the_chosen_parameters_count() -> None:
    task = register(lock_by=["a"])
    assert lock(task, 1, 5, c=6) == lock(task, 1)
    assert lock(task, 2) != lock(task, 1)


def test_no_chosen_parameter_means_the_name_only() -> None:
    task = register(lock_by=[])
    assert lock(task, 1) == lock(task, 2) == lock(register(), 3)


def test_values_that_look_alike_have_different_locks() -> None:
    task = register(lock_by=("a",))
    assert len({lock(task, value) for value in (1, "1", True, 1.0)}) == 4


def test_chosen_parameters_are_added_to_a_lock_name_of_ones_own() -> None:
    assert lock(register(lock_name="x", lock_by=("a",)), 1)[0] == 'x{"a":1}'
    task = register(lock_name=lambda *_: "y", lock_by=("a",))
    assert lock(task, 1)[0] == 'y{"a":1}'


def test_an_argument_without_canonical_form_is_named() -> None:
    task = register(lock_by=("a", "b"))
    with pytest.raises(TypeError, match="lock_by parameter 'b'"):
        lock(task, 1, object())


def test_arguments_that_do_not_fit_are_the_same_error_as_without_a_lock() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        lock(register(lock_by=("a",)))


def test_the_first_parameter_of_a_bound_task_is_not_an_argument() -> None:
    def bound(self: Any, a: int) -> None:
        """Take the task and one argument."""

    task = register(bound, bind=True, lock_by=("a",))
    assert lock(task, 1)[0] == 'proj.t{"a":1}'
    assert "'self', which is not a parameter" in refusal(bound, bind=True, lock_by=("self",))


def test_a_task_that_retries_by_itself_keeps_its_parameters() -> None:
    task = register(lock_by=("a", "c"), autoretry_for=(ValueError,), retry_backoff=True)
    assert lock(task, 1, c=4) == lock(register(lock_by=("a", "c")), a=1, c=4)


def test_a_task_written_as_a_class_has_its_options_as_attributes() -> None:
    class Report(LockedTask):
        name = "proj.report"
        lock_by = ("tenant",)
        lock_wait = dt.timedelta(seconds=2)
        autoretry_for = (ValueError,)

        @override
        def run(self, tenant: str, day: str = "") -> None:
            """Report."""

    task = an_app().register_task(Report())
    assert lock(task, "x", day="y")[0] == 'proj.report{"tenant":"x"}'
    assert options.of(Report).given["lock_wait"] == 2.0


def test_a_class_of_ones_own_hands_its_options_down() -> None:
    class Careful(LockedTask):
        abstract = True
        lock_conflict = "raise"
        max_crash_retries = 0

        def lock_report(self) -> str:
            """Be a method whose name begins like an option."""
            return "fine"

    task = register(base=Careful, max_crash_retries=1)
    assert options.of(type(task)).given == {"lock_conflict": "raise", "max_crash_retries": 1}


def test_a_function_as_class_attribute_does_not_become_a_method() -> None:
    class Named(LockedTask):
        abstract = True

        @staticmethod
        def lock_name(arguments: Mapping[str, Any], _request: Context) -> str:
            return f"by-{arguments['a']}"

    task = register(base=Named)
    assert lock(task, 1)[0] == "by-1"


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("lock_nme", "lock_name"),
        ("lock_timeout", None),
        ("lockname", "lock_name"),
        ("lock_levels", "lock_level"),
        ("once_pr", "once_per"),
        ("onceper", "once_per"),
        ("once", None),
        ("skip_states", "skip_state"),
        ("max_crash_retry", "max_crash_retries"),
        ("catch_up", "catchup"),
        ("lock_unavailble", "lock_unavailable"),
        ("pglock_level", None),
    ],
)
def test_a_misspelt_option_is_refused_when_the_task_is_registered(
    misspelt: str, meant: str | None
) -> None:
    sentence = refusal(**{misspelt: "x"})
    assert sentence.startswith(f"unknown option {misspelt} of task 'proj.t'; ")
    if meant:
        assert sentence.endswith(f"did you mean {meant}?")


def test_the_options_of_celery_and_of_users_are_left_alone() -> None:
    register(rate_limit="1/s", tenant="x", max_retries=3, acks_late=True, unlock=1)


def test_a_misspelt_option_of_a_base_class_is_refused_too() -> None:
    class Misspelt(LockedTask):
        abstract = True
        lock_waits = 3

    with pytest.raises(errors.ConfigurationError, match="did you mean lock_wait"):
        register(base=Misspelt)


def test_the_options_of_another_package_s_task_class_are_left_to_it() -> None:
    # Celery's own classes take no type arguments in 5.5.0.
    class Other(celery.Task):  # type: ignore[type-arg]
        abstract = True
        lock_expiry = None
        lock_waits = 3

    class Both(Other, LockedTask):
        abstract = True

    with pytest.raises(errors.ConfigurationError, match="did you mean lock_wait"):
        register(base=Both)
    del Other.lock_waits
    register(base=Both, lock_expiry=60)
    # The control.
    assert "unknown option lock_expiry" in refusal(lock_expiry=60)
    assert "unknown option lock_expired" in refusal(base=Both, lock_expired=60)


def test_inside_a_command_the_refusal_is_one_sentence_without_a_traceback() -> None:
    with click.Context(click.Command("celery")), pytest.raises(click.ClickException) as caught:
        register(lock_levl="session")
    assert caught.value.format_message() == (
        "unknown option lock_levl of task 'proj.t'; did you mean lock_level?"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lock_level", "transactional"),
        ("lock_wait", -1),
        ("lock_wait", "5"),
        ("lock_conflict", None),
        ("skip_state", "FAILURE"),
        ("once_per", "daily"),
        ("max_crash_retries", -1),
        ("lock_lost", "ignore"),
        ("lock_unavailable", "skip"),
        ("catchup", "all"),
        ("lock_name", 1.5),
        ("lock_name", True),
        ("lock_name", b"x"),
        ("lock_by", "tenant"),
        ("lock_by", {"a"}),
        ("lock_by", None),
    ],
)
def test_a_wrong_value_is_refused_with_the_names_of_option_and_task(
    name: str, value: object
) -> None:
    sentence = refusal(**{name: value})
    assert sentence.startswith(f"{name} of task 'proj.t' must be ")
    assert repr(value) in sentence


@pytest.mark.parametrize("value", ["", "a\0b", "\ud800"])
def test_a_lock_name_that_postgresql_cannot_store_is_refused(value: str) -> None:
    assert refusal(lock_name=value).startswith("lock_name of task 'proj.t' ")


def test_a_key_beyond_64_bits_is_refused() -> None:
    assert "is not a signed 64-bit number; use a text" in refusal(lock_name=2**63)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("tenants", "did you mean 'tenant'?"), ("zzz", "it has: tenant, day"), (1, "it has: tenant,")],
)
def test_an_unknown_parameter_is_refused_by_name(name: object, hint: str) -> None:
    def report(tenant: str, day: str, *args: Any, **kwargs: Any) -> None:
        """Take two parameters with names, and any others."""

    sentence = refusal(report, lock_by=("tenant", name))
    assert sentence.startswith(f"lock_by of task 'proj.t' names {name!r}, which is not a param")
    assert hint in sentence


@pytest.mark.parametrize("name", ["args", "kwargs"])
def test_what_collects_the_rest_is_no_parameter_to_lock_by(name: str) -> None:
    def report(*args: Any, **kwargs: Any) -> None:
        """Take anything."""

    assert f"names {name!r}" in refusal(report, lock_by=[name])


def test_a_key_of_ones_own_leaves_no_room_for_arguments() -> None:
    assert "lock_by of task 'proj.t' cannot be combined" in refusal(lock_name=5, lock_by=("a",))
    task = register(lock_name=lambda *_: 5, lock_by=("a",))
    with pytest.raises(errors.ConfigurationError, match=r"lock_by of task 'proj\.t' cannot"):
        lock(task, 1)


def test_what_a_task_does_not_set_comes_from_the_settings() -> None:
    defaults = settings.of(an_app(pglock_lock_wait=9, pglock_once_per="day")).options
    chosen = options.of(type(register(once_per=None)))
    assert chosen.value("lock_wait", defaults) == 9.0
    assert chosen.value("once_per", defaults) is None
    assert chosen.value("lock_level", defaults) == "session"


def test_as_class_of_all_tasks_it_leaves_celerys_own_alone() -> None:
    app: Any = Celery("proj", set_as_current=False, task_cls=LockedTask)
    own = app.tasks["celery.accumulate"]
    assert isinstance(own, LockedTask)
    # Neither a database nor tables: a lock would be refused.
    assert own(1, 2) == (1, 2)
    mine = app.task(three, shared=False, lazy=False)
    with pytest.raises(errors.ConfigurationError, match="pglock_database_url is not set"):
        mine(1)


def test_every_option_is_documented_at_the_class() -> None:
    assert LockedTask.__doc__ is not None
    assert [name for name in options.NAMES if f"- ``{name}``:" not in LockedTask.__doc__] == []


def test_a_plain_celery_task_takes_what_it_likes() -> None:
    task = register(base=celery.Task, lock_nme="x")
    assert task.lock_nme == "x"

"""The derivation of keys is frozen: two releases that derive different ones exclude nobody."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from celery_pglock import errors, keys

GOLDEN: list[tuple[str, keys.Kind, str, int]] = [
    ("default", "task", "proj.tasks.report", -2048580814103339231),
    ("default", "beat", "leader", -4674417040079587049),
    ("prod", "task", "naïve.café", 7068187718008132289),
    ("proj", "task", "t", -2100000040108351976),
    ("proj", "task", "a" * 300, 1726560067637908083),
    ("proj", "task", "ü" * 300, -7927040203423983550),
    ("proj", "task", "日次レポート", 1204175929931800933),
    ("proj", "task", "🧹 nightly", -7736000671327644674),
    # One word to the eye, two names: nothing is normalized.
    ("proj", "task", "cafe\u0301", -7569854128286930008),
    ("proj", "task", "café", -1726065452178508205),
    ("proj", "task", "with space:and:colons", 1748989287696006482),
    ("proj", "task", 'tasks.report{"tenant":1}', 5059519036709994909),
    ("proj", "task", 'tasks.report{"tenant":"1"}', 6122708263644640503),
    ("proj", "task", "\t\n\x7f", -916703138767788624),
    ("A-Z_0.9", "task", "t", -3658135379153486782),
    ("proj", "run", "proj:nightly\0" + "2026-11-03T03:00:00.000000+00:00", -7661308364788623054),
    ("proj", "run", "proj:nightly\0" + "2026-W45", -3529803697515344657),
    ("proj", "run", "proj:tasks.report\0id:4f2c6a3e", -5405568538194023952),
    ("proj", "beat", "leader", -8442663452464918523),
    ("pglock", "migrate", "pglock", 3237111611254791344),
]

# The package's __init__ is left out, so that an interpreter without Celery can derive keys too.
DERIVE = """
import json, sys, types
package = types.ModuleType("celery_pglock")
package.__path__ = [sys.argv[1]]
sys.modules["celery_pglock"] = package
from celery_pglock import keys
triples = json.load(sys.stdin)
derived = [keys.from_name(*triple) for triple in triples]
derived += [keys.from_name("proj", "task", keys.with_arguments("t", {"b": name, "a": [1, 2.5]}))
            for _, _, name in triples]
print(json.dumps([list(sys.version_info[:2]), hash("salted"), derived]))
"""

namespaces = st.from_regex(r"[A-Za-z0-9_.-]{1,8}", fullmatch=True)
kinds = st.sampled_from(["task", "run", "beat", "migrate"])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
triples = st.tuples(namespaces, kinds, texts)


class Colour(enum.Enum):
    RED = 1


def other_pythons() -> list[str]:
    """Return interpreters of newer versions that are on this machine, one for each."""
    found: dict[str, str] = {}
    for version in ("3.12", "3.13", "3.14"):
        candidates = [shutil.which(f"python{version}")]
        candidates += [
            str(path)
            for path in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        ]
        for candidate in candidates:
            # A shim stands for an interpreter that may not be there.
            if candidate and "shims" not in Path(candidate).parts:
                found.setdefault(version, candidate)
    return list(found.values())


def derive(python: str, seed: str, directory: Path) -> tuple[list[int], int, list[int]]:
    shutil.copy(typing_extensions.__file__, directory)
    done = subprocess.run(
        [python, "-c", DERIVE, str(Path(keys.__file__).parent)],
        input=json.dumps([triple[:3] for triple in GOLDEN]),
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    version, salted, derived = json.loads(done.stdout)
    return version, salted, derived


@pytest.mark.parametrize(("namespace", "kind", "name", "key"), GOLDEN)
def test_keys_are_what_they_were_in_every_release_before(
    namespace: str, kind: keys.Kind, name: str, key: int
) -> None:
    assert keys.from_name(namespace, kind, name) == key


def test_the_run_lock_is_named_by_job_and_period() -> None:
    assert keys.of_run("proj", "proj:nightly", "2026-W45") == -3529803697515344657


def test_two_processes_with_other_hash_seeds_derive_the_same_keys(tmp_path: Path) -> None:
    _, one_hash, one = derive(sys.executable, "1", tmp_path)
    _, other_hash, other = derive(sys.executable, "2", tmp_path)
    assert one_hash != other_hash  # what a key made by hash() would have suffered from
    assert one == other
    assert one[: len(GOLDEN)] == [key for *_, key in GOLDEN]


def test_every_python_on_this_machine_derives_the_same_keys(tmp_path: Path) -> None:
    pythons = [sys.executable, *other_pythons()]
    answers = [derive(python, "random", tmp_path) for python in pythons]
    assert len({tuple(version) for version, _, _ in answers}) >= min(2, len(pythons))
    for _, _, derived in answers:
        assert derived == answers[0][2]
        assert derived[: len(GOLDEN)] == [key for *_, key in GOLDEN]


@given(triples)
def test_every_key_is_a_signed_64_bit_number(triple: tuple[str, keys.Kind, str]) -> None:
    key = keys.from_name(*triple)
    assert keys.check_key(key, "key") == key
    assert -(2**63) <= key < 2**63


@given(triples, triples)
def test_different_triples_have_different_keys(
    one: tuple[str, keys.Kind, str], other: tuple[str, keys.Kind, str]
) -> None:
    assert (keys.from_name(*one) == keys.from_name(*other)) == (one == other)


def test_what_looks_like_another_kind_in_the_name_stays_a_name() -> None:
    assert keys.from_name("a", "task", "task:b") != keys.from_name("a", "task", "b")
    assert keys.from_name("a", "run", "task:b") != keys.from_name("a", "task", "b")
    with pytest.raises(errors.ConfigurationError):  # else "a:task" + "b" were "a" + "task:b"
        keys.check_namespace("a:task")


def test_job_and_period_do_not_run_into_each_other() -> None:
    assert keys.of_run("n", "n:a", "bc") != keys.of_run("n", "n:ab", "c")


@given(namespaces.filter(lambda text: text != "__main__"))
def test_a_namespace_of_letters_digits_and_three_signs_is_taken(namespace: str) -> None:
    assert keys.check_namespace(namespace) == namespace


@pytest.mark.parametrize("namespace", ["", "a b", "a:b", "ä", "a\n", "a/b", "\0"])
def test_any_other_namespace_is_refused_by_name_of_its_setting(namespace: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"pglock_namespace .* A-Z a-z 0-9"):
        keys.check_namespace(namespace)


def test_the_namespace_main_is_refused_with_the_remedy() -> None:
    with pytest.raises(errors.ConfigurationError, match=r'Celery\("proj"\), or set pglock_name'):
        keys.check_namespace("__main__")


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "a\udfff"])
def test_a_name_that_postgresql_cannot_store_is_refused(name: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="lock_name of task 't'"):
        keys.check_name(name, "lock_name of task 't'")


@pytest.mark.parametrize("name", ["a", "a" * 5000, "Ünï", "🧹", "a:b", " "])
def test_any_other_name_is_taken_as_it_is(name: str) -> None:
    assert keys.check_name(name, "name") == name


@pytest.mark.parametrize("key", [2**63, -(2**63) - 1, 10**30])
def test_a_number_beyond_64_bits_is_no_key(key: int) -> None:
    with pytest.raises(errors.ConfigurationError, match=f"lock_name {key} is not a signed 64-bit"):
        keys.check_key(key, "lock_name")


@pytest.mark.parametrize("key", [2**63 - 1, -(2**63), 0, 42])
def test_the_ends_of_the_range_are_keys(key: int) -> None:
    assert keys.check_key(key, "lock_name") == key


def test_one_and_its_lookalikes_are_different_arguments() -> None:
    alike: list[Any] = [1, "1", True, 1.0, [1], None, "None", decimal.Decimal(1), b"1", "true"]
    assert len({keys.with_arguments("t", {"a": value}) for value in alike}) == len(alike)


def test_the_order_of_parameters_and_of_dictionaries_does_not_matter() -> None:
    one = {"a": {"x": 1, "y": {"p": 1, "q": 2}}, "b": 2}
    other = {"b": 2, "a": {"y": {"q": 2, "p": 1}, "x": 1}}
    assert list(one) != list(other)
    assert keys.with_arguments("t", one) == keys.with_arguments("t", other)


def test_the_order_of_a_list_does_matter() -> None:
    assert keys.with_arguments("t", {"a": [1, 2]}) != keys.with_arguments("t", {"a": [2, 1]})


MOMENT = dt.datetime(2026, 11, 3, 14, tzinfo=dt.timezone(dt.timedelta(hours=1)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        ("ü", '"ü"'),
        (None, "null"),
        (True, "true"),
        (2.5, "2.5"),
        ((1, "a"), '[1,"a"]'),
        (Colour.RED, "1"),
        (MOMENT, '{"$datetime":"2026-11-03T13:00:00+00:00"}'),
        (MOMENT.astimezone(dt.UTC), '{"$datetime":"2026-11-03T13:00:00+00:00"}'),
        (MOMENT.replace(tzinfo=None), '{"$datetime":"2026-11-03T14:00:00"}'),
        (MOMENT.date(), '{"$date":"2026-11-03"}'),
        (MOMENT.time(), '{"$time":"14:00:00"}'),
        (uuid.UUID(int=1), '{"$uuid":"00000000-0000-0000-0000-000000000001"}'),
        (decimal.Decimal("1.50"), '{"$decimal":"1.50"}'),
        (b"\x00\xff", '{"$bytes":"00ff"}'),
        ({"$date": "2026-11-03"}, '{"$$date":"2026-11-03"}'),
    ],
)
def test_the_canonical_form_of_a_value_is_frozen(value: Any, text: str) -> None:
    assert keys.with_arguments("t", {"a": value}) == f't{{"a":{text}}}'


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from("abc"), json_values))
def test_an_argument_is_the_same_after_its_way_through_a_json_message(
    chosen: dict[str, Any],
) -> None:
    received = json.loads(json.dumps(chosen))
    assert keys.with_arguments("t", chosen) == keys.with_arguments("t", received)


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return [_typed(item) for item in value]
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    return type(value).__name__, repr(value)


@given(json_values, json_values)
def test_different_arguments_have_different_lock_names(one: Any, other: Any) -> None:
    same = keys.with_arguments("t", {"a": one}) == keys.with_arguments("t", {"a": other})
    assert same == (_typed(one) == _typed(other))


class Plain:
    """Has the repr that holds a memory address."""


@pytest.mark.parametrize(
    "value", [Plain(), object, {1, 2}, {1: 2}, float("nan"), float("inf"), [Plain()], 1j,
              {"x": Plain()}, decimal.Decimal("NaN")]
)  # fmt: skip
def test_a_value_without_canonical_form_is_a_type_error_that_names_the_parameter(
    value: Any,
) -> None:
    with pytest.raises(TypeError, match=r"lock_by parameter 'tenant' .* use lock_name with a func"):
        keys.with_arguments("t", {"tenant": value})


def test_half_a_surrogate_pair_is_a_type_error_that_names_the_parameter() -> None:
    with pytest.raises(TypeError, match="lock_by parameter 'tenant' holds a lone surrogate"):
        keys.with_arguments("t", {"tenant": ["\ud800"]})

"""docs/reference/messages.md names every warning, every error record and every exception."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import celery_pglock
from celery_pglock import errors
from tests.support.processes import REPOSITORY

PACKAGE = Path(celery_pglock.__file__).parent
RECORDS, EXCEPTIONS = (REPOSITORY / "docs/reference/messages.md").read_text().split("## Exceptions")
ENTRY = re.compile(r"^`(\w+)`\n: (.*?)(?=^`\w+`\n: |^## |\Z)", re.MULTILINE | re.DOTALL)
LEVELS = {"warning": "WARNING", "error": "ERROR", "exception": "ERROR", "critical": "ERROR"}


def records(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield event, level and text of each record of level WARNING or above that a module makes.

    A text has `…` for what is filled in.
    """
    for call in ast.walk(ast.parse(source)):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="_log"), attr=method), args=args):
                if method == "log":
                    level, args = "WARNING", args[1:]  # one that is chosen when it is made
                elif method in LEVELS:
                    level = LEVELS[method]
                else:
                    continue
                (extra,) = (word.value for word in call.keywords if word.arg == "extra")
                if event := _event(extra):
                    yield event, level, _text(args[0])
            case ast.Call(
                func=ast.Name(id="_once") | ast.Attribute(attr="warn"),
                args=[ast.Constant(value=str(event)), *args],
            ):
                # `_once` has the subject between the event and the text.
                yield event, "WARNING", _text(next(a for a in reversed(args) if _long(a)))


def _event(extra: ast.expr) -> str | None:
    match extra:
        case ast.Dict(values=[ast.Constant(value=str(event)), *_]):
            return event
        case ast.Call(args=[ast.Constant(value=str(event)), *_]):
            return event
    return None  # `events.warn`, whose callers name it


def _long(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant) and " " in str(argument.value)


def _text(argument: ast.expr) -> str:
    text = argument.value if isinstance(argument, ast.Constant) else ""
    return re.sub(r"(%[.\d]*[a-z]\s*)+", _gap, str(text)).strip()


def _gap(match: re.Match[str]) -> str:
    """Turn `%s %s ` into `… … `."""
    return re.sub(r"%[.\d]*[a-z]", "…", match[0])


def all_records() -> dict[str, set[tuple[str, str]]]:
    found: dict[str, set[tuple[str, str]]] = {}
    for path in PACKAGE.rglob("*.py"):
        for event, level, text in records(path.read_text()):
            found.setdefault(event, set()).add((level, text))
    return found


def all_exceptions() -> set[str]:
    classes: set[str] = set()
    for module in pkgutil.walk_packages([str(PACKAGE)], "celery_pglock."):
        if "contrib.django" in module.name or module.name.endswith("__main__"):
            continue  # they need a project, or do something when they are imported
        for name, value in vars(importlib.import_module(module.name)).items():
            if (
                isinstance(value, type)
                and issubclass(value, Exception)
                and value.__module__.startswith("celery_pglock.")
                and not name.startswith("_")
            ):
                classes.add(name)
    return classes


def fits(shown: str, text: str) -> bool:
    """Whether what a page shows of a text is that text, or its beginning up to a `…`."""
    return shown == text or (shown.endswith("…") and text.startswith(shown[:-1]))


def test_every_record_of_a_warning_or_an_error_is_explained() -> None:
    entries = dict(ENTRY.findall(RECORDS))
    found = all_records()
    assert found.keys() == entries.keys()
    for event, made in found.items():
        shown = [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", entries[event])]
        for level, text in made:
            assert level in entries[event], (event, level)
            # A text that is only filled in is that of an exception, which has its own entry.
            assert not text.strip("… ") or any(fits(each, text) for each in shown), (event, text)


def test_every_exception_is_explained() -> None:
    entries = dict(ENTRY.findall(EXCEPTIONS))
    assert entries.keys() == all_exceptions()
    assert {name for name, value in vars(errors).items() if isinstance(value, type)} <= set(entries)


def test_what_an_exception_says_is_what_the_page_shows() -> None:
    entries = dict(ENTRY.findall(EXCEPTIONS))
    for name, arguments in {
        "CrashRetriesExhausted": ("j", "p", 4),
        "DatabaseUnavailable": ("h", "r"),
        "EntryChanged": ("e",),
        "JobSkipped": ("j", "p", "r"),
        "LeadershipLost": ("n", 1, "r"),
        "LockLost": ("j", "p", "r"),
        "LockNotAcquired": ("j", "p", "r"),
        "NoCurrentRun": (),
        "OutcomeUnknown": ("j", "p", "done", "r"),
        "RerunRefused": ("j", "p", "r"),
        "SchemaError": ("s", "f", "r"),
        "ServerInRecovery": ("h",),
        "TransactionEnded": ("j", "p", "r"),
        "TransactionPooler": ("h",),
    }.items():
        said = str(getattr(errors, name)(*arguments))
        shown = " ".join(re.search(r"`([^`]+)`", entries[name])[1].split())  # type: ignore[index]
        pattern = ".*".join(map(re.escape, shown.split("…")))
        assert re.fullmatch(pattern, said), (name, shown, said)


def test_control_a_record_is_found_in_each_of_the_ways_in_which_they_are_made() -> None:
    source = """
_log.info("not this one", extra={"event": "quiet"})
_log.warning("%s has %.1f s", a, b, extra={"event": "one", "seconds": b})
_log.exception("two failed", extra=_fields("two", a))
_log.log(logging.WARNING if a else logging.INFO, "three", extra=_fields("three", a))
_once("four", a, "task %s is four", a)
events.warn("five", "five of %s", a)
"""
    assert list(records(source)) == [
        ("one", "WARNING", "… has … s"),
        ("two", "ERROR", "two failed"),
        ("three", "WARNING", "three"),
        ("four", "WARNING", "task … is four"),
        ("five", "WARNING", "five of …"),
    ]
    assert not fits("five", "five of …")

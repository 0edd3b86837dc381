"""The reference names what there is, all of it and nothing else, with its defaults."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, Final

import celery
import click
import pytest
import sqlalchemy as sa
from celery.utils.dispatch import Signal

import celery_pglock
from celery_pglock import cli, errors, options, settings, tables
from tests.support import pages
from tests.support.processes import REPOSITORY
from tests.unit.test_messages_page import all_records
from tests.unit.test_public_surface import EVENTS

NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)(?: (min|days))?")
UNITS: Final = {None: 1, "min": 60, "days": 86400}
# Hosts that pages may link to. The network is no part of the tests, so that is all that is checked.
HOSTS: Final = {"keepachangelog.com", "rich.readthedocs.io", "semver.org"}


def page(name: str) -> str:
    return (REPOSITORY / "docs/reference" / name).read_text()


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables of a text, row by row, but for their heads."""
    found = [re.split(r"(?<!\\) \| ", line[2:].rstrip(" |")) for line in text.splitlines()
             if line.startswith("| ")]  # fmt: skip
    return [row for row in found if not set("".join(row)) <= set("-| ") and "`" in row[0]]


def value(cell: str, **named: Any) -> Any:
    """Return the default that a cell shows."""
    text = cell.strip("`")
    if text in named:
        return named[text]
    if match := NUMBER.fullmatch(text):
        return float(match[1]) * UNITS[match[2]]
    return None if text == "none" else ast.literal_eval(text)


def test_each_setting_and_its_default() -> None:
    app = celery.Celery("proj", set_as_current=False)
    app.conf.pglock_database_url = "postgresql://nobody@127.0.0.1:1/nowhere"
    config = settings.of(app)
    shown = {row[0].strip("`"): row[1] for row in rows(page("settings.md"))}
    of_options = {f"pglock_{name}" for name in settings.OPTION_DEFAULTS}
    named = {f"pglock_{name}" for name in settings._NAMES}  # noqa: SLF001 - what is accepted
    assert shown.keys() == named - of_options
    assert set(re.findall(r"`(pglock_\w+)`", page("settings.md"))) == named
    for name, cell in shown.items():
        if name != "pglock_database_url":
            default = getattr(config, name.removeprefix("pglock_"))
            assert value(cell, **{"app.main": "proj"}) == default, name


def test_each_option_its_values_and_its_default() -> None:
    (table, _) = page("options.md").split("## The run")
    shown = {row[0].strip("`"): row[1:] for row in rows(table)}
    assert shown.keys() == set(options.NAMES)
    for name, (values, default, _) in shown.items():
        if name in settings.OPTION_DEFAULTS:
            assert value(default) == settings.OPTION_DEFAULTS[name]
            for each in re.findall(r'`"(.*?)"`', values):
                settings.OPTION_VALIDATORS[name](each, name)


def test_each_signal_and_its_arguments() -> None:
    shown = {
        row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2]))
        for row in rows(page("events.md").partition("Log records come")[0])
    }
    offered: list[Any] = [
        each
        for each in (getattr(celery_pglock, name) for name in celery_pglock.__all__)
        if isinstance(each, Signal)
    ]
    assert shown == {str(each.name): set(each.providing_args) for each in offered}


def test_each_event_and_its_level() -> None:
    shown = {
        name: row[1]
        for row in rows(page("events.md").partition("Log records come")[2])
        for name in re.findall(r"`(\w+)`", row[0])
        if name != "event"
    }
    assert shown.keys() == EVENTS
    for event, made in all_records().items():
        for level, _ in made:
            # One that is INFO as a rule, and WARNING while the database cannot be reached.
            assert level in shown[event] or event == "run_postponed", event


def test_each_command_and_its_options() -> None:
    own, _, shared = page("command-line.md").partition("| Option |")
    of_many = {row[0].strip("`") for row in rows(shared.partition("| Exit code |")[0])}
    shown = {row[0].strip("`"): row for row in rows(own)}
    names = {re.sub(r" [A-Z ]+$", "", each): row for each, row in shown.items()}
    found = dict(commands(cli.pglock))
    assert {name for name in names if not name.isdigit()} == found.keys()
    for name, command in found.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                told = [each for each in parameter.opts if each in names[name][1]]
                assert told or of_many & set(parameter.opts), (name, parameter.opts)
            else:
                assert str(parameter.name).upper() in shown_head(shown, name)


def commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group, and those of the groups among them, by their full names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield prefix + name, command
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")


def shown_head(shown: dict[str, Any], name: str) -> str:
    return next(head for head in shown if re.sub(r" [A-Z ]+$", "", head) == name)


def test_each_column_of_each_table() -> None:
    parts = re.split(r"^## ", page("schema.md"), flags=re.MULTILINE)
    for name, table in tables.mirror(sa.MetaData()).items():
        (part,) = (part for part in parts if part.startswith(f"`{name}`"))
        named = set(re.findall(r"`(\w+)`", part))
        assert {column.name for column in table.columns} <= named, name


def test_each_name_of_the_package_is_in_the_reference() -> None:
    api, events = page("api.md"), page("events.md")
    assert "automodule:: celery_pglock.errors" in api
    for name in celery_pglock.__all__:
        offered = getattr(celery_pglock, name)
        if isinstance(offered, Signal):
            assert f"`{name}`" in events
        elif not (isinstance(offered, type) and offered.__module__ == errors.__name__):
            assert re.search(rf"auto(class|function):: celery_pglock\.{name}$", api, re.MULTILINE)


@pytest.mark.parametrize(
    "path",
    pages.PAGES,
    ids=lambda path: path.name if path.name == "README.md" else str(path.relative_to(pages.DOCS)),
)
def test_where_links_lead(path: Any) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        scheme, _, rest = target.partition("://")
        if rest:
            assert scheme == "https"
            assert rest.partition("/")[0] in HOSTS
        elif not target.startswith("#"):
            assert (path.parent / target.partition("#")[0]).exists(), target

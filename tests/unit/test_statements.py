"""The SQL of the ledger: short enough to be remembered, never waiting, its names quoted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import celery_pglock
from celery_pglock import claims, locks, schema, sessions, statements

AWKWARD = 'we"ird %s {schema}'
TEMPLATES = {
    name: value
    for name, value in vars(statements).items()
    if name.isupper() and not name.startswith("_") and isinstance(value, str)
}
SOURCES = sorted(Path(celery_pglock.__file__).parent.rglob("*.py"))
LEVELS: list[sessions.Level] = ["session", "transaction"]


def test_there_are_statements_to_look_at() -> None:
    assert {"SETTLE_AND_UNLOCK", "SETTLE_ONLY", "SKIP", "POSTPONE", "HOLDER"} <= TEMPLATES.keys()
    assert len(SOURCES) > 20


@pytest.mark.parametrize("level", LEVELS)
def test_the_claim_is_short_enough_for_psycopg_to_remember(level: sessions.Level) -> None:
    """Up to 4,096 characters psycopg caches how it converts a statement; the claim is hot.

    The name of a schema may be 63 characters long, and the claim holds it more than once.
    """
    assert len(statements.claim("s" * 63, level)) < 4096


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_statement_is_short_enough_too(template: str) -> None:
    assert len(statements.statement(template, "s" * 63)) < 4096


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_statement_quotes_the_schemas_name(template: str) -> None:
    text = statements.statement(template, AWKWARD).decode()
    assert '"we""ird %s {schema}"."job_runs"' in text.replace("%%", "%")


@pytest.mark.parametrize("level", LEVELS)
def test_the_claim_quotes_the_schemas_name(level: sessions.Level) -> None:
    text = statements.claim(AWKWARD, level).decode().replace("%%", "%")
    assert text.count('"we""ird %s {schema}"."job_runs"') == 2


def test_the_migrations_quote_the_schemas_name() -> None:
    text = schema.script('we"ird')
    assert 'CREATE TABLE "we""ird".job_runs' in text
    assert '"we""ird".schema_version' in re.sub(r'"schema_version"', "schema_version", text)
    assert "{schema}" not in text


@pytest.mark.parametrize("level", LEVELS)
def test_a_claim_takes_the_run_lock_before_the_name_lock(level: sessions.Level) -> None:
    text = statements.claim("pglock", level).decode()
    tried = re.findall(r"pg_try_advisory_(?:xact_)?lock\(%\((\w+)\)s::bigint\)", text)
    assert tried == ["run_key", "name_key"]


def test_only_the_session_level_has_locks_to_give_back() -> None:
    assert b"pg_advisory_unlock" in statements.claim("pglock", "session")
    assert b"pg_advisory_unlock" not in statements.claim("pglock", "transaction")
    assert b"pg_try_advisory_lock" not in statements.claim("pglock", "transaction")


def test_nothing_in_the_package_waits_for_an_advisory_lock() -> None:
    """Whoever waits in pg_advisory_lock() holds back vacuum and CREATE INDEX CONCURRENTLY."""
    waiting = re.compile(r"pg_advisory_(?:xact_)?lock(?:_shared)?\s*\(")
    trying = re.compile(r"pg_try_advisory_(?:xact_)?lock\s*\(")
    texts = {path.name: path.read_text() for path in SOURCES}
    assert any(trying.search(text) for text in texts.values())  # the pattern finds calls
    # In prose a name is followed by "()", in SQL by an argument.
    calls = [
        (name, text[match.start() : match.end() + 1])
        for name, text in texts.items()
        for match in waiting.finditer(text)
        if text[match.end()] != ")"
    ]
    assert calls == []


def test_nothing_that_takes_an_advisory_lock_sets_a_lock_timeout_other_than_none() -> None:
    settings = [
        line.strip()
        for path in SOURCES
        if path.name != "migrating.py"  # there it is for tables that are altered
        for line in path.read_text().splitlines()
        if re.search(r"[\"']lock_timeout[\"']|set lock_timeout", line, re.IGNORECASE)
    ]
    assert settings == ['"lock_timeout": "0",']


def test_every_parameter_has_a_type() -> None:
    """Without one the server guesses: bigint becomes numeric, and there is no such lock."""
    texts = [*TEMPLATES.values(), *(statements.claim("s", level).decode() for level in LEVELS)]
    parameters = [match for text in texts for match in re.findall(r"%\(\w+\)s(?!::)", text)]
    assert parameters == []


def test_functions_of_the_server_are_named_with_their_schema() -> None:
    """A function of the same name in another schema of the search path must not be taken."""
    texts = [*TEMPLATES.values(), *(statements.claim("s", level).decode() for level in LEVELS)]
    texts.append(locks.HELD_BY.as_string())
    called = {match for text in texts for match in re.findall(r"(?<![\w.])(\w+)\(", text)}
    # What is left is syntax, not a function that could be replaced.
    assert called <= {"coalesce", "in", "as", "job_runs", "not", "values", "any", "cast"}


def test_what_the_server_shows_of_a_run_fits_into_its_63_bytes() -> None:
    work = claims.Work(
        job="j", period=None, name="n", name_key=1, run_key=None, task="t" * 100, node="n" * 100
    )
    assert len(work.application) == len(work.idle_application) == 63


def test_a_run_without_period_holds_one_lock_and_one_with_a_period_two() -> None:
    work = claims.Work(job="j", period=None, name="n", name_key=1, run_key=None, task="t")
    assert work.lock_keys == {1}
    with_period = claims.Work(job="j", period="p", name="n", name_key=1, run_key=2, task="t")
    assert with_period.lock_keys == {1, 2}

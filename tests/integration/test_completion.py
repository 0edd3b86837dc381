"""What a shell offers, by the protocol that its completion script speaks; it never fails, and is quick."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import celery
import pytest
from celery.bin.celery import celery as command
from click import shell_completion

from celery_pglock.cli import completion
from tests.acceptance.test_bad_input import url_for
from tests.integration.test_command_states import application, fill, silent_server
from tests.support.databases import Database
from tests.support.processes import Processes

pytestmark = pytest.mark.usefixtures("alone")

CELERY = Path(sys.executable).parent / "celery"
ENTRIES = ["hourly", "kept", "nightly"]


@pytest.fixture(scope="module")
def fixed(read_database: Database) -> Database:
    """A database with entries and runs, which no test here changes."""
    fill(read_database)
    read_database.rows(
        "update pglock.beat_entries set paused_until = '9999-01-01Z' where entry = 'hourly'"
    )
    return read_database


def offered(app: celery.Celery | str, *words: str) -> list[str]:
    """Return what is offered for the last word."""
    complete = shell_completion.BashComplete(
        command, {"auto_envvar_prefix": "CELERY"}, "celery", "_CELERY_COMPLETE"
    )
    if isinstance(app, str):
        arguments = ["-A", app, "pglock", *words]
        found = complete.get_completions(arguments[:-1], arguments[-1])
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("celery.app.utils.find_app", {"proj": app}.__getitem__)
            arguments = ["-A", "proj", "pglock", *words]
            found = complete.get_completions(arguments[:-1], arguments[-1])
    return [item.value for item in found]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("st",), ["status"]),
        (("ent",), ["entries"]),
        (("entries", ""), ["add", "remove"]),
        (("runs", "--st"), ["--status"]),
        (("prune", "--"), ["--dry-run", "--yes", "--verbose", "--json", "--help"]),
        (("runs", "--status", "s"), ["sent", "skipped"]),
        (("runs", "--job", ""), ["nightly", "other"]),
        (("pause", ""), ENTRIES),
        (("pause", "ni"), ["nightly"]),
        (("trigger", "k"), ["kept"]),
        (("resume", ""), ["hourly"]),
        (("entries", "remove", ""), ["kept"]),
        (("entries", "add", "new", "repo"), ["report"]),
        (("entries", "add", "new", "report", "--zone", "Europe/Ber"), ["Europe/Berlin"]),
        (("rerun", ""), ["nightly", "other"]),
        (("rerun", "nightly", ""), ["2026-11-03"]),
        (("rerun", "other", "2026"), ["2026-11-03"]),
    ],
)
def test_what_is_offered(fixed: Database, words: tuple[str, ...], names: list[str]) -> None:
    assert offered(application(fixed.url), *words) == names


def test_jobs_are_found_from_one_to_the_next(database: Database) -> None:
    """However many runs each has, and of this application alone."""
    database.rows(
        "insert into pglock.job_runs (job, period, status) select n || ':' || j, p::text, 'done'"
        " from (values ('a'), ('proj'), ('z')) as ns(n), generate_series(1, 30) as j,"
        " generate_series(1, 100) as p"
    )
    names = offered(application(database.url), "runs", "--job", "")
    assert names == sorted(str(number) for number in range(1, 31))


# --- whatever goes wrong ---------------------------------------------------------------------------


@pytest.mark.slow
def test_without_a_database_the_configuration_is_offered_in_time() -> None:
    with silent_server() as port:
        app = application(f"postgresql://me@127.0.0.1:{port}/x?connect_timeout=60")
        started = time.monotonic()
        assert offered(app, "pause", "") == ["nightly"]
        assert time.monotonic() - started < completion._PATIENCE + 2  # noqa: SLF001
        assert offered(app, "resume", "") == []


@pytest.mark.parametrize("fault", ["refused", "no tables", "no url", "misspelt", "no application"])
def test_what_is_not_to_be_had_is_not_offered(
    read_blank_database: Database, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    url = read_blank_database.url
    settings: dict[str, dict[str, Any]] = {
        "refused": {"pglock_database_url": url_for(url, host="127.0.0.1", port="1")},
        "no url": {"pglock_database_url": None},
        "misspelt": {"pglock_databse_url": url},
    }
    app = (
        "nosuch.module"
        if fault == "no application"
        else application(url, **settings.get(fault, {}))
    )
    for words in (("resume", ""), ("rerun", "nightly", ""), ("entries", "remove", "")):
        assert offered(app, *words) == []
    assert offered(app, "stat") == ["status"]
    assert capfd.readouterr() == ("", "")


# --- the real protocol -----------------------------------------------------------------------------

IN_BASH = """
source <({celery})
COMP_WORDS=({words} "")
COMP_CWORD={cword}
unset _CELERY_COMPLETE
_celery_completion {celery}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def project(fixed: Database, tmp_path: Path) -> Path:
    """The directory of an application that prints something when it is imported."""
    (tmp_path / "proj.py").write_text(
        "from celery import Celery\n"
        "print('hello')\n"
        "app = Celery('proj', broker='memory://')\n"
        f"app.conf.update(pglock_database_url={fixed.url!r}, result_expires=None)\n"
    )
    return tmp_path


def words(project: Path) -> list[str]:
    return [str(CELERY), "--workdir", str(project), "-A", "proj", "pglock", "pause"]


@pytest.mark.slow
def test_bash_offers_what_the_celery_command_tells(processes: Processes, project: Path) -> None:
    given = words(project)
    script = IN_BASH.format(celery=CELERY, words=" ".join(given), cword=len(given))
    process = processes.start("bash", "-c", script, env={"_CELERY_COMPLETE": "bash_source"})
    assert process.wait() == 0, process.output()
    assert process.output().splitlines() == ENTRIES


@pytest.mark.parametrize(
    ("shell", "cword", "answer"),
    [
        ("zsh", "7", [line for entry in ENTRIES for line in ("plain", entry, "_")]),
        ("fish", "", [line for entry in ENTRIES for line in ("plain", entry)]),
    ],
)
def test_other_shells_are_answered(
    processes: Processes, project: Path, shell: str, cword: str, answer: list[str]
) -> None:
    env = {
        "_CELERY_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": f"{' '.join(words(project))} ",
        "COMP_CWORD": cword,
    }
    process = processes.start(str(CELERY), env=env)
    process.wait()
    assert [word for word in re.split(r"[,\s]+", process.output()) if word] == answer

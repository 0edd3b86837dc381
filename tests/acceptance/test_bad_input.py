"""What users do wrong, with the real commands: one sentence with the remedy, no traceback.

`pglock` commands end with 1 when it is not so, 2 when the command or the configuration is
wrong, 69 when the database cannot be used. A worker that could never work ends with 1; one
whose database does not answer starts, and says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import celery
import psycopg
import pytest
from psycopg import sql

from celery_pglock import migrating, schema
from celery_pglock.demo.servers import PostgresServer
from tests.support import commands as in_process
from tests.support.databases import Database
from tests.support.processes import Process, Processes, eventually

GOOD = "tests.apps.bad_settings"
SECRET = "tops3cret"
STEPS = [step.name for step in schema.migrations()]
NO_DATABASE = "pglock_database_url is not set, so a LockedTask has nowhere to take its lock; set it"
MAIN = 'the namespace would be "__main__"'
MISSPELT_SETTING = "unknown setting pglock_databse_url; did you mean pglock_database_url?"
# A beat that has begun writes its last words through the log.
OURS = re.compile(r"Error: |(\[.*\] )?celery-pglock: ")
SAME_KEY = "lock names 'first' (task 'first') and "


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    output: str

    def says(self, sentence: str, code: int) -> None:
        """Expect one sentence of ours, as the last line, and this exit code."""
        assert "Traceback" not in self.output
        assert SECRET not in self.output
        lines = [line for line in self.output.splitlines() if line.strip()]
        ours = [line for line in lines if OURS.match(line)]
        assert ours == lines[-1:], self.output
        assert sentence in ours[0]
        assert self.code == code


class Commands:
    """Runs the `celery` command as a user does.

    Attributes:
        broker: the URL of the broker.
    """

    def __init__(self, processes: Processes, broker: str) -> None:
        self._processes = processes
        self.broker = broker

    def _environment(self, settings: dict[str, Any]) -> dict[str, str]:
        return {
            "BAD_SETTINGS": json.dumps(settings),
            "BAD_BROKER_URL": self.broker,
            "BAD_QUEUE": f"pglock-test-{uuid.uuid4().hex[:12]}",
        }

    def start_pglock(self, *arguments: str, app: str = GOOD, **settings: Any) -> Process:
        return self._processes.celery(
            app, "pglock", *arguments, env=self._environment(settings), name="pglock"
        )

    def pglock(self, *arguments: str, app: str = GOOD, **settings: Any) -> Ended:
        return ended(self.start_pglock(*arguments, app=app, **settings))

    @staticmethod
    def in_this_process(*arguments: str, **settings: Any) -> Ended:
        """Run a `pglock` command where what it shows matters, and not how it is started."""
        app = celery.Celery("bad", set_as_current=False)
        app.conf.update(settings)
        shown = in_process.pglock(app, *arguments)
        return Ended(shown.code, shown.output)

    def without_app(self, *arguments: str) -> Ended:
        return ended(self._processes.python("-m", "celery", *arguments))

    def beat(self, *, app: str = GOOD, **settings: Any) -> Process:
        arguments = ("--scheduler=pglock", "--pidfile=", "--loglevel=INFO")
        return self._processes.celery(app, "beat", *arguments, env=self._environment(settings))

    def worker(self, *, app: str = GOOD, **settings: Any) -> Process:
        arguments = ("--pool=solo", "--without-gossip", "--without-mingle", "--without-heartbeat")
        return self._processes.celery(
            app, "worker", *arguments, "--loglevel=INFO", env=self._environment(settings)
        )


def ended(process: Process) -> Ended:
    return Ended(process.wait(), process.output())


@pytest.fixture
def commands(processes: Processes, redis_url: str) -> Commands:
    return Commands(processes, redis_url)


def url_for(url: str, **parts: str) -> str:
    """Return a URL with another user, password, port or database."""
    split = urlsplit(url)
    user = parts.get("user", split.username or "postgres")
    password = parts.get("password", split.password)
    host = f"{parts.get('host', split.hostname)}:{parts.get('port', split.port)}"
    login = user if password is None else f"{user}:{password}"
    path = f"/{parts['database']}" if "database" in parts else split.path
    return urlunsplit(split._replace(netloc=f"{login}@{host}", path=path))


@contextlib.contextmanager
def role_of(database: Database) -> Iterator[tuple[str, str]]:
    """Make a role without any right on the database; give its name and its URL."""
    name = f"pglock_role_{uuid.uuid4().hex[:12]}"
    create = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}")
    with database.connect() as admin:
        admin.execute(create.format(sql.Identifier(name), SECRET))
    try:
        yield name, url_for(database.url, user=name, password=SECRET)
    finally:
        with database.connect() as admin:
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


def tables(database: Database) -> list[str]:
    query = "select table_name from information_schema.tables where table_schema = 'pglock'"
    return sorted(name for (name,) in database.rows(query))


# --- The application and its configuration ----------------------------------------------------


@pytest.mark.parametrize("command", ["migrate", "runs"])
def test_without_an_application_the_command_says_where_to_name_it(
    commands: Commands, command: str
) -> None:
    commands.without_app("pglock", command).says("celery -A proj pglock", 2)


@pytest.mark.parametrize("arguments", [("migrate",), ("migrate", "--check"), ("runs",)])
def test_without_a_database_a_command_names_the_setting(
    commands: Commands, arguments: tuple[str, ...]
) -> None:
    commands.pglock(*arguments).says(NO_DATABASE, 2)


def test_without_a_database_a_worker_does_not_start(commands: Commands) -> None:
    ended(commands.worker()).says(NO_DATABASE, 1)


def test_without_locks_a_worker_needs_no_database(commands: Commands) -> None:
    commands.worker(pglock_enabled=False).wait_for_line(r" ready\.$")


@pytest.mark.parametrize(
    ("app", "settings", "sentence"),
    [
        ("tests.apps.bad_main", {"pglock_database_url": "host=127.0.0.1 port=1"}, MAIN),
        (GOOD, {"pglock_databse_url": f"postgresql://app:{SECRET}@db/x"}, MISSPELT_SETTING),
        (GOOD, {"pglock_lock_wait": "5"}, "pglock_lock_wait must be a number of seconds"),
        (GOOD, {"pglock_once_per": "daily"}, "got 'daily' (did you mean 'day'?)"),
        (GOOD, {"pglock_schema": "my schema"}, "pglock_schema must be the name of a PostgreSQL"),
        (
            GOOD,
            {"pglock_database_url": f"mysql://app:{SECRET}@db/x"},
            "pglock_database_url is not a PostgreSQL connection string; write it like postgresql:",
        ),
        (
            GOOD,
            {"pglock_database_url": f"postgresql://app:a@{SECRET}@db/x"},
            "of a password must be percent-encoded",
        ),
        (
            GOOD,
            {"pglock_database_url": f"postgresql+asyncpg://app:{SECRET}@db/x?ssl=1"},
            "pglock_database_url is not a PostgreSQL connection string",
        ),
    ],
)
def test_a_wrong_configuration_ends_command_and_worker(
    commands: Commands, app: str, settings: dict[str, Any], sentence: str
) -> None:
    worker = commands.worker(app=app, **settings)
    commands.pglock("migrate", "--check", app=app, **settings).says(sentence, 2)
    ended(worker).says(sentence, 1)


@pytest.mark.parametrize(
    ("app", "sentence"),
    [
        ("option", "unknown option lock_levl of task 'misspelt'; did you mean lock_level?"),
        ("parameter", "names 'tenants', which is not a parameter of the task; did you mean 'ten"),
        ("value", "once_per of task 'nightly' must be one of 'occurrence', "),
        ("keys", SAME_KEY),
    ],
)
def test_a_wrong_task_ends_the_worker(
    commands: Commands, database: Database, app: str, sentence: str
) -> None:
    worker = commands.worker(app=f"tests.apps.bad_{app}", pglock_database_url=database.url)
    ended(worker).says(sentence, 1)


@pytest.mark.parametrize(
    ("app", "settings", "sentence"),
    [
        (GOOD, {}, NO_DATABASE),
        (GOOD, {"pglock_databse_url": f"postgresql://app:{SECRET}@db/x"}, MISSPELT_SETTING),
        ("tests.apps.bad_main", {"pglock_database_url": "host=127.0.0.1 port=1"}, MAIN),
        ("tests.apps.bad_option", {}, "did you mean lock_level?"),
    ],
)
def test_a_beat_that_could_never_send_does_not_start(
    commands: Commands, app: str, settings: dict[str, Any], sentence: str
) -> None:
    ended(commands.beat(app=app, **settings)).says(sentence, 1)


def test_a_wrong_task_that_is_registered_at_import_ends_every_command(
    commands: Commands, database: Database
) -> None:
    """Celery wraps whatever an import raises into a traceback; our sentence is its last line."""
    app, given = "tests.apps.bad_at_import", {"pglock_database_url": database.url}
    worker = commands.worker(app=app, **given)
    for refusal in (commands.pglock("runs", app=app, **given), ended(worker)):
        *_, last = [line for line in refusal.output.splitlines() if line.strip()]
        sentence = "unknown option lock_conflct of task 'misspelt'; did you mean lock_conflict?"
        assert last.endswith(sentence)
        assert "Unable to load celery application" in refusal.output
        assert refusal.code == 2


# --- The database cannot be used --------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"port": "1"}, "127.0.0.1:1/"),
        ({"host": "nosuch.invalid"}, "nosuch.invalid:"),
        ({"database": "nosuch"}, 'database "nosuch" does not exist'),
    ],
)
def test_a_database_that_cannot_be_reached_ends_commands_but_no_worker(
    commands: Commands, database: Database, parts: dict[str, str], reason: str
) -> None:
    url = url_for(database.url, password=SECRET, **parts)
    worker = commands.worker(pglock_database_url=url)
    for arguments in (("migrate",), ("runs",)):
        refusal = commands.pglock(*arguments, pglock_database_url=url)
        refusal.says("cannot use PostgreSQL at ", 69)
        refusal.says(reason, 69)
        refusal.says("check pglock_database_url", 69)
    worker.wait_for_line(r"WARNING.*starting although cannot use PostgreSQL at .*check pglock_data")
    worker.wait_for_line(r" ready\.$")
    output = worker.output()
    assert reason in output
    assert SECRET not in output
    assert "Traceback" not in output


def test_a_wrong_password_is_told_without_it(
    commands: Commands, own_postgres: PostgresServer
) -> None:
    wrong, right = "wr0ngsecret", SECRET
    admin_url = own_postgres.url(socket=True)
    rules = Path(own_postgres.data_dir) / "pg_hba.conf"
    rules.write_text("local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
    with psycopg.connect(admin_url, autocommit=True) as admin:
        admin.execute(f"ALTER ROLE postgres PASSWORD '{right}'".encode())
        admin.execute("select pg_reload_conf()")
    good, bad = (
        url_for(own_postgres.url(), password=password) for password in (right, wrong)
    )  # fmt: skip
    eventually(lambda: not _connects(bad), what="the server asks for passwords")
    worker = commands.worker(pglock_database_url=bad)
    refusal = commands.pglock("migrate", pglock_database_url=bad)
    refusal.says('password authentication failed for user "postgres"', 69)
    worker.wait_for_line(r"WARNING.*starting although .*password authentication failed")
    worker.wait_for_line(r" ready\.$")
    migrated = commands.pglock("migrate", pglock_database_url=good)
    assert migrated.code == 0
    for text in (refusal.output, worker.output(), migrated.output):
        assert wrong not in text
        assert right not in text
        assert "Traceback" not in text


def _connects(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def test_a_server_in_recovery_is_refused(commands: Commands, own_postgres: PostgresServer) -> None:
    migrating.migrate(own_postgres.url())
    with own_postgres.standby() as standby:
        worker = commands.worker(pglock_database_url=standby.url())
        for arguments in (("migrate",), ("migrate", "--check")):
            refusal = commands.pglock(*arguments, pglock_database_url=standby.url())
            refusal.says("is in recovery", 69)
            refusal.says("point pglock_database_url at the primary", 69)
        ended(worker).says("is in recovery", 1)


def test_time_outs_of_the_connection_string_do_not_clash_with_ours(
    commands: Commands, blank_database: Database
) -> None:
    url = f"{blank_database.url}?keepalives_idle=30&tcp_user_timeout=9000&connect_timeout=3"
    url += "&application_name=theirs"
    assert commands.pglock("migrate", pglock_database_url=url).code == 0
    commands.worker(pglock_database_url=url).wait_for_line(r" ready\.$")


# --- The tables -------------------------------------------------------------------------------


def test_missing_tables_are_told_with_the_command_that_makes_them(
    commands: Commands, blank_database: Database
) -> None:
    given = {"pglock_database_url": blank_database.url}
    sentence = f"has no tables of celery-pglock in database '{blank_database.name}'"
    worker, beat = commands.worker(**given), commands.beat(**given)
    for arguments in (("migrate", "--check"), ("runs",), ("status",)):
        refusal = commands.pglock(*arguments, **given)
        refusal.says(sentence, 1)
        refusal.says("run: celery -A <your app> pglock migrate", 1)
    ended(worker).says(sentence, 1)
    ended(beat).says(sentence, 1)
    assert tables(blank_database) == []


def test_a_lost_unique_constraint_is_told_with_the_statement_that_restores_it(
    commands: Commands, database: Database
) -> None:
    given = {"pglock_database_url": database.url}
    database.rows("ALTER TABLE pglock.job_runs DROP CONSTRAINT job_runs_job_period_key")
    worker = commands.worker(**given)
    for arguments in (("migrate",), ("migrate", "--check"), ("runs",)):
        commands.pglock(*arguments, **given).says("without its UNIQUE (job, period)", 1)
    refusal = ended(worker)
    refusal.says("without its UNIQUE (job, period)", 1)
    statement = re.search(r"run: (ALTER TABLE .*)$", refusal.output, re.MULTILINE)
    assert statement is not None
    database.rows(statement[1])
    assert commands.pglock("migrate", "--check", **given).code == 0


def test_an_older_schema_is_told_with_the_step_that_is_missing(
    commands: Commands, database: Database
) -> None:
    assert len(STEPS) > 1
    given = {"pglock_database_url": database.url}
    database.rows("DELETE FROM pglock.schema_version WHERE number > 1")
    worker = commands.worker(**given)
    sentence = f"is older than this release needs (missing: {STEPS[1]}); run: celery"
    for arguments in (("migrate", "--check"), ("runs",)):
        commands.pglock(*arguments, **given).says(sentence, 1)
    ended(worker).says(sentence, 1)


def test_tables_that_no_migration_has_made_are_told_with_the_way_on(
    commands: Commands, database: Database
) -> None:
    given = {"pglock_database_url": database.url}
    database.rows("DROP TABLE pglock.schema_version")
    before = tables(database)
    refusal = commands.pglock("migrate", **given)
    refusal.says(f"holds already what step {STEPS[0]} makes", 1)
    refusal.says("INSERT INTO", 1)
    assert tables(database) == before


def test_the_first_migration_makes_the_tables_and_the_second_has_nothing_to_do(
    commands: Commands, blank_database: Database
) -> None:
    given = {"pglock_database_url": blank_database.url}
    first = commands.pglock("migrate", **given)
    assert first.code == 0
    assert re.findall(r"^applied (.*)$", first.output, re.MULTILINE) == STEPS
    assert 'GRANT USAGE ON SCHEMA "pglock" TO <role>;' in first.output
    second = commands.pglock("migrate", **given)
    assert second == Ended(0, 'schema "pglock" is up to date\n')
    assert commands.pglock("migrate", "--check", **given) == second
    commands.worker(**given).wait_for_line(r" ready\.$")


def test_the_printed_sql_makes_the_tables_and_printing_it_touches_nothing(
    commands: Commands, blank_database: Database
) -> None:
    given = {"pglock_database_url": blank_database.url}
    printed = commands.pglock("migrate", "--sql", **given)
    assert (printed.code, tables(blank_database)) == (0, [])
    blank_database.rows(printed.output)
    assert "job_runs" in tables(blank_database)
    assert commands.pglock("migrate", "--check", **given).code == 0
    # It needs no database at all, only the name of the schema.
    assert commands.pglock("migrate", "--sql") == printed
    other = commands.pglock("migrate", "--sql", pglock_schema="other")
    assert 'CREATE TABLE "other".job_runs' in other.output


def test_a_role_without_rights_is_told_whom_to_ask(
    commands: Commands, blank_database: Database
) -> None:
    with role_of(blank_database) as (name, url):
        refusal = commands.pglock("migrate", pglock_database_url=url)
        refusal.says(f"cannot be migrated by role '{name}' (permission denied for database", 1)
        refusal.says("pglock migrate --sql, and let the owner of the database apply", 1)
        worker = commands.worker(pglock_database_url=url)
        ended(worker).says("has no tables of celery-pglock", 1)
    assert tables(blank_database) == []


def test_a_role_without_the_grants_is_told_to_get_them_and_with_them_all_works(
    commands: Commands, database: Database
) -> None:
    with role_of(database) as (name, url):
        given = {"pglock_database_url": url}
        worker = commands.worker(**given)
        for arguments in (("migrate",), ("migrate", "--check"), ("runs",)):
            refusal = commands.pglock(*arguments, **given)
            refusal.says("may not be used by this role (permission denied for schema pglock)", 1)
            refusal.says("run the GRANTs", 1)
        ended(worker).says("permission denied for schema pglock", 1)
        database.rows(schema.grants("pglock", name))
        assert commands.pglock("migrate", **given) == Ended(0, 'schema "pglock" is up to date\n')
        assert commands.pglock("runs", **given) == Ended(0, "no runs recorded\n")
        commands.worker(**given).wait_for_line(r" ready\.$")


def test_a_role_that_may_not_read_the_runs_is_told_so(
    commands: Commands, database: Database
) -> None:
    with role_of(database) as (name, url):
        database.rows(f"GRANT USAGE ON SCHEMA pglock TO {name}")
        database.rows(f"GRANT SELECT ON pglock.schema_version TO {name}")
        for command in ("runs", "status"):
            refusal = commands.pglock(command, pglock_database_url=url)
            refusal.says("may not be used by this role (permission denied for table ", 1)


# --- Everybody migrates at once ---------------------------------------------------------------

GATES = 8_000
MIGRATES = """
import json, sys
import psycopg
from celery_pglock import migrating
url, rounds, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with psycopg.connect(url, autocommit=True) as gatekeeper:
    for number in range(rounds):
        gatekeeper.execute("select pg_advisory_lock_shared(%s)", [first + number])
        print(json.dumps([number, migrating.migrate(url, f"round{number}")]), flush=True)
"""


def test_eight_processes_that_migrate_at_once_all_come_up(
    processes: Processes, blank_database: Database
) -> None:
    """They wait at a gate, a lock that the test holds, and are let through all at once."""
    count, rounds = 8, 5
    gate = blank_database.connect()
    for number in range(rounds):
        gate.execute("select pg_advisory_lock(%s)", [GATES + number])
    started = [
        processes.python(
            "-c", MIGRATES, blank_database.url, str(rounds), str(GATES), name="migrate"
        )
        for _ in range(count)
    ]

    def waiting(number: int) -> bool:
        query = (
            "select count(*) from pg_locks l join pg_database d on d.oid = l.database"
            " where d.datname = current_database() and locktype = 'advisory'"
            " and objid = %s and not granted"
        )
        return blank_database.rows(query, GATES + number) == [(count,)]

    for number in range(rounds):
        eventually(
            functools.partial(waiting, number),
            60,
            "all eight are at the gate",
            told=lambda: [process.output() for process in started],
        )
        gate.execute("select pg_advisory_unlock(%s)", [GATES + number])
    codes = [process.wait(60) for process in started]
    assert codes == [0] * count, [process.output() for process in started]
    answers = [json.loads(line) for process in started for line in process.output().splitlines()]
    for number in range(rounds):
        applied = [steps for at, steps in answers if at == number]
        assert len(applied) == count
        assert sorted(applied) == [[]] * (count - 1) + [STEPS]
        schema.verify(blank_database.url, f"round{number}")


# --- pglock runs ------------------------------------------------------------------------------


@pytest.fixture
def recorded(database: Database) -> Database:
    """A ledger with three runs of this application and one of another."""
    database.rows(
        "INSERT INTO pglock.job_runs (job, period, status, attempts, task, task_id, node,"
        " started_at, finished_at, reason) VALUES"
        " ('bad:good', '2026-11-01', 'done', 1, 'good', 'one', 'w1', '2026-11-01 03:00Z',"
        "  '2026-11-01 03:00:01.5Z', NULL),"
        " ('bad:good', '2026-11-02', 'skipped', 0, 'good', 'two', 'w1', NULL,"
        "  '2026-11-02 03:00Z', 'held by somebody'),"
        " ('bad:other', '2026-11-03', 'failed', 4, 'other', 'three', 'w2', '2026-11-03 03:00Z',"
        "  '2026-11-03 03:00:09Z', 'exhausted'),"
        " ('elsewhere:good', '2026-11-04', 'done', 1, 'good', 'four', 'w3', '2026-11-04 03:00Z',"
        "  '2026-11-04 03:00:01Z', NULL)"
    )
    return database


@pytest.mark.parametrize(
    ("arguments", "task_ids"),
    [
        ((), ["three", "two", "one"]),
        (("--limit", "1"), ["three"]),
        (("--job", "good"), ["two", "one"]),
        (("--job", "elsewhere:good"), []),
        (("--status", "done", "--status", "failed"), ["three", "one"]),
        (("--job", "good", "--status", "failed"), []),
    ],
)
def test_runs_are_shown_newest_first_and_of_this_application_only(
    commands: Commands, recorded: Database, arguments: tuple[str, ...], task_ids: list[str]
) -> None:
    shown = commands.in_this_process("runs", "--json", *arguments, pglock_database_url=recorded.url)
    assert shown.code == 0
    assert [run["task_id"] for run in json.loads(shown.output)] == task_ids


def test_runs_as_json_have_every_column_and_moments_with_a_zone(
    commands: Commands, recorded: Database
) -> None:
    shown = commands.pglock("runs", "--json", "--limit", "1", pglock_database_url=recorded.url)
    (run,) = json.loads(shown.output)
    query = (
        "select column_name from information_schema.columns"
        " where table_schema = 'pglock' and table_name = 'job_runs'"
    )
    assert run.keys() == {name for (name,) in recorded.rows(query)}
    assert (run["reason"], run["attempts"], run["due_at"]) == ("exhausted", 4, None)
    moments = recorded.rows("select %s::timestamptz = '2026-11-03 03:00Z'", run["started_at"])
    assert moments == [(True,)]
    assert re.search(r"[+-]\d\d:\d\d$", run["started_at"])


def test_runs_as_a_table_say_what_ran_and_why_not(commands: Commands, recorded: Database) -> None:
    shown = commands.pglock("runs", pglock_database_url=recorded.url)
    head, *rows = shown.output.splitlines()
    assert head.split() == [
        "job", "period", "status", "attempts", "started_at", "seconds", "node", "reason",
    ]  # fmt: skip
    assert [row.split()[:4] for row in rows] == [
        ["bad:other", "2026-11-03", "failed", "4"],
        ["bad:good", "2026-11-02", "skipped", "0"],
        ["bad:good", "2026-11-01", "done", "1"],
    ]
    assert rows[1].endswith("w1    held by somebody")
    assert rows[2].split()[4:] == ["2026-11-01", "03:00:00+00:00", "1.500", "w1"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("runs", "--status", "finished"), "'finished' is not one of 'sent', 'running'"),
        (("runs", "--jobs", "x"), "No such option"),
        (("migrat",), "No such command 'migrat'"),
    ],
)
def test_a_wrong_command_line_is_told_with_exit_code_2(
    commands: Commands, database: Database, arguments: tuple[str, ...], word: str
) -> None:
    commands.in_this_process(*arguments, pglock_database_url=database.url).says(word, 2)

"""Every command on every state of the database: one clear sentence, the right exit code, no secret.

And what it prints with `--json` is what its schema says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import celery
import click
import psycopg
import pytest
from celery.schedules import crontab

from celery_pglock import LockedTask, cli, elections, keys, patience
from celery_pglock.cli import sending, session
from celery_pglock.demo.servers import PostgresServer
from tests.acceptance.test_bad_input import SECRET, role_of, url_for
from tests.support.commands import Ended, on_terminal, pglock, told
from tests.support.databases import Database
from tests.support.processes import eventually
from tests.support.queued import count

pytestmark = pytest.mark.usefixtures("alone")

NAMESPACE: Final = "proj"
QUEUE: Final = "pglock-commands"
READING: Final[tuple[tuple[str, ...], ...]] = (
    ("status",),
    ("runs",),
    ("runs", "--job", "nightly", "--since", "2h"),
    ("entries",),
)
WRITING: Final[tuple[tuple[str, ...], ...]] = (
    ("pause", "nightly"),
    ("resume", "nightly"),
    ("trigger", "nightly"),
    ("rerun", "nightly", "2026-11-03"),
    ("prune",),
    ("entries", "add", "new", "report", "--every", "60"),
    ("entries", "remove", "kept"),
)
ASKING: Final = (("resign",),)  # it needs no right: a notification is everybody's
TABLES: Final = (*READING, *WRITING, *ASKING)
ALL: Final = (*TABLES, ("migrate",), ("migrate", "--check"), ("locks",))


def application(url: str, broker: str = "memory://", **settings: Any) -> celery.Celery:
    app = celery.Celery(NAMESPACE, broker=broker, set_as_current=False)
    app.conf.update(
        {
            "pglock_database_url": url,
            "timezone": "Europe/Berlin",
            "result_expires": None,  # else Celery adds an entry of its own
            "task_default_queue": QUEUE,
            "beat_schedule": {
                "nightly": {"task": "report", "schedule": crontab(minute="0", hour="4")}
            },
            **settings,
        }
    )

    def report() -> None:
        """Do nothing: no command runs it."""

    register: Any = app.task(name="report", base=LockedTask, shared=False)
    register(report)
    return app


@pytest.fixture(scope="module")
def fixed(read_database: Database) -> Database:
    """A database with an entry and a run, which no test here changes."""
    fill(read_database)
    return read_database


@pytest.fixture
def changing(fixed: Database) -> Iterator[Database]:
    """The same, which afterwards is made again what it was: quicker than another one."""
    yield fixed
    refill(fixed)


@pytest.fixture(scope="module")
def of_nobody(fixed: Database) -> Iterator[str]:
    """The URL of a role without any right."""
    with role_of(fixed) as (_, url):
        yield url


@pytest.fixture(scope="module")
def of_reader(fixed: Database) -> Iterator[str]:
    """The URL of a role that may read, and nothing else."""
    with role_of(fixed) as (name, url):
        fixed.rows(f"GRANT USAGE ON SCHEMA pglock TO {name}")
        fixed.rows(f"GRANT SELECT ON ALL TABLES IN SCHEMA pglock TO {name}")
        yield url


def fill(database: Database) -> None:
    """Write what a beat and its workers leave."""
    insert = "insert into pglock.job_runs (job, period, status, task, entry, attempts, started_at,"
    database.rows(
        f"{insert} finished_at, reason, error) values"
        " ('proj:nightly', '2026-11-03', 'failed', 'report', 'nightly', 1, now() - interval '9 s',"
        "  now(), 'error', 'ValueError(1)'),"
        " ('proj:nightly', '2026-11-02', 'done', 'report', 'nightly', 1, now() - interval '1 d',"
        "  now() - interval '1 d', null, null),"
        " ('proj:nightly', '2026-10-01', 'done', 'report', 'nightly', 1, '2026-10-01', '2026-10-01',"
        "  null, null),"
        " ('proj:other', '2026-11-03', 'skipped', 'report', null, 0, null, now(),"
        '  \'lock "report" is held by job "proj:nightly" (w1@host)\', null),'
        " ('another:nightly', '2026-11-03', 'done', 'report', 'nightly', 1, now(), now(), null, null)"
    )
    database.rows(
        "insert into pglock.beat_entries (namespace, entry, task, schedule, anchor, due_at,"
        " published_at, next_due_at) values"
        " ('proj', 'nightly', 'report', 'crontab 0 4 * * *', now(), now(), now(),"
        "  '2026-12-01 03:00Z'),"
        " ('proj', 'hourly', 'report', 'crontab 0 * * * *', now(), now(), null, '2026-12-01 04:00Z')"
    )
    database.rows(
        "insert into pglock.beat_entries (namespace, entry, task, schedule, anchor, definition,"
        " revision, added) values ('proj', 'kept', 'report', '', now(),"
        ' \'{"version": 1, "task": "report", "schedule": {"type": "interval", "seconds": 60}}\', 1, 1)'
    )


def refill(database: Database) -> None:
    """Make it what ``fill`` makes of an empty one."""
    database.rows("truncate pglock.job_runs, pglock.beat_entries, pglock.beat_terms")
    fill(database)


def whole(database: Database) -> Any:
    return database.rows(
        "select r::text from pglock.job_runs r union all select e::text from pglock.beat_entries e"
        " order by 1"
    )


def each(commands: tuple[tuple[str, ...], ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("command", commands, ids=" ".join)


def refused(ended: Ended, sentence: str, code: int) -> None:
    ended.says(sentence, code)
    assert SECRET not in ended.output
    assert len(ended.output.splitlines()) == 1


# --- the database is not as it should be -----------------------------------------------------------


@each(TABLES)
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_without_tables_it_says_what_makes_them(
    read_blank_database: Database, command: tuple[str, ...], more: tuple[str, ...]
) -> None:
    sentence = "has no tables of celery-pglock in database "
    ended = pglock(application(read_blank_database.url), *command, *more)
    refused(ended, sentence, 1)
    assert ended.output.endswith("; run: celery -A <your app> pglock migrate\n")


def test_without_tables_migrate_can_tell_and_locks_can_show(read_blank_database: Database) -> None:
    app = application(read_blank_database.url)
    refused(pglock(app, "migrate", "--check"), "has no tables of celery-pglock", 1)
    code, found = told(app, "migrate", "--check")
    assert (code, found["applied"]) == (1, [])
    assert "has no tables of celery-pglock" in found["fault"]
    assert told(app, "locks")[0] == 0


@each((*TABLES, ("migrate", "--check")))
def test_without_any_right_it_says_which_are_needed(
    of_nobody: str, command: tuple[str, ...]
) -> None:
    ended = pglock(application(of_nobody), *command)
    refused(ended, "may not be used by this role (permission denied for schema pglock)", 1)
    assert "run the GRANTs that celery -A <your app> pglock migrate prints" in ended.output


@each(WRITING)
def test_with_the_right_to_read_alone_what_writes_is_refused(
    fixed: Database, of_reader: str, command: tuple[str, ...]
) -> None:
    before = whole(fixed)
    ended = pglock(application(of_reader), *command)
    refused(ended, "may not be used by this role (permission denied for table", 1)
    assert whole(fixed) == before


def test_with_the_right_to_read_alone_what_reads_works(of_reader: str) -> None:
    app = application(of_reader)
    for reading in READING:
        assert pglock(app, *reading).code == (1 if reading == ("status",) else 0)
    for writing in WRITING:
        assert pglock(app, *writing, "--dry-run").code == 0
    assert pglock(app, "migrate").code == 0


# --- there is no database --------------------------------------------------------------------------


@each(ALL)
def test_a_server_that_refuses_is_told_with_what_to_check(
    fixed: Database, command: tuple[str, ...]
) -> None:
    url = url_for(fixed.url, host="127.0.0.1", port="1", password=SECRET)
    ended = pglock(application(url), *command, *(["--json"] if "runs" in command else []))
    refused(ended, "cannot use PostgreSQL at 127.0.0.1:1/", 69)
    assert "check pglock_database_url and that the server accepts connections" in ended.output


@pytest.mark.slow
def test_a_wrong_password_is_told_by_every_command(own_postgres: PostgresServer) -> None:
    rules = Path(own_postgres.data_dir) / "pg_hba.conf"
    rules.write_text("local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
    with psycopg.connect(own_postgres.url(socket=True), autocommit=True) as admin:
        admin.execute("ALTER ROLE postgres PASSWORD 'right'")
        admin.execute("select pg_reload_conf()")
    app = application(url_for(own_postgres.url(), password=SECRET))

    def told_so() -> bool:
        return "password authentication failed" in pglock(app, "runs").output

    eventually(told_so, what="the server asks for passwords")
    for command in ALL:
        refused(pglock(app, *command), "password authentication failed for user", 69)


@each((("runs",), ("migrate",), ("migrate", "--check"), ("locks",)))
def test_a_function_for_the_url_that_raises_is_told_without_its_words(
    command: tuple[str, ...],
) -> None:
    def url() -> str:
        msg = f"postgresql://me:{SECRET}@db/x"
        raise KeyError(msg)

    app = application("")
    app.conf.pglock_database_url = url
    refused(pglock(app, *command), "the function that pglock_database_url is raised KeyError", 2)


@pytest.mark.slow
def test_a_standby_is_refused_by_every_command(own_postgres: PostgresServer) -> None:
    """It knows of no lock that is held, and would say that nobody leads."""
    with own_postgres.standby() as standby:
        app = application(standby.url())
        for command in ALL:
            refused(pglock(app, *command), "is in recovery (a standby grants", 69)


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """Accept connections and never say a word; give the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("runs",),
        pytest.param(("migrate", "--check"), marks=pytest.mark.chaos),
        pytest.param(("locks",), marks=pytest.mark.chaos),
    ],
)
def test_a_server_that_accepts_and_says_nothing_is_given_up(command: tuple[str, ...]) -> None:
    with silent_server() as port:
        app = application(f"postgresql://me:{SECRET}@127.0.0.1:{port}/x?connect_timeout=2")
        started = time.monotonic()
        refused(pglock(app, *command), "timeout expired", 69)
    assert time.monotonic() - started < 10


@pytest.mark.slow
def test_a_statement_that_is_not_answered_is_given_up_and_undone(
    changing: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has locked the table: what waits is called back, so that it does nothing later."""
    monkeypatch.setattr(patience.Patient, "patience", 1.0)
    database = changing
    before = whole(database)
    app = application(database.url)
    with psycopg.connect(database.url) as blocking:
        blocking.execute("lock table pglock.beat_entries in share mode")
        started = time.monotonic()
        refused(pglock(app, "pause", "nightly"), "no answer within 1 s", 69)
        assert time.monotonic() - started < 10
        waiting = "select 1 from pg_stat_activity where application_name = 'pglock pause'"
        eventually(lambda: not database.rows(waiting), what="its session has ended")
    assert whole(database) == before
    assert pglock(app, "pause", "nightly").code == 0


@pytest.mark.slow
def test_a_server_that_hangs_is_given_up(
    own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience.Patient, "patience", 1.0)
    app = application(own_postgres.url())
    assert pglock(app, "migrate").code == 0
    with session.opened(_config(app), "test") as connection:
        # The postmaster too, which would pass on that the statement is called back.
        frozen = (connection.info.backend_pid, own_postgres.pid)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(psycopg.OperationalError, match="no answer within 1 s"):
                connection.execute("select 1")
            assert time.monotonic() - started < 10
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)


def _config(app: celery.Celery) -> Any:
    from celery_pglock import settings

    return settings.of(app)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "broker"),
    [
        (("trigger", "nightly"), "redis"),
        (("rerun", "nightly", "2026-11-03"), "amqp"),
        pytest.param(("trigger", "nightly"), "amqp", marks=pytest.mark.chaos),
        pytest.param(("rerun", "nightly", "2026-11-03"), "redis", marks=pytest.mark.chaos),
    ],
)
def test_a_broker_that_accepts_and_says_nothing_is_given_up(
    fixed: Database, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], broker: str
) -> None:
    monkeypatch.setattr(sending, "PATIENCE", 1.0)
    before = whole(fixed)
    with silent_server() as port:
        app = application(fixed.url, f"{broker}://me:{SECRET}@127.0.0.1:{port}//")
        started = time.monotonic()
        refused(pglock(app, *command), "could not be sent", 1)
        assert time.monotonic() - started < 10
    assert whole(fixed) == before


# --- the command is not as it should be ------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "sentence", "code"),
    [
        (("statsu",), "No such command 'statsu'; did you mean 'status'?", 2),
        (("entries", "ad"), "No such command 'ad'; did you mean 'add'?", 2),
        (("runs", "--jsn"), "No such option", 2),
        (("runs", "--status", "finished"), "'finished' is not one of 'sent', 'running'", 2),
        (("runs", "--since", "yesterday"), "must be how long ago, like 90s, 30m, 2h or 7d", 2),
        (("runs", "--limit", "0"), "0 is not in the range x>=1", 2),
        (("pause",), "Missing argument 'ENTRY'", 2),
        (("pause", "nightly", "--for", "2 hours"), "must be a number and a unit", 2),
        (("pause", "nightli"), "did you mean 'nightly'?", 2),
        (("resume", "nightli", "--dry-run"), "did you mean 'nightly'?", 2),
        (("trigger", "nightli"), "did you mean 'nightly'?", 2),
        (("trigger", "nightli", "--dry-run"), "did you mean 'nightly'?", 2),
        (("rerun", "nightly", "2026-11-04"), "no such run is recorded", 1),
        (
            ("rerun", "nightly", "2026-11-02", "--dry-run"),
            "+01:00; add --force to run it all the",
            1,
        ),
        (("entries", "remove", "kep"), "did you mean 'kept'?", 1),
        (("entries", "remove", "nightly", "--dry-run"), "it is in the configuration", 1),
        (("entries", "add", "kept", "report", "--every", "9", "--dry-run"), "give --replace", 1),
        (("migrate", "--sql", "--check"), "--sql prints SQL alone", 2),
        (("migrate", "--sql", "--json"), "--sql prints SQL alone", 2),
        (("resign",), "no beat leads proj; start one: celery beat -S pglock", 1),
        (("resign", "--dry-run"), "no beat leads proj; start one: celery beat -S pglock", 1),
    ],
)
def test_what_cannot_be_done_is_told_and_changes_nothing(
    fixed: Database, command: tuple[str, ...], sentence: str, code: int
) -> None:
    before = whole(fixed)
    pglock(application(fixed.url), *command).says(sentence, code)
    pglock(application(fixed.url), *command, *(["--json"] if "--json" not in command else [])).says(
        sentence, code
    )
    assert whole(fixed) == before


def test_a_job_without_runs_is_told_with_the_one_that_was_meant(fixed: Database) -> None:
    ended = pglock(application(fixed.url), "runs", "--job", "nightli")
    assert (ended.code, ended.stdout) == (0, "no runs recorded\n")
    assert "no run of job 'nightli' is recorded; did you mean 'nightly'?" in ended.output
    ended = pglock(application(fixed.url), "runs", "--job", "nightly", "--status", "missed")
    assert ended.output == "no runs recorded\n"


# --- all is as it should be ------------------------------------------------------------------------


def test_on_tables_without_rows(database: Database) -> None:
    app = application(database.url, beat_schedule={})
    code, found = told(app, "status")
    assert (code, found["leader"], found["next"], found["skips"]) == (1, None, [], [])
    assert told(app, "runs") == (0, [])
    assert told(app, "entries") == (0, [])
    assert told(app, "prune")[1]["runs"] == 0
    assert told(app, "migrate") == (0, told(app, "migrate", "--check")[1])
    for command in READING:
        on_terminal(app, *command).fits()


def test_status_tells_who_leads_what_is_held_due_and_skipped(database: Database) -> None:
    fill(database)
    key = keys.from_name(NAMESPACE, "beat", "leader")
    leading = database.connect(
        application_name=f"{elections.application('leader', NAMESPACE)}web1:4711"
    )
    leading.execute("select pg_advisory_lock(%s)", [key])
    unknown = f"leader     backend {leading.info.backend_pid}, whose term is not recorded\n"
    assert unknown in pglock(application(database.url), "status").output
    for node in ("web3:2", "web2:1"):
        database.connect(application_name=f"{elections.application('standby', NAMESPACE)}{node}")
    database.rows(
        "insert into pglock.beat_terms (namespace, term, node, backend_pid, elected_at, last_tick_at)"
        " values ('proj', 7, 'web1:4711', %s, '2026-11-30 03:00Z', now())",
        leading.info.backend_pid,
    )
    running = database.connect(application_name="pglock:report@w1:9")
    running.execute("select pg_advisory_lock(77)")
    database.rows(
        "insert into pglock.job_runs (job, period, status, name_key, task, node, attempts,"
        " started_at) values ('proj:nightly', '2026-11-04', 'running', 77, 'report', 'w1:9', 2, now())"
    )
    app = application(database.url)
    code, found = told(app, "status")
    assert code == 0
    assert (found["leader"]["node"], found["leader"]["term"]) == ("web1:4711", 7)
    assert [standby["node"] for standby in found["standbys"]] == ["web2:1", "web3:2"]
    assert [(held["period"], held["pid"]) for held in found["holders"]] == [
        ("2026-11-04", running.info.backend_pid)
    ]
    assert [entry["entry"] for entry in found["next"]] == ["nightly", "hourly"]
    assert found["next"][0]["next_due_at"] == "2026-12-01T04:00:00+01:00"
    (skip,) = found["skips"]
    assert 'held by job "proj:nightly"' in skip["reason"]
    assert told(app, "status", "--utc")[1]["next"][0]["next_due_at"] == "2026-12-01T03:00:00+00:00"
    lines = pglock(app, "status").output
    assert "leader     web1:4711, term 7, backend " in lines
    assert "since 2026-11-30 04:00:00+01:00, last tick " in lines
    assert "standbys   web2:1, web3:2\n" in lines
    assert "holders    proj:nightly 2026-11-04 on w1:9, attempt 2, since " in lines
    assert "next due   2026-12-01 04:00:00+01:00 nightly\n" in lines
    assert "2026-12-01 05:00:00+01:00 hourly, its last message is not confirmed\n" in lines
    assert ' proj:other 2026-11-03: lock "report" is held by job "proj:nightly" (w1@host)' in lines
    on_terminal(app, "status").fits()
    code, asked = told(app, "resign", "--dry-run")
    assert (code, asked["before"], asked["after"]) == (0, {"node": "web1:4711", "term": 7}, None)
    assert "would be asked to resign" in pglock(app, "resign", "--dry-run").output


def test_runs_are_chosen_by_job_state_and_time(fixed: Database) -> None:
    app = application(fixed.url)

    def periods(*arguments: str) -> list[str]:
        code, found = told(app, "runs", *arguments)
        assert code == 0
        return [run["period"] for run in found]

    nightly = ("--job", "nightly")
    assert periods(*nightly) == ["2026-11-03", "2026-11-02", "2026-10-01"]
    assert periods(*nightly, "--limit", "1") == ["2026-11-03"]
    assert periods(*nightly, "--status", "done") == ["2026-11-02", "2026-10-01"]
    assert periods(*nightly, "--since", "2h") == ["2026-11-03"]
    assert periods(*nightly, "--since", "2d") == ["2026-11-03", "2026-11-02"]
    assert periods(*nightly, "--since", "2026-10-01") == periods(*nightly)
    # The oldest began at midnight UTC; what is typed is in the application's zone.
    assert periods(*nightly, "--since", "2026-10-01T02:00") == periods(*nightly)
    assert periods(*nightly, "--since", "2026-10-01T02:00:01") == periods(*nightly)[:2]


@pytest.mark.parametrize(
    "command",
    [
        ("pause", "nightly", "--for", "2h", "--reason", "why"),
        ("trigger", "nightly"),
        ("rerun", "nightly", "2026-11-03"),
        ("prune",),
        ("entries add", "new", "report", "--crontab", "0 7 * * mon-fri"),
        ("entries remove", "kept"),
        ("resume", "paused"),
    ],
    ids=" ".join,
)
def test_what_is_tried_out_is_not_done_and_what_is_done_is_told(
    changing: Database, fresh_redis_url: str, command: tuple[str, ...]
) -> None:
    database = changing
    database.rows(
        "insert into pglock.beat_entries (namespace, entry, task, schedule, anchor, next_due_at,"
        " paused_until) values ('proj', 'paused', 'report', '', now(), now(), '9999-01-01Z')"
    )
    app = application(database.url, fresh_redis_url, pglock_retention=7200)
    before = whole(database)
    code, dry = told(app, *command, "--dry-run")
    assert (code, dry["dry_run"]) == (0, True)
    assert "would" in pglock(app, *command[0].split(), *command[1:], "--dry-run").output
    assert whole(database) == before
    assert count(fresh_redis_url, QUEUE) == 0
    code, done = told(app, *command)
    assert (code, done["dry_run"]) == (0, False)
    assert whole(database) != before
    assert count(fresh_redis_url, QUEUE) == (command[0] in ("trigger", "rerun"))
    changes = {"dry_run", "task_id", "revision", "period", "paused_until"}
    assert {name: dry[name] for name in dry.keys() - changes} == {
        name: done[name] for name in done.keys() - changes
    }
    app.close()


def test_on_rabbitmq_it_is_confirmed_before_it_is_told(
    changing: Database, rabbitmq_url: str, queue_name: str
) -> None:
    database = changing
    app = application(database.url, rabbitmq_url, task_default_queue=queue_name)
    for command in (("trigger", "nightly"), ("rerun", "nightly", "2026-11-03")):
        assert told(app, *command)[0] == 0
    with app.connection_for_read() as connection:
        channel: Any = connection.channel()
        assert channel.queue_declare(queue_name, passive=True).message_count == 2
    app.close()


def test_a_paused_entry_is_shown_as_such(changing: Database) -> None:
    database = changing
    app = application(database.url)
    pglock(app, "pause", "nightly")
    pglock(app, "pause", "hourly", "--for", "36500d")
    rows = {row["entry"]: row for row in told(app, "entries")[1]}
    assert [(row["paused"], row["paused_until"] is None) for row in rows.values()] == [
        (True, False), (False, True), (True, True),
    ]  # fmt: skip
    assert "until resumed" in pglock(app, "entries").output
    assert told(app, "resume", "nightly")[1]["was_paused"]
    assert not told(app, "resume", "nightly")[1]["was_paused"]


def test_a_first_migration_tells_its_steps(blank_database: Database) -> None:
    code, found = told(application(blank_database.url), "migrate")
    assert (code, found["fault"], found["pooler"]) == (0, None, None)
    assert found["applied"][0] == "0001_job_runs"
    assert found["grants"][0].startswith("GRANT USAGE ON SCHEMA")


def test_every_command_has_a_schema_and_the_documentation_shows_it() -> None:
    names = set(_names(cli.pglock)) - {"web"}  # which prints none
    folder = Path(cli.__file__).parent
    assert {path.name.removesuffix(".schema.json") for path in folder.glob("*.json")} == names
    page = (folder.parents[1] / "docs/reference/json.md").read_text()
    for name in names:
        assert f"cli/{name}.schema.json" in page


def _names(group: click.Group, prefix: str = "") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        yield prefix + name
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _names(command, f"{prefix}{name}-")

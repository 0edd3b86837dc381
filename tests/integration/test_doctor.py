"""`pglock doctor`: each fault is planted in turn and found; where there is none, none is found."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import re
import typing
import uuid
from collections.abc import Iterator
from typing import Any

import celery
import psycopg
import pytest
from celery.schedules import crontab
from psycopg import sql

from celery_pglock import LockedTask, beat, errors, examination, findings, keys, migrating, schema
from celery_pglock.demo.servers import PostgresServer, children
from tests.support.commands import on_terminal, schema_of, told
from tests.support.databases import Database
from tests.support.pgbouncer import StartPgBouncer
from tests.support.processes import REPOSITORY, eventually
from tests.support.proxy import Proxy
from tests.support.requirements import since
from tests.support.stage import APP, MakeStage

pytestmark = pytest.mark.usefixtures("alone")

SECRET = "tops3cret"
NAMES = {
    "taken": "tests.doctor.taken",
    "plain": "tests.doctor.plain",
}


def application(url: object, **settings: Any) -> celery.Celery:
    """An application with a locked task and a plain one, whose only entry is healthy."""
    app = celery.Celery("doctor", broker="redis://localhost:1/0", set_as_current=False)
    entry = {"task": NAMES["taken"], "schedule": crontab(minute="*/10"), "args": (1,)}
    app.conf.update(
        {"pglock_database_url": url, "beat_schedule": {"often": entry}, "result_expires": None}
    )
    app.conf.update(settings)

    @app.task(name=NAMES["taken"], base=LockedTask, shared=False)
    def taken(tenant: int) -> int:
        return tenant

    @app.task(name=NAMES["plain"], shared=False)
    def plain() -> None: ...

    return app


def more(app: celery.Celery, name: str, **entry: Any) -> celery.Celery:
    """Add an entry."""
    app.conf.beat_schedule = {
        **app.conf.beat_schedule,
        name: {"task": NAMES["taken"], "schedule": crontab(minute="*/10"), **entry},
    }
    return app


def examined(app: celery.Celery, code: int) -> dict[str, Any]:
    """Examine an application, and expect an exit code; no secret is told."""
    ended, found = told(app, "doctor")
    assert SECRET not in json.dumps(found)
    assert ended == code, found
    assert isinstance(found, dict)
    names = [*found["made"], *(not_made["check"] for not_made in found["not_made"])]
    assert len(set(names)) == len(names)
    assert set(examination.CHECKS) - {"transaction_level"} <= set(names)
    return found


def only(app: celery.Celery, fault: str, severity: str = "error") -> dict[str, str]:
    """Expect that an application has this one fault, and return it."""
    found = examined(app, 1 if severity == "error" else 0)
    ((finding),) = found["findings"]
    assert (finding["code"], finding["severity"]) == (fault, severity)
    for text in (finding["reason"], finding["remedy"]):
        assert text.strip() == text
        assert "\n" not in text
        assert not text.endswith(".")
    assert isinstance(finding, dict)
    return finding


def not_made(found: dict[str, Any]) -> dict[str, str]:
    return {each["check"]: each["because"] for each in found["not_made"]}


def healthy(app: celery.Celery) -> None:
    found = examined(app, 0)
    assert found["findings"] == []
    assert found["not_made"] == []
    assert found["healthy"] is True


@pytest.fixture
def read_app(read_database: Database) -> celery.Celery:
    """For tests that write nothing into the database."""
    return application(read_database.url)


@pytest.fixture
def app(database: Database) -> celery.Celery:
    return application(database.url)


def test_where_nothing_is_wrong_nothing_is_found(app: celery.Celery, database: Database) -> None:
    healthy(app)
    ended = on_terminal(app, "doctor").fits()
    assert ended.code == 0
    assert re.search(r"^all is well: \d+ checks made, nothing found$", ended.output, re.MULTILINE)
    assert database.name in ended.output


@pytest.mark.slow
def test_beside_a_leader_all_is_well(make_stage: MakeStage) -> None:
    """With the real commands."""
    stage = make_stage({"one": 1.0})
    leader = stage.beat()
    leader.wait_for_line("leadership gained: ", 60)
    command = stage.processes.celery(APP, "pglock", "doctor", env=stage.env())
    assert command.wait(60) == 0, command.output()
    assert "all is well: " in command.output()
    assert stage.leader([leader]) is leader
    assert stage.term() == 1


def test_it_writes_nothing_and_asks_for_no_lock(own_postgres: PostgresServer) -> None:
    migrating.migrate(own_postgres.url())
    app = more(application(own_postgres.url()), "unknown", task="tests.doctor.takn")
    with psycopg.connect(own_postgres.url(), autocommit=True) as connection:
        # What could use up a transaction's number beside it.
        connection.execute("alter system set autovacuum = off")
        connection.execute("alter system set log_statement = 'all'")
        connection.execute("select pg_reload_conf()")
        eventually(
            lambda: connection.execute("show log_statement").fetchone() == ("all",),
            what="the server logs each statement",
        )

        def transactions() -> Any:
            return connection.execute("select pg_snapshot_xmax(pg_current_snapshot())").fetchone()

        before, logged = transactions(), len(own_postgres.log_file.read_text())
        examined(app, 1)
        assert transactions() == before
        log = own_postgres.log_file.read_text()[logged:]
        assert "job_runs" in log
        assert not re.search(r"advisory_(xact_)?(un)?lock", log)
        # Control: what writes uses one up, and a lock that is tried is seen.
        connection.execute("create table control as select pg_try_advisory_xact_lock(1)")
        assert transactions() != before
        assert "advisory_xact_lock" in own_postgres.log_file.read_text()[logged:]


# --- 1: the URL ---------------------------------------------------------------------------------


def raising() -> str:
    raise KeyError(SECRET)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        (None, "set it, for instance"),
        (f"nonsense {SECRET}", "write it like postgresql://user@host:5432/database"),
        (f"postgresql://user:p@{SECRET}@host/db", "percent-encoded"),
        (4711, "correct it"),
        (raising, "have it return a connection string"),
        (lambda: f"nonsense {SECRET}", "write it like postgresql://user@host:5432/database"),
    ],
)
def test_a_url_that_cannot_be_used(url: object, remedy: str) -> None:
    app = application(url)
    assert remedy in only(app, "database_url")["remedy"]
    missing = not_made(examined(app, 1))
    assert missing["session_level"]
    assert missing["tables"]
    ended = on_terminal(app, "doctor").fits()
    assert re.search("^not made  .*because ", ended.output, re.MULTILINE | re.DOTALL)
    assert "1 error, 0 warnings" in ended.output


def test_a_server_that_does_not_answer_is_the_first_finding_and_exit_code_69() -> None:
    url = f"postgresql://user:{SECRET}@127.0.0.1:{children.free_port()}/nowhere"
    found = examined(application(url), 69)
    assert [finding["code"] for finding in found["findings"]] == ["database_unreachable"]
    assert "check pglock_database_url" in found["findings"][0]["remedy"]
    assert not_made(found)["clocks"] == "database_unreachable was found"


def test_a_setting_that_is_wrong_is_a_finding_too(read_database: Database) -> None:
    finding = only(application(read_database.url, pglock_shcema="x"), "settings")
    assert "did you mean pglock_schema?" in finding["reason"]


def test_a_wrong_option_of_a_task_is_a_finding_too(read_app: celery.Celery) -> None:
    def wrong() -> None: ...

    read_app.task(name="tests.doctor.wrong", base=LockedTask, shared=False, lock_levl="x")(wrong)
    assert "lock_levl" in only(read_app, "settings")["reason"]


# --- 2 to 6: the server and the way to it -------------------------------------------------------


def test_a_server_that_is_too_old(read_database: Database) -> None:
    with psycopg.connect(read_database.url) as connection:
        number = b"server_version\0%d." % (connection.info.server_version // 10000)
    assert len(number) == len(b"server_version\x0013.")
    # None so old is to be had; what this one says of itself is changed on its way.
    old = Proxy(
        read_database.url, alter=lambda data: data.replace(number, b"server_version\x0013.")
    )
    with contextlib.closing(old):
        finding = only(application(old.url), "server_too_old")
    assert "PostgreSQL 13" in finding["reason"]
    assert "upgrade the server" in finding["remedy"]
    with contextlib.closing(Proxy(read_database.url)) as same:
        healthy(application(same.url))


@pytest.mark.slow
def test_a_server_in_recovery(own_postgres: PostgresServer) -> None:
    migrating.migrate(own_postgres.url())
    with own_postgres.standby() as standby:
        app = application(standby.url())
        assert (
            "point pglock_database_url at the primary" in only(app, "server_in_recovery")["remedy"]
        )


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_a_pooler_that_holds_no_session_locks(
    read_database: Database, pgbouncer: StartPgBouncer, mode: Any
) -> None:
    app = application(pgbouncer(read_database, mode).url)
    assert "point pglock_database_url at PostgreSQL itself" in only(app, "pooler")["remedy"]


def test_through_a_pool_in_session_mode_all_is_well(
    read_database: Database, pgbouncer: StartPgBouncer
) -> None:
    healthy(application(pgbouncer(read_database, "session", default_pool_size=5).url))


def test_a_pooler_matters_less_where_all_tasks_are_at_transaction_level(
    read_database: Database, pgbouncer: StartPgBouncer
) -> None:
    url = pgbouncer(read_database, "transaction").url
    only(application(url, pglock_lock_level="transaction"), "pooler", "warning")
    settings = {"pglock_lock_level": "transaction", "beat_scheduler": "pglock"}
    only(application(url, **settings), "pooler", "error")


def test_a_pooler_in_statement_mode_holds_no_transaction_level_locks_either(
    read_database: Database, pgbouncer: StartPgBouncer
) -> None:
    app = application(pgbouncer(read_database, "statement").url, pglock_lock_level="transaction")
    found = examined(app, 1)["findings"]
    assert {finding["code"] for finding in found} == {"pooler"}
    assert any("statement mode" in finding["reason"] for finding in found)


@pytest.mark.parametrize(("off", "way"), [(60, "ahead of"), (-60, "behind")])
def test_clocks_that_differ(read_app: celery.Celery, off: int, way: str) -> None:
    def wrong() -> dt.datetime:
        return dt.datetime.now(dt.UTC) + dt.timedelta(seconds=off)

    (finding,) = examination.examine(read_app, wrong).examination.findings
    assert (finding.code, finding.severity) == ("clock_differs", "warning")
    assert re.search(rf"(59|60)\.\d s {way} the one of PostgreSQL", finding.reason)
    assert finding.remedy == "have both hosts synchronize their clocks"


def test_a_limit_of_the_host_that_a_lock_session_cannot_lift(read_database: Database) -> None:
    # Linux knows no longer time than 32767 s here, and the server goes on without it.
    finding = only(
        application(read_database.url, pglock_lost_after=32768), "limit_not_lifted", "warning"
    )
    assert finding["reason"].startswith("tcp_keepalives_idle is ")
    assert "have the limits" in finding["remedy"]


def test_a_limit_of_the_database_that_stays_behind_a_pooler(
    database: Database, pgbouncer: StartPgBouncer
) -> None:
    with psycopg.connect(database.url) as connection:
        since(connection.info.server_version >= 170000, "PostgreSQL 17")
    database.rows(f"alter database {database.name} set transaction_timeout = '7s'")
    url = pgbouncer(database, "transaction").url
    found = examined(application(url, pglock_lock_level="transaction"), 0)["findings"]
    assert [finding["code"] for finding in found] == ["pooler", "limit_not_lifted"]
    assert "transaction_timeout stays 7s" in found[1]["reason"]
    assert "ALTER ROLE ... SET transaction_timeout = 0" in found[1]["remedy"]
    # Control: a session of our own lifts it.
    healthy(application(database.url))


def test_limits_of_the_role_that_are_lifted_are_no_fault(database: Database) -> None:
    for limit in ("idle_session_timeout", "idle_in_transaction_session_timeout", "lock_timeout"):
        database.rows(f"alter database {database.name} set {limit} = '7s'")
    healthy(application(database.url))


def test_transactions_that_are_read_only_by_default(database: Database) -> None:
    database.rows(f"alter database {database.name} set default_transaction_read_only = on")
    finding = only(application(database.url), "read_only")
    assert "default_transaction_read_only = off" in finding["remedy"]


# --- 7 to 9: the tables -------------------------------------------------------------------------


def test_tables_that_are_missing(blank_database: Database) -> None:
    app = application(blank_database.url)
    finding = only(app, "schema_missing")
    assert finding["remedy"] == "run: celery -A <your app> pglock migrate"
    missing = not_made(examined(app, 1))
    assert missing["unique"] == missing["stock_beat"] == "schema_missing was found"
    migrating.migrate(blank_database.url)
    healthy(application(blank_database.url))


def test_a_lock_only_application_needs_no_tables(blank_database: Database) -> None:
    app = application(blank_database.url, pglock_once_per=None)
    found = examined(app, 0)
    assert found["findings"] == []
    assert "no task keeps rows" in not_made(found)["tables"]


def test_tables_that_are_old(app: celery.Celery, database: Database) -> None:
    newest = schema.migrations()[-1]
    database.rows("delete from pglock.schema_version where number = %s", newest.number)
    finding = only(app, "schema_old")
    assert newest.name in finding["reason"]
    assert finding["remedy"] == "run: celery -A <your app> pglock migrate"


def test_a_constraint_that_is_missing(app: celery.Celery, database: Database) -> None:
    database.rows("alter table pglock.job_runs drop constraint job_runs_job_period_key")
    remedy = only(app, "unique_missing")["remedy"]
    database.rows(remedy.removeprefix("run: "))
    healthy(app)


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    name = f"poor-{uuid.uuid4().hex[:8]}"
    database.rows(f'create role "{name}" login')
    yield name
    database.rows(f'drop owned by "{name}"')
    database.rows(f'drop role "{name}"')


@pytest.mark.parametrize("first", ["", "grant usage on schema pglock to {}"])
def test_rights_that_are_missing(database: Database, role: str, first: str) -> None:
    quoted = sql.Identifier(role).as_string()
    if first:
        database.rows(first.format(quoted))
    url = psycopg.conninfo.make_conninfo(database.url, user=role)
    finding = only(application(url), "rights_missing")
    assert quoted in finding["reason"]
    for statement in finding["remedy"].partition("run: ")[2].split(";"):
        if statement.strip():
            database.rows(statement)
    healthy(application(url))


# --- 10 to 15: the application and its schedule -------------------------------------------------


def test_a_task_of_another_application_ran_in_the_namespace(
    app: celery.Celery, database: Database
) -> None:
    insert = (
        "insert into pglock.job_runs (job, period, status, task, started_at, finished_at)"
        " select %s, %s, 'done', %s, now() - %s::interval, now() - %s::interval"
    )
    for job, task, ago in (
        ("doctor:x", NAMES["taken"], "1 min"),
        ("doctor:y", "celery.backend_cleanup", "1 min"),
        ("doctor:z", "tests.elsewhere.old", "2 days"),
        ("doctors:x", "tests.elsewhere.neighbour", "1 min"),
    ):
        database.rows(insert, job, "2026", task, ago, ago)
    healthy(app)
    database.rows(insert, "doctor:x", "2027", "tests.elsewhere.other", "1 min", "1 min")
    finding = only(app, "namespace_shared", "warning")
    assert "tests.elsewhere.other" in finding["reason"]
    assert "old" not in finding["reason"]
    assert "pglock_namespace of its own" in finding["remedy"]


def test_a_leader_with_another_schedule(app: celery.Celery, database: Database) -> None:
    with leading(application(database.url)):
        healthy(app)
    with leading(more(application(database.url), "another", args=(2,))):
        finding = only(app, "namespace_shared", "warning")
        assert "has another schedule" in finding["reason"]
        assert "pglock_namespace of its own" in finding["remedy"]
    healthy(app)  # it has gone, and what it left behind proves nothing


@contextlib.contextmanager
def leading(app: celery.Celery) -> Iterator[None]:
    scheduler = beat.LeaderScheduler(app)
    try:
        eventually(lambda: scheduler.tick() is not None and _leads(scheduler), what="it leads")
        yield
    finally:
        scheduler.close()


def _leads(scheduler: beat.LeaderScheduler) -> bool:
    candidate = scheduler._leadership  # noqa: SLF001 - it says so nowhere else
    return candidate is not None and candidate.leading


@pytest.mark.parametrize("broker", ["redis://localhost:1/0", "sqs://"])
def test_a_run_may_last_longer_than_the_broker_waits(read_database: Database, broker: str) -> None:
    visible = {"visibility_timeout": 600}
    settings = {"broker_url": broker, "task_acks_late": True, "broker_transport_options": visible}
    finding = only(application(read_database.url, **settings), "redelivery", "warning")
    assert "without time_limit" in finding["reason"]
    assert "600 s" in finding["reason"]
    assert "set time_limit" in finding["remedy"]
    finding = only(
        application(read_database.url, **settings, task_time_limit=601), "redelivery", "warning"
    )
    assert "by time_limit" in finding["reason"]
    assert "raise visibility_timeout in broker_transport_options above" in finding["remedy"]


@pytest.mark.parametrize(
    "settings",
    [
        {"task_time_limit": 3600},
        {"task_acks_late": False},
        {"broker_url": "amqp://localhost:1"},
        {"broker_transport_options": {"visibility_timeout": 7200}, "task_time_limit": 7000},
    ],
)
def test_a_run_that_may_not(read_database: Database, settings: dict[str, Any]) -> None:
    healthy(application(read_database.url, **{"task_acks_late": True, **settings}))


def test_an_entry_whose_task_is_unknown(read_app: celery.Celery) -> None:
    finding = only(more(read_app, "typo", task="tests.doctor.takn"), "unknown_task")
    assert "entry typo sends task tests.doctor.takn" in finding["reason"]
    assert "did you mean tests.doctor.taken" in finding["remedy"]


def test_entries_whose_task_takes_no_lock(read_app: celery.Celery) -> None:
    for number in range(7):
        more(read_app, f"plain{number}", task=NAMES["plain"])
    finding = only(read_app, "plain_task", "warning")
    assert "plain0, plain1, plain2, plain3, plain4 and 2 more send" in finding["reason"]
    assert "base=LockedTask" in finding["remedy"]


def test_two_entries_that_share_a_calendar_job(read_database: Database) -> None:
    healthy(more(application(read_database.url), "twin", args=(2,)))
    app = more(application(read_database.url, pglock_once_per="day"), "twin", args=(2,))
    finding = only(app, "shared_period", "warning")
    assert "entries often and twin share job tests.doctor.taken" in finding["reason"]
    assert "lock_by" in finding["remedy"]


@pytest.mark.parametrize(
    "expires",
    [7200, dt.timedelta(hours=2), dt.datetime.now(dt.UTC) + dt.timedelta(hours=2)],
)
def test_a_message_that_outlives_its_history(read_database: Database, expires: object) -> None:
    def scheduled(retention: int | None) -> celery.Celery:
        app = application(read_database.url, pglock_retention=retention)
        return more(app, "slow", options={"expires": expires})

    finding = only(scheduled(3600), "expires_beyond_retention", "warning")
    assert "entry slow" in finding["reason"]
    assert "at most 3600 s, or raise pglock_retention" in finding["remedy"]
    healthy(scheduled(8000))
    healthy(scheduled(None))


def began(database: Database, starts: list[dt.datetime], task: str = NAMES["taken"]) -> None:
    """Plant the rows of runs that no beat of ours has sent."""
    for start in starts:
        database.rows(
            "insert into pglock.job_runs (job, period, status, task, started_at, finished_at)"
            " values (%s, %s, 'done', %s, %s, %s)",
            f"doctor:{task}", f"id:{uuid.uuid4()}", task, start, start,
        )  # fmt: skip


def tens(count: int, off: float) -> list[dt.datetime]:
    """Return the last full ten minutes, and some seconds."""
    now = dt.datetime.now(dt.UTC).replace(second=0, microsecond=0)
    last = now - dt.timedelta(minutes=now.minute % 10 + 10)
    return [last - dt.timedelta(minutes=10 * k) + dt.timedelta(seconds=off) for k in range(count)]


def test_a_stock_beat_that_sends_the_same_entries(app: celery.Celery, database: Database) -> None:
    began(database, tens(2, 0.8))
    began(database, tens(9, 0.8), NAMES["plain"])  # nobody's promise
    healthy(app)
    began(database, tens(3, 1.1))
    finding = only(app, "stock_beat", "warning")
    assert "5 runs of task tests.doctor.taken" in finding["reason"]
    assert "by the schedule of entry often" in finding["reason"]
    assert "start every beat with -S pglock" in finding["remedy"]
    # Under a calendar rule two of them do no harm.
    healthy(application(database.url, pglock_once_per="day"))
    began(database, tens(6, 40.0))
    healthy(app)  # most of them were sent by something else


@pytest.mark.slow
@pytest.mark.chaos  # its short form is the one above
def test_a_real_stock_beat_leaves_such_rows(make_stage: MakeStage) -> None:
    """A message of Celery's own scheduler, run by a worker, and the doctor's word for it."""
    stage = make_stage({"one": 2.0}, extra={"APP_TASK": "quick"})
    stage.worker()
    stage.beat(scheduler="celery.beat:Scheduler")
    eventually(
        lambda: (
            stage.rows(
                "select count(*) from pglock.job_runs where entry is null and period like 'id:%'"
            )[0][0]
            >= 5
        ),
        30,
        "five runs",
    )
    command = stage.processes.celery(APP, "pglock", "doctor", "--json", env=stage.env())
    assert command.wait(60) == 0, command.output()
    (finding,) = json.loads(command.output())["findings"]
    assert finding["code"] == "stock_beat"


# --- more than the fifteen ----------------------------------------------------------------------


def test_locks_that_are_switched_off(read_database: Database) -> None:
    only(application(read_database.url, pglock_enabled=False), "disabled", "warning")


def test_two_lock_names_with_one_key(read_app: celery.Celery) -> None:
    def task() -> None: ...

    key = keys.from_name("doctor", "task", "a name")
    for name, lock in (("first", "a name"), ("second", key)):
        read_app.task(name=name, base=LockedTask, shared=False, lock_name=lock)(task)
    assert "rename one of them" in only(read_app, "equal_keys")["remedy"]


def never() -> crontab:
    """The 30th of February, which newer releases of Celery refuse to write."""
    schedule = crontab(minute="0")
    vars(schedule).update(day_of_month={30}, month_of_year={2})
    return schedule


@pytest.mark.parametrize(
    ("schedule", "fault", "severity"),
    [
        (0, "entry_unusable", "error"),
        (never(), "schedule_never_comes", "warning"),
    ],
)
def test_a_schedule_that_is_none(
    read_app: celery.Celery, schedule: object, fault: str, severity: str
) -> None:
    only(more(read_app, "odd", schedule=schedule), fault, severity)


def test_an_entry_that_is_none(read_app: celery.Celery) -> None:
    read_app.conf.beat_schedule = {"odd": {"task": NAMES["taken"], "every": 5}}
    found = examined(read_app, 1)
    assert [finding["code"] for finding in found["findings"]] == ["entry_unusable"]
    assert not_made(found)["stock_beat"] == "entry_unusable was found"


def test_a_database_that_goes_in_the_middle() -> None:
    made = findings.Examination()

    def gone() -> Iterator[findings.Finding]:
        yield from ()
        raise errors.DatabaseUnavailable("db:5432/proj", "connection refused")

    made.check("tables", gone)
    made.check("unique", list, needs=["tables"])
    assert made.unreachable
    assert [dataclasses.astuple(each) for each in made.not_made] == [
        ("tables", "the database has gone"),
        ("unique", "the database has gone"),
    ]


def test_each_code_is_in_the_schema_and_in_the_documentation() -> None:
    codes = set(typing.get_args(findings.Code))
    described = schema_of("doctor")["properties"]["findings"]["items"]["properties"]["code"]
    assert set(described["enum"]) == codes
    page = (REPOSITORY / "docs/howto/troubleshoot.md").read_text()
    by_code = page.partition("## By the code of a finding")[2]
    assert set(re.findall(r"^`(\w+)`", by_code, re.MULTILINE)) == codes
    assert schema_of("doctor")["$defs"]["check"]["enum"] == list(examination.CHECKS)

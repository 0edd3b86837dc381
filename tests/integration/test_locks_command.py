"""`pglock locks`: what is held is shown by its name, and what is not ours is said to be so."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest
from celery.schedules import crontab

from celery_pglock import LockedTask, advisory_lock, beat, keys
from tests.support.commands import on_terminal, pglock, told
from tests.support.databases import Database
from tests.support.processes import eventually

pytestmark = pytest.mark.usefixtures("alone")

Body = Callable[[], Any]
NAMESPACE = "shown"


@pytest.fixture
def app(database: Database) -> celery.Celery:
    return application(database.url)


def application(url: str, **settings: Any) -> celery.Celery:
    """An application whose tasks call what they are given."""
    app = celery.Celery(NAMESPACE, broker="memory://", set_as_current=False)
    app.conf.update(
        pglock_database_url=url,
        beat_schedule={"hourly": {"task": "plain", "schedule": crontab(minute="0")}},
        **settings,
    )

    def task(name: str, **options: Any) -> None:
        def body(call: Body, tenant: str = "") -> Any:
            del tenant
            return call()

        register: Any = app.task(name=name, base=LockedTask, shared=False, **options)
        register(body)

    task("plain")
    task("named", lock_name="a name")
    task("numbered", lock_name=4711)
    task("of_tenant", lock_by=["tenant"])
    task("made", lock_name=lambda arguments, _: f"made for {arguments['tenant']}")
    task("daily", once_per="day")
    task("transactional", lock_level="transaction")
    task("lock_only", once_per=None)
    return app


def shown(app: celery.Celery, *arguments: str) -> dict[str, Any]:
    on_terminal(app, "locks", *arguments).fits()
    code, found = told(app, "locks", *arguments)
    assert code == 0
    assert isinstance(found, dict)
    return found


def while_running(app: celery.Celery, task: str, **arguments: Any) -> dict[str, dict[str, Any]]:
    """Return what is shown from inside a run, by its kind."""
    found: dict[str, Any] = app.tasks[task](call=lambda: shown(app), **arguments)
    return {lock["kind"]: lock for lock in found["locks"]}


def test_nothing_is_held(app: celery.Celery) -> None:
    assert shown(app)["locks"] == []
    assert "0 locks held" in pglock(app, "locks").output


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("plain", "plain"), ("named", "a name"), ("numbered", "4711"), ("daily", "daily"),
        ("transactional", "transactional"),
    ],
)  # fmt: skip
def test_a_run_is_shown_with_both_its_locks(
    app: celery.Celery, database: Database, task: str, name: str
) -> None:
    found = while_running(app, task)
    assert set(found) == {"name", "run"}
    ((job, period, started_at, pid),) = database.rows(
        "select job, period, started_at, backend_pid from pglock.job_runs"
    )
    for lock in found.values():
        assert lock["ours"]
        assert (lock["job"], lock["period"], lock["task"]) == (job, period, task)
        assert dt.datetime.fromisoformat(lock["since"]) == started_at
        assert pid in (None, lock["pid"])
        assert lock["node"]
        assert lock["application"].startswith(f"pglock:{task}@")
    assert found["name"]["name"] == name
    key = 4711 if task == "numbered" else keys.from_name(NAMESPACE, "task", name)
    assert found["name"]["key"] == key
    assert found["run"]["name"] == f"{job} {period}"
    assert found["run"]["key"] == keys.of_run(NAMESPACE, job, period)
    assert shown(app)["locks"] == []


@pytest.mark.parametrize("task", ["of_tenant", "made"])
def test_a_name_that_arguments_make_is_known_by_its_run(app: celery.Celery, task: str) -> None:
    found = while_running(app, task, tenant="acme")
    # Under occurrence no row holds the lock name, and no key can be turned back into it.
    assert (found["name"]["name"], found["name"]["task"]) == (None, task)
    text: str = app.tasks[task](call=lambda: on_terminal(app, "locks").fits().output, tenant="acme")
    assert f"name       a name of task {task} that its arguments make" in text


def test_under_a_calendar_rule_the_job_tells_the_name(database: Database) -> None:
    app = application(database.url, pglock_once_per="day")
    found = while_running(app, "of_tenant", tenant="acme")
    assert found["name"]["name"] == 'of_tenant{"tenant":"acme"}'


def test_a_lock_without_a_run_is_known_by_its_name(app: celery.Celery) -> None:
    (lock,) = while_running(app, "lock_only").values()
    assert (lock["kind"], lock["name"], lock["job"], lock["since"]) == (
        "name", "lock_only", None, None,
    )  # fmt: skip
    with advisory_lock("by a script", app=app):
        (lock,) = shown(app)["locks"]
    assert (lock["kind"], lock["name"]) == ("name", "by a script")
    assert lock["session_since"] is not None


@contextlib.contextmanager
def leading(app: celery.Celery) -> Iterator[None]:
    scheduler = beat.LeaderScheduler(app)

    def leads() -> bool:
        scheduler.tick()
        candidate = scheduler._leadership  # noqa: SLF001 - it says so nowhere else
        return candidate is not None and candidate.leading

    try:
        eventually(leads, what="it leads")
        yield
    finally:
        scheduler.close()


def test_the_leader_and_the_ones_of_other_namespaces(database: Database) -> None:
    app = application(database.url)
    other = application(database.url, pglock_namespace="other")
    with leading(app), leading(other):
        found = {lock["name"]: lock for lock in shown(app)["locks"]}
        assert set(found) == {NAMESPACE, "other"}
        for name, lock in found.items():
            assert lock["kind"] == "leader"
            ((node, elected_at, pid),) = database.rows(
                "select node, elected_at, backend_pid from pglock.beat_terms where namespace = %s",
                name,
            )
            assert (lock["node"], lock["pid"]) == (node, pid)
            assert dt.datetime.fromisoformat(lock["since"]) == elected_at


def test_what_is_not_ours_is_said_to_be_so(app: celery.Celery, database: Database) -> None:
    connection = database.connect(application_name="reports")
    connection.execute("select pg_advisory_lock(-42), pg_advisory_lock(1, -2)")
    connection.execute("select pg_advisory_lock_shared(7)")
    locks = shown(app)["locks"]
    pid = connection.info.backend_pid
    assert {(lock["key"], lock["shared"]) for lock in locks} == {
        (-42, False), (7, True), (None, False),
    }  # fmt: skip
    assert [lock["pair"] for lock in locks if lock["key"] is None] == [[1, -2]]
    for lock in locks:
        assert (lock["kind"], lock["name"], lock["ours"]) == (None, None, False)
        assert (lock["application"], lock["pid"]) == ("reports", pid)
    output = pglock(app, "locks").output
    assert output.count("foreign    key") == 3
    assert f"held by reports, backend {pid}, not before 20" in output
    assert output.count("its session is not one of celery-pglock's") == 3


def test_a_foreign_session_with_a_key_of_ours(app: celery.Celery, database: Database) -> None:
    key = keys.from_name(NAMESPACE, "task", "plain")
    database.connect(application_name="reports").execute(b"select pg_advisory_lock(%d)" % key)
    (lock,) = shown(app)["locks"]
    assert (lock["kind"], lock["name"], lock["ours"]) == ("name", "plain", False)
    output = pglock(app, "locks").output
    assert re.search("^name       plain$", output, re.MULTILINE)
    assert "its session is not one of celery-pglock's" in output


def test_a_row_of_a_run_that_died_gives_its_lock_no_holder(
    app: celery.Celery, database: Database
) -> None:
    database.rows(
        "insert into pglock.job_runs (job, period, status, name_key, task, node, backend_pid,"
        " started_at) values (%s, 'p', 'running', %s, 'plain', 'gone:1', 0, now())",
        f"{NAMESPACE}:plain",
        keys.from_name(NAMESPACE, "task", "plain"),
    )
    assert shown(app)["locks"] == []
    found = while_running(app, "plain")
    assert {lock["node"] for lock in found.values()}.isdisjoint({"gone:1"})


def test_locks_of_another_database_are_not_shown(
    app: celery.Celery, blank_database: Database
) -> None:
    blank_database.connect().execute("select pg_advisory_lock(1)")
    assert shown(app)["locks"] == []


def test_it_works_without_tables(blank_database: Database) -> None:
    app = application(blank_database.url)
    found = app.tasks["lock_only"](call=lambda: shown(app))
    assert found["tables"] is False
    assert [lock["name"] for lock in found["locks"]] == ["lock_only"]
    assert "without tables" in pglock(app, "locks").output


def test_all_names_are_shown_though_nobody_holds_them(app: celery.Celery) -> None:
    names = {each["task"]: each for each in shown(app, "--all")["names"]}
    assert "names" not in shown(app)
    assert names["plain"] == {
        "task": "plain", "name": "plain", "depends_on": None,
        "key": keys.from_name(NAMESPACE, "task", "plain"),
    }  # fmt: skip
    assert names["numbered"]["key"] == 4711
    assert (names["of_tenant"]["key"], names["of_tenant"]["depends_on"]) == (None, "lock_by")
    assert (names["made"]["name"], names["made"]["depends_on"]) == (None, "lock_name")
    text: str = app.tasks["named"](call=lambda: on_terminal(app, "locks", "--all").fits().output)
    assert re.findall(r"^free +(.*)$", text, re.MULTILINE) == [
        "daily", "lock_only", "4711", "plain", "transactional",
    ]  # fmt: skip
    assert "name       a name" in text
    assert len(re.findall("^any ", text, re.MULTILINE)) == 2

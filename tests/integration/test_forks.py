"""Children of a process that holds a lock: none of them ends it, keeps it, or speaks for it.

What a bare session does across forks is in `test_sessions`; here it is held in the ways in which
users hold it, by children of all kinds. `tests.apps.forking` is the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from celery_pglock import keys
from celery_pglock.demo.servers import children
from tests.apps import forking
from tests.integration.workbench import advisory_locks, row, terminate
from tests.support.databases import Database
from tests.support.processes import Process, Processes, eventually
from tests.support.proxy import Proxy
from tests.support.requirements import require
from tests.support.stage import MakeStage, Stage

HOLDINGS = ["run", "transaction", "block", "leader"]
ENDS = ["exit at once", "exit", "return", "raise", "be killed", "give up", "ask"]
KINDS = [kind for kind in forking.KINDS if kind not in ("os.fork", "os.fork in a proof", "storm")]
JOB = "forking:report"
REPORT = keys.from_name(forking.NAMESPACE, "task", "report")
ANOTHER = keys.from_name(forking.NAMESPACE, "task", "another")


class Parent:
    """A process of `tests.apps.forking`, and what it holds."""

    def __init__(self, process: Process, database: Database, holding: str) -> None:
        self.process = process
        self.database = database
        self.holding = holding
        self.child = int(process.wait_for_line(r"^parent has (\d+)")[1])
        self.locks = advisory_locks(database)

    @property
    def backend(self) -> int:
        (backend,) = {pid for _, pid in self.locks}
        return backend

    def expect_undisturbed(self) -> None:
        """Fail unless it holds what it held, over the same session, and nobody spoke for it."""
        self.process.wait_for_line("^parent holds True$")
        assert advisory_locks(self.database) == self.locks
        assert users(self.database, self.backend, self.process) == {self.process.pid}
        if self.holding in ("run", "transaction"):
            assert row(self.database, "status", "attempts", job=JOB) == ("running", 1)
        if self.holding == "leader":
            rows = self.database.rows("select term, resigned_at from pglock.beat_terms")
            assert rows == [(1, None)]

    def end(self) -> None:
        """Let it go on to its end, which is as if it had had no child."""
        self.process.send(forking.GOING_ON)
        assert self.process.wait() == 0, self.process.output()
        output = self.process.output()
        (ending,) = re.findall("^parent ends with (.*)$", output, re.MULTILINE)
        assert ending == {"block": "left", "leader": "resigned True"}.get(self.holding, "Ran")
        if self.holding in ("run", "transaction"):
            assert row(self.database, "status", "attempts", job=JOB) == ("done", 1)
        eventually(lambda: not advisory_locks(self.database), what="nothing is held")
        # Nothing was called lost, by either of them.
        assert not re.search("^(parent|child) lost|WARNING|ERROR", output, re.MULTILINE), output

    def kill(self) -> float:
        """Kill it and not its child; return after how many seconds nothing was held."""
        self.process.kill()
        killed = time.monotonic()
        eventually(lambda: not advisory_locks(self.database), 1.0, "the lock is free")
        return time.monotonic() - killed


MakeParent = Callable[..., Parent]


@pytest.fixture
def make_parent(database: Database, processes: Processes) -> Iterator[MakeParent]:
    """Start a parent: how it holds, and its children as kind and act."""
    # The socket of a fork server has a name of at most 108 characters.
    with tempfile.TemporaryDirectory(prefix="pglock-") as directory:

        def make(holding: str, *children: str, url: str = "", **env: str) -> Parent:
            words = "-m", "tests.apps.forking", url or database.url, holding, *children
            process = processes.python(*words, env={"TMPDIR": directory, **env}, name="forking")
            return Parent(process, database, holding)

        yield make
        processes.end()


def users(database: Database, backend: int, *processes: Process) -> set[int]:
    """Return which of these processes and their children have the client's end of a session.

    While one of them lives, the server does not see the others die.
    """
    require(Path("/proc/net/tcp").exists(), "Linux's /proc")
    ((port,),) = database.rows("select client_port from pg_stat_activity where pid = %s", backend)
    server = urlsplit(database.url).port or 5432
    # Established: a connection of before that had the same port may still be listed. And one may be
    # listed twice, because the table changes while it is read.
    wanted = re.compile(rf"\s*\d+: \w+:{port:04X} \w+:{server:04X} 01 ")
    lines = Path("/proc/net/tcp").read_text().splitlines()
    (inode,) = {line.split()[9] for line in lines if wanted.match(line)}
    pids = {pid for process in processes for pid in (process.pid, *process.children())}
    return {pid for pid in pids if f"socket:[{inode}]" in opened_by(pid)}


def opened_by(pid: int) -> set[str]:
    """Return what a process has open; nothing of one that has just ended."""
    files = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            files.add(str(link.readlink()))
    return files


# --- what a child does -----------------------------------------------------------------------


@pytest.mark.parametrize("holding", HOLDINGS)
def test_however_forked_children_end_their_parent_holds_on(
    make_parent: MakeParent, holding: str
) -> None:
    """Also where a child leaves the body or the block, by an exception, `sys.exit` or a return.

    Asked, a child says no: it would learn of no loss.
    """
    parent = make_parent(holding, *(f"os.fork:{act}" for act in ENDS))
    parent.process.wait_for_line("^child asks False (LockLost|LeadershipLost)$")
    parent.expect_undisturbed()
    assert set(re.findall("^child ends with (.*)$", parent.process.output(), re.MULTILINE)) == {
        "SystemExit",
        "RuntimeError",
        {"block": "left", "leader": "resigned False"}.get(holding, "Ran"),
    }
    parent.end()


@pytest.mark.slow
@pytest.mark.parametrize("holding", HOLDINGS)
def test_children_of_any_kind_leave_their_parent_alone(
    make_parent: MakeParent, holding: str
) -> None:
    parent = make_parent(holding, *(f"{kind}:leave" for kind in KINDS))
    parent.process.wait_for_line("^child leaves$", count=len(KINDS))
    parent.expect_undisturbed()
    parent.end()


@pytest.mark.parametrize("holding", ["run", "block"])
def test_a_fork_in_the_middle_of_a_proof_leaves_nobody_waiting(
    make_parent: MakeParent, holding: str
) -> None:
    """The monitor's thread, which has the connection, does not exist in the child."""
    parent = make_parent(holding, "os.fork in a proof:ask")
    parent.process.wait_for_line("^child asks False LockLost$", 10)
    parent.expect_undisturbed()
    parent.end()


def test_control_a_child_that_takes_itself_for_its_parent_waits_for_ever(
    make_parent: MakeParent,
) -> None:
    parent = make_parent("run", "os.fork in a proof:ask unguarded")
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        assert "asks" not in parent.process.output()
        assert children.alive(parent.child)
        time.sleep(0.05)
    children.send(parent.child, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["os.fork", "fork", "billiard"])
def test_a_child_has_sessions_and_a_monitor_of_its_own(
    make_parent: MakeParent, database: Database, kind: str
) -> None:
    """It is refused what its parent holds; what it holds itself, it can lose."""
    parent = make_parent("run", f"{kind}:lock too")
    child = parent.process
    child.wait_for_line("^child is refused running$")
    child.wait_for_line("^child is refused the block$")
    child.wait_for_line("^child holds True with a monitor True$")
    (own,) = {pid for key, pid in advisory_locks(database) if key == ANOTHER}
    assert own != parent.backend
    ends = {parent.backend: {parent.process.pid}, own: {parent.child}}
    assert {pid: users(database, pid, parent.process) for pid in ends} == ends
    terminate(database, own)
    child.wait_for_line("^child knows: its session was ended by the server$", 5)
    assert row(database, "status", "reason", job="forking:another") == ("failed", "lock lost")
    parent.process.wait_for_line("^parent holds True$")
    assert advisory_locks(database) == parent.locks
    assert row(database, "status", "attempts", job=JOB) == ("running", 1)


# --- a child that outlives its parent ---------------------------------------------------------


@pytest.mark.parametrize(
    ("holding", "kind"),
    [
        *(("run", kind) for kind in KINDS),
        *((holding, "os.fork") for holding in HOLDINGS),
    ],
)
def test_the_lock_of_a_killed_parent_is_free_although_its_child_lives(
    make_parent: MakeParent, holding: str, kind: str
) -> None:
    parent = make_parent(holding, f"{kind}:live")
    parent.process.wait_for_line("^child lives$")
    parent.expect_undisturbed()
    seconds = parent.kill()
    assert children.alive(parent.child)
    print(f"{holding}, {kind}: free after {seconds:.3f} s")


def test_a_session_that_was_being_opened_during_a_fork_is_the_parents_alone(
    make_parent: MakeParent, database: Database, proxy: Proxy
) -> None:
    """No hook knew of its connection, so it is opened again."""
    parent = forked_while_opening(make_parent, database, proxy)
    parent.kill()
    assert children.alive(parent.child)


def test_control_without_noticing_the_fork_the_child_keeps_that_session(
    make_parent: MakeParent, database: Database, proxy: Proxy
) -> None:
    parent = forked_while_opening(make_parent, database, proxy, FORKING_UNNOTICED="1")
    parent.process.kill()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        assert advisory_locks(database) == parent.locks
        time.sleep(0.05)
    children.send(parent.child, signal.SIGKILL)
    eventually(lambda: not advisory_locks(database), 1.0, "the lock is free")


@pytest.fixture
def proxy(database: Database) -> Iterator[Proxy]:
    proxy = Proxy(database.url)
    yield proxy
    proxy.close()


def forked_while_opening(
    make_parent: MakeParent, database: Database, proxy: Proxy, **env: str
) -> Parent:
    """Return a parent that forked while its session was being opened, and holds by now."""
    proxy.hold()
    parent = make_parent("opening", "os.fork:live", url=proxy.url, **env)
    parent.process.wait_for_line("^child lives$")
    proxy.flow()
    parent.process.wait_for_line("^parent holds True$")
    parent.locks = advisory_locks(database)
    assert REPORT in [key for key, _ in parent.locks]
    return parent


# --- many children, and a beat that is one ----------------------------------------------------


def test_fifty_children_at_once_cost_no_session_and_no_lock(
    make_parent: MakeParent, database: Database
) -> None:
    parent = make_parent("run", "storm:")
    assert len(parent.process.children()) == 50
    # Everybody lives; one has the session. Proofs go on beside the children.
    assert users(database, parent.backend, parent.process) == {parent.process.pid}
    mine = "select count(*) from pg_stat_activity where application_name like 'pglock:%%'"
    assert database.rows(f"{mine} and datname = %s", database.name) == [(1,)]
    parent.process.send(forking.GOING_ON)
    words = parent.process.wait_for_line(r"^parent had 50 \{0\} (\S+)$", 20)
    print(f"50 forks and their ends: {words[1]} s")
    parent.expect_undisturbed()
    assert "does not hold" not in parent.process.output()
    parent.end()


@pytest.mark.slow
def test_a_worker_its_children_and_its_embedded_beat_share_no_session(
    make_stage: MakeStage, database: Database
) -> None:
    """`worker -B`, prefork: what each has open was opened by itself, and nobody else has it."""
    stage = make_stage(dict.fromkeys(("one", "two", "three", "four"), 1.0))
    worker = stage.worker("-B", "--scheduler", "pglock", "-s", os.devnull)
    worker.wait_for_line("leadership gained: ")
    stage.wait_for_runs(12)
    owners: dict[int, str] = {}

    def seen() -> bool:
        """Look until a beat and both children were seen with a session each."""
        for backend, name in sessions_of(stage):
            with contextlib.suppress(ValueError):  # it was closed meanwhile
                (owner,) = users(database, backend, worker)
                assert name.endswith(f":{owner}"), (name, owner)
                owners[owner] = name
        return len(owners) >= 3

    eventually(seen, 20, "three processes have sessions")
    assert worker.pid not in owners
    assert len([name for name in owners.values() if name.startswith("pglock:leader:")]) == 1
    worker.terminate()
    assert worker.wait() == 0


def sessions_of(stage: Stage) -> list[tuple[int, str]]:
    return [
        (pid, name)
        for pid, name in stage.rows(
            "select pid, application_name from pg_stat_activity"
            " where application_name like 'pglock:%%' and datname = current_database()"
        )
    ]

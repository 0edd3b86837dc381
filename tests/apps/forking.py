"""A process that holds a lock in some way, and has children of some kind that do something.

`python -m tests.apps.forking URL HOLDING KIND:ACT...`. It has one child after the other, says
what happens line by line, each with who says it, and ends when it is sent SIGUSR1.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import billiard
import celery

from celery_pglock import (
    advisory_lock,
    attempts,
    claims,
    errors,
    execution,
    keys,
    leadership,
    ledger,
    monitor,
    outcomes,
    sessions,
    stacks,
)

PARENT = os.getpid()
NAMESPACE = "forking"
LOST_AFTER = 2.0
GOING_ON = signal.SIGUSR1
LIVING = "import time; print('child lives', flush=True); time.sleep(600)"


def say(*words: object) -> None:
    """Write a line in one piece, so that two processes can write to one file."""
    # A child that is spawned imports this module anew, under another name.
    who = "parent" if os.getpid() == PARENT and __name__ == "__main__" else "child"
    os.write(1, f"{who} {' '.join(map(str, words))}\n".encode())


@dataclasses.dataclass(frozen=True)
class Grip:
    """What is held, in whatever way.

    Attributes:
        held: whether it is, without a query.
        check: asks the server; raises when it is not.
        give_up: what a child may try in order to end it.
    """

    held: Callable[[], bool]
    check: Callable[[], object]
    give_up: Callable[[], object]


# --- ways to hold ----------------------------------------------------------------------------


def work(name: str, period: str | None = "2026-11-29") -> claims.Work:
    """Return work whose job is called as its lock."""
    job = f"{NAMESPACE}:{name}"
    return claims.Work(
        job=job,
        period=period,
        name=name,
        name_key=keys.from_name(NAMESPACE, "task", name),
        run_key=None if period is None else keys.of_run(NAMESPACE, job, period),
        task=name,
        task_id=f"m-{name}",
        node=f"here:{os.getpid()}",
    )


def executor(url: str, level: sessions.Level) -> execution.Executor:
    """Return an executor with a stack of its own."""
    plan = sessions.Plan(target=url, level=level, application="pglock:idle", lost_after=LOST_AFTER)
    return execution.Executor(
        stack=stacks.Stack(plan),
        records=ledger.Ledger(),
        terms=attempts.Terms(
            classify=outcomes.verdict, lost=lambda *_: say("lost"), interrupt=True
        ),
    )


def hold_a_run(url: str, level: sessions.Level, under: Callable[[Grip], None]) -> object:
    """Hold the locks of a run; return what its end was."""

    def body(run: Any) -> None:
        under(Grip(lambda: run.held, run.check, lambda: None))

    return type(executor(url, level).execute(work("report"), body)).__name__


def hold_a_block(url: str, under: Callable[[Grip], None]) -> object:
    """Hold the lock of a name in a script."""
    with advisory_lock("report", app=application(url)) as lock:
        under(Grip(lambda: lock.held, lock.check, lambda: None))
    return "left"


def hold_the_leadership(url: str, under: Callable[[Grip], None]) -> object:
    """Lead."""
    candidate = leadership.Leadership(
        url, namespace=NAMESPACE, node=f"here:{PARENT}", poll=0.1, lease=30.0
    )
    while candidate.stand() is None:
        pass
    under(Grip(lambda: candidate.held, candidate.confirm, candidate.resign))
    return f"resigned {candidate.resign()}"


def hold_what_is_being_opened(url: str, under: Callable[[Grip], None]) -> object:
    """Have children while another thread opens the session whose lock will be held."""
    if os.environ.get("FORKING_UNNOTICED"):
        setattr(stacks, "_connect", vars(stacks)["_connect_once"])  # noqa: B010 - for mypy
    begun = threading.Event()

    def body(_: Any) -> None:
        begun.set()
        time.sleep(600)

    opener = executor(url, "session")
    threading.Thread(target=opener.execute, args=(work("report"), body), daemon=True).start()
    while not any(str(link.readlink()).startswith("socket:") for link in open_files()):
        time.sleep(0.01)
    under(Grip(lambda: begun.wait(20), lambda: None, lambda: None))
    return "at last"


def open_files() -> list[Path]:
    """Return what this process has open, but for what looks."""
    return [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def application(url: str) -> celery.Celery:
    """Return an application on this database."""
    app = celery.Celery(NAMESPACE, set_as_current=False)
    app.conf.update(pglock_database_url=url, pglock_lost_after=LOST_AFTER)
    return app


HOLDINGS: dict[str, Callable[[str, Callable[[Grip], None]], object]] = {
    "run": lambda url, under: hold_a_run(url, "session", under),
    "transaction": lambda url, under: hold_a_run(url, "transaction", under),
    "block": hold_a_block,
    "leader": hold_the_leadership,
    "opening": hold_what_is_being_opened,
}


# --- what a child does -----------------------------------------------------------------------


def live() -> None:
    """Outlive the parent, unless it is killed."""
    say("lives")
    time.sleep(600)


def leave() -> None:
    """Do nothing and end, in the usual way of this kind of child."""
    gc.collect()
    say("leaves")


def fail(_: Grip) -> None:
    """Let an exception out of what the parent is in."""
    msg = "the child's own"
    raise RuntimeError(msg)


def ask(grip: Grip) -> None:
    """Tell what this process believes of its parent's locks."""
    held = grip.held()
    try:
        grip.check()
    except errors.PGLockError as error:
        say("asks", held, type(error).__name__)
    else:
        say("asks", held, "held")
    os._exit(0)


def lock_too(_: Grip) -> None:
    """Use the package itself: be refused where the parent holds, hold another, and lose it."""
    url = sys.argv[1]
    own = executor(url, "session")
    refused = own.execute(work("report"), lambda _: say("runs although it must not"))
    say("is refused", refused.kind if isinstance(refused, claims.Refused) else "not at all")
    try:
        with advisory_lock("report", app=application(url)):
            say("is in the block although it must not")
    except errors.LockNotAcquired:
        say("is refused the block")

    def body(run: Any) -> None:
        thread = vars(monitor.of_this_process())["_thread"]
        say("holds", run.held, "with a monitor", thread.is_alive())
        # Until the test has ended this session.
        time.sleep(20)

    try:
        own.execute(work("another"), body)
    except errors.LockLost as lost:
        say("knows:", lost.reason)
    os._exit(0)


def ask_unguarded(grip: Grip) -> None:
    """Ask as the parent would: nothing tells this process that it is another."""
    os.getpid = lambda: PARENT
    ask(grip)


ACTS: dict[str, Callable[[Grip], object]] = {
    "exit at once": lambda _: os._exit(0),
    "exit": lambda _: sys.exit(0),
    "return": lambda _: None,
    "raise": fail,
    "be killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "give up": lambda grip: (grip.give_up(), os._exit(0)),
    "ask": ask,
    "ask unguarded": ask_unguarded,
    "lock too": lock_too,
    "live": lambda _: live(),
    "leave": lambda _: leave(),
}
# For children that are given a function and not a copy of everything.
PLAIN: dict[str, Callable[[], None]] = {"live": live, "leave": leave}


# --- kinds of children -----------------------------------------------------------------------


def fork(act: str, grip: Grip) -> None:
    """Have a child by os.fork(), which returns to the caller as well."""
    if (pid := os.fork()) == 0:
        ACTS[act](grip)
        return
    say("has", pid)
    if act != "live":
        os.waitpid(pid, 0)


def fork_in_a_proof(act: str, grip: Grip) -> None:
    """Have a child while the monitor's thread has the connection in its hands."""
    arrived, forked = threading.Event(), threading.Event()
    inner = sessions.Session.ask

    def ask_slowly(session: sessions.Session) -> None:
        arrived.set()
        forked.wait(20)
        inner(session)

    setattr(sessions.Session, "ask", ask_slowly)  # noqa: B010 - mypy refuses an assignment
    arrived.wait(20)
    fork(act, grip)
    forked.set()


def storm(_: str, grip: Grip, count: int = 50) -> None:
    """Have many children who live at the same time, then let them end, and tell how long it took."""
    started = time.monotonic()
    waiting, ending = os.pipe()
    pids = []
    for _number in range(count):
        if (pid := os.fork()) == 0:
            os.close(ending)
            os.read(waiting, 1)
            os._exit(0)
        pids.append(pid)
        if not grip.held():
            say("does not hold after", len(pids))
    say("has", pids[-1], "of", len(pids))
    signal.sigwait({GOING_ON})
    os.close(ending)
    codes = {os.waitpid(pid, 0)[1] for pid in pids}
    say("had", len(pids), codes, f"{time.monotonic() - started:.3f}")


def start(context: Any, act: str, grip: Grip) -> None:
    """Have a child by the `Process` of multiprocessing or billiard."""
    if act in PLAIN:
        process = context.Process(target=PLAIN[act])
    else:
        process = context.Process(target=ACTS[act], args=(grip,))
    process.start()
    say("has", process.pid)
    if act != "live":
        process.join()


def command(act: str, **options: Any) -> None:
    """Have a child that is another program."""
    code = LIVING if act == "live" else "print('child leaves')"
    process = subprocess.Popen([sys.executable, "-c", code], **options)
    say("has", process.pid)
    if act != "live":
        process.wait()


KINDS: dict[str, Callable[[str, Grip], None]] = {
    "os.fork": fork,
    "os.fork in a proof": fork_in_a_proof,
    "storm": storm,
    "fork": lambda act, grip: start(multiprocessing.get_context("fork"), act, grip),
    "forkserver": lambda act, grip: start(multiprocessing.get_context("forkserver"), act, grip),
    "spawn": lambda act, grip: start(multiprocessing.get_context("spawn"), act, grip),
    "billiard": lambda act, grip: start(billiard, act, grip),
    "Popen": lambda act, _: command(act),
    "Popen, descriptors kept": lambda act, _: command(act, close_fds=False),
}


def main() -> None:
    url, holding, *children = sys.argv[1:]
    logging.basicConfig(format="%(levelname)s:%(name)s:%(message)s", stream=sys.stdout)
    signal.pthread_sigmask(signal.SIG_BLOCK, {GOING_ON})

    def under(grip: Grip) -> None:
        for child in children:
            kind, _, act = child.partition(":")
            KINDS[kind](act, grip)
            if os.getpid() != PARENT:
                return
        grip.check()
        say("holds", grip.held())
        signal.sigwait({GOING_ON})

    ending: object = "not at all"
    try:
        ending = HOLDINGS[holding](url, under)
    except BaseException as error:  # noqa: BLE001 - whatever a child lets out
        ending = type(error).__name__
    say("ends with", ending)


if __name__ == "__main__":
    main()

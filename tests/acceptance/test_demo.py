"""The demonstration: what it shows, what it counts, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import redis

from celery_pglock.demo import books, feed, outcome, plot, story, verdict
from celery_pglock.demo.servers import children
from tests.support.processes import Process, Processes, eventually

ANCHOR = dt.datetime(2026, 11, 3, 12, tzinfo=dt.UTC)
EVERY = dt.timedelta(seconds=2)
DUE = verdict.instants(ANCHOR, EVERY, ANCHOR + 4 * EVERY)
SECOND = dt.timedelta(seconds=1)


def billed(*periods: dt.datetime, customers: int = 3) -> list[tuple[dt.datetime, int]]:
    return [(period, customer) for period in periods for customer in range(customers)]


def start(processes: Processes, *arguments: str, **env: str) -> Process:
    return processes.python("-m", "celery_pglock.demo", *arguments, env=env, name="demo")


def figure(process: Process, name: str) -> int:
    """Return a figure of the last table."""
    found = re.search(rf"^ *{name} +(\d+) ", process.output(), re.MULTILINE)
    assert found, process.output()
    return int(found[1])


def works_in(place: Path) -> dict[int, str]:
    """Return the processes that work below a directory, with their commands."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").resolve().is_relative_to(place) and children.alive(int(entry.name)):
                found[int(entry.name)] = (entry / "cmdline").read_text(errors="replace")
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    """Where the demonstration makes its directories; the account `nobody` has to get in."""
    made = Path(tempfile.mkdtemp(prefix="demo-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def left_in(place: Path) -> list[Path]:
    """Return what is left there, but for the copy of the server programs that is for later."""
    return [path for path in place.iterdir() if not path.name.startswith("pglock-bin-")]


# --- the count --------------------------------------------------------------------------------


def test_what_is_due_follows_from_anchor_and_distance_alone() -> None:
    assert [ANCHOR + k * EVERY for k in (1, 2, 3, 4)] == DUE
    assert verdict.instants(ANCHOR, EVERY, ANCHOR + SECOND) == []
    assert verdict.instants(ANCHOR, EVERY, ANCHOR + 3 * SECOND) == DUE[:1]


def test_one_invoice_for_each_customer_and_period_is_right() -> None:
    counted = verdict.count(DUE, billed(*DUE), 3)

    assert counted.right
    assert (counted.due, counted.billed, counted.invoices) == (4, 4, 12)
    assert counted.wrong == ()


def test_a_second_invoice_is_a_double() -> None:
    counted = verdict.count(DUE, [*billed(*DUE), (DUE[1], 0), (DUE[1], 0)], 3)

    assert not counted.right
    assert (counted.doubles, counted.missing, counted.undue, counted.billed) == (2, 0, 0, 3)
    assert counted.wrong == (verdict.Wrong(DUE[1], doubles=2, missing=0),)


def test_a_period_that_nobody_remembers_is_missing() -> None:
    counted = verdict.count(DUE, billed(*DUE[:2], DUE[3]), 3)

    assert not counted.right
    assert (counted.doubles, counted.missing, counted.billed) == (0, 3, 3)
    assert counted.wrong == (verdict.Wrong(DUE[2], doubles=0, missing=3),)


def test_doubled_and_missing_do_not_make_up_for_each_other() -> None:
    rows = billed(*DUE)
    rows[0] = rows[1]

    counted = verdict.count(DUE, rows, 3)

    assert (counted.doubles, counted.missing, counted.invoices) == (1, 1, 12)


def test_an_invoice_for_a_period_that_was_not_due_is_seen() -> None:
    counted = verdict.count(DUE, [*billed(*DUE), (ANCHOR, 0)], 3)

    assert not counted.right
    assert (counted.doubles, counted.missing, counted.undue) == (0, 0, 1)


def test_lateness_is_that_of_the_first_occurrence_due_after_the_kill() -> None:
    sent = {DUE[0]: DUE[0], DUE[1]: DUE[1] + SECOND / 4, DUE[2]: None}

    late = verdict.lateness([DUE[0] + SECOND, DUE[1], DUE[3]], DUE, sent)

    assert [(found.due, found.seconds) for found in late] == [(DUE[1], 0.25), (DUE[2], None)]


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("right", [True, False])
def test_the_sentence_says_which(*, guarded: bool, right: bool) -> None:
    counted = verdict.count(DUE, billed(*(DUE if right else DUE[1:])), 3)
    done = len(DUE) if guarded else None
    result = outcome.Result(
        verdict.Verdict(counted, done, 4, None), story.Deeds(), settled=True, notes={}
    )

    assert ("must not happen" in result.sentence) == (guarded and not right)
    assert ("what the locks prevent" in result.sentence) == (not guarded and not right)
    assert ("3 missing" in result.sentence) == (not right)


# --- the plot and the feed --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("seconds", [10.0, 30.0])
def test_every_plot_has_all_kinds_of_faults_and_time_to_recover(seed: int, seconds: float) -> None:
    faults = plot.draw(seed, seconds)

    assert faults == plot.draw(seed, seconds)
    kinds = [fault.kind for fault in faults]
    assert set(kinds) == set(get_args(plot.Kind))
    assert all(0 < fault.at < seconds - plot.QUIET for fault in faults)
    assert all(0 <= fault.into < books.WRITING for fault in faults)


def test_the_feed_shortens_what_it_tells(tmp_path: Path) -> None:
    reader = feed.Reader(tmp_path / "feed")
    writer = feed.Writer(tmp_path / "feed", "worker1")
    writer.write(
        "a long sentence",
        event="run_skipped",
        period="2026-11-03T12:00:02.250000+00:00",
        reason="already ran (task 0c3fdb24-9d55-4b7b-8cf0-9d1a0b7d3f61)",
    )

    (told,) = reader.read()

    assert told.sentence == "worker1 skips 12:00:02.250: already ran (task 0c3fdb24)"
    assert reader.read() == []


# --- the play ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_guarded_it_bills_every_period_once(processes: Processes) -> None:
    demo = start(processes, "--seed", "7", "--seconds", "12")

    assert demo.wait(90) == 0, demo.output()
    assert (figure(demo, "doubles"), figure(demo, "missing"), figure(demo, "not due")) == (0, 0, 0)
    assert figure(demo, "runs done") == figure(demo, "periods due") >= 5
    assert figure(demo, "invoices") == 50 * figure(demo, "periods due")
    # It was put to the test.
    assert figure(demo, "lost attempts") >= 1
    assert len(re.findall(r"kill -9 beat\d, which leads", demo.output())) == 2
    assert demo.output().count(" a second time, as task ") == 2
    assert "leads now, term 3" in demo.output()


def broker_of(place: Path) -> str:
    """Return the URL of the broker of the demonstration that plays below a directory."""
    for pid in works_in(place):
        with contextlib.suppress(OSError):
            environment = (Path("/proc") / str(pid) / "environ").read_text(errors="replace")
            if found := re.search(r"PGLOCK_DEMO_BROKER_URL=([^\0]+)", environment):
                return found[1]
    return ""


@pytest.mark.slow
def test_a_message_that_a_worker_took_with_it_is_sent_again(
    processes: Processes, place: Path
) -> None:
    demo = start(processes, "--seed", "7", "--seconds", "12", TMPDIR=str(place))
    url = eventually(lambda: broker_of(place), 30)
    demo.wait_for_line(r"leads now, term 1")
    # As a worker that is killed before it has written down what it was given.
    with redis.Redis.from_url(url) as client:
        taken: Any = client.brpop(["celery"], 30)
    assert taken, demo.output()

    assert demo.wait(120) == 0, demo.output()
    assert re.search(r"beat\d sends [\d:.]+ again: sent, and nobody works on it", demo.output())
    assert figure(demo, "missing") == 0


@pytest.mark.slow
def test_unguarded_it_doubles(processes: Processes) -> None:
    demo = start(processes, "--unguarded", "--seed", "7", "--seconds", "10")

    assert demo.wait(90) == 1, demo.output()
    assert figure(demo, "doubles") > 0
    assert "this is what the locks prevent" in demo.output()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.chaos),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.chaos),
    ],
)
@pytest.mark.parametrize("moment", [r"two 'celery beat", r"written since"])
def test_however_it_ends_it_leaves_nothing_running(
    processes: Processes, place: Path, signum: signal.Signals, code: int, moment: str
) -> None:
    demo = start(processes, "--seed", "7", TMPDIR=str(place))
    demo.wait_for_line(moment)
    # Two servers, two beats, two workers; later also the processes of the pools.
    assert len(works_in(place)) >= 6
    assert len(left_in(place)) == 3

    demo.send(signum)

    assert demo.wait(20) == code, demo.output()
    eventually(lambda: not works_in(place), what="all processes end")
    assert signum == signal.SIGKILL or left_in(place) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_ended_while_it_makes_a_database_it_leaves_nothing(
    processes: Processes, place: Path, signum: signal.Signals
) -> None:
    """Initdb has children of its own, which went on writing into the removed directory."""
    demo = start(processes, TMPDIR=str(place))

    eventually(
        lambda: any("initdb" in command for command in works_in(place).values()),
        what="initdb runs",
        interval=0.005,
    )

    demo.send(signum)

    demo.wait(20)
    eventually(lambda: not works_in(place), what="all processes end")
    assert signum == signal.SIGKILL or left_in(place) == []


@pytest.mark.parametrize("module", ["rich", "redis"])
def test_a_missing_extra_is_named_in_one_sentence(processes: Processes, module: str) -> None:
    code = (
        f"import runpy, sys; sys.modules[{module!r}] = None;"
        "runpy.run_module('celery_pglock.demo', run_name='__main__', alter_sys=True)"
    )
    demo = processes.python("-c", code)

    assert demo.wait() == 2
    assert demo.output() == (
        f"The demonstration needs {module}, which is not installed: "
        "run pip install 'celery-pglock[demo]'.\n"
    )


def test_missing_servers_are_named_in_one_sentence(processes: Processes, tmp_path: Path) -> None:
    demo = start(processes, PGLOCK_TEST_PG_BIN=str(tmp_path))

    assert demo.wait() == 2
    assert "there is no 'postgres' in it" in demo.output()
    assert "Traceback" not in demo.output()


@pytest.mark.parametrize("seconds", ["1", "nan", "soon"])
def test_a_length_that_cannot_be_played_is_refused(processes: Processes, seconds: str) -> None:
    demo = start(processes, "--seconds", seconds)

    assert demo.wait() == 2
    assert "Traceback" not in demo.output()

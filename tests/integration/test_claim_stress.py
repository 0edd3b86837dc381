"""Many processes claim the same periods at once, under changing lock names, and some die.

The judge is a side table that is written on other connections, in the order of a database
sequence: a run writes `enter` after it was given its locks and `leave` before it lets them go.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import random
import time
import uuid

import pytest

from celery_pglock import sessions
from tests.integration import stress
from tests.integration.workbench import advisory_locks
from tests.support.databases import Database
from tests.support.processes import Processes, eventually

PROCESSES = 16
# A run at transaction level costs two and a half times as much.
PERIODS: list[tuple[sessions.Level, int]] = [("session", 500), ("transaction", 250)]
MORE: list[tuple[sessions.Level, int]] = [("session", 2_000), ("transaction", 2_000)]

# Whoever comes between the two marks of another run under the same lock was not excluded.
OVERLAPS = """
select count(*) from (
 select what, claim, lag(what) over run as before, lag(claim) over run as whose from trail
 window run as (partition by {by} order by moment)) as t
where what = 'enter' and before = 'enter' or what = 'leave' and (before, whose) <> ('enter', claim)
"""


def overlaps(database: Database) -> dict[str, int]:
    return {by: database.rows(OVERLAPS.format(by=by))[0][0] for by in ("period", "name")}


def claim_all(
    database: Database,
    processes: Processes,
    orders: stress.Orders,
    number: int,
    patience: float = 110,
) -> collections.Counter[str]:
    """Let that many claimers claim every period, and return what they have counted."""
    database.rows(stress.SIDE_TABLE)
    started = [
        processes.python(
            "-m",
            "tests.integration.stress",
            json.dumps(
                dataclasses.asdict(dataclasses.replace(orders, seed=orders.seed + n))
                | ({"key_space": f"alone-{n}"} if orders.key_space == "alone" else {})
            ),
            name=f"claimer-{n}",
        )
        for n in range(number)
    ]
    counts: collections.Counter[str] = collections.Counter()
    for process in started:
        process.wait_for_line(r"^\{", patience)
        assert process.wait() == 0, process.output()
        counts.update(json.loads(process.output().splitlines()[-1]))
    return counts


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("level", "periods"),
    [*PERIODS, *(pytest.param(*more, marks=pytest.mark.chaos) for more in MORE)],
)
def test_each_period_is_done_once_and_no_two_runs_overlap(
    database: Database, processes: Processes, level: sessions.Level, periods: int
) -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    orders = stress.Orders(
        url=database.url, level=level, periods=periods, seed=seed, death_rate=0.1
    )
    started = time.monotonic()
    counts = claim_all(database, processes, orders, PROCESSES)
    seconds = time.monotonic() - started
    print(
        f"\n{level} level, {PROCESSES} processes, {periods} periods, seed {seed}:"
        f" {seconds:.1f} s, {dict(sorted(counts.items()))}"
    )
    assert overlaps(database) == {"period": 0, "name": 0}
    assert database.rows(
        "select count(*), count(*) filter (where status = 'done') from pglock.job_runs"
    ) == [(periods, periods)]
    # Not a test of nothing: they have met, died and finished twice.
    assert counts["claimed"] == counts["settled"] + counts["died"]
    assert counts["settled"] == periods
    assert counts["died"] > periods * 0.05
    assert counts["running"] > periods * 0.05
    assert counts["held"] > periods * 0.05
    assert not counts["settled twice"]
    assert not counts["lost"]
    runs = "select count(*), count(distinct period) from "
    if level == "session":
        attempts = "select sum(attempts), sum(lost_attempts) from pglock.job_runs"
        assert database.rows(attempts) == [(counts["claimed"], counts["died"])]
    else:
        # What a run wrote is there once, for it was committed together with its `done`.
        assert database.rows(runs + "effects") == [(periods, periods)]
    eventually(lambda: not advisory_locks(database), what="no lock is left")


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_thirty_thousand_periods_from_eight_processes_of_which_a_tenth_dies(
    database: Database, processes: Processes
) -> None:
    periods = int(os.environ.get("PGLOCK_TEST_PERIODS", "30000"))
    seed = random.SystemRandom().randrange(1_000_000)
    orders = stress.Orders(
        url=database.url, level="session", periods=periods, seed=seed, death_rate=0.1
    )
    started = time.monotonic()
    counts = claim_all(database, processes, orders, 8, patience=1000)
    print(
        f"\n8 processes, {periods} periods, seed {seed}:"
        f" {time.monotonic() - started:.1f} s, {dict(sorted(counts.items()))}"
    )
    # Of each pair there is one row, `done`, and one run that has come to its end.
    assert database.rows(
        "select count(*), count(distinct (job, period)), count(*) filter (where status = 'done'),"
        " sum(attempts), sum(lost_attempts) from pglock.job_runs"
    ) == [(periods, periods, periods, counts["claimed"], counts["died"])]
    assert counts["settled"] == periods
    assert counts["claimed"] == counts["settled"] + counts["died"]
    assert counts["died"] > periods * 0.05
    assert not counts["settled twice"]
    assert not counts["lost"]
    assert overlaps(database) == {"period": 0, "name": 0}


def test_control_without_the_run_lock_the_judge_finds_overlaps(
    database: Database, processes: Processes
) -> None:
    """Every claimer has run locks of its own, so that only the names exclude."""
    orders = stress.Orders(
        url=database.url,
        level="session",
        periods=200,
        seed=1,
        death_rate=0.0,
        key_space="alone",
    )
    counts = claim_all(database, processes, orders, 4)
    assert overlaps(database)["period"] > 0
    assert overlaps(database)["name"] == 0
    assert counts["lost"] > 0  # the fence has still kept each period from being settled twice
    assert counts["settled"] == 200


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (["enter a", "leave a", "enter b", "leave b"], 0),
        (["enter a", "enter b", "leave a", "leave b"], 3),
        (["enter a", "enter b", "leave b", "leave a"], 2),
        (["enter a", "leave b"], 1),
    ],
)
def test_the_judge_sees_overlaps(blank_database: Database, marks: list[str], expected: int) -> None:
    blank_database.rows(stress.SIDE_TABLE)
    whose = {"a": uuid.uuid4(), "b": uuid.uuid4()}
    for what, who in (mark.split() for mark in marks):
        blank_database.rows(
            "insert into trail (what, period, name, claim) values (%s, 'p', 'n', %s)",
            what,
            whose[who],
        )
    assert overlaps(blank_database)["period"] == expected

"""Real workers of a Django project: what the ORM has saved when their processes are killed."""

from __future__ import annotations

import os
import random
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance.bench import FAST_REDELIVERY, NAMESPACE, Bench, due, occurrence
from tests.acceptance.conftest import MakeBench
from tests.acceptance.reaper import Reaper
from tests.support.databases import Database, _database
from tests.support.django_site import environment
from tests.support.processes import eventually
from tests.support.servers import TestedPostgres

APP = "tests.apps.django_site"
ROWS = 100
# Seconds after each: a body has to last about as long as a process may live.
PAUSE = 0.002
# The evidence is of 200 (`make chaos-tests`); these show that it works.
TRIALS = int(os.environ.get("PGLOCK_TEST_DJANGO_TRIALS", "15"))
PATIENCE = 30.0


@pytest.fixture
def migrated(postgres_server: TestedPostgres, site_template: str) -> Iterator[Database]:
    """A database in which the project has been migrated."""
    with _database(postgres_server, template=site_template) as database:
        yield database


def bench_of(make_bench: MakeBench, database: Database, **settings: Any) -> Bench:
    """Return a bench whose workers are the project's."""
    bench = make_bench(database=database, **FAST_REDELIVERY)
    bench.variables = {
        **environment(
            database.url,
            CELERY_PGLOCK_NAMESPACE=NAMESPACE,
            CELERY_RESULT_BACKEND=bench.backend,
            CELERY_BROKER_TRANSPORT_OPTIONS=bench.transport_options,
            CELERY_WORKER_PREFETCH_MULTIPLIER=1,
            **settings,
        ),
        "SITE_BROKER_URL": bench.broker,
        "SITE_QUEUE": bench.queue,
    }
    return bench


def reap(bench: Bench, task: str, trials: int) -> tuple[Counter[str], dict[str, int]]:
    """Run a task under so many keys, kill its processes; return outcomes, and rows by key."""
    seed = secrets.randbits(32)
    reaper = Reaper(bench, random.Random(seed), APP)  # noqa: S311 - only moments
    moment = due(minutes=1)
    reaper.work(
        [f"trial-{number}" for number in range(trials)],
        lambda key: bench.send(task, key, ROWS, PAUSE, headers=occurrence(key, moment)),
        patience=60 + 2 * trials,
        told=f"seed {seed}",
    )
    runs = bench.runs()
    deaths = sum(run.lost_attempts for run in runs)
    rows: dict[str, int] = dict(
        bench.database.rows("SELECT job, count(*) FROM books_row GROUP BY job")
    )
    outcomes = Counter(run.status for run in runs)
    print(
        f"seed {seed}: {len(reaper.killed)} kills, {reaper.workers_killed} of a whole worker; "
        f"{deaths} attempts died; {dict(outcomes)}; {sum(rows.values())} rows"
    )
    assert len(runs) == trials
    assert len(reaper.killed) >= trials / 4, "the faults happened"
    assert deaths >= trials / 8, "and struck runs that were at work"
    return outcomes, rows


def expect_all_or_none(bench: Bench, trials: int) -> None:
    outcomes, rows = reap(bench, "books.save", trials)
    assert outcomes == {"done": trials}
    assert rows == {f"trial-{number}": ROWS for number in range(trials)}
    assert not bench.locks()


@pytest.mark.timeout(200)
def test_what_the_orm_saved_and_the_outcome_are_whole_whoever_is_killed(
    make_bench: MakeBench, migrated: Database
) -> None:
    expect_all_or_none(bench_of(make_bench, migrated), TRIALS)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_what_the_orm_saved_is_whole_in_two_hundred_trials(
    make_bench: MakeBench, migrated: Database
) -> None:
    expect_all_or_none(bench_of(make_bench, migrated), 200)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_control_at_session_level_the_rows_do_not_fit_the_outcomes(
    make_bench: MakeBench, migrated: Database
) -> None:
    migrated.rows("ALTER TABLE books_row DROP CONSTRAINT row_once")
    outcomes, rows = reap(bench_of(make_bench, migrated), "books.save_at_session_level", 30)
    assert sum(rows.values()) != ROWS * outcomes["done"]


def test_a_retry_leaves_the_rows_of_its_last_attempt_and_calls_its_hooks_alone(
    make_bench: MakeBench, migrated: Database
) -> None:
    """Celery's Django fixup closes all connections around each of these tasks."""
    bench = bench_of(make_bench, migrated)
    bench.worker(app=APP)
    result = bench.send("books.twice", "key")
    assert result.get(timeout=PATIENCE) is None
    run = bench.run(task_id=result.id)
    assert (run.status, run.attempts) == ("done", 2)
    query = "SELECT job, number FROM books_row ORDER BY job, number"
    wanted = [("key", 1), ("plain", 1)]
    eventually(lambda: migrated.rows(query) == wanted, PATIENCE, "the task of the hook has run")

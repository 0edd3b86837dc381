"""What Prometheus is told, and the alert rules over it."""

from __future__ import annotations

import datetime as dt
import re
import shutil
import subprocess
from importlib import resources
from typing import Any

import celery
import psycopg
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML

from celery_pglock import keys, metrics, settings
from tests.integration.test_page import ask
from tests.support.databases import Database
from tests.support.history import History
from tests.support.processes import REPOSITORY

NAMESPACE = "measured"
RULES = resources.files("celery_pglock") / "alerts.yml"


@pytest.fixture
def app(database: Database) -> celery.Celery:
    app = celery.Celery(NAMESPACE, broker="memory://", set_as_current=False)
    app.conf.pglock_database_url = database.url
    return app


@pytest.fixture
def history(database: Database) -> History:
    return History(database.url, NAMESPACE)


def scraped(app: celery.Celery) -> dict[tuple[str, ...], float]:
    """Return the samples as Prometheus reads them, by name and values of labels."""
    answer = ask(app, "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_beats_are_measured(app: celery.Celery, database: Database) -> None:
    found = scraped(app)
    assert found["pglock_database_up",] == 1
    assert found["pglock_info", NAMESPACE] == 1
    assert found["pglock_leader",] == found["pglock_standbys",] == 0
    assert ("pglock_leader_term",) not in found
    database.rows(
        "insert into pglock.beat_terms (namespace, term, node, backend_pid, elected_at,"
        " last_tick_at) values (%s, 7, 'web1:1', 1, now() - interval '3 hours',"
        " now() - interval '20 s')",
        NAMESPACE,
    )
    leader = database.connect(application_name=f"pglock:leader:{NAMESPACE}@web1:1")
    leader.execute("select pg_advisory_lock(%s)", [keys.from_name(NAMESPACE, "beat", "leader")])
    database.connect(application_name=f"pglock:standby:{NAMESPACE}@web2:2")
    found = scraped(app)
    assert found["pglock_leader",] == found["pglock_standbys",] == 1
    assert found["pglock_leader_term",] == 7
    assert 20 <= found["pglock_leader_tick_age_seconds",] < 40


def test_jobs_are_measured(app: celery.Celery, database: Database, history: History) -> None:
    history.entry("nightly")
    for ago in (400, 300, 200):
        history.row("nightly", "skipped", ago)
    done = history.row("nightly", "done", 500, started_at=history.now - dt.timedelta(seconds=493))
    history.row("nightly", "failed", 600)
    history.row("stuck", "sent", 1000)
    history.row("fine", "done", 30)
    stranger = database.connect()
    stranger.execute("select pg_advisory_lock(%s)", [history.key("proj.job")])
    found = scraped(app)
    last = found["pglock_job_last_success_timestamp_seconds", "nightly"]
    assert last == done["finished_at"].timestamp()
    due = found["pglock_job_next_due_timestamp_seconds", "nightly"]
    assert due == (history.now + dt.timedelta(seconds=30)).timestamp()
    assert found["pglock_job_consecutive_skips", "nightly"] == 3
    assert found["pglock_job_consecutive_skips", "fine"] == 0
    assert found["pglock_job_lateness_seconds", "nightly"] == 7
    assert found["pglock_job_overdue_seconds", "nightly"] == 0
    assert 1000 <= found["pglock_job_overdue_seconds", "stuck"] < 1100
    assert 0 <= found["pglock_job_lock_held_seconds", "nightly"] < 60
    assert found["pglock_job_paused", "nightly"] == 0
    counts = {
        outcome: found["pglock_runs_last_hour", "nightly", outcome]
        for outcome in ("done", "failed", "skipped", "missed")
    }
    assert counts == {"done": 1, "failed": 1, "skipped": 3, "missed": 0}


def test_an_entry_that_is_due_and_not_sent_is_overdue_unless_it_is_paused(
    app: celery.Celery, history: History
) -> None:
    ago = history.now - dt.timedelta(seconds=100)
    history.entry("late", next_due_at=ago)
    history.entry("paused", next_due_at=ago, paused_until=history.now + dt.timedelta(hours=1))
    found = scraped(app)
    assert 100 <= found["pglock_job_overdue_seconds", "late"] < 200
    assert found["pglock_job_overdue_seconds", "paused"] == 0
    assert found["pglock_job_paused", "paused"] == 1


def test_other_namespaces_are_not_measured(
    app: celery.Celery, database: Database, history: History
) -> None:
    History(database.url, "other").row("theirs", "done")
    history.row("ours", "done")
    names = {sample[1] for sample in scraped(app) if len(sample) > 1}
    assert "ours" in names
    assert "theirs" not in names


def test_a_database_that_is_away_is_a_measurement_too() -> None:
    app = celery.Celery(NAMESPACE, broker="memory://", set_as_current=False)
    app.conf.pglock_database_url = "postgresql://127.0.0.1:1/nowhere"
    assert scraped(app) == {("pglock_database_up",): 0}


def test_labels_do_not_grow_with_the_history(
    app: celery.Celery, database: Database, history: History
) -> None:
    history.row("nightly", "done", 30)
    before = len(scraped(app))
    for ago in range(60, 300, 10):
        history.row("nightly", "failed", ago, task_id=f"task {ago}", error=f"E: {ago}")
    assert len(scraped(app)) == before
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(
            "insert into pglock.job_runs (job, period, status, finished_at)"
            " select 'measured:tenant-' || n, '2026-11-03', 'done', now()"
            " from generate_series(1, 600) n"
        )
    found = scraped(app)
    assert found["pglock_jobs_omitted",] == 101
    assert sum(name == "pglock_job_paused" for name, *_ in found) == 500


def test_it_may_be_collected_with_others(app: celery.Celery) -> None:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(metrics.LedgerCollector(settings.of(app)))
    assert registry.get_sample_value("pglock_database_up") == 1


# --- Alert rules ----------------------------------------------------------------------------


def rules() -> list[dict[str, Any]]:
    (group,) = YAML(typ="safe").load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def exported(app: celery.Celery, database: Database, history: History) -> set[str]:
    test_jobs_are_measured(app, database, history)
    return {family.name for family in metrics.LedgerCollector(settings.of(app)).collect()}


def test_every_metric_that_a_rule_names_is_there(
    app: celery.Celery, database: Database, history: History
) -> None:
    named = {name for rule in rules() for name in re.findall(r"pglock_\w+", rule["expr"])}
    assert len(named) >= 7
    assert named <= exported(app, database, history)


def test_every_metric_is_documented(
    app: celery.Celery, database: Database, history: History
) -> None:
    page = (REPOSITORY / "docs/howto/monitor.md").read_text()
    documented = set(re.findall(r"`(pglock_[a-z_]+)`", page.partition("## Prometheus")[2]))
    found = {
        "pglock_info" if name == "pglock" else name for name in exported(app, database, history)
    }
    assert documented - {"pglock_warn_after_skips"} == found


def test_every_rule_says_what_to_do() -> None:
    for rule in rules():
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("critical", "warning")
    if promtool := shutil.which("promtool"):
        subprocess.run([promtool, "check", "rules", str(RULES)], check=True, capture_output=True)

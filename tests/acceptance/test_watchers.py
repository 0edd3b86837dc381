"""What Sentry and OpenTelemetry see of a beat and its tasks: the same as of Celery's own beat."""

from __future__ import annotations

import collections
import datetime as dt
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.databases import Database
from tests.support.processes import Processes

TASKS = ("plain", "fails", "locked", "skipped")
Watch = Callable[..., dict[str, Any]]


@pytest.fixture
def watch(database: Database, processes: Processes) -> Watch:
    due = dt.datetime.now(dt.UTC).replace(second=0, microsecond=0)

    def run(kind: str, *tasks: str, **env: str) -> dict[str, Any]:
        process = processes.python(
            "-m", "tests.apps.watched", kind, *tasks,
            env={"APP_DATABASE_URL": database.url, "APP_DUE": due.isoformat(), **env}, name=kind,
        )  # fmt: skip
        assert process.wait(90) == 0, process.output()
        seen: dict[str, Any] = json.loads(process.output().splitlines()[-1])
        return seen

    return run


def _checkins(seen: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Return the statuses of the check-ins of each monitor, one after the other."""
    ids: dict[str, dict[str, list[str]]] = collections.defaultdict(dict)
    for told in seen["checkins"]:
        ids[told["monitor_slug"]].setdefault(told["check_in_id"], []).append(told["status"])
    return {slug: [tuple(statuses) for statuses in each.values()] for slug, each in ids.items()}


def _spans(seen: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the spans, with how many of their trace there are."""
    sizes = collections.Counter(span["trace"] for span in seen["spans"])
    return sorted(
        (span["name"], span["kind"], str(span["state"]), span["status"], str(sizes[span["trace"]]))
        for span in seen["spans"]
    )


def _take_out(seen: dict[str, Any], task: str) -> dict[str, Any]:
    """Take what there is of one task out of what was seen, and return it."""
    taken = {}
    for kind, name in (("checkins", "monitor_slug"), ("spans", "name")):
        taken[kind] = [told for told in seen[kind] if told[name].endswith(task)]
        seen[kind] = [told for told in seen[kind] if not told[name].endswith(task)]
    return taken


def test_they_see_what_they_see_of_celerys_own_beat(watch: Watch) -> None:
    """And the check-in of a run that is skipped is closed, under either."""
    ours, stock = watch("pglock", *TASKS, "again"), watch("stock", *TASKS)
    # One that the broker did not take, and which stock beat would not send any more.
    again = _take_out(ours, "again")
    assert _checkins(again) == {"again": [("in_progress", "error"), ("in_progress", "ok")]}
    expected = {
        "plain": [("in_progress", "ok")],
        "fails": [("in_progress", "error")],
        "locked": [("in_progress", "ok")],
        "skipped": [("in_progress", "ok")],
    }
    assert _checkins(ours) == _checkins(stock) == expected
    configs = [
        sorted({json.dumps(told["monitor_config"], sort_keys=True) for told in seen["checkins"]})
        for seen in (ours, stock)
    ]
    assert configs[0] == configs[1]
    assert len(configs[0]) == 1
    assert _spans(ours) == _spans(stock)
    run = "run/watched.skipped", "CONSUMER", "IGNORED", "UNSET", "2"
    assert run in _spans(ours)
    assert len(_spans(ours)) == 2 * len(TASKS)


def test_left_alone_the_check_in_of_a_skipped_run_stays_open(watch: Watch) -> None:
    """The control."""
    seen = _checkins(watch("pglock", "skipped", "plain", APP_UNWATCHED="1"))
    assert seen == {"skipped": [("in_progress",)], "plain": [("in_progress", "ok")]}

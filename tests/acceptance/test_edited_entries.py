"""Entries in the database, edited by many while beats are killed: none lost, nothing twice."""

from __future__ import annotations

import collections
import datetime as dt
import functools
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any, Final

import celery
import psycopg
import pytest

from celery_pglock import Entry
from tests.acceptance.bench import close_app
from tests.support.processes import Process, eventually
from tests.support.stage import MakeStage, Stage

TASK: Final = "tests.apps.counted.counted"
IMPORTS: Final = {"imports": ["tests.apps.counted"], "pglock_catchup": 1000}
SECOND: Final = dt.timedelta(seconds=1)
STEADY: Final = [f"steady {number}" for number in range(4)]
MOVED: Final = [f"moved {number}" for number in range(4)]
EDITORS: Final = 4
SAVES: Final = int(os.environ.get("PGLOCK_TEST_SAVES", "8"))


def standing(beat: Process) -> Process:
    beat.wait_for_line("standby: |leadership gained: ")
    return beat


def application(stage: Stage) -> celery.Celery:
    app = celery.Celery(stage.namespace, set_as_current=False)
    app.conf.pglock_database_url = stage.url
    return app


def change_leaders(stage: Stage, beats: list[Process], times: int) -> None:
    """Kill the leader so many times; each time another one takes over."""
    for _ in range(times):
        leader = stage.leader(beats)
        term = stage.term()
        standing(next(beat for beat in beats if beat is not leader))
        leader.kill()
        beats.remove(leader)
        beats.append(stage.beat())
        stage.leader(beats, not_before_term=term + 1)


def edited(editors: list[Process]) -> tuple[collections.Counter[str], int]:
    """Return how many edits of each entry were saved, and how many were refused."""
    saved: collections.Counter[str] = collections.Counter()
    refused = 0
    for editor in editors:
        assert editor.wait(60) == 0, editor.output()
        told: dict[str, Any] = json.loads(editor.output().splitlines()[-1])
        saved.update(told["saved"])
        refused += told["refused"]
    return saved, refused


def steady_dues(stage: Stage, entry: str) -> list[dt.datetime]:
    """Return all instants at which it was due: only its argument was ever edited."""
    ((anchor, last, published_at),) = stage.rows(
        "SELECT anchor, due_at, published_at FROM pglock.beat_entries WHERE entry = %s", entry
    )
    if published_at is None:
        last -= SECOND  # claimed by a beat that was stopped, and not sent yet
    return [anchor + SECOND * k for k in range(1, (last - anchor) // SECOND + 1)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("edits", "changes", "pace"),
    [
        (60, 2, 0.3),
        pytest.param(1000, 20, 0.8, marks=pytest.mark.chaos, id="a thousand"),
    ],
)
def test_no_edit_is_lost_and_nothing_doubled_while_leaders_are_killed(
    make_stage: MakeStage, tmp_path: Path, edits: int, changes: int, pace: float
) -> None:
    """Each editor reads an entry, adds one to its argument, and saves it."""
    marker = tmp_path / "enough"
    stage = make_stage(
        {"one": 1.0},
        settings=IMPORTS,
        extra={
            "APP_MARKER": str(marker),
            "APP_EDITS": str(math.ceil(edits / EDITORS / 2)),
            "APP_PACE": str(pace),
            "APP_STEADY": json.dumps(STEADY),
            "APP_MOVED": json.dumps(MOVED),
        },
    )
    with psycopg.connect(stage.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE counted (entry text, due timestamptz, edits integer)")
    app = application(stage)
    for name in STEADY + MOVED:
        Entry(name, 1.0, TASK, [0]).save(app=app)
    stage.worker()
    beats = [standing(stage.beat()) for _ in range(3)]
    first_term = stage.term()
    editors = [
        stage.processes.python(
            "-m", "tests.apps.counted", str(number), env=stage.env(), name="editor"
        )
        for number in range(EDITORS)
    ]
    began = time.monotonic()
    change_leaders(stage, beats, changes)
    marker.touch()
    saved, refused = edited(editors)
    took = time.monotonic() - began
    assert stage.term() - first_term >= changes

    # No edit lost: not in the database, and not on the way to the leader.
    found = {entry.name: entry for entry in Entry.all(app=app)}
    assert {name: entry.args for name, entry in found.items()} == {
        name: [saved[name]] for name in STEADY + MOVED
    }
    query = "SELECT entry, max(edits) FROM counted GROUP BY entry"
    eventually(
        lambda: {name: edits for name, edits in stage.rows(query) if name in found} == saved,
        20,
        "each is sent as it was saved last",
        told=lambda: (stage.rows(query), saved),
    )
    for beat in beats:
        standing(beat).terminate()
        assert beat.wait() == 0
    count = stage.expect_each_once()

    # Nothing twice, and of those that stayed where they are nothing lost.
    runs = collections.Counter(stage.rows("SELECT entry, due FROM counted"))
    assert set(runs.values()) == {1}
    for name in STEADY:
        ran = sorted(due for entry, due in runs if entry == name)
        assert ran == steady_dues(stage, name)
    # By a later edit, never by an earlier one again; and what is deleted is not sent any more.
    for name in found:
        order = stage.rows("SELECT edits FROM counted WHERE entry = %s ORDER BY due", name)
        assert order == sorted(order)
    assert (
        stage.rows(
            "SELECT r.due, e.edited_at FROM counted r JOIN pglock.beat_entries e USING (entry)"
            " WHERE e.definition IS NULL AND r.due > e.edited_at"
        )
        == []
    )
    ((total,),) = stage.rows(
        "SELECT sum(revision)::integer FROM pglock.beat_entries WHERE revision > 0"
    )
    total -= len(found)
    assert total >= edits
    print(
        f"{total} edits ({refused} more refused, made anew) by {EDITORS * 2} editors in {took:.0f} s,"
        f" {stage.term() - first_term} changes of leader; {sum(runs.values()) + count} runs, each once"
    )
    close_app(app)


@pytest.mark.slow
@pytest.mark.timeout(60 + 2 * SAVES)
def test_an_edit_is_live_within_a_second(make_stage: MakeStage) -> None:
    """Counted from when it is saved to when the leader has planned by it."""
    stage = make_stage({"one": 3600.0})
    app = application(stage)
    beats = [standing(stage.beat()), standing(stage.beat())]
    stage.leader(beats)
    took = []
    for number in range(1, SAVES + 1):
        Entry("a", 3600.0 + number, TASK).save(app=app)
        query = "SELECT seen_at - edited_at FROM pglock.beat_entries WHERE registered = %s"
        rows = eventually(
            functools.partial(stage.rows, query, number), what="the leader has planned it"
        )
        took.append(rows[0][0].total_seconds())
    close_app(app)
    print(
        f"live in the leader: median {statistics.median(took):.3f} s, max {max(took):.3f} s,"
        f" n {len(took)}"
    )
    # A busy machine delays the beat itself; the documented figure is of an idle one.
    assert statistics.median(took) < 1.0
    assert max(took) < (1.0 if "PGLOCK_TEST_SAVES" in os.environ else 5.0)

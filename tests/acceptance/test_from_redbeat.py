"""docs/howto/from-redbeat.md, step by step: entries made at run time, moved, and moved back."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.support.guides import PATIENCE, Project, blocks, sides
from tests.support.processes import Process, eventually

pytestmark = pytest.mark.timeout(400)
PAGE = "from-redbeat.md"
DIFFS = {name: sides(parts[0]) for name, parts in blocks(PAGE, "diff").items()}
MOVE = blocks(PAGE, "python")["move.py"][0]
IMPORTS = ("from proj import app", "import customers")


def files(side: int) -> dict[str, str]:
    """Return one side of the diffs; reports come more often than on the page."""
    found = {name: both[side] for name, both in DIFFS.items()}
    found["customers.py"] = found["customers.py"].replace("86400.0", "1.0")
    assert "1.0" in found["customers.py"]
    return found


def expect_entries_of_redbeat(project: Project) -> Process:
    """Make an entry at run time, see it sent, and kill the beat; return the worker."""
    worker = project.start_worker("-P", "threads")
    shell = project.shell(*IMPORTS)
    shell.do("customers.welcome(6)")
    shell.do("customers.welcome(7)")
    beat = project.beat("-S", "redbeat.RedBeatScheduler")
    project.ended("report 7", 2)
    shell.do("customers.goodbye(6)")
    beat.kill()
    with redis.Redis.from_url(project.broker) as client:
        # Nobody else may send before that.
        assert 1200 < int(client.ttl("redbeat::lock")) <= 1500
    return worker


def test_entries_made_at_run_time_move_there_and_back(make_project: Any) -> None:
    before: Project = make_project("before", files(0))
    after: Project = make_project("after", {**files(1), "move.py": MOVE}, broker=before.broker)
    expect_entries_of_redbeat(before).terminate()
    ran_before = before.times("report 7")

    shell = after.shell(*IMPORTS, "import move", "from celery_pglock import Entry")
    shell.do("move.there()")
    shell.do("move.there()")
    assert shell.ask("[entry.name for entry in Entry.all(app=app)]") == ["report of 7"]
    after.start_worker("-P", "threads")
    beats = [after.beat("-S", "pglock") for _ in range(2)]
    for beat in beats:
        beat.wait_for_line("standby: |leadership gained: ", PATIENCE)
    shell.do("customers.welcome(8)")
    shell.do("customers.welcome(9)")
    after.ended("report 8", 3)
    after.ended("report 7", ran_before + 3)
    shell.do("customers.goodbye(8)")
    for beat in beats:
        beat.terminate()
        assert beat.wait() == 0
        assert "Traceback" not in beat.output()
    # Of two beats, each occurrence once.
    eventually(lambda: not after.open_rows(), 20, "all is settled", told=after.told)
    for tenant in (8, 9):
        assert after.done(f"report of {tenant}") == after.times(f"report {tenant}") > 0
    # What redbeat had sent, and nobody had run yet, may have come after it was counted.
    assert 0 <= after.times("report 7") - ran_before - after.done("report of 7") <= 1

    shell.do("move.back()")
    names = "sorted((entry.name, entry.args) for entry in move.in_redis())"
    assert shell.ask(names) == [["report of 7", [7]], ["report of 9", [9]]]
    # The lock of the beat that was killed.
    with redis.Redis.from_url(before.broker) as client:
        client.delete("redbeat::lock")
    ran = before.times("report 9")
    before.start_worker("-P", "threads")
    before.beat("-S", "redbeat.RedBeatScheduler")
    before.ended("report 9", ran + 1)

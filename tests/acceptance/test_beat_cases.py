"""Reports of others, with real beats: a deploy, a restart, an edit, a downtime, a flood.

C02, C10 and C14; and entries that come, change, go and come back.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import re
import zoneinfo
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import celery
import psycopg
import pytest

from tests.acceptance.bench import close_app
from tests.support.processes import Process, eventually
from tests.support.queued import Message, queued
from tests.support.stage import MakeStage, Stage

SECOND = dt.timedelta(seconds=1)
SPANS = b"""
CREATE TABLE spans (
    task text NOT NULL, due timestamptz NOT NULL, id text NOT NULL,
    began timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(), ended timestamptz
)
"""
IMPORTS = {"imports": ["tests.apps.beat_plan"]}
# No restart that a busy machine makes long is a downtime: that is 1.25 leases and 4 polls.
PATIENT = {"pglock_leader_lease": 60.0}
# Two beats and a machine that does nothing else hold the bounds of the cases; make test runs more.
SLACK = 0.0 if "PGLOCK_TEST_CASES" in os.environ else 3.0


def standing(beat: Process) -> Process:
    beat.wait_for_line("standby: |leadership gained: ", 60)
    return beat


def end(*processes: Process) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        assert process.wait() == 0, process.output()


def plan(stage: Stage, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Give a stage entries of other kinds than seconds, for the processes that start from now on."""
    stage.extra["APP_PLAN"] = json.dumps(entries)


def messages(stage: Stage, *entries: str) -> list[Message]:
    """Return what waits in the queue, of all or of some entries."""
    found = queued(stage.broker, stage.queue)
    return [message for message in found if not entries or message.entry in entries]


def now(stage: Stage) -> dt.datetime:
    ((moment,),) = stage.rows("SELECT pg_catalog.clock_timestamp()")
    assert isinstance(moment, dt.datetime)
    return moment


def elected_at(stage: Stage) -> dt.datetime:
    """Return when the beat that leads was elected."""
    ((moment,),) = stage.rows("SELECT elected_at FROM pglock.beat_terms")
    assert isinstance(moment, dt.datetime)
    return moment


def sent_dues(stage: Stage, entry: str) -> list[dt.datetime]:
    """Return what was sent: once, or twice under one id by a beat that was stopped meanwhile."""
    sent = {(message.due, message.task_id) for message in messages(stage, entry)}
    return sorted(due for due, _ in sent)


# --- C02: a rolling deploy ------------------------------------------------------------------------


@pytest.mark.chaos
def test_a_new_release_starts_while_the_old_one_leads_and_takes_over_when_it_stops(
    make_stage: MakeStage,
) -> None:
    """C02. The entry that only the new one knows is first sent by it."""
    stage = make_stage({"one": 1.0})
    stage.worker()
    old = standing(stage.beat())
    stage.leader([old])
    stage.entries = {"one": 1.0, "new": 1.0}
    new = standing(stage.beat())
    new.wait_for_line("has another schedule than this beat")
    ran = len(stage.rows("SELECT 1 FROM ran"))
    stage.wait_for_runs(ran + 5)
    # While both live, only the old one sends.
    assert "Sending due task" not in new.output()
    assert stage.rows("SELECT DISTINCT term, entry FROM pglock.job_runs") == [(1, "one")]
    assert stage.rows("SELECT entry FROM pglock.beat_entries") == [("one",)]
    ((backend,),) = stage.rows("SELECT backend_pid FROM pglock.beat_terms")
    stopped_at = now(stage)
    old.terminate()
    assert old.wait() == 0
    exited_at = now(stage)
    held = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"
    eventually(lambda: not stage.rows(held, backend), 1.0 + SLACK, "its lock is gone")
    gone_at = now(stage)
    gained = new.wait_for_line("leadership gained: .* in term 2; (.*)")
    assert re.fullmatch(rf".*:{old.pid} resigned from term 1", gained[1])
    took_over = (elected_at(stage) - stopped_at).total_seconds()
    assert took_over < 0.5 + 1.0 + SLACK
    eventually(lambda: stage.rows("SELECT 1 FROM ran WHERE entry = 'new'"), 20, "it runs")
    first = min(due for (due,) in stage.rows("SELECT due FROM ran WHERE entry = 'new'"))
    assert dt.timedelta(0) < first - elected_at(stage) <= SECOND
    assert stage.rows("SELECT DISTINCT term FROM pglock.job_runs WHERE entry = 'new'") == [(2,)]
    end(new)
    # Late is at most what fell due in between; lost or sent twice is nothing.
    late = stage.rows(
        "SELECT due_at FROM pglock.job_runs WHERE sent_at - due_at > %s",
        dt.timedelta(seconds=0.5 + SLACK),
    )
    assert all(stopped_at - SECOND < due <= elected_at(stage) for (due,) in late), late
    count = stage.expect_each_once()
    print(
        f"\n{count} occurrences; lock gone {(gone_at - exited_at).total_seconds():.3f} s after the"
        f" exit, the next leads {took_over:.3f} s after the signal, {len(late)} late"
    )


# --- C10: a restart, an edit, another time zone -----------------------------------------------------

# For how long it is looked at what a beat sends after its start.
MINUTE = [
    pytest.param(0.0, marks=pytest.mark.slow),
    pytest.param(60.0, marks=pytest.mark.chaos, id="a whole minute"),
]


def daily(moment: dt.datetime) -> dict[str, Any]:
    """Return an entry that is due each day at that time."""
    return {"schedule": {"hour": str(moment.hour), "minute": str(moment.minute)}}


class Daily:
    """Entries that are due once a day, and have been run today: one just now, one hours ago."""

    def __init__(self, stage: Stage, schedule_file: Path) -> None:
        self.stage = stage
        self.file = schedule_file
        self.today = dt.datetime.now(dt.UTC).replace(second=0, microsecond=0)
        self.dues = {
            "recent": self.today - dt.timedelta(minutes=10),
            # In New York it is due hours later, and that was before now, too.
            "morning": self.today - dt.timedelta(hours=6),
        }
        self.entries = {name: daily(due) for name, due in self.dues.items()}

    def run(self) -> None:
        """Have today's occurrences run, as they do when a beat was late for them."""
        stage = self.stage
        plan(stage, self.entries)
        beat = standing(self.beat())
        eventually(lambda: len(self.stored()) == 2, 30, "they are registered")
        end(beat)
        for name, due in self.dues.items():
            assert self.stored()[name] == due + dt.timedelta(days=1)
            stage.rows(
                "UPDATE pglock.beat_entries SET next_due_at = %s WHERE entry = %s RETURNING 1",
                due,
                name,
            )
        worker, beat = stage.worker(), standing(self.beat())
        eventually(lambda: self.done() == self.dues, 30, "today's are done", told=self.done)
        end(beat)
        eventually(lambda: not messages(stage), 20, "the queue is empty")
        end(worker)

    def beat(self, scheduler: str = "pglock") -> Process:
        return self.stage.beat("--schedule", str(self.file), scheduler=scheduler)

    def stored(self) -> dict[str, dt.datetime]:
        return dict(
            self.stage.rows(
                "SELECT entry, next_due_at FROM pglock.beat_entries WHERE entry <> 'one'"
            )
        )

    def done(self) -> dict[str, dt.datetime]:
        rows = self.stage.rows(
            "SELECT entry, due_at FROM pglock.job_runs WHERE status = 'done' AND entry <> 'one'"
        )
        return dict(rows)

    def rows(self) -> list[Any]:
        return self.stage.rows(
            "SELECT entry, due_at, status FROM pglock.job_runs WHERE entry <> 'one' ORDER BY 1, 2"
        )

    def messages_after_a_start(self, seconds: float, scheduler: str = "pglock") -> list[Message]:
        """Start a beat and return what it has sent of these entries, as the broker has it.

        An entry that is due each second shows that the beat has had its chance: it sends what
        is due in the order of its instants.
        """
        started_at = now(self.stage)
        beat = standing(self.beat(scheduler))

        def looked() -> bool:
            dues = sent_dues(self.stage, "one")
            return sum(due > started_at + SECOND * seconds for due in dues) >= 3

        eventually(looked, seconds + 30, "the beat has sent for a while")
        end(beat)
        return messages(self.stage, *self.entries)


@pytest.mark.timeout(480)
@pytest.mark.parametrize("seconds", MINUTE)
def test_what_ran_today_does_not_run_again_after_a_restart_an_edit_or_in_another_time_zone(
    make_stage: MakeStage, tmp_path: Path, seconds: float
) -> None:
    """C10: no message at all, where one for each entry would be allowed."""
    case = Daily(make_stage({"one": 1.0}, settings={**IMPORTS, **PATIENT}), tmp_path / "schedule")
    case.run()
    before, stored = case.rows(), case.stored()
    # (a) A restart; the schedule file is gone, if there ever was one.
    for file in tmp_path.glob("schedule*"):
        file.unlink()
    assert case.messages_after_a_start(seconds) == []
    assert case.stored() == stored
    # (b) One is moved to an earlier time of today: it is due tomorrow, and not retroactively.
    earlier = case.dues["recent"] - dt.timedelta(minutes=20)
    case.entries["recent"] = daily(earlier)
    plan(case.stage, case.entries)
    assert case.messages_after_a_start(seconds) == []
    assert case.stored() == {**stored, "recent": earlier + dt.timedelta(days=1)}
    # (c) Another time zone: one of them is then due later today, and one was, hours ago.
    case.stage.settings["timezone"] = "America/New_York"
    assert case.messages_after_a_start(seconds) == []
    for name, label in (("recent", earlier), ("morning", case.dues["morning"])):
        next_due_at = case.stored()[name]
        local = next_due_at.astimezone(zoneinfo.ZoneInfo("America/New_York"))
        assert (local.hour, local.minute) == (label.hour, label.minute)
        assert dt.timedelta(0) < next_due_at - case.today < dt.timedelta(hours=25)
    assert case.rows() == before
    # The control, in a third zone: a beat that counts an edited entry from its last run.
    case.stage.settings["timezone"] = "America/Halifax"
    variant = "tests.apps.beat_variants:CountsFromTheLastRun"
    assert [message.entry for message in case.messages_after_a_start(0.0, variant)] == ["morning"]


# --- C14 (a): no beat for a while -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("catchup", "down"),
    [
        (1, 4.5),
        pytest.param(0, 4.5, marks=pytest.mark.chaos),
        pytest.param(3, 4.5, marks=pytest.mark.chaos),
        pytest.param(1, 60.0, marks=pytest.mark.chaos),
        pytest.param(0, 60.0, marks=pytest.mark.chaos),
        pytest.param(3, 60.0, marks=pytest.mark.chaos),
    ],
)
def test_of_what_was_missed_without_a_beat_the_newest_is_made_up(
    make_stage: MakeStage, catchup: int, down: float
) -> None:
    """C14 (a): the rest is recorded as missed, and one line tells how many."""
    # What lasts longer than 1.25 leases and 4 polls is a downtime and no take-over.
    settings = {"pglock_leader_lease": 2.0, "pglock_standby_poll": 0.25}
    if catchup != 1:
        settings["pglock_catchup"] = catchup
    stage = make_stage({"one": 1.0, "two": 2.0, "rare": 3600.0}, settings=settings)
    first = standing(stage.beat())
    eventually(lambda: len(messages(stage, "two")) >= 2, 20, "it sends")
    end(first)
    before = messages(stage)
    down_since = now(stage)
    eventually(
        lambda: now(stage) > down_since + down * SECOND, down + 10, "time goes by", interval=0.2
    )
    second = standing(stage.beat())
    since = elected_at(stage)
    eventually(
        lambda: all(
            sum(due > since for due in sent_dues(stage, entry)) >= 2 for entry in ("one", "two")
        ),
        30,
        "both go on",
    )
    end(second)
    assert stage.term() == 2
    log = second.output()
    for entry, every in (("one", SECOND), ("two", 2 * SECOND)):
        last = max(message.due for message in before if message.entry == entry)
        meanwhile = list(
            itertools.takewhile(
                lambda due: due <= since, (last + every * k for k in itertools.count(1))
            )
        )
        passed_over = max(0, len(meanwhile) - catchup)
        kept, gone = meanwhile[passed_over:], meanwhile[:passed_over]
        made_up = [due for due in sent_dues(stage, entry) if last < due <= since]
        assert made_up == kept
        rows = stage.rows(
            "SELECT due_at, reason FROM pglock.job_runs WHERE entry = %s AND status = 'missed'"
            " ORDER BY 1",
            entry,
        )
        assert rows == [(due, "no beat was leading when it was due") for due in gone]
        told = re.findall(rf"occurrences missed: (\d+) of entry {entry}, from (.*) to ", log)
        assert told == ([(str(len(gone)), str(gone[0]))] if gone else [])
        print(f"\n{entry}: {len(meanwhile)} due without a beat, {len(kept)} made up, told {told}")
    assert "of entry rare" not in log
    # Each runs, once. A beat that was stopped between sending and recording it sends it twice.
    sent = sorted({(message.entry, message.due) for message in messages(stage)})
    stage.worker()
    eventually(lambda: not messages(stage) and not open_rows(stage), 30, "all is worked off")
    assert stage.rows("SELECT entry, due FROM ran ORDER BY 1, 2") == sent


# --- C14 (b): no worker for a while -----------------------------------------------------------------


def four_workers(stage: Stage) -> list[Process]:
    """Start four at once, which have room for more than one message each."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda n: stage.worker("-c", "4", name=f"worker{n}"), range(4)))


def overlaps(stage: Stage, task: str) -> int:
    ((count,),) = stage.rows(
        "SELECT count(*) FROM spans a JOIN spans b ON a.task = b.task AND a.id < b.id"
        " AND a.began < b.ended AND b.began < a.ended WHERE a.task = %s",
        task,
    )
    return int(count)


def open_rows(stage: Stage) -> list[Any]:
    return stage.rows(
        "SELECT entry, due_at, status FROM pglock.job_runs WHERE status IN ('running', 'retrying')"
        " OR status = 'sent' AND sent_at IS NOT NULL"
    )


def held_by_workers(stage: Stage) -> list[Any]:
    return stage.rows(
        "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
        " WHERE l.locktype = 'advisory' AND a.datname = current_database()"
        " AND a.application_name NOT LIKE 'pglock:leader:%'"
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.chaos)])
def test_what_piled_up_without_a_worker_runs_at_most_once_and_one_at_a_time(
    make_stage: MakeStage, count: int
) -> None:
    """C14 (b): each message keeps its own period. The same task without a lock is the control."""
    stage = make_stage({}, settings=dict(IMPORTS))
    plan(
        stage,
        {task: {"schedule": 1.0, "task": task} for task in ("guarded", "unguarded")},
    )
    with psycopg.connect(stage.url, autocommit=True) as connection:
        connection.execute(SPANS)
    beat = standing(stage.beat())
    eventually(lambda: len(messages(stage, "guarded")) >= count, count + 30, "they pile up")
    end(beat)
    piled = messages(stage)
    workers = four_workers(stage)
    unguarded = {message.task_id for message in piled if message.entry == "unguarded"}
    eventually(
        lambda: (
            len(stage.rows("SELECT 1 FROM spans WHERE task = 'unguarded' AND ended IS NOT NULL"))
            >= len(unguarded)
            and not open_rows(stage)
        ),
        count + 30,
        "all are worked off",
        told=lambda: open_rows(stage),
    )
    eventually(lambda: not held_by_workers(stage), 20, "no lock is held")
    end(*workers)
    assert overlaps(stage, "unguarded") > 0, "four workers work at the same time"
    assert overlaps(stage, "guarded") == 0
    guarded = sorted({message.due for message in piled if message.entry == "guarded"})
    rows = stage.rows(
        "SELECT due_at, status FROM pglock.job_runs WHERE entry = 'guarded' ORDER BY 1"
    )
    assert [due for due, _ in rows] == guarded
    assert {status for _, status in rows} <= {"done", "skipped"}
    ran = [due for (due,) in stage.rows("SELECT due FROM spans WHERE task = 'guarded' ORDER BY 1")]
    assert ran == [due for due, status in rows if status == "done"]
    print(f"\n{len(guarded)} piled up: {len(ran)} ran, {len(rows) - len(ran)} were skipped")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.chaos)])
def test_what_has_expired_without_a_worker_is_revoked_and_holds_nothing(
    make_stage: MakeStage, count: int
) -> None:
    """C14 (b), with `expires`."""
    stage = make_stage({}, settings=dict(IMPORTS))
    stage.settings["result_backend"] = stage.broker
    expires = 3.0
    plan(stage, {"brief": {"schedule": 1.0, "options": {"expires": expires}}})
    beat = standing(stage.beat())
    eventually(lambda: len(messages(stage)) >= count, count + 30, "they pile up")
    piled = {message.task_id: message.due for message in messages(stage)}
    workers_at = now(stage)
    workers = four_workers(stage)
    eventually(lambda: stage.rows("SELECT 1 FROM ran WHERE due > %s", workers_at), 30, "it runs")
    end(beat)
    eventually(lambda: not messages(stage), 20, "the queue is empty")
    eventually(lambda: not open_rows(stage), 20, "all is settled", told=lambda: open_rows(stage))
    eventually(lambda: not held_by_workers(stage), 20, "no lock is held")
    end(*workers)
    expired = {
        task_id: due for task_id, due in piled.items() if due + expires * SECOND < workers_at
    }
    assert len(expired) >= count - expires - 1
    asker = celery.Celery("asker", broker=stage.broker, backend=stage.broker, set_as_current=False)
    states = {asker.AsyncResult(task_id).state for task_id in expired}
    close_app(asker)
    assert states == {"REVOKED"}
    rows = stage.rows(
        "SELECT DISTINCT status, reason FROM pglock.job_runs WHERE task_id = ANY(%s)", list(expired)
    )
    assert rows == [("skipped", "its message had expired")]
    ran = [due for (due,) in stage.rows("SELECT due FROM ran ORDER BY due")]
    assert len(set(ran)) == len(ran)
    assert not set(ran) & set(expired.values())
    assert (
        stage.rows("SELECT 1 FROM ran WHERE at > due + make_interval(secs => %s)", expires + 2)
        == []
    )


# --- entries that change ----------------------------------------------------------------------------


@pytest.mark.slow
def test_an_edited_entry_starts_from_its_next_occurrence(make_stage: MakeStage) -> None:
    """And so does a new one, beside one that goes on as it was."""
    stage = make_stage({"kept": 1.0, "edited": 1.0}, settings=PATIENT)
    end_of_first = standing(stage.beat())
    eventually(lambda: len(messages(stage)) >= 4, 20, "both are sent")
    end(end_of_first)
    before = max(sent_dues(stage, "edited"))
    stage.entries = {"kept": 1.0, "edited": 2.0, "new": 2.0}
    second = standing(stage.beat())
    since = elected_at(stage)
    eventually(lambda: len(sent_dues(stage, "new")) >= 2, 20, "the new one is sent")
    end(second)
    for entry in ("edited", "new"):
        later = [due for due in sent_dues(stage, entry) if due > before]
        assert later[:2] == [since + 2 * SECOND, since + 4 * SECOND]
    kept = sent_dues(stage, "kept")
    assert kept == [kept[0] + SECOND * k for k in range(len(kept))], "it lost nothing"
    assert stage.rows("SELECT entry FROM pglock.job_runs WHERE status = 'missed'") == []


@pytest.mark.chaos
@pytest.mark.slow
def test_what_was_claimed_before_an_edit_is_sent_before_it_applies(make_stage: MakeStage) -> None:
    stage = make_stage({"one": 1.0})
    doomed = stage.beat(scheduler="tests.apps.beat_faults:DiesBeforePublishing")
    assert doomed.wait(30) < 0
    ((due, task_id),) = stage.rows(
        "SELECT due_at, task_id FROM pglock.beat_entries WHERE published_at IS NULL"
    )
    assert due not in sent_dues(stage, "one")
    stage.entries = {"one": 3.0}
    beat = standing(stage.beat())
    since = elected_at(stage)
    eventually(lambda: max(sent_dues(stage, "one")) > since, 20, "its new schedule applies")
    end(beat)
    later = [(m.due, m.task_id) for m in messages(stage) if m.due >= due]
    assert later[0] == (due, task_id)
    assert later[1][0] == since + 3 * SECOND


@pytest.mark.chaos
@pytest.mark.slow
def test_an_entry_that_is_taken_out_is_not_sent_until_it_is_there_again(
    make_stage: MakeStage,
) -> None:
    """Then what fell due meanwhile is sent: nobody can tell a removal from a release going back."""
    stage = make_stage({"kept": 1.0, "out": 1.0}, settings=PATIENT)
    first = standing(stage.beat())
    eventually(lambda: len(sent_dues(stage, "out")) >= 2, 20, "it is sent")
    end(first)
    before = sent_dues(stage, "out")
    stage.entries = {"kept": 1.0}
    second = standing(stage.beat())
    since = elected_at(stage)
    eventually(
        lambda: sum(due > since for due in sent_dues(stage, "kept")) >= 3, 20, "the other goes on"
    )
    end(second)
    assert sent_dues(stage, "out") == before
    stage.entries = {"kept": 1.0, "out": 1.0}
    third = standing(stage.beat())
    again = elected_at(stage)
    eventually(lambda: max(sent_dues(stage, "out")) > again, 20, "it is sent again")
    end(third)
    for entry in ("kept", "out"):
        dues = sent_dues(stage, entry)
        assert dues == [dues[0] + SECOND * k for k in range(len(dues))]
    assert "missed" not in third.output()


@pytest.mark.chaos
@pytest.mark.slow
def test_an_entry_that_was_out_for_days_is_made_up_for_once(make_stage: MakeStage) -> None:
    stage = make_stage({"kept": 1.0, "out": 60.0}, settings=PATIENT)
    first = standing(stage.beat())
    eventually(lambda: sent_dues(stage, "kept"), 20, "it sends")
    end(first)
    stage.rows(
        "UPDATE pglock.beat_entries SET anchor = anchor - interval '2 days',"
        " next_due_at = next_due_at - interval '2 days' WHERE entry = 'out' RETURNING 1"
    )
    second = standing(stage.beat())
    since = elected_at(stage)
    eventually(lambda: sum(due > since for due in sent_dues(stage, "kept")) >= 3, 20, "it sends")
    end(second)
    (due,) = sent_dues(stage, "out")
    assert dt.timedelta(0) <= since - due < 60 * SECOND
    missed = "SELECT entry, count(*) FROM pglock.job_runs WHERE status = 'missed' GROUP BY 1"
    assert stage.rows(missed) == [("out", 1000)], (
        "the newest of them are recorded, the others are only counted out"
    )
    assert len(re.findall("occurrences missed: 1000 of entry out", second.output())) == 1

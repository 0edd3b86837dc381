"""Beats whose clocks are wrong, clocks that are set, and the days on which they change.

Case C09 and what belongs to it; all with real `celery beat` processes.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psycopg
import pytest

from tests.support.clocks import Clock, ClockedServer, MakeClock
from tests.support.processes import Process, eventually
from tests.support.stage import MakeStage, Stage

APP = "tests.apps.beat_clocks"
# In each phase of a test; the figures in the documentation are of 10.
OCCURRENCES = int(os.environ.get("PGLOCK_TEST_CLOCK_OCCURRENCES", "3"))
SECOND = dt.timedelta(seconds=1)
HOUR = dt.timedelta(hours=1)
TWO_HOURS = 7200.0
BERLIN = {"timezone": "Europe/Berlin"}


def start_beat(
    stage: Stage,
    clock: Clock | None = None,
    *,
    scheduler: str = "pglock",
    crontabs: Mapping[str, Mapping[str, Any]] | None = None,
) -> Process:
    env = {
        **stage.env(),
        **({} if clock is None else clock.env),
        "APP_CRONTABS": json.dumps(crontabs or {}),
    }
    beat = stage.processes.celery(
        APP, "beat", "-S", scheduler, "-l", "INFO", "-s", os.devnull, env=env, name="beat"
    )
    if not scheduler.startswith("celery."):
        beat.wait_for_line("standby: |leadership gained: ")
    return beat


def sendings(beat: Process, entry: str = "one") -> int:
    return beat.output().count(f"Sending due task {entry} ")


def one_worker(stage: Stage) -> None:
    """Start a worker that runs what is sent in its order."""
    stage.worker("-c", "1")


class Watch:
    """Sees all the time when runs of an entry come, by this process's monotonic clock."""

    def __init__(self, stage: Stage, entry: str) -> None:
        self._stage = stage
        self._entry = entry
        self._came_at: list[float] = []
        self._waited_for = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        with psycopg.connect(self._stage.url, autocommit=True) as connection:
            while not self._over.wait(0.02):
                query = "SELECT count(*) FROM ran WHERE entry = %s"
                ((count,),) = connection.execute(query, (self._entry,)).fetchall()
                self._came_at += [time.monotonic()] * (count - len(self._came_at))

    def dues(self) -> list[dt.datetime]:
        """Return for which instants it ran, in the order of the runs."""
        query = "SELECT due FROM ran WHERE entry = %s ORDER BY ctid"
        return [due for (due,) in self._stage.rows(query, self._entry)]

    def so_far(self) -> None:
        """Count further runs from here on."""
        self._waited_for = len(self._came_at)

    def wait_for(self, count: int, timeout: float = 30.0) -> list[dt.datetime]:
        """Wait for so many further runs; return the instants for which they ran."""
        before = self._waited_for
        self._waited_for += count
        what = f"{count} further runs of {self._entry}"
        eventually(lambda: len(self._came_at) >= self._waited_for, timeout, what)
        return self.dues()[before : self._waited_for]

    def longest_silence(self) -> float:
        return max(later - earlier for earlier, later in itertools.pairwise(self._came_at))

    def expect_no_silence(self, bound: float) -> float:
        """Fail if there was a pause longer than the bound; return the longest there was."""
        longest = self.longest_silence()
        # A busy machine delays the processes themselves.
        slack = 0.0 if "PGLOCK_TEST_CLOCK_OCCURRENCES" in os.environ else 3.0
        assert longest <= bound + slack
        return longest

    def expect_no_double(self) -> int:
        """Fail if it ran twice for one instant; return how often it ran."""
        dues = self.dues()
        assert len(set(dues)) == len(dues)
        return len(dues)

    def expect_none_early(self) -> None:
        """Fail if anything ran, or was recorded as sent, before it was due on the server.

        What was on its way when the server's clock was set back by two hours is another matter.
        """
        rows = self._stage.rows(
            "SELECT entry, due FROM ran WHERE at < due AND at > due - interval '1 h'"
            " UNION ALL SELECT entry, due_at FROM pglock.job_runs"
            " WHERE sent_at < due_at AND sent_at > due_at - interval '1 h'"
        )
        assert rows == []


Watching = Callable[..., Watch]


@pytest.fixture
def watching() -> Iterator[Watching]:
    """Makes watches, of the entry `one` if no other is named."""
    made: list[Watch] = []

    def make(stage: Stage, entry: str = "one") -> Watch:
        made.append(Watch(stage, entry))
        return made[-1]

    yield make
    for watch in made:
        watch.close()


def in_a_row(dues: list[dt.datetime]) -> bool:
    return all(later - earlier == SECOND for earlier, later in itertools.pairwise(dues))


def end(*beats: Process) -> None:
    for beat in beats:
        beat.terminate()
        assert beat.wait() == 0
        assert "Traceback" not in beat.output()


# --- the clocks of the beats ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("off", [600.0, pytest.param(-600.0, marks=pytest.mark.chaos)])
def test_two_beats_whose_clocks_are_ten_minutes_apart_send_as_one(
    make_stage: MakeStage, make_clock: MakeClock, watching: Watching, off: float
) -> None:
    """The wrong one leads, stands by while the right one leads, and leads again."""
    stage = make_stage({"one": 1.0})
    one_worker(stage)
    watch = watching(stage)
    clock = make_clock()
    clock.set(off)
    wrong = start_beat(stage, clock)
    stage.leader([wrong])
    right = start_beat(stage)
    watch.wait_for(OCCURRENCES)
    wrong.kill()
    stage.leader([right], not_before_term=2)
    watch.so_far()
    wrong_again = start_beat(stage, clock)
    watch.wait_for(OCCURRENCES)
    right.kill()
    stage.leader([wrong_again], not_before_term=3)
    watch.so_far()
    watch.wait_for(OCCURRENCES)
    end(wrong_again)
    count = stage.expect_each_once()
    watch.expect_none_early()
    longest = watch.expect_no_silence(2.5)
    print(f"\n{count} occurrences, clocks {off:g} s apart: longest silence {longest:.2f} s")
    told = f"the clock of this host is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} the"
    assert [each.output().count(told) for each in (wrong, right, wrong_again)] == [1, 0, 1]


def test_a_standby_too_says_that_its_clock_is_wrong(
    make_stage: MakeStage, make_clock: MakeClock
) -> None:
    """Once; again after it was right; and not for what a slow connection may look like."""
    stage = make_stage({"one": 3600.0})
    leader = start_beat(stage)
    clock = make_clock()
    clock.set(3.0)
    standby = start_beat(stage, clock)
    for off in (600.0, 3.0, -600.0):
        told = standby.output().count("the clock of this host is")
        clock.set(off)
        if abs(off) > 5:
            standby.wait_for_line("the clock of this host is", count=told + 1)
        else:
            # Until it has looked at the clock again: a poll lasts half a second.
            before = tries(stage)
            eventually(lambda seen=before: tries(stage) >= seen + 2, 20, "two more polls")  # type: ignore[misc]
    assert standby.output().count("the clock of this host is") == 2
    end(standby, leader)


def tries(stage: Stage) -> int:
    """Return how often the standby's session has begun a statement, as the server counts."""
    ((at,),) = stage.rows(
        "SELECT extract(epoch from max(query_start)) * 2 FROM pg_stat_activity"
        " WHERE application_name LIKE 'pglock:standby:%'"
    )
    return int(at)


def test_a_beat_that_went_by_its_own_clock_would_send_before_it_is_due(
    make_stage: MakeStage, make_clock: MakeClock, watching: Watching
) -> None:
    """The control: what the clocks that are ten minutes apart would do without the rule."""
    stage = make_stage({"one": 1.0})
    one_worker(stage)
    watch = watching(stage)
    clock = make_clock()
    clock.set(600.0)
    beat = start_beat(stage, clock, scheduler=f"{APP}:ByItsOwnClock")
    watch.wait_for(3)
    beat.kill()
    with pytest.raises(AssertionError):
        watch.expect_none_early()


@pytest.mark.slow
def test_a_leader_whose_clock_jumps_by_two_hours_goes_on(
    make_stage: MakeStage, make_clock: MakeClock, watching: Watching
) -> None:
    """Forward and back, and back and forward."""
    stage = make_stage({"one": 1.0})
    one_worker(stage)
    watch = watching(stage)
    clock = make_clock()
    beat = start_beat(stage, clock)
    for off in (0.0, TWO_HOURS, 0.0, -TWO_HOURS, 0.0):
        clock.set(off)
        watch.wait_for(OCCURRENCES)
    end(beat)
    count = stage.expect_each_once()
    watch.expect_none_early()
    longest = watch.expect_no_silence(1.5)
    print(f"\n{count} occurrences, clock set four times: longest silence {longest:.2f} s")
    # At a jump to zero the host is right again.
    assert beat.output().count("the clock of this host is") == 2
    assert "the clock of PostgreSQL was set" not in beat.output()


@pytest.mark.chaos
@pytest.mark.parametrize("scheduler", ["celery.beat:Scheduler", "pglock"])
def test_a_stock_beat_is_silent_after_its_clock_was_set_back(
    make_stage: MakeStage, make_clock: MakeClock, scheduler: str
) -> None:
    """The control: the same jump, of a stock beat and of ours."""
    stage = make_stage({"one": 1.0})
    clock = make_clock()
    beat = start_beat(stage, clock, scheduler=scheduler)
    eventually(lambda: sendings(beat) >= 3, 20, "three messages are sent")
    clock.set(-TWO_HOURS)
    jumped_at = time.monotonic()
    sent = sendings(beat)
    if scheduler == "pglock":
        eventually(lambda: sendings(beat) >= sent + 4, 20, "four more messages are sent")
    else:
        # Long enough for four, and it may have been sending one at the time.
        eventually(lambda: time.monotonic() > jumped_at + 6, 20, "six seconds are over")
        assert sendings(beat) <= sent + 1
        assert beat.running()
    beat.kill()


# --- the clock of the server ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_clock_of_the_server_is_set_while_a_beat_leads(
    make_stage: MakeStage, clocked_server: ClockedServer, watching: Watching
) -> None:
    """Back and forward, forward and back by two hours; then the leader is killed."""
    stage = make_stage({"one": 1.0}, url=clocked_server.url)
    one_worker(stage)
    watch = watching(stage)
    clock = clocked_server.clock
    beats = [start_beat(stage), start_beat(stage)]
    watch.wait_for(OCCURRENCES)
    for off in (-TWO_HOURS, 0.0, TWO_HOURS, 0.0):
        clock.set(off)
        eventually(lambda: abs(watch.dues()[-1] - clock.now()) < 20 * SECOND, 30, "it goes on")
        watch.so_far()
        # The first may still be on its way from before.
        _, *dues = watch.wait_for(1 + OCCURRENCES)
        assert in_a_row(dues)
    told = "".join(beat.output() for beat in beats)
    # Set forward, PostgreSQL may take the leader's session for idle: then the other one leads.
    assert told.count("the clock of PostgreSQL was set back by 7") >= 2
    assert "the clock of PostgreSQL was set forward by" in told or "leadership lost" in told
    leader, term = stage.leader(beats), stage.term()
    leader.kill()
    beats.remove(leader)
    stage.leader(beats, not_before_term=term + 1)
    watch.so_far()
    watch.wait_for(OCCURRENCES)
    end(*beats)
    count = watch.expect_no_double()
    longest = watch.expect_no_silence(2.5)
    expect_all_accounted_for(stage)
    watch.expect_none_early()
    print(f"\n{count} runs, server's clock set four times: longest silence {longest:.2f} s")


def expect_all_accounted_for(stage: Stage) -> None:
    """Fail unless what a clock that was set forward went over is recorded as missed."""
    eventually(lambda: stage._unsettled() == "none", 30, "all are settled")  # noqa: SLF001
    rows = stage.rows(
        "SELECT reason, count(*) FROM pglock.job_runs WHERE status = 'missed' GROUP BY 1"
    )
    # Two hours are 7200, of which the newest thousand are recorded, twice.
    assert sum(count for _, count in rows) == 2000
    assert {reason for reason, _ in rows} <= {
        "the server's clock was set forward over it",
        "no beat was leading when it was due",
    }


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_the_clock_of_the_server_is_set_while_no_beat_leads(
    make_stage: MakeStage, clocked_server: ClockedServer, watching: Watching
) -> None:
    stage = make_stage({"one": 1.0}, url=clocked_server.url)
    one_worker(stage)
    watch = watching(stage)
    clock = clocked_server.clock
    phases = [
        (0.0, None),
        (-TWO_HOURS, "back"),
        (0.0, "missed"),
        (TWO_HOURS, "missed"),
        (0.0, "back"),
    ]
    for number, (off, told) in enumerate(phases):
        clock.set(off)
        beat = start_beat(stage)
        beat.wait_for_line("leadership gained: ")
        led_at = time.monotonic()
        # The first may be one that the leader before had claimed.
        _, *dues = watch.wait_for(1 + OCCURRENCES)
        assert time.monotonic() - led_at < OCCURRENCES + 10
        assert in_a_row(dues)
        assert abs(dues[-1] - clock.now()) < 20 * SECOND
        output = beat.output()
        assert ("the clock of PostgreSQL was set back by" in output) is (told == "back")
        assert ("occurrences missed: " in output) is (told == "missed")
        # Once killed, once stopped.
        if number % 2:
            end(beat)
        else:
            beat.kill()
        eventually(lambda: stage._unsettled() == "none", 30, "all are settled")  # noqa: SLF001
        watch.so_far()
    count = watch.expect_no_double()
    watch.expect_none_early()
    print(f"\n{count} runs, the server's clock set four times between two leaders")


@pytest.mark.chaos
@pytest.mark.slow
def test_without_the_rule_a_server_whose_clock_is_set_back_silences_the_beats(
    make_stage: MakeStage, clocked_server: ClockedServer, watching: Watching
) -> None:
    """The control: the leader waits for the clock, and so does the next one."""
    stage = make_stage({"one": 1.0}, url=clocked_server.url)
    one_worker(stage)
    watch = watching(stage)
    beat = start_beat(stage, scheduler=f"{APP}:WaitsForTheClock")
    watch.wait_for(2)
    clocked_server.clock.set(-TWO_HOURS)
    beat.wait_for_line("the clock of PostgreSQL was set back by")
    expect_silence(watch)
    beat.kill()
    beat = start_beat(stage, scheduler=f"{APP}:WaitsForTheClock")
    beat.wait_for_line("leadership gained: ")
    expect_silence(watch)
    beat.kill()


def expect_silence(watch: Watch) -> None:
    """Fail if anything more runs than what is on its way."""
    began = time.monotonic()
    eventually(lambda: time.monotonic() > began + 2, 20, "two seconds are over")
    before = len(watch.dues())
    eventually(lambda: time.monotonic() > began + 6, 20, "six seconds are over")
    assert len(watch.dues()) == before


@pytest.mark.chaos
@pytest.mark.slow
def test_an_instant_to_which_the_clock_comes_twice_is_sent_twice_and_run_once(
    make_stage: MakeStage, clocked_server: ClockedServer, watching: Watching
) -> None:
    """A crontab names instants of the clock; the record knows which of them were run."""
    stage = make_stage({}, url=clocked_server.url)
    one_worker(stage)
    watch = watching(stage, "minutely")
    clock = clocked_server.clock
    noon = dt.datetime(2026, 11, 3, 12, tzinfo=dt.UTC)
    clock.set_to(noon - HOUR)
    beat = start_beat(stage, crontabs={"minutely": {}})
    clock.set_to(noon - 3 * SECOND)
    eventually(lambda: noon in watch.dues(), 30, "noon runs")
    eventually(lambda: stage._unsettled() == "none", 20, "it is done")  # noqa: SLF001
    sent = sendings(beat, "minutely")
    clock.set_to(noon - 7 * SECOND)
    beat.wait_for_line("the clock of PostgreSQL was set back by")
    eventually(lambda: sendings(beat, "minutely") == sent + 1, 20, "it is sent again")
    clock.set_to(noon + 57 * SECOND)
    after = noon + 60 * SECOND
    eventually(lambda: after in watch.dues(), 30, "the minute after noon runs")
    end(beat)
    assert sendings(beat, "minutely") >= sent + 2
    assert watch.dues()[-2:] == [noon, after]
    watch.expect_no_double()


# --- C09: the days on which the clocks change --------------------------------------------------


DAILY: Mapping[str, Mapping[str, Any]] = {"daily": {"hour": 2, "minute": 30}}
BOTH: Mapping[str, Mapping[str, Any]] = {**DAILY, "half": {"minute": "*/30"}}


def utc(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC)


class Visit:
    """Lets the clock of the server and of all beats pass an instant."""

    def __init__(self, server: ClockedServer, watch: Watch, half: Watch) -> None:
        self._clock = server.clock
        self._watch = watch
        self._half = half

    def passes(self, moment: dt.datetime) -> None:
        """Set the clock shortly before a half hour, and wait until that was sent and run."""
        self._clock.set_to(moment - 3 * SECOND)
        eventually(lambda: moment in self._half.dues(), 30, f"the half hour of {moment} runs")

    def ran(self) -> list[dt.datetime]:
        return self._watch.dues()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "scheduler", ["pglock", pytest.param(f"{APP}:ByEachMinute", marks=pytest.mark.chaos)]
)
def test_a_time_that_does_not_exist_is_run_once_moved_by_the_gap(
    make_stage: MakeStage, clocked_server: ClockedServer, watching: Watching, scheduler: str
) -> None:
    """2026-03-29: 02:30 in Berlin is skipped. The naive rule would skip the run too."""
    stage = make_stage({}, url=clocked_server.url, settings=BERLIN)
    one_worker(stage)
    visit = Visit(clocked_server, watching(stage, "daily"), half := watching(stage, "half"))
    clocked_server.clock.set_to(utc("2026-03-28T01:05"))
    beat = start_beat(stage, clocked_server.clock, scheduler=scheduler, crontabs=BOTH)
    for moment in ("28T01:30", "29T00:30", "29T01:00", "29T01:30", "29T02:00", "30T00:30"):
        visit.passes(utc(f"2026-03-{moment}"))
    end(beat)
    days = (
        ["28T01:30", "29T01:30", "30T00:30"] if scheduler == "pglock" else ["28T01:30", "30T00:30"]
    )
    assert visit.ran() == [utc(f"2026-03-{day}") for day in days]
    assert half.expect_no_double() >= 6


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "scheduler", ["pglock", pytest.param(f"{APP}:ByEachMinute", marks=pytest.mark.chaos)]
)
def test_a_time_that_comes_twice_is_run_once_although_the_leader_is_replaced(
    make_stage: MakeStage, clocked_server: ClockedServer, watching: Watching, scheduler: str
) -> None:
    """2026-10-25: 02:30 in Berlin comes at 00:30 and at 01:30 UTC; the leader dies in between."""
    stage = make_stage({}, url=clocked_server.url, settings=BERLIN)
    one_worker(stage)
    clock = clocked_server.clock
    visit = Visit(clocked_server, watching(stage, "daily"), half := watching(stage, "half"))
    clock.set_to(utc("2026-10-24T00:05"))
    beats = [start_beat(stage, clock, scheduler=scheduler, crontabs=BOTH) for _ in range(2)]
    for moment in ("24T00:30", "25T00:30", "25T01:00"):
        visit.passes(utc(f"2026-10-{moment}"))
    clock.set_to(utc("2026-10-25T01:10"))  # 02:10, the second one
    leader, term = stage.leader(beats), stage.term()
    leader.kill()
    beats.remove(leader)
    stage.leader(beats, not_before_term=term + 1)
    for moment in ("25T01:30", "25T02:00", "26T01:30"):
        visit.passes(utc(f"2026-10-{moment}"))
    end(*beats)
    days = ["24T00:30", "25T00:30", "26T01:30"]
    if scheduler != "pglock":
        days.insert(2, "25T01:30")
    assert visit.ran() == [utc(f"2026-10-{day}") for day in days]
    assert {utc("2026-10-25T00:30"), utc("2026-10-25T01:30")} <= set(half.dues())
    assert half.expect_no_double() >= 6


@pytest.mark.chaos
def test_a_clock_that_jumps_over_the_second_half_past_two_does_not_run_it(
    make_stage: MakeStage, clocked_server: ClockedServer, watching: Watching
) -> None:
    stage = make_stage({}, url=clocked_server.url, settings=BERLIN)
    one_worker(stage)
    clock = clocked_server.clock
    visit = Visit(clocked_server, watching(stage, "daily"), half := watching(stage, "half"))
    clock.set_to(utc("2026-10-25T00:05"))
    beat = start_beat(stage, clock, crontabs=BOTH)
    visit.passes(utc("2026-10-25T00:30"))
    for jump, half_hour in (("01:20", "01:00"), ("01:40", "01:30")):
        clock.set_to(utc(f"2026-10-25T{jump}"))
        made_up = utc(f"2026-10-25T{half_hour}")
        eventually(lambda due=made_up: due in half.dues(), 30, f"{made_up} is made up for")  # type: ignore[misc]
    visit.passes(utc("2026-10-25T02:00"))
    end(beat)
    assert visit.ran() == [utc("2026-10-25T00:30")]


@pytest.mark.chaos
@pytest.mark.parametrize("scheduler", ["celery.beat:Scheduler", "pglock"])
def test_a_stock_beat_that_starts_in_the_repeated_hour_sends_without_end(
    make_stage: MakeStage, clocked_server: ClockedServer, scheduler: str
) -> None:
    """The control: `*/30` in the second pass, of a stock beat and of ours."""
    stage = make_stage({}, url=clocked_server.url, settings=BERLIN)
    clock = clocked_server.clock
    clock.set_to(utc("2026-10-25T01:05"))
    beat = start_beat(stage, clock, scheduler=scheduler, crontabs={"half": {"minute": "*/30"}})
    if scheduler == "pglock":
        clock.set_to(utc("2026-10-25T01:29:57"))
        eventually(lambda: sendings(beat, "half") == 1, 30, "01:30 is sent")
        assert clock.now() >= utc("2026-10-25T01:30")
        end(beat)
        assert sendings(beat, "half") == 1
    else:
        # What is due in this pass is 01:00, and that once.
        eventually(lambda: sendings(beat, "half") > 100, 60, "it is sent a hundred times")
        assert clock.now() < utc("2026-10-25T01:30")
        beat.kill()

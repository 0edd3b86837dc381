"""Redelivery, deaths and retries at random moments: each period is done once, or its row says why.

What is decided one case at a time stands elsewhere: C20's running task and its countdown in
`test_same_message.py` (`test_redis_delivers_a_running_task_again_and_it_runs_once`,
`test_a_message_for_later_that_redis_delivers_many_times_runs_once`), C21 and C22 there too
(`test_a_run_whose_process_was_killed_is_run_again`,
`test_a_task_that_asks_for_retries_is_done_in_one_period`,
`test_while_a_retry_waits_another_copy_may_run_and_the_retry_finds_it_done`); crash loops in
`test_worker_death.py`; an outcome that cannot be recorded in
`tests/integration/test_execution.py` (`test_an_outcome_that_cannot_be_recorded_is_unknown`).

A run that outlasts RabbitMQ's `consumer_timeout` is in `test_consumer_timeout.py`.

`PGLOCK_TEST_TRIALS` is how many trials there are for each broker, in batches.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import os
import random
import re
import secrets
import time
import uuid
from collections import Counter
from concurrent import futures
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_pglock import CrashRetriesExhausted
from tests.acceptance.bench import (
    FAST_REDELIVERY,
    NAMESPACE,
    Bench,
    Note,
    Run,
    due,
    label,
    occurrence,
    rabbitmqctl,
)
from tests.acceptance.conftest import MakeBench
from tests.support.processes import Process, eventually
from tests.support.stage import MakeStage

APP = "tests.apps.trials"
PATIENCE = 30.0
BODY = 12.0
TRIALS = int(os.environ.get("PGLOCK_TEST_TRIALS", "10"))
RETRIES = 100
BATCH = 20
DROPS = 2
REPEATED = ("late", "late_transactional", "retried_when_lost")
AT_MOST_ONCE = ("once_or_never", "once_or_never_transactional")
BROKERS = ["redis", "rabbitmq"]


def redelivering(broker: str) -> dict[str, Any]:
    """Return the transport options with which a broker can be made to deliver again."""
    if broker == "redis":
        return FAST_REDELIVERY
    rabbitmqctl("version")  # without the right to, skipped before anything is started
    return {"client_properties": {"connection_name": f"trials-{uuid.uuid4().hex}"}}


def drop_connections(bench: Bench) -> int:
    """Have RabbitMQ close all connections of the workers at once; return how many."""
    name = bench.transport_options["client_properties"]["connection_name"]
    # In one call: each is a start of Erlang, which may take seconds. Some may just have ended.
    (answer,) = rabbitmqctl(
        "eval",
        'length([catch rabbit_networking:close_connection(Pid, "closed by a test") ||'
        " [{pid, Pid}, {client_properties, Properties}] <-"
        " rabbit_networking:connection_info_all([pid, client_properties]),"
        f' {{<<"connection_name">>, _, <<"{name}">>}} <- Properties]).',
    )
    return int(answer)


@dataclasses.dataclass(kw_only=True)
class Trial:
    """One period of one job, as the first step of a chain.

    Attributes:
        key: its lock's, and its value.
        task: the task that is its body.
        moment: its due instant.
        killed_after: seconds from its first start to the death of that process.
        result: of the next step, whose parent is the trial's own.
        killed: whether that process was killed in the middle of the body.
    """

    key: str
    task: str
    moment: dt.datetime
    killed_after: float
    result: AsyncResult[Any]
    killed: bool = False

    def own(self) -> AsyncResult[Any]:
        parent = self.result.parent
        assert isinstance(parent, AsyncResult)
        return parent

    def row(self, bench: Bench) -> Run:
        return bench.run(job=f"{NAMESPACE}:{self.key}")


def is_final(run: Run) -> bool:
    return run.status == "done" or run.reason == "exhausted"


class Batch:
    """Trials that run at the same time in the same two workers."""

    def __init__(self, bench: Bench, rng: random.Random, tasks: list[str]) -> None:
        self.bench = bench
        self._rng = rng
        self.trials: list[Trial] = []
        # Every second one of each task is killed.
        seen: Counter[str] = Counter()
        for task in tasks:
            doomed = seen[task] % 2 == 0
            seen[task] += 1
            self.trials.append(self._send(task, rng.uniform(0, BODY - 1) if doomed else math.inf))
        self._begun: dict[str, Note] = {}
        # Beside the loop that kills: it takes seconds.
        self._dropper = futures.ThreadPoolExecutor(max_workers=1)
        self._drops: list[futures.Future[int]] = []
        self._drop_at: list[dt.datetime] = []

    def _send(self, task: str, killed_after: float) -> Trial:
        key = f"trial-{uuid.uuid4()}"
        moment = due(minutes=1)
        first = self.bench.step(task, key, seconds=BODY, value=key)
        first.set(headers=occurrence(key, moment))
        result = self.bench.chain(first, self.bench.step("plain", key))
        return Trial(key=key, task=task, moment=moment, killed_after=killed_after, result=result)

    def play(self) -> int:
        """Kill and drop as drawn, and wait until each trial has an end and nothing is left.

        Returns how many connections were closed.
        """
        with self._dropper:
            deadline = time.monotonic() + 100
            while open_trials := self._unsettled():
                assert time.monotonic() < deadline, (open_trials, self._open_rows())
                time.sleep(0.05)
        eventually(
            lambda: self.bench.messages() == 0, PATIENCE, "nothing is left in the broker",
            interval=0.5,
        )  # fmt: skip
        eventually(lambda: not self.bench.locks(), what="no lock is held")
        return sum(drop.result() for drop in self._drops)

    def _unsettled(self) -> list[Trial]:
        for note in self.bench.notes("start"):
            self._begun.setdefault(note.detail["key"], note)
        now = self.bench.now()
        for trial in self.trials:
            begun = self._begun.get(trial.key)
            if begun and not trial.killed and (now - begun.at).total_seconds() > trial.killed_after:
                self._kill(trial, begun)
        self._drop(now)
        ended = [run.job for run in self.bench.runs() if is_final(run)]
        return [trial for trial in self.trials if f"{NAMESPACE}:{trial.key}" not in ended]

    def _open_rows(self) -> list[Run]:
        return [run for run in self.bench.runs() if not is_final(run)]

    def _kill(self, trial: Trial, begun: Note) -> None:
        if (self.bench.now() - begun.at).total_seconds() < BODY - 0.5:
            self.bench.kill(begun.pid)
            trial.killed = True
        else:
            # So slow a machine that its moment has passed: a trial without a death.
            trial.killed_after = math.inf

    def _drop(self, now: dt.datetime) -> None:
        if not self.bench.broker.startswith("amqp") or len(self._begun) < len(self.trials):
            return
        if not self._drop_at and not self._drops:
            moments = sorted(self._rng.uniform(0, BODY - 1) for _ in range(DROPS))
            self._drop_at = [now + dt.timedelta(seconds=moment) for moment in moments]
        if self._drop_at and self._drop_at[0] <= now:
            self._drop_at.pop(0)
            self._drops.append(self._dropper.submit(drop_connections, self.bench))


@dataclasses.dataclass(kw_only=True)
class Played:
    """What was played on one broker."""

    bench: Bench
    trials: list[Trial]

    def of(self, tasks: tuple[str, ...]) -> list[Trial]:
        return [trial for trial in self.trials if trial.task in tasks]


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, make_shared_bench: MakeBench) -> Played:
    """Play all trials on one broker: with deaths and redelivery of what still runs."""
    seed = secrets.randbits(32)
    print(f"\n{request.param}: seed {seed}")
    rng = random.Random(seed)  # noqa: S311 - only moments
    bench = make_shared_bench(request.param, **redelivering(request.param))
    tasks = [REPEATED[number % len(REPEATED)] for number in range(TRIALS)]
    tasks += [AT_MOST_ONCE[number % len(AT_MOST_ONCE)] for number in range(TRIALS // 2)]
    rng.shuffle(tasks)
    # Enough processes for each trial, and for copies that look in.
    concurrency = min(BATCH, len(tasks))
    workers = bench.expect(
        *(bench.start_worker(app=APP, concurrency=concurrency) for _ in range(2))
    )
    trials: list[Trial] = []
    dropped = 0
    for begin in range(0, len(tasks), BATCH):
        batch = Batch(bench, rng, tasks[begin : begin + BATCH])
        dropped += batch.play()
        trials += batch.trials
    for worker in workers:
        worker.kill(group=True)
    rows = bench.runs()
    print(
        f"{len(trials)} trials, {sum(trial.killed for trial in trials)} killed, "
        f"{dropped} connections closed, {sum(row.postponements for row in rows)} copies, "
        f"{Counter((row.status, row.attempts) for row in rows)}"
    )
    assert sum(row.postponements for row in rows) >= len(trials) / 10, (
        "what ran was delivered again"
    )
    if request.param == "rabbitmq":
        assert dropped >= 2, "both workers were connected"
    return Played(bench=bench, trials=trials)


ON_BOTH = pytest.mark.parametrize("played", BROKERS, indirect=True)


def expect_once(bench: Bench, trial: Trial, *, attempts: int) -> None:
    """Fail unless a trial was done once, its value is its own, and the next step came after it."""
    row = trial.row(bench)
    assert (row.period, row.status) == (label(trial.moment), "done"), trial
    assert (row.attempts, row.lost_attempts) == (attempts, attempts - 1), trial
    starts = bench.notes("start", key=trial.key)
    assert [note.detail["attempt"] for note in starts] == list(range(1, attempts + 1))
    assert {note.detail["period"] for note in starts} == {label(trial.moment)}
    (end,) = bench.notes("end", key=trial.key)
    assert end.pid == starts[-1].pid
    assert trial.own().get(timeout=PATIENCE) == trial.key
    assert trial.result.get(timeout=PATIENCE) == "plain"
    # Sent once. That it is run once nobody promises of a plain task: its message too is delivered
    # again when a worker's connection is dropped.
    following = bench.notes("plain", args=[trial.key])
    assert sum(not note.detail["redelivered"] for note in following) <= 1, following
    assert following[0].at >= end.at
    assert row.task_id == trial.own().id
    assert not bench.skips(task_id=row.task_id), "its own copies are no skips"


@ON_BOTH
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_c20_c21_whatever_is_delivered_again_or_killed_is_completed_once(played: Played) -> None:
    trials = played.of(REPEATED)
    assert len(trials) == TRIALS
    # Half are to be killed; on a slow machine the moment of some has passed.
    assert sum(trial.killed for trial in trials) >= max(1, TRIALS // 4)
    for trial in trials:
        expect_once(played.bench, trial, attempts=1 + trial.killed)
    assert not played.bench.notes("log", event="lock_lost")


@ON_BOTH
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_may_not_be_repeated_is_begun_once_whatever_is_delivered_again(
    played: Played,
) -> None:
    trials = played.of(AT_MOST_ONCE)
    assert len(trials) == TRIALS // 2
    assert any(trial.killed for trial in trials)
    for trial in trials:
        if not trial.killed:
            expect_once(played.bench, trial, attempts=1)
            continue
        assert len(played.bench.notes("start", key=trial.key)) == 1
        assert not played.bench.notes("end", key=trial.key)
        row = trial.row(played.bench)
        assert (row.status, row.reason) == ("failed", "exhausted")
        assert (row.attempts, row.lost_attempts) == (1, 1)
        # Neither result hangs, and the next step does not run.
        for result in (trial.own(), trial.result):
            with pytest.raises(CrashRetriesExhausted):
                result.get(timeout=PATIENCE)
        assert not played.bench.notes("plain", args=[trial.key])


# --- The control: without the rule for repeated messages -------------------------------------


@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.chaos)])
@pytest.mark.parametrize(
    "forgetful",
    [pytest.param(True, marks=pytest.mark.chaos), False],
    ids=["control", "as it is"],
)
@pytest.mark.slow
def test_only_where_a_repeated_message_is_known_is_no_period_lost(
    make_bench: MakeBench, broker: str, *, forgetful: bool
) -> None:
    """The first run dies after its message came again and was dealt with."""
    bench = make_bench(broker, backend="redis", **redelivering(broker))
    workers = bench.expect(
        *(bench.start_worker(app=APP, concurrency=5, trials_forgetful=forgetful) for _ in "12")
    )
    keys = [f"key-{uuid.uuid4()}" for _ in range(3)]
    moment = due(minutes=1)
    results = [
        bench.send("late", key, params={"gate": key}, headers=occurrence(key, moment))
        for key in keys
    ]
    starts = [bench.wait_for_notes("start", key=key)[0] for key in keys]
    if broker == "rabbitmq":
        assert drop_connections(bench) >= 2, "both workers were connected"
    signal = "run_skipped" if forgetful else "run_postponed"
    for result in results:
        bench.wait_for_notes("signal", name=signal, task_id=result.id, timeout=PATIENCE)
    if forgetful:
        # Skipped and acknowledged: the broker has forgotten it, although the first run goes on.
        eventually(lambda: bench.messages() == 0, PATIENCE, "no message is left", interval=0.5)
    for start in starts:
        bench.kill(start.pid)
    pids = {start.pid for start in starts}
    eventually(lambda: said_lost(workers) >= pids, PATIENCE, "the workers saw it")
    for key in keys:
        bench.open_gate(key)
    eventually(lambda: bench.messages() == 0, PATIENCE, "the broker is empty", interval=0.5)
    eventually(lambda: not bench.locks(), what="no lock is held")
    statuses = [bench.run(job=f"{NAMESPACE}:{key}").status for key in keys]
    if forgetful:
        # Nothing is left that could run them, and they are called skipped although nobody ran.
        assert statuses == ["running"] * 3
        for result in results:
            with pytest.raises(TaskRevokedError):
                result.get(timeout=PATIENCE)
    else:
        assert statuses == ["done"] * 3
        assert [result.get(timeout=PATIENCE) for result in results] == [None] * 3


def said_lost(workers: tuple[Process, ...]) -> set[int]:
    """Return the processes whose end the workers have told of."""
    told = "".join(worker.output() for worker in workers)
    return {int(pid) for pid in re.findall(r"pid:(\d+) exited with", told)}


# --- A copy that comes after the end ----------------------------------------------------------


@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.chaos)])
@pytest.mark.slow
def test_c20_a_copy_that_comes_after_the_end_is_acknowledged_silently(
    make_bench: MakeBench, broker: str
) -> None:
    """The worker dies between the end of the run and its acknowledgement."""
    bench = make_bench(broker, backend="redis", **redelivering(broker))
    key = f"key-{uuid.uuid4()}"
    dying = bench.worker(concurrency=1)
    first = bench.step("late", key, gate=key, value=key)
    first.set(headers=occurrence(key, due(minutes=1)))
    result = bench.chain(first, bench.step("plain", key))
    bench.wait_for_notes("start", key=key)
    dying.stop(group=False)
    bench.open_gate(key)
    run = bench.wait_for_run("done", job=f"{NAMESPACE}:{key}")
    eventually(lambda: result.parent.state == "SUCCESS", what="its result is there")
    # The child sends the next step after the result; it is idle in its pipe when it has.
    eventually(lambda: bench.messages() >= 2, what="the next step is sent", interval=0.1)
    dying.kill(group=True)
    bench.worker(concurrency=1)
    bench.wait_for_notes("delivered", count=2, timeout=PATIENCE, task_id=run.task_id)
    eventually(lambda: bench.messages() == 0, PATIENCE, "nothing is left in the broker")
    assert len(bench.notes("start", key=key)) == 1
    assert bench.run(job=run.job) == run
    assert result.parent.get(timeout=PATIENCE) == key
    assert result.get(timeout=PATIENCE) == "plain"
    assert len(bench.notes("plain", args=[key])) == 1
    assert not bench.skips(job=run.job)


# --- An attempt that wakes after its period was taken over ------------------------------------


@pytest.mark.slow
def test_done_is_not_overwritten_by_a_first_attempt_that_wakes_late(make_bench: MakeBench) -> None:
    """Frozen and cut off from the server, it is taken over by its own redelivered message."""
    bench = make_bench(**FAST_REDELIVERY)
    frozen = bench.worker(app=APP, concurrency=6)
    moment = due(minutes=1)
    results: dict[str, AsyncResult[Any]] = {}
    for task in ("twice", "twice_warned", "twice_transactional"):
        for ending in ("fails", "returns"):
            key = f"{task}-{ending}"
            results[key] = bench.send(task, key, ending, headers=occurrence(key, moment))
    bench.wait_for_notes("start", count=len(results))
    frozen.stop()
    for backend in {lock["pid"] for lock in bench.locks()}:
        bench.database.rows("SELECT pg_terminate_backend(%s)", backend)
    other = bench.worker(app=APP, concurrency=6)
    for key, result in results.items():
        assert result.get(timeout=PATIENCE) == 2, key
        bench.wait_for_run("done", job=f"{NAMESPACE}:{key}")
    rows = bench.runs()
    assert {(row.attempts, row.lost_attempts) for row in rows} == {(2, 1)}
    assert {start.pid for start in bench.notes("start", attempt=2)} <= set(other.children())
    frozen.cont()
    for key, result in results.items():
        bench.open_gate(key)
        frozen.wait_for_line(rf"\[{result.id}\] (succeeded|raised)")
    # Where the body is not interrupted it has come to its own end, and that did not count.
    assert {note.detail["key"] for note in bench.notes("end")} >= {
        "twice_warned-fails",
        "twice_warned-returns",
    }
    assert bench.runs() == rows
    for result in results.values():
        assert (result.state, result.get(timeout=PATIENCE)) == ("SUCCESS", 2)
    eventually(lambda: bench.messages() == 0, PATIENCE, "nothing is left in the broker")


# --- Retries ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def idle_workers(request: pytest.FixtureRequest, make_shared_bench: MakeBench) -> Bench:
    """Workers with processes to spare: a retry finds a free one at once."""
    bench = make_shared_bench(request.param, backend="redis")
    bench.expect(*(bench.start_worker(app=APP, concurrency=6) for _ in range(2)))
    return bench


@pytest.mark.parametrize("idle_workers", BROKERS, indirect=True)
@pytest.mark.parametrize("task", ["lingering_autoretry", "lingering_countdown"])
@pytest.mark.chaos
def test_c22_no_retry_is_lost_to_its_own_lock(idle_workers: Bench, task: str) -> None:
    """Each retry arrives while the run that asked for it still has the lock."""
    bench = idle_workers
    keys = [f"{task}-{uuid.uuid4()}" for _ in range(RETRIES)]
    at_a_time = 4
    for begin in range(0, RETRIES, at_a_time):
        results = [bench.send(task, key) for key in keys[begin : begin + at_a_time]]
        assert [result.get(timeout=PATIENCE) for result in results] == [1] * len(results)
    job = f"{NAMESPACE}:{task}"
    starts = Counter(note.detail["key"] for note in bench.notes("start", job=job))
    assert starts == dict.fromkeys(keys, 2)
    came_early = Counter(note.detail["key"] for note in bench.notes("came early"))
    assert {key: came_early[key] for key in keys} == dict.fromkeys(keys, 1)
    rows = Counter((row.status, row.attempts) for row in bench.runs(job=job))
    assert rows == {("done", 2): RETRIES}
    assert not bench.skips(job=job)


# --- Copies ----------------------------------------------------------------------------------


@pytest.mark.chaos
@pytest.mark.timeout(200)
def test_copies_of_a_long_run_do_not_multiply(make_bench: MakeBench) -> None:
    """A run of 60 s whose message Redis would deliver again every 5 s."""
    bench = make_bench(**FAST_REDELIVERY)
    bench.expect(bench.start_worker(concurrency=2), bench.start_worker(concurrency=2))
    key = f"key-{uuid.uuid4()}"
    job = f"{NAMESPACE}:{key}"
    bench.send("late", key, params={"seconds": 60}, headers=occurrence(key, due(minutes=1)))
    sizes: Counter[int] = Counter()

    def done() -> bool:
        sizes[bench.messages()] += 1
        return bool(bench.runs(job=job, status="done"))

    eventually(done, 90, "the run is done", interval=0.05)
    eventually(lambda: bench.messages() == 0, PATIENCE, "every copy is acknowledged")
    run = bench.run(job=job)
    delivered = bench.notes("delivered", task_id=run.task_id)
    print(
        f"at most {max(sizes)} messages in the broker ({dict(sizes)}), {run.postponements} copies "
        f"one after the other, {len(delivered)} deliveries"
    )
    assert max(sizes) <= 4
    assert run.attempts == 1
    assert len(bench.notes("start", key=key)) == 1


# --- The period is that of the occurrence -----------------------------------------------------


@pytest.mark.slow
def test_c15_a_run_that_starts_late_is_booked_on_its_own_period(make_stage: MakeStage) -> None:
    """The worker is blocked while several occurrences fall due.

    That a period outlives retries and redelivery is seen by C20, C21 and C22.
    """
    stage = make_stage({"two": 2.0})
    worker = stage.worker("-c", "1")
    beat = stage.beat()
    stage.wait_for_runs(1)
    entry = stage.rows("SELECT definition, schedule FROM pglock.beat_entries")
    worker.stop()
    sent = "SELECT count(*) FROM pglock.job_runs WHERE status = 'sent' AND sent_at IS NOT NULL"
    eventually(lambda: stage.rows(sent)[0][0] >= 4, PATIENCE, "four occurrences wait")
    worker.cont()
    beat.terminate()
    assert beat.wait() == 0
    assert stage.expect_each_once() >= 5
    late = stage.rows(
        "SELECT due_at, period, attempts FROM pglock.job_runs"
        " WHERE started_at > due_at + interval '2 s'"
    )
    assert len(late) >= 3, "so late that by the clock it would be the next one's period"
    assert [(period, attempts) for _, period, attempts in late] == [
        (label(moment), 1) for moment, _, _ in late
    ]
    assert stage.rows("SELECT definition, schedule FROM pglock.beat_entries") == entry

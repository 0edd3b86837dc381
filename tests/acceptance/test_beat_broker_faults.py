"""Brokers that forget, die or hang right after a burst: each occurrence runs exactly once."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from celery_pglock.demo.servers import ValkeyServer
from tests.acceptance import bursts
from tests.support.processes import eventually
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQNode
from tests.support.stage import MakeStage, Stage

FAULTS = "tests.apps.beat_faults"
TRIALS = int(os.environ.get("PGLOCK_TEST_BROKER_KILLS", "3"))
BURST = 200
QUICK = {"pglock_rescue_sent_after": 2, "pglock_rescue_lost_after": 2}
NO_RESCUE = {"pglock_rescue_sent_after": None, "pglock_rescue_lost_after": None}
LEASE = 4.0


@pytest.mark.slow
def test_messages_that_a_flushed_broker_has_forgotten_are_sent_again(
    make_stage: MakeStage, own_valkey: ValkeyServer
) -> None:
    """Of a burst, and of an entry that goes on being due; no worker has taken any of them."""
    stage = make_stage(bursts.names(20), broker=own_valkey.url(), settings=QUICK)
    bursts.due_at_once(stage, 0)
    stage.entries["often"] = 1.0
    beat = stage.beat()
    bursts.wait_until_confirmed(stage, 23)
    forgotten = _flush(own_valkey, stage.queue)
    ((flushed,),) = stage.rows("SELECT clock_timestamp()")
    beat.wait_for_line("rescued: stage:entry", count=20)
    stage.worker()
    # Also the first copies of some, when these were forgotten with the rest.
    waiting = "SELECT 1 FROM pglock.job_runs WHERE status <> 'done' AND due_at <= %s"
    eventually(lambda: not stage.rows(waiting, flushed), 60, "all are done")
    bursts.end([beat])
    count = stage.expect_each_once()
    print(f"\n{forgotten} messages forgotten, {count} occurrences")
    assert forgotten >= 20


def test_without_rescue_they_are_lost(make_stage: MakeStage, own_valkey: ValkeyServer) -> None:
    """The control for the one above."""
    stage = make_stage(bursts.names(20), broker=own_valkey.url(), settings=NO_RESCUE)
    bursts.due_at_once(stage, 0)
    beat = stage.beat()
    bursts.wait_until_confirmed(stage, 20)
    assert _flush(own_valkey, stage.queue) == 20
    stage.entries["later"] = 1.0
    bursts.end([beat])
    stage.beat()
    stage.worker()
    stage.wait_for_runs(3)
    assert stage.rows("SELECT DISTINCT entry FROM ran") == [("later",)]


@pytest.fixture(scope="module")
def node() -> Iterator[RabbitMQNode]:
    """A RabbitMQ that the tests of this module kill and start again."""
    with RabbitMQNode() as started:
        yield started


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("trial", "at"),
    [
        pytest.param(trial, at, marks=[] if (trial, at) == (0, BURST) else [pytest.mark.chaos])
        for trial in range(TRIALS)
        for at in (BURST, BURST // 2)
    ],
)
def test_a_rabbitmq_that_is_killed_during_a_burst_loses_nothing(
    make_stage: MakeStage, node: RabbitMQNode, trial: int, at: int
) -> None:
    """Right after the last publication, or after half of them; without any rescue."""
    stage = _burst_on(make_stage, node, at)
    beats = [stage.beat(scheduler=f"{FAULTS}:KillsTheBroker")]
    stage.leader(beats)
    beats.append(stage.beat())
    node.wait()
    before = bursts.confirmed(stage)
    node.start()
    bursts.wait_until_confirmed(stage, BURST)
    stage.worker("-c", "4")
    eventually(lambda: bursts.done(stage) == BURST, 120, "all are done")
    bursts.end([bursts.standing(beat) for beat in beats])
    assert stage.expect_each_once() == BURST
    print(f"\ntrial {trial}, killed after {at}: {BURST} ran, {before} recorded before its end")


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_rabbitmq_that_is_not_asked_to_confirm_loses_them_until_they_are_rescued(
    make_stage: MakeStage, node: RabbitMQNode, trial: int
) -> None:
    """The control for the one above."""
    stage = _burst_on(make_stage, node, BURST)
    beat = stage.beat(scheduler=f"{FAULTS}:KillsTheBrokerUnasked")
    stage.leader([beat])
    node.wait()
    bursts.wait_until_confirmed(stage, BURST)
    node.start()
    bursts.end([beat])
    worker = stage.worker("-c", "4")
    # A message that is sent after all of them arrives after all of them.
    stage.entries["later"] = 1.0
    beat = stage.beat()
    eventually(
        lambda: stage.rows("SELECT 1 FROM ran WHERE entry = 'later'"), 60, "what is due later runs"
    )
    del stage.entries["later"]
    bursts.end([beat])
    ran = len(stage.rows("SELECT 1 FROM ran WHERE entry <> 'later'"))
    print(f"\ntrial {trial}: {BURST - ran} of {BURST} lost without confirms")
    assert ran < BURST
    stage.settings.update(QUICK)
    beat = stage.beat()
    eventually(
        lambda: len(stage.rows("SELECT 1 FROM ran WHERE entry <> 'later'")) == BURST,
        120,
        "all are rescued",
    )
    bursts.end([beat, worker])
    assert stage.expect_each_once() == BURST


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.chaos)])
def broker(request: pytest.FixtureRequest) -> str:
    """The URL of a broker, of either kind."""
    names = {"redis": "fresh_redis_url", "rabbitmq": "rabbitmq_url"}
    return str(request.getfixturevalue(names[request.param]))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_leader_whose_broker_never_answers_hands_over_to_one_that_has_another(
    make_stage: MakeStage, broker: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        stage, marker = _timed(make_stage, broker, tmp_path)
        hanging = _through(stage, mute.getsockname()[1])
        stage.worker()
        first = hanging.beat(scheduler=f"{FAULTS}:Timed")
        stage.leader([first])
        other = bursts.standing(stage.beat())
        first.wait_for_line("leadership .*the broker did not take . messages in a row")
        stage.leader([other], not_before_term=2)
        ran = len(stage.rows("SELECT 1 FROM ran"))
        stage.wait_for_runs(ran + 6)
        bursts.end([first, other])
    count = stage.expect_each_once()
    print(f"\n{count} occurrences, the longest tick {_longest(marker):.2f} s, lease {LEASE:g} s")
    assert "leadership lost" not in first.output() + other.output()
    assert _longest(marker) <= LEASE / 4 + _slack()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_leader_whose_broker_never_answers_keeps_what_is_due_and_its_lease(
    make_stage: MakeStage, broker: str, tmp_path: Path
) -> None:
    """It is alone. The broker answers again after three leases, and has missed nothing."""
    stage, marker = _timed(make_stage, broker, tmp_path)
    proxy = Proxy(broker)
    try:
        leader = _through(stage, urlsplit(proxy.url).port or 0).beat(scheduler=f"{FAULTS}:Timed")
        stage.worker()
        stage.wait_for_runs(2)
        proxy.hold()
        silent = _silence(stage, 3 * LEASE)
        ran = len(stage.rows("SELECT 1 FROM ran"))
        proxy.flow()
        stage.wait_for_runs(ran + int(3 * LEASE), 60)
        bursts.end([leader])
    finally:
        proxy.close()
    count = stage.expect_each_once()
    print(
        f"\n{count} occurrences, the longest tick {_longest(marker):.2f} s, at most {silent:.2f} s"
        f" without a sign of life, lease {LEASE:g} s"
    )
    assert "leadership lost" not in leader.output()
    assert stage.term() == 1
    assert _longest(marker) <= LEASE / 4 + _slack()
    # A quarter until the next sign of life is due, and a quarter for a tick in between.
    assert silent <= LEASE / 2 + _slack()


@pytest.mark.chaos
def test_a_leader_without_time_outs_loses_its_lease(
    make_stage: MakeStage, fresh_redis_url: str, tmp_path: Path
) -> None:
    """The control for the two above."""
    stage, _ = _timed(make_stage, fresh_redis_url, tmp_path)
    proxy = Proxy(fresh_redis_url)
    try:
        through = _through(stage, urlsplit(proxy.url).port or 0)
        leader = through.beat(scheduler=f"{FAULTS}:WaitsForEver")
        bursts.wait_until_confirmed(stage, 1)
        proxy.hold()
        eventually(lambda: not _has_leader(stage), 30, "the server ends the leader's session")
        proxy.flow()
        leader.wait_for_line("leadership lost: ")
    finally:
        proxy.close()


def _flush(server: ValkeyServer, queue: str) -> int:
    """Have a broker forget everything; return how many messages were waiting in a queue."""
    with redis.Redis.from_url(server.url()) as client:
        waiting = client.llen(queue)
        client.flushall()
    assert isinstance(waiting, int)
    return waiting


def _burst_on(make_stage: MakeStage, node: RabbitMQNode, at: int) -> Stage:
    """A stage whose beat kills the node when it has taken so many messages of a burst."""
    stage = make_stage(
        bursts.names(BURST),
        broker=node.url,
        settings=dict(NO_RESCUE),
        extra={"APP_STRIKE_AT": str(at), "APP_VICTIM": str(node.pid)},
    )
    bursts.due_at_once(stage, 5)
    return stage


def _timed(make_stage: MakeStage, broker: str, tmp_path: Path) -> tuple[Stage, Path]:
    marker = tmp_path / "longest"
    stage = make_stage(
        {"one": 1.0},
        broker=broker,
        settings={"pglock_leader_lease": LEASE},
        extra={"APP_MARKER": str(marker)},
    )
    return stage, marker


def _through(stage: Stage, port: int) -> Stage:
    """The same stage, whose broker is at another port."""
    parts = urlsplit(stage.broker)
    login = f"{parts.username}:{parts.password}@" if parts.username else ""
    broker = parts._replace(netloc=f"{login}127.0.0.1:{port}").geturl()
    return dataclasses.replace(stage, broker=broker)


def _silence(stage: Stage, seconds: float) -> float:
    """Watch a leader for some time; return for how long at most it gave no sign of life."""
    longest = 0.0
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        ((age,),) = stage.rows(
            "SELECT extract(epoch FROM clock_timestamp() - last_tick_at)::float"
            " FROM pglock.beat_terms"
        )
        longest = max(longest, age)
        time.sleep(0.05)
    return longest


def _has_leader(stage: Stage) -> bool:
    return bool(
        stage.rows(
            "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'pglock:leader:%'"
            " AND datname = current_database()"
        )
    )


def _longest(marker: Path) -> float:
    return float(marker.read_text())


def _slack() -> float:
    # A busy machine delays the processes themselves; the tight bound is for one that does
    # nothing else.
    return 0.25 if "PGLOCK_TEST_BROKER_KILLS" in os.environ else 1.5

"""A leader that is cut off from PostgreSQL while it reaches its broker: nothing that it sends.

Each of two beats has wires of its own, one to the database and one to the broker. What comes on
the first one is really dropped, both ways or one way, so both kernels take part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import random
import sys
import time
from collections.abc import Iterator

import pytest

from celery_pglock.demo.servers import ValkeyServer
from tests.support.broker_log import watched
from tests.support.namespaces import (
    HOLES,
    Hole,
    Namespace,
    far_postgres,
    require_namespaces,
    seen_at,
)
from tests.support.processes import Process, eventually
from tests.support.stage import APP, MakeStage, Stage

# The figures in the documentation are of 30 of each kind.
PARTITIONS = int(os.environ.get("PGLOCK_TEST_PARTITIONS", "1"))
SLACK = 0.0 if "PGLOCK_TEST_PARTITIONS" in os.environ else 1.0
LEASE = 2.0
# A busy machine may take so long to replace a leader that this counts as a downtime.
SETTINGS = {"pglock_leader_lease": LEASE, "pglock_catchup": 100}


@pytest.fixture
def places(make_stage: MakeStage) -> Iterator[tuple[Stage, list[Namespace]]]:
    """A stage whose servers are also seen from two namespaces."""
    require_namespaces()
    with contextlib.ExitStack() as stack:
        namespaces = [stack.enter_context(Namespace()) for _ in range(2)]
        server = stack.enter_context(far_postgres(*namespaces))
        addresses = " ".join(["127.0.0.1", *(it.elsewhere for it in namespaces)])
        broker = stack.enter_context(ValkeyServer({"bind": addresses, "protected-mode": "no"}))
        stage = make_stage({"one": 1.0}, url=server.url(), broker=broker.url(), settings=SETTINGS)
        yield stage, namespaces
        # Before the namespaces go.
        stage.processes.end()


def _beat(stage: Stage, namespace: Namespace, scheduler: str = "pglock") -> Process:
    """Start a beat in a namespace, and wait until it leads or stands by."""
    there = dataclasses.replace(
        stage,
        url=seen_at(namespace.server, stage.url),
        broker=seen_at(namespace.elsewhere, stage.broker),
    )
    beat = stage.processes.start(
        *namespace.command(sys.executable, "-m", "celery", "-A", APP, "beat"),
        *("-S", scheduler, "-l", "INFO"),
        env=there.env(),
        name="beat",
    )
    beat.wait_for_line("standby: |leadership gained: ")
    return beat


@pytest.mark.slow
@pytest.mark.timeout(180 + 30 * PARTITIONS)
@pytest.mark.parametrize(
    "hole", [HOLES[0], *(pytest.param(hole, marks=pytest.mark.chaos) for hole in HOLES[1:])]
)
def test_a_leader_that_is_cut_off_is_replaced_and_sends_nothing_more(
    places: tuple[Stage, list[Namespace]], hole: Hole
) -> None:
    """It trusts itself for half a lease; whoever leads next has to wait for the whole of it."""
    stage, namespaces = places
    stage.worker()
    beats = [_beat(stage, namespace) for namespace in namespaces]
    seed = random.SystemRandom().randrange(1_000_000)
    pace = random.Random(seed)  # noqa: S311 - not for secrets
    lateness = []
    with stage.witness() as witness, watched(stage.broker, stage.queue) as log:
        ends = []
        for _ in range(PARTITIONS):
            leader = stage.leader(beats)
            term = stage.term()
            namespace = namespaces[beats.index(leader)]
            stood = leader.output().count("standby: ")
            time.sleep(pace.uniform(0.0, 1.0))
            moment = witness.now()
            namespace.block(hole)
            ends.append((term, dt.datetime.now(dt.UTC) + dt.timedelta(seconds=LEASE / 2)))
            lateness.append(witness.lateness_after(moment))
            assert stage.leader(beats, not_before_term=term + 1) is not leader
            # It knows by itself, and not because it is told.
            leader.wait_for_line(rf"leadership lost: .*\(term {term}\)")
            namespace.heal()
            leader.wait_for_line("standby: ", count=stood + 1)
        for beat in beats:
            beat.terminate()
            assert beat.wait() == 0
        count = stage.expect_each_once()
        # All that was ever sent is known by now, and can be judged.
        for term, trusted_until in ends:
            log.expect_silence(term, trusted_until)
        log.expect_one_leader_after_the_other()
    print(
        f"\n{hole}, seed {seed}: {PARTITIONS} partitions, {count} occurrences, lateness max"
        f" {max(lateness):.3f} s: {', '.join(f'{late:.2f}' for late in sorted(lateness))}"
    )
    assert max(lateness) <= LEASE + 1.0 + SLACK


@pytest.mark.slow
def test_control_a_leader_that_trusts_itself_sends_while_it_is_cut_off(
    places: tuple[Stage, list[Namespace]],
) -> None:
    """So its broker is reachable, and nothing but its own judgement keeps a leader from sending."""
    stage, namespaces = places
    trusting = _beat(stage, namespaces[0], "tests.apps.beat_trusting:Trusting")
    stage.leader([trusting])
    heir = _beat(stage, namespaces[1])
    with stage.witness() as witness, watched(stage.broker, stage.queue) as log:
        moment = witness.now()
        namespaces[0].block("both ways")
        trusted_until = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=LEASE / 2)
        witness.lateness_after(moment)
        stage.leader([heir], not_before_term=2)
        # By now the other has sent too.
        led_at = dt.datetime.now(dt.UTC)
        eventually(lambda: log.of_term(1, led_at), 20, "it sends although another leads")
        with pytest.raises(AssertionError, match="term 1 was over"):
            log.expect_silence(1, trusted_until)
        with pytest.raises(AssertionError):
            log.expect_one_leader_after_the_other()
        namespaces[0].heal()

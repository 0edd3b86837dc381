"""RabbitMQ closes the channel of a consumer that does not acknowledge in time.

The limit is the server's (per queue only from 3.12 on), so these tests change the server that
they use, for channels that are opened meanwhile: they are not among those that run beside others.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from tests.acceptance.bench import NAMESPACE, due, label, occurrence, rabbitmqctl
from tests.acceptance.conftest import MakeBench
from tests.support.processes import eventually

PATIENCE = 60.0
LIMIT = 5


@pytest.fixture
def short_limit(rabbitmq_url: str) -> Iterator[None]:
    """Five seconds, looked at each second, instead of half an hour and each minute."""
    assert rabbitmq_url
    names = ("consumer_timeout", "channel_tick_interval")
    before = {
        name: rabbitmqctl("eval", f'io:format("~p", [application:get_env(rabbit, {name})]).')[0]
        for name in names
    }
    # Of both one is restored even if that of the other fails.
    with contextlib.ExitStack() as stack:
        for name, value in before.items():
            stack.callback(restore, name, value)
        rabbitmqctl("eval", f"application:set_env(rabbit, consumer_timeout, {LIMIT * 1000}).")
        rabbitmqctl("eval", "application:set_env(rabbit, channel_tick_interval, 1000).")
        yield


def restore(name: str, value: str) -> None:
    number = "".join(character for character in value if character.isdigit())
    change = (
        f"application:set_env(rabbit, {name}, {number})."
        if number
        else f"application:unset_env(rabbit, {name})."
    )
    rabbitmqctl("eval", change)


@pytest.mark.chaos
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("short_limit")
def test_a_run_that_is_longer_than_the_limit_runs_once(make_bench: MakeBench) -> None:
    """With late acknowledgement the message comes again and again while its first run goes on."""
    bench = make_bench("rabbitmq")
    workers = bench.expect(bench.start_worker(concurrency=2), bench.start_worker(concurrency=2))
    moment = due(minutes=1)
    job = f"{NAMESPACE}:long"
    result = bench.send(
        "late", "long", params={"seconds": 20, "value": "its own"},
        headers=occurrence("long", moment),
    )  # fmt: skip
    run = bench.wait_for_run("done", job=job, timeout=PATIENCE)
    assert (run.period, run.attempts, run.lost_attempts) == (label(moment), 1, 0)
    told = "".join(worker.output() for worker in workers)
    assert re.search("PRECONDITION_FAILED|delivery acknowledgement .* timed out", told)
    assert run.postponements >= 1, "it was delivered again"
    assert result.get(timeout=PATIENCE) == "its own"
    eventually(lambda: bench.messages() == 0, PATIENCE, "every copy is acknowledged")
    assert len(bench.notes("start", key="long")) == 1
    assert not bench.skips(job=job)

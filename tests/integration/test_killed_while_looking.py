"""Redis delivers again although a worker was killed while it looked for what is due for that."""

from __future__ import annotations

import json
from typing import Any

import kombu
import pytest
import redis

from celery_pglock.demo import app as demo
from tests.acceptance import bench
from tests.chaos import stage
from tests.support.processes import Processes, eventually

OPTION = "unacked_mutex_expire"
LOCK = "unacked_mutex"


def leave_locked(processes: Processes, url: str, options: dict[str, Any]) -> None:
    """Kill the taker of a message in the middle of its look for others."""
    with kombu.Connection(url) as connection:
        kombu.Producer(connection).publish("invoices", routing_key="queue")
    worker = processes.python("-m", "tests.apps.restorer", url, json.dumps(options))
    worker.wait_for_line("^looking$")
    worker.kill()


def look(connection: kombu.Connection) -> None:
    channel: Any = connection.default_channel
    channel.qos.restore_visible(interval=1)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(demo.TRANSPORT, id="demo"),
        pytest.param(bench.FAST_REDELIVERY, id="bench"),
        pytest.param(stage.TRANSPORT, id="chaos"),
    ],
)
def test_others_deliver_again_what_it_had(
    fresh_redis_url: str, processes: Processes, options: dict[str, Any]
) -> None:
    soon = {**options, "visibility_timeout": 0}
    leave_locked(processes, fresh_redis_url, soon)
    with (
        redis.Redis.from_url(fresh_redis_url) as client,
        kombu.Connection(fresh_redis_url, transport_options=soon) as connection,
    ):

        def is_back() -> bool:
            look(connection)
            return bool(client.llen("queue") == 1)

        eventually(is_back, 5)


def test_without_the_option_nobody_looks_for_five_minutes(
    fresh_redis_url: str, processes: Processes
) -> None:
    soon = {**demo.TRANSPORT, "visibility_timeout": 0}
    del soon[OPTION]
    leave_locked(processes, fresh_redis_url, soon)
    with (
        redis.Redis.from_url(fresh_redis_url) as client,
        kombu.Connection(fresh_redis_url, transport_options=soon) as connection,
    ):
        assert client.pttl(LOCK) > 290_000
        look(connection)
        assert client.llen("queue") == 0
        # It is the lock alone that keeps them from it.
        client.delete(LOCK)
        look(connection)
        assert client.llen("queue") == 1

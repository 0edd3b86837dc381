"""Messages that are kept for a pipeline, over a real Valkey and whatever kombu there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kombu
import pytest
import redis

from celery_pglock import pipelines
from tests.support.processes import eventually


class BadlyEndedError(Exception):
    """What ends a batch."""


@pytest.fixture
def channel(fresh_redis_url: str) -> Iterator[Any]:
    with kombu.Connection(fresh_redis_url) as connection:
        yield connection.default_channel


@pytest.fixture
def server(fresh_redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(fresh_redis_url) as client:
        yield client


def publish(channel: Any, body: str, *, to: str = "queue", exchange: str = "") -> None:
    kombu.Producer(channel, auto_declare=False).publish(body, routing_key=to, exchange=exchange)


def bodies(channel: Any, queue: str = "queue") -> list[str]:
    taken = iter(lambda: channel.basic_get(queue, no_ack=True), None)
    return [message.decode() for message in taken]


def test_they_arrive_together_in_their_order(channel: Any, server: Any) -> None:
    pipeline = pipelines.Pipeline(channel)
    with pipeline.together():
        for number in range(3):
            publish(channel, str(number))
        assert server.llen("queue") == 0
    assert server.llen("queue") == 3
    with pipeline.together():
        pass
    publish(channel, "by itself")
    assert bodies(channel) == ["0", "1", "2", "by itself"]


def test_a_batch_that_is_given_up_has_sent_nothing(channel: Any) -> None:
    pipeline = pipelines.Pipeline(channel)

    def end_badly() -> None:
        publish(channel, "given up")
        raise BadlyEndedError

    with pytest.raises(BadlyEndedError), pipeline.together():
        end_badly()
    with pipeline.together():
        publish(channel, "another")
    assert bodies(channel) == ["another"]


def test_one_that_cannot_be_written_leaves_the_others(channel: Any) -> None:
    def write(what: Any) -> None:
        kombu.Producer(channel, auto_declare=False).publish(
            "x", routing_key="queue", headers={"what": what}
        )

    with pipelines.Pipeline(channel).together():
        write("text")
        with pytest.raises(TypeError):
            write(object())
        write("text")
    assert len(bodies(channel)) == 2


def test_one_that_the_server_refuses_is_told_without_its_message(channel: Any, server: Any) -> None:
    server.set("no queue", "a text")
    pipeline = pipelines.Pipeline(channel)
    refused = pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE")
    with refused as raised, pipeline.together():
        publish(channel, "a")
        publish(channel, "tops3cret", to="no queue")
        publish(channel, "b")
    assert "tops3cret" not in str(raised.value)
    assert bodies(channel) == ["a", "b"]


def test_what_is_for_all_who_listen_is_kept_too(channel: Any, server: Any) -> None:
    channel.exchange_declare("everybody", type="fanout")
    listener = server.pubsub(ignore_subscribe_messages=True)
    try:
        listener.psubscribe("*everybody*")
        eventually(lambda: server.pubsub_numpat() == 1, what="it listens")
        with pipelines.Pipeline(channel).together():
            publish(channel, "all", exchange="everybody")
            publish(channel, "one")
            assert not listener.get_message(timeout=0.2)
        eventually(lambda: listener.get_message(timeout=0.2), what="it is told")
    finally:
        listener.close()
    assert bodies(channel) == ["one"]


@pytest.mark.parametrize("option", ["retry_on_timeout", None])
def test_it_fits_where_redis_py_repeats_nothing(fresh_redis_url: str, option: str | None) -> None:
    options: dict[str, Any] = {option: True} if option else {}
    with kombu.Connection(fresh_redis_url, transport_options=options) as connection:
        assert pipelines.Pipeline.fits(connection.default_channel) is (option is None)


def test_it_fits_no_other_transport() -> None:
    with kombu.Connection("memory://") as connection:
        assert not pipelines.Pipeline.fits(connection.default_channel)

"""Takes a message from Redis, and stays for ever in looking for what nobody has acknowledged.

Called with the URL of the server and the transport's options as JSON; says ``looking``.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from typing import Any

import kombu
from kombu.transport import redis as transport

_mutex = transport.Mutex


@contextlib.contextmanager
def _for_ever(client: Any, name: str, expire: int) -> Iterator[None]:
    with _mutex(client, name, expire):
        print("looking", flush=True)
        signal.pause()
        yield


def main(url: str, options: str) -> None:
    with kombu.Connection(url, transport_options=json.loads(options)) as connection:
        channel: Any = connection.default_channel
        if channel.basic_get("queue") is None:
            sys.exit("there was no message")
        transport.Mutex = _for_ever
        channel.qos.restore_visible(interval=1)


if __name__ == "__main__":
    main(*sys.argv[1:])

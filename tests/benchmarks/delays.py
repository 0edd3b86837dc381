"""A network that takes its time, in front of a server."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

from tests.support.proxy import Proxy


@contextlib.contextmanager
def delayed(url: str, round_trip: float) -> Iterator[str]:
    """Return the URL of a server as it is seen from so many seconds away, there and back.

    The proxy has a process of its own: in a thread of this one it would take the interpreter
    from what is measured.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_forward, args=(theirs, url, round_trip / 2), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send("end")
        process.join(10)


def _forward(pipe: Connection, url: str, delay: float) -> None:
    proxy = Proxy(url, delay=delay)
    pipe.send(proxy.url)
    with contextlib.suppress(EOFError):
        pipe.recv()
    proxy.close()

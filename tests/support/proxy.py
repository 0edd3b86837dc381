"""A TCP proxy in front of a server, that tests cut: it swallows, delays, forgets, or resets."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

Way = Literal["to server", "to client"]


class Proxy:
    """Forwards connections to the server of a URL, until it is told otherwise.

    Args:
        url: of the server.
        delay: for how many seconds each packet is kept on its way, in either direction.
        alter: changes what the server says, on its way.

    Attributes:
        url: the same URL, through the proxy.
        swallowed: how many times it has been given something that it did not forward.
        delay: as given; it may be changed, and counts for what comes from then on.
        forgotten: how many connections it has given up because they were idle.
    """

    def __init__(
        self, url: str, *, delay: float = 0.0, alter: Callable[[bytes], bytes] = bytes
    ) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        user = f"{parts.username}@" if parts.username else ""
        self.url = urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{port}"))
        self.swallowed = 0
        self.forgotten = 0
        self._flows = threading.Event()
        self._flows.set()
        self._blocked: Way | None = None
        self.delay = delay
        self._alter = alter
        self._idle_limit: float | None = None
        self._forgets_silently = False
        # Per direction what is on its way, with the moment at which it arrives.
        self._travelling: dict[socket.socket, deque[tuple[float, bytes]]] = {}
        self._from_client: set[socket.socket] = set()
        self._last_bytes: dict[socket.socket, float] = {}
        self._silent: set[socket.socket] = set()
        self._ended = False
        self._peers: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Let nothing through; what comes meanwhile is kept, and delivered by ``flow``."""
        self._flows.clear()

    def hold_one_way(self, way: Way) -> None:
        """Let nothing through in one direction, ends of connections included, until ``flow``."""
        self._blocked = way

    def flow(self) -> None:
        """Let everything through again."""
        self._blocked = None
        self._flows.set()

    def forget_idle(self, after: float, *, silently: bool) -> None:
        """Forget connections without bytes for so many seconds, as a middle box does.

        Args:
            after: the limit; TCP's own keep-alive packets do not count, since they end here.
            silently: swallow what comes later, instead of resetting the connection.
        """
        self._forgets_silently = silently
        self._idle_limit = after

    def reset(self) -> None:
        """Break all connections, as a firewall does that has forgotten them."""
        for peer in list(self._peers):
            self._reset(peer)

    def close(self) -> None:
        """Break everything and end."""
        self._ended = True
        self._flows.set()
        self._thread.join(5)
        self.reset()
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(self._patience()):
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._listener:
                    self._connect(source.accept()[0])
                else:
                    self._forward(source)
            self._deliver()
            self._forget()

    def _patience(self) -> float:
        moments = [queue[0][0] for queue in list(self._travelling.values()) if queue]
        return max(0.0, min([0.02, *(moment - time.monotonic() for moment in moments)]))

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._server)
        except OSError:  # it is down
            client.close()
            return
        self._from_client.add(client)
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[one] = other
            self._travelling[one] = deque()
            self._last_bytes[one] = time.monotonic()
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        try:
            data = source.recv(65536)
            if data and not self._flows.is_set():
                self.swallowed += 1
                self._flows.wait()
        except OSError:
            data = b""
        if (other := self._peers.get(source)) is None:
            return
        if source in self._silent:
            self.swallowed += 1
            if not data:
                self._selector.unregister(source)
            return
        self._last_bytes[source] = self._last_bytes[other] = time.monotonic()
        if self._blocks(source):
            self.swallowed += 1
        if source not in self._from_client:
            data = self._alter(data)
        self._travelling[source].append((time.monotonic() + self.delay, data))
        if not data:
            # It would be readable for ever; the end is delivered after what came before it.
            self._selector.unregister(source)

    def _blocks(self, source: socket.socket) -> bool:
        way: Way = "to server" if source in self._from_client else "to client"
        return self._blocked == way

    def _deliver(self) -> None:
        for source, queue in list(self._travelling.items()):
            while queue and queue[0][0] <= time.monotonic() and not self._blocks(source):
                _, data = queue.popleft()
                try:
                    self._peers[source].sendall(data)
                except (OSError, KeyError):
                    data = b""
                if not data:
                    self._drop(source)
                    break

    def _forget(self) -> None:
        if self._idle_limit is None:
            return
        limit = time.monotonic() - self._idle_limit
        for client in list(self._from_client - self._silent):
            if self._last_bytes.get(client, limit) < limit:
                self.forgotten += 1
                if self._forgets_silently:
                    self._silent.update({client, self._peers[client]})
                else:
                    self._reset(client)

    def _reset(self, peer: socket.socket) -> None:
        for one in (peer, self._peers.get(peer)):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._drop(peer)

    def _drop(self, source: socket.socket) -> None:
        other = self._peers.pop(source, None)
        for one in (source, other):
            if one is not None:
                self._peers.pop(one, None)
                self._travelling.pop(one, None)
                self._last_bytes.pop(one, None)
                self._from_client.discard(one)
                self._silent.discard(one)
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(one)
                one.close()

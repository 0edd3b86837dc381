"""A TCP proxy in front of a server, that tests cut: it swallows, or it resets."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """Forwards connections to the server of a URL, until it is told otherwise.

    Attributes:
        url: the same URL, through the proxy.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        user = f"{parts.username}@" if parts.username else ""
        self.url = urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{port}"))
        self.swallowed = 0
        self._flows = threading.Event()
        self._flows.set()
        self._ended = False
        self._peers: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Let nothing through; what comes meanwhile is kept, and delivered by ``flow``."""
        self._flows.clear()

    def flow(self) -> None:
        """Let everything through again."""
        self._flows.set()

    def reset(self) -> None:
        """Break all connections, as a firewall does that has forgotten them."""
        for peer in list(self._peers):
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._drop(peer)

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
            for key, _ in self._selector.select(0.02):
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._listener:
                    self._connect(source.accept()[0])
                else:
                    self._forward(source)

    def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection(self._server)
        for one, other in ((client, server), (server, client)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        try:
            data = source.recv(65536)
            if data and not self._flows.is_set():
                self.swallowed += 1
                self._flows.wait()
            if data and source in self._peers:
                self._peers[source].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(source)

    def _drop(self, source: socket.socket) -> None:
        other = self._peers.pop(source, None)
        for one in (source, other):
            if one is not None:
                self._peers.pop(one, None)
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(one)
                one.close()

"""A proxy of TCP connections that drops all of them on request."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Passes connections on to an address, each direction by a thread.

    Attributes:
        address: where it listens.
    """

    def __init__(self, to: str) -> None:
        self._to = to.rsplit(":", 1)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self) -> int:
        """Drop every connection; the number of dropped ones."""
        dropped = list(self._open)
        for one in dropped:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        return len(dropped) // 2

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            try:
                far = socket.create_connection((self._to[0], int(self._to[1])), timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self._open |= {near, far}
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            self._open.discard(one)
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

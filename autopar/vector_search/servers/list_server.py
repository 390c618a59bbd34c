"""Serve an index, or a part of one, over HTTP.

    POST /search    JSON: queries, k, and optionally effort -> ids, distances, coverage
    POST /lists     arrays, from a router: queries, which query probes which list, k -> distances, positions
    GET  /health    JSON: the part, vectors, lists

In: a search function, a part. Out: a server. Requests of many clients are read by a thread each; an index searches for
one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparError, SearchError
from autopar.vector_search.on_disk.index import DiskIndex
from autopar.vector_search.servers.messages import decoded, encoded, of_dtype

#: Largest body of a request.
_MAX_BODY = 2**28

#: Answers a search: queries, k, effort -> ids, distances, coverage.
Search = Callable[[NDArray[Any], int, int | None], tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]


class ListServer(ThreadingHTTPServer):
    """A server of one index.

    Args:
        address: host and port; 0: any port.
        health: what `/health` replies.
        search: answers `/search`; None: a part, which cannot.
        part: answers `/lists`; None: it is not served.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], health: Mapping[str, Any], search: Search | None, part: DiskIndex | None
    ) -> None:
        self.health, self.search, self.part = health, search, part
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """The address that clients use."""
        host, port = self.server_address[:2]
        return f"http://{host}:{port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ListServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if self.path != "/health":
            return self._reply(404, {"error": f"{self.path} is unknown: GET /health, POST /search"})
        return self._reply(200, self.server.health)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _MAX_BODY:
            self.close_connection = True
            return self._reply(413, {"error": f"the body needs a length, of at most {_MAX_BODY:,} bytes"})
        body = self.rfile.read(int(length))
        try:
            if self.path == "/search" and self.server.search is not None:
                return self._reply(200, _searched(self.server.search, body))
            if self.path == "/lists" and self.server.part is not None:
                return self._send(200, "application/octet-stream", _lists(self.server.part, body))
        except SearchError as error:
            return self._reply(400, {"error": str(error)})
        except AutoparError as error:
            return self._reply(500, {"error": str(error)})
        return self._reply(404, {"error": f"{self.path} is not served here"})

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def _reply(self, status: int, content: Mapping[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _searched(search: Search, body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
        queries, k, effort = np.asarray(given["queries"]), given["k"], given.get("effort")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SearchError(f"the body is no JSON with `queries` and `k` ({error!r})") from None
    ids, distances, coverage = search(queries, k, effort)
    finite = [[None if not np.isfinite(each) else each for each in row] for row in distances.tolist()]
    return {"ids": ids.tolist(), "distances": finite, "coverage": coverage.tolist()}


def _lists(part: DiskIndex, body: bytes) -> bytes:
    try:
        arrays = decoded(body)
        queries, k = of_dtype(arrays["queries"], part.lists.dtype), int(arrays["k"])
        shape = (len(queries), part.lists.num_lists)
        is_probed = np.unpackbits(arrays["is_probed"], count=shape[0] * shape[1]).reshape(shape).astype(bool)
        allowed = arrays.get("allowed")
        if allowed is not None:
            allowed = np.unpackbits(allowed, count=part.lists.num_vectors).astype(bool)
    except (ValueError, LookupError, OSError, TypeError) as error:
        raise SearchError(f"the body is no search of lists ({error!r})") from None
    with part.lock:
        distances, positions = part.searches.of_lists(queries, k, is_probed, allowed)
    return encoded({"distances": distances, "positions": positions})

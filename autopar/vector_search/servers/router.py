"""Search an index that is divided among servers: `ServedIndex`.

In: a part, for the centroids and the placement; the servers' addresses. Out: results, and which share of the lists that
each query wanted was answered for. A query uses only servers that have its lists, as few as possible. If a server does not
answer, its lists are requested from other servers that have them.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.metrics import NO_ID, worst_distance
from autopar.vector_search.on_disk.index import AT_ONCE, DiskIndex
from autopar.vector_search.on_disk.page_file import open_page_file
from autopar.vector_search.on_disk.probing import Probing
from autopar.vector_search.servers.divide import PART
from autopar.vector_search.servers.list_placement import chosen
from autopar.vector_search.servers.messages import decoded, encoded


class Answers(NamedTuple):
    """The results of a search, as `Found`, and how complete they are.

    Args:
        coverage: f64 `[num_queries]`, share of the lists that were wanted and answered for; below 1, servers were
            missing, and neighbours may be.
        requested: int64 `[num_queries]`, servers that were asked for each query.
    """

    ids: NDArray[np.int64]
    distances: NDArray[Any]
    coverage: NDArray[np.float64]
    requested: NDArray[np.int64]


@dataclass(slots=True)
class _Server:
    url: str
    down_until: float = 0.0
    idle: list[http.client.HTTPConnection] = field(default_factory=list)

    def post(self, path: str, body: bytes, timeout_s: float) -> bytes:
        """Send a request.

        Raises:
            OSError, http.client.HTTPException: no answer.
            SearchError, IndexFileError: the server refuses it.
        """
        try:
            status, content = self._sent(self.idle.pop(), path, body, timeout_s)
        except (IndexError, ConnectionError, http.client.RemoteDisconnected):  # the server was restarted since
            parts = urlsplit(self.url)
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
            status, content = self._sent(connection, path, body, timeout_s)
        if status == 400:
            raise SearchError(f"{self.url}: {content.decode(errors='replace')}")
        if status != 200:
            raise IndexFileError(f"{self.url}: {content.decode(errors='replace')}")
        return content

    def _sent(
        self, connection: http.client.HTTPConnection, path: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        """Status and body of the reply. The connection is kept for the next request."""
        try:
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            connection.request("POST", path, body, {"Content-Type": "application/octet-stream"})
            reply = connection.getresponse()
            content = reply.read()
        except BaseException:
            connection.close()
            raise
        self.idle.append(connection)
        return reply.status, content


class ServedIndex:
    """An index whose lists are on several servers. Use it as a context, or `close` it.

    Args:
        part: the file of any part; its lists are not read.
        servers: address of each server, in the order of the parts.
        deadline_s: how long a search waits for a server, before it asks others.
        retry_s: how long a server that did not answer is not asked.

    Raises:
        SearchError: the number of addresses is not that of the parts.
        IndexFileError: the file is damaged, or no part.
    """

    def __init__(
        self, part: str | os.PathLike[str], servers: Sequence[str], *, deadline_s: float = 5.0, retry_s: float = 10.0
    ) -> None:
        pages = open_page_file(part)
        if pages.kind != PART:
            raise IndexFileError(f"{part} is no part of a divided index: divide it by `vector_search.divide`")
        self._index = DiskIndex(pages, "mmap")
        self._has = pages.arrays["servers"].astype(bool)
        if self._has.shape != (self._index.lists.num_lists, len(servers)):
            self._index.close()
            raise SearchError(
                f"`servers` has {len(servers)} addresses, and the index is divided into {self._has.shape[-1]} parts: give one"
                " for each, in their order"
            )
        self._servers = [_Server(url.rstrip("/")) for url in servers]
        self._deadline_s, self._retry_s = deadline_s, retry_s
        self._loads = np.zeros(len(servers))
        self._threads = ThreadPoolExecutor(4 * len(servers), thread_name_prefix="autopar-ask")

    @property
    def loads(self) -> NDArray[np.float64]:
        """Lists that each server was asked for."""
        return self._loads.copy()

    def search(
        self, queries: ArrayLike, k: int, *, filter: ArrayLike | None = None, effort: int | None = None
    ) -> Answers:
        """See `Index.search`.

        Raises:
            SearchError: an invalid argument.
            IndexFileError: a server reports damage.
        """
        lists = self._index.lists
        checked = inputs.checked_queries(queries, lists.dim, lists.dtype)
        k, allowed = inputs.checked_count("k", k), inputs.checked_filter(filter, lists.num_vectors)
        effort = None if effort is None else inputs.checked_count("effort", effort)
        parts = [
            self._searched(checked[at : at + AT_ONCE], k, allowed, effort) for at in range(0, len(checked), AT_ONCE)
        ]
        if not parts:
            return Answers(np.zeros((0, k), np.int64), np.zeros((0, k)), np.zeros(0), np.zeros(0, np.int64))
        distances, positions, coverage, requested = (np.concatenate(each) for each in zip(*parts, strict=True))
        ids = np.full(positions.shape, NO_ID, np.int64)
        ids[positions != NO_ID] = lists.ids_of(positions[positions != NO_ID])
        found = Answers(ids, distances, coverage, requested)
        return Answers(*(each[0] for each in found)) if np.ndim(queries) == 1 else found

    def close(self) -> None:
        """Close the connections and the file."""
        self._threads.shutdown()
        for server in self._servers:
            for connection in server.idle:
                connection.close()
        self._index.close()

    def __enter__(self) -> ServedIndex:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- private ------------------------------------------------------------------------------

    def _searched(
        self, queries: NDArray[Any], k: int, allowed: NDArray[np.bool_] | None, effort: int | None
    ) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """As `DiskIndex.search`: queries that find too few probe twice as many lists, until all."""
        lists = self._index.lists
        num_allowed = lists.num_vectors if allowed is None else int(np.count_nonzero(allowed))
        wanted = min(k, num_allowed)
        probing = self._index.searches.probing(effort, wanted, num_allowed)
        found = self._requested(queries, k, allowed, self._index.searches.probed(queries, probing))
        while (probing.is_usual or probing.effort < lists.num_lists) and wanted:
            short = np.flatnonzero((found[1][:, wanted - 1] == NO_ID) & (found[2] == 1))
            if not short.size:
                break
            probing = Probing(min(2 * probing.effort, lists.num_lists))
            again = self._requested(queries[short], k, allowed, self._index.searches.probed(queries[short], probing))
            for part, new in zip(found, again, strict=True):
                part[short] = new
        return found

    def _requested(
        self, queries: NDArray[Any], k: int, allowed: NDArray[np.bool_] | None, is_probed: NDArray[np.bool_]
    ) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Ask the servers, and others for those that do not answer."""
        left = is_probed.copy()
        left[:, self._index.searches.whole_counts == 0] = False
        wanted = left.sum(axis=1)
        requested = np.zeros((len(queries), len(self._servers)), np.bool_)
        best: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        while left.any():
            is_up = np.array([time.monotonic() >= each.down_until for each in self._servers])
            which = chosen(left, self._has, is_up, self._loads)
            if (which < 0).all():
                break
            waiting = []
            for server in range(len(self._servers)):
                mask = which == server
                rows = np.flatnonzero(mask.any(axis=1))
                if rows.size:
                    requested[rows, server] = True
                    body = self._body(queries[rows], k, allowed, mask[rows])
                    post = self._servers[server].post
                    waiting.append((server, mask, rows, self._threads.submit(post, "/lists", body, self._deadline_s)))
            for server, mask, rows, reply in waiting:
                try:
                    arrays = decoded(reply.result())
                except (OSError, http.client.HTTPException):
                    self._servers[server].down_until = time.monotonic() + self._retry_s
                    continue
                left &= ~mask
                best.append((rows, arrays["distances"], arrays["positions"]))
        distances, positions = self._merged(len(queries), k, best)
        missing = left.sum(axis=1)
        return distances, positions, 1 - missing / np.maximum(wanted, 1), requested.sum(axis=1)

    def _body(
        self, queries: NDArray[Any], k: int, allowed: NDArray[np.bool_] | None, is_probed: NDArray[np.bool_]
    ) -> bytes:
        arrays = {"queries": queries, "k": np.array(k), "is_probed": np.packbits(is_probed)}
        return encoded(arrays if allowed is None else arrays | {"allowed": np.packbits(allowed)})

    def _merged(
        self, num: int, k: int, best: Sequence[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The best k of all answers, each vector once, by distance and then by position."""
        metric = self._index.lists.metric
        sign = 1.0 if metric == "l2" else -1.0
        dtype = best[0][1].dtype if best else np.dtype(np.float32)
        distances = np.full((num, k), worst_distance(dtype, metric), dtype)
        positions = np.full((num, k), NO_ID, np.int64)
        for query in range(num):
            rows = [(far[rows == query][0], which[rows == query][0]) for rows, far, which in best if query in rows]
            if not rows:
                continue
            far, which = (np.concatenate(each) for each in zip(*rows, strict=True))
            far, which = far[which != NO_ID], which[which != NO_ID]
            first = np.unique(which, return_index=True)[1]
            order = first[np.lexsort((which[first], sign * far[first].astype(np.float64)))][:k]
            distances[query, : len(order)], positions[query, : len(order)] = far[order], which[order]
        return distances, positions

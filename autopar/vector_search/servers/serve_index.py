"""Make the server of an index, of a part of one, or the router of all parts.

In: a file or a folder, an address. Out: a `ListServer`.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.on_disk.index import KIND, DiskIndex
from autopar.vector_search.on_disk.page_file import open_page_file
from autopar.vector_search.on_disk.reader_table import AUTO
from autopar.vector_search.servers.divide import PART
from autopar.vector_search.servers.list_server import ListServer
from autopar.vector_search.servers.router import ServedIndex


@contextmanager
def server_of(
    path: str | os.PathLike[str],
    address: tuple[str, int],
    servers: Sequence[str] | None = None,
    memory_budget_bytes: float | None = None,
) -> Iterator[ListServer]:
    """The server of an index on disk. Call its `serve_forever`.

    Args:
        path: an index on disk, or a part that `divide` made.
        address: host and port; 0: any port.
        servers: addresses of the servers of all parts: this one answers searches by requests to them.
        memory_budget_bytes: as in `load`.

    Raises:
        IndexFileError: the file is damaged, or of another kind.
        SearchError: the address is in use, or addresses of an index that is not divided.
    """
    pages = open_page_file(Path(path))
    if pages.kind not in (KIND, PART):
        raise IndexFileError(
            f"{path} has an index of kind {pages.kind!r}: a server has one of kind {KIND!r}, or a part of it"
        )
    lists = {"vectors": int(pages.settings["num_vectors"]), "part": pages.settings.get("part")}
    if servers is not None:
        with ServedIndex(path, servers) as served:

            def search_parts(queries: NDArray[Any], k: int, effort: int | None) -> Any:
                return served.search(np.atleast_2d(queries), k, effort=effort)[:3]

            with _bound(ListServer, address, lists | {"servers": list(servers)}, search_parts, None) as server:
                yield server
        return
    with DiskIndex(pages, AUTO, memory_budget_bytes) as index:

        def search(queries: NDArray[Any], k: int, effort: int | None) -> Any:
            found = index.search(np.atleast_2d(queries), k, effort=effort)
            return found.ids, found.distances, np.ones(len(found.ids))

        whole = search if pages.kind == KIND else None
        with _bound(ListServer, address, lists, whole, index) as server:
            yield server


def _bound(kind: type[ListServer], address: tuple[str, int], *given: Any) -> ListServer:
    try:
        return kind(address, *given)
    except OSError as error:
        raise SearchError(f"{address[0]}:{address[1]} cannot be listened on: {error.strerror or error}") from None


def health(url: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """What the server at an address says of itself.

    Raises:
        SearchError: no answer.
    """
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=timeout_s) as reply:
            return json.load(reply)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise SearchError(f"{url} does not answer: {error}") from None

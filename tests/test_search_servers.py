"""`autopar.vector_search.servers`: divided equals whole, few servers are used, and a lost one is told."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar import vector_search
from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.servers.list_orders import smooth_order
from autopar.vector_search.servers.list_placement import chosen, num_requested, placed
from autopar.vector_search.servers.list_server import ListServer
from autopar.vector_search.servers.serve_index import health, server_of


@pytest.mark.parametrize(("num_servers", "replicas"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (8, 2)])
def test_each_list_has_its_replicas_and_loads_are_even(num_servers: int, replicas: int) -> None:
    draw = np.random.default_rng(0)
    order, num_bytes = draw.permutation(400), draw.integers(100, 300, 400)
    loads = 1 / (1 + draw.permutation(400))
    has = placed(order, loads, num_bytes, num_servers, replicas)
    assert (has.sum(axis=1) >= replicas).all()
    held = num_bytes @ has
    assert held.max() <= num_bytes.sum() or num_servers == replicas
    if num_servers > replicas:
        weights = (loads * num_bytes / has.sum(axis=1)) @ has
        assert weights.max() <= 1.5 * weights.mean()
    assert (has[np.argmax(loads)]).all()  # hot


def test_a_query_uses_few_servers() -> None:
    has = placed(np.arange(100), np.ones(100), np.full(100, 10), 4, 2)
    is_probed = np.zeros((91, 100), bool)
    for query in range(91):
        is_probed[query, query : query + 10] = True
    which = chosen(is_probed, has, np.ones(4, bool), np.zeros(4))
    assert ((which >= 0) == is_probed).all()
    assert max(len(set(row[row >= 0].tolist())) for row in which) == 1  # runs overlap by a half
    down = np.array([True, True, False, True])
    which = chosen(is_probed, has, down, np.zeros(4))
    assert ((which >= 0) == is_probed).all() and not (which == 2).any()
    one = chosen(is_probed, placed(np.arange(100), np.ones(100), np.full(100, 10), 4, 1), down, np.zeros(4))
    assert ((one >= 0) != is_probed).any()
    with pytest.raises(SearchError, match="give at least one server per replica"):
        placed(np.arange(3), np.ones(3), np.ones(3, np.int64), 2, 3)


class Served:
    """An index, and servers of its parts."""

    def __init__(self, folder: Path, stack: ExitStack, vectors: np.ndarray, num_servers: int) -> None:
        self.index = vector_search.build_on_disk(vectors, folder / "index", progress=False, reader="mmap")
        stack.callback(self.index.close)
        self.parts = vector_search.divide(self.index, folder, num_servers)
        self.servers: list[ListServer] = []
        for part in self.parts:
            self.servers.append(server := stack.enter_context(server_of(part, ("127.0.0.1", 0))))
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self, which: int) -> None:
        self.servers[which].shutdown()
        self.servers[which].server_close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    vectors = np.round(30 * np.random.default_rng(0).normal(size=(12_000, 12))).astype(np.int8)
    with ExitStack() as stack:
        yield Served(tmp_path, stack, vectors, 4)


@pytest.mark.slow
def test_parts_of_an_index_are_found_like_the_whole(served: Served) -> None:
    draw = np.random.default_rng(1)
    queries = np.round(30 * draw.normal(size=(40, 12))).astype(np.int8)
    urls = [server.url for server in served.servers]
    sizes = [part.stat().st_size for part in served.parts]
    assert max(sizes) < 0.8 * served.index.path.stat().st_size
    allowed = draw.random(12_000) < 0.1
    router = lambda: vector_search.ServedIndex(served.parts[2], urls, deadline_s=60, retry_s=60)  # noqa: E731
    with router() as every:
        for filter in (None, allowed):
            found, truth = every.search(queries, 10, filter=filter), served.index.search(queries, 10, filter=filter)
            np.testing.assert_array_equal(found.distances, truth.distances)
            assert (found.coverage == 1).all()
        assert every.search(queries[0], 3).ids.shape == (3,)
        assert every.search(queries[0], 12_100).ids.tolist().count(-1) == 100
    truth = served.index.search(queries, 10)
    served.stop(1)
    with router() as some:
        found = some.search(queries, 10)
        np.testing.assert_array_equal(found.distances, truth.distances)
        assert (found.coverage == 1).all()
    for which in (0, 2):
        served.stop(which)
    with router() as few:
        found = few.search(queries, 10)
        assert found.coverage.min() < 1 and (found.coverage >= 0).all()
    served.stop(3)
    with router() as none:
        found = none.search(queries, 10)
        assert (found.ids == -1).all() and (found.coverage == 0).all()


@pytest.mark.slow
def test_a_part_alone_is_no_index(served: Served) -> None:
    with pytest.raises(IndexFileError, match="is part 1 of an index that was divided: serve it"):
        vector_search.load(served.parts[1])
    with pytest.raises(SearchError, match="`servers` has 1 addresses, and the index is divided into 4 parts"):
        vector_search.ServedIndex(served.parts[0], ["http://127.0.0.1:1"])
    with pytest.raises(IndexFileError, match="is no part of a divided index"):
        vector_search.ServedIndex(served.index.path, ["http://127.0.0.1:1"])
    with pytest.raises(SearchError, match="which is no folder"):
        vector_search.divide(served.index, served.index.path, 2)


def post(url: str, body: bytes) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_a_whole_index_is_served_as_json(served: Served) -> None:
    queries = np.arange(24).reshape(2, 12) % 7
    with server_of(served.index.path, ("127.0.0.1", 0)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        truth = served.index.search(queries, 4)
        status, found = post(f"{server.url}/search", json.dumps({"queries": queries.tolist(), "k": 4}).encode())
        assert status == 200 and found["ids"] == truth.ids.tolist() and found["coverage"] == [1, 1]
        assert health(server.url)["vectors"] == 12_000
        for body, text in ((b"{", "is no JSON"), (b'{"queries": [[1, 2]], "k": 4}', "`queries` has shape")):
            status, refused = post(f"{server.url}/search", body)
            assert status == 400 and text in refused["error"]
        assert post(f"{server.url}/other", b"")[0] == 404
        with (
            pytest.raises(SearchError, match="cannot be listened on"),
            server_of(served.index.path, ("127.0.0.1", server.server_address[1])),
        ):
            pass
        server.shutdown()
    assert post(f"{served.servers[0].url}/search", b"{}")[0] == 404  # a part
    assert post(f"{served.servers[0].url}/lists", b"nonsense")[0] == 400
    with pytest.raises(SearchError, match="does not answer"):
        health("http://127.0.0.1:1", 1)


def test_the_command_serves_models_or_an_index(capsys: pytest.CaptureFixture[str]) -> None:
    from autopar.cli.main import main

    for arguments, text in (
        ([], "or `--index FILE` for vector search: one of the two"),
        (["model", "--index", "x"], "one of the two"),
        (["model", "--servers", "http://a"], "are for vector search"),
    ):
        assert main(["serve", *arguments]) != 0
        assert text in capsys.readouterr().err


def test_queries_near_each_other_ask_fewer_servers_by_the_smooth_order() -> None:
    """Lists on a grid: the runs of the order are compact, whatever order the lists were in."""
    draw = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(np.arange(40), np.arange(12)), axis=-1).reshape(-1, 2).astype(np.float32)
    grid = grid[draw.permutation(len(grid))]
    far = ((grid[:, None] - grid[None]) ** 2).sum(axis=2)
    is_probed = far[::7] <= 4
    ones, sizes = np.ones(len(grid)), np.full(len(grid), 100)
    requested = [
        num_requested(is_probed, placed(order, ones, sizes, 4, 2)) for order in (np.arange(480), smooth_order(grid))
    ]
    assert requested[1] <= 1.1 * len(is_probed) < requested[0]


def test_a_single_list_has_an_order() -> None:
    assert smooth_order(np.zeros((1, 3), np.float32)).tolist() == [0]

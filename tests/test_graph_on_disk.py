"""Graphs on disk: recall and equality between readers, filters, duplicates, shards, damaged files, small budgets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nearest import exact_nearest, recall

from autopar import vector_search
from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.graph import nearest_points
from autopar.vector_search.graph_on_disk import build as graph_build
from autopar.vector_search.graph_on_disk.block_packing import links_within, packed
from autopar.vector_search.graph_on_disk.node_blocks import NodeBlocks, Nodes
from autopar.vector_search.on_disk import page_file
from autopar.vector_search.on_disk.page_file import PageFileWriter, open_page_file
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.on_disk.reader_table import READERS
from benchmarks.synthetic_vectors import faiss_synthetic

NUM, DIM = 1500, 16
DATA = faiss_synthetic(DIM, 0, NUM, 60)
OWN_IDS = np.arange(NUM)[::-1] * 3 + 2**40
build_graph = partial(vector_search.build_graph_on_disk, progress=False, degree=16, reader="mmap")


def data(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    scale, offset = (100 if dtype in ("int8", "uint8") else 1), (100 if dtype == "uint8" else 0)
    corpus, queries = ((scale * each + offset).astype(getattr(jnp, dtype)) for each in (DATA.corpus, DATA.queries))
    return corpus, queries


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vector_search.GraphDiskIndex]:
    with build_graph(DATA.corpus, tmp_path_factory.mktemp("graph") / "index", ids=OWN_IDS) as made:
        yield made


def positions(found: vector_search.Found) -> np.ndarray:
    return np.where(found.ids == NO_ID, NO_ID, NUM - 1 - (found.ids - 2**40) // 3)


def test_recall_distances_and_ids(index: vector_search.GraphDiskIndex) -> None:
    assert index.stats().reached
    found = index.search(DATA.queries, 10)
    nearest = exact_nearest(DATA.queries, DATA.corpus, 10, "l2")
    assert recall(positions(found), nearest) >= 0.93
    direct = ((DATA.corpus[positions(found)] - DATA.queries[:, None]) ** 2).sum(-1)
    np.testing.assert_allclose(found.distances, direct, rtol=1e-5)
    assert (np.diff(found.distances, axis=1) >= 0).all()
    one = index.search(DATA.queries[3], 10)
    np.testing.assert_array_equal(one.ids, found.ids[3])


@pytest.mark.slow
def test_a_search_by_coarse_codes_reads_few_blocks(tmp_path: Path) -> None:
    """The codes are so coarse that all neighbours of a query have the same: their distances are too small by the error."""
    places = np.random.default_rng(1).normal(size=(6, 48))
    corpus = np.sin(np.random.default_rng(2).normal(size=(3000, 6)) @ places).astype(np.float32)
    with build_graph(corpus, tmp_path / "index", code_bytes=2, recall_target=0.5) as made:
        before = made.reads().pages
        found = made.search(corpus[:50] + np.float32(0.01), 10, effort=10)
        assert (found.ids[:, 0] == np.arange(50)).mean() > 0.9
        for query in corpus[:20]:
            made.search(query, 10, effort=10)
        assert made.reads().pages - before < 20 * made.graph.num_blocks / 5


@pytest.mark.slow
def test_recall_of_the_sample_is_that_of_unseen_queries(tmp_path: Path) -> None:
    """A vector of the corpus is a node, whose edges lead to all of its neighbours: it ignores itself. The vectors have no
    structure, so without that its recall would be 0.2 above that of others."""
    draw = np.random.default_rng(0)
    corpus, queries = (draw.normal(size=(num, 32)).astype(np.float32) for num in (4000, 500))
    nearest = exact_nearest(queries, corpus, 10)
    with build_graph(corpus, tmp_path / "index", degree=32) as made:
        for effort, sampled in made.stats().details["recall_by_effort"].items():
            found = recall(made.search(queries, 10, effort=max(10, effort)).ids, nearest)
            assert abs(found - sampled) < 0.03, (effort, found, sampled)


def test_a_wide_beam_is_exact(index: vector_search.GraphDiskIndex) -> None:
    nearest = exact_nearest(DATA.queries, DATA.corpus, 10, "l2")
    for effort in (NUM, 2 * NUM):
        assert recall(positions(index.search(DATA.queries, 10, effort=effort)), nearest) == 1


def test_reads_fewer_pages_than_it_uses_nodes(index: vector_search.GraphDiskIndex) -> None:
    before = index.reads()
    for query in DATA.queries:
        index.search(query, 10)
    single = index.reads()
    pages = single.pages - before.pages
    assert single.used_bytes - before.used_bytes >= 3 * pages * NodeBlocks(DIM, np.dtype(np.float32), 16).node_bytes
    index.search(DATA.queries, 10)
    assert index.reads().pages - single.pages < pages
    assert index.reads().num_bytes == index.reads().pages * PAGE_BYTES


@pytest.mark.parametrize("num_allowed", [0, 7, NUM // 3])
def test_filter_and_k_beyond_the_corpus(index: vector_search.GraphDiskIndex, num_allowed: int) -> None:
    allowed = np.zeros(NUM, bool)
    allowed[np.random.default_rng(0).permutation(NUM)[:num_allowed]] = True
    found = positions(index.search(DATA.queries, 10, filter=allowed))
    there = found != NO_ID
    assert (there.sum(axis=1) == min(10, num_allowed)).all()
    assert allowed[found[there]].all()
    if num_allowed:
        which = np.flatnonzero(allowed)
        nearest = which[exact_nearest(DATA.queries, DATA.corpus[which], min(10, num_allowed), "l2")]
        assert recall(found[:, : nearest.shape[1]], nearest) >= 0.93
    every = index.search(DATA.queries[:2], NUM + 5)
    assert (np.sort(every.ids[:, :NUM]) == np.sort(OWN_IDS)).all()
    assert (every.ids[:, NUM:] == NO_ID).all() and np.isinf(every.distances[:, NUM:]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "dtype"), [("cosine", "bfloat16"), ("inner_product", "int8"), ("l2", "uint8")])
def test_other_metrics(tmp_path: Path, metric: str, dtype: str) -> None:
    corpus, queries = data(dtype)
    with build_graph(corpus, tmp_path / "index", metric=metric) as made:
        assert made.stats().reached
        found = made.search(queries, 10)
        exact = vector_search.build(corpus, metric=metric, index="exact", progress=False).search(queries, 10)
        assert recall(found.ids, exact.ids) >= 0.9
        same = found.ids == exact.ids
        assert found.distances.dtype == exact.distances.dtype
        np.testing.assert_allclose(found.distances[same], exact.distances[same], rtol=1e-5)


@pytest.mark.slow
def test_equal_vectors_are_one_node_and_all_are_found(tmp_path: Path) -> None:
    corpus = np.repeat(DATA.corpus[:200], 5, axis=0)[np.random.default_rng(1).permutation(1000)]
    with build_graph(corpus, tmp_path / "index") as made:
        found = made.search(DATA.queries, 20).ids
        exact = vector_search.build(corpus, index="exact", progress=False).search(DATA.queries, 20)
        distances = ((corpus[found] - DATA.queries[:, None]) ** 2).sum(-1)
        assert (distances <= exact.distances[:, -1:] * (1 + 1e-5)).mean() >= 0.95
        assert all(len(set(row)) == 20 for row in found.tolist())
        allowed = np.zeros(1000, bool)
        allowed[::2] = True
        assert allowed[made.search(DATA.queries, 20, filter=allowed).ids].all()
        assert (np.sort(made.search(DATA.queries[:1], 1000).ids) == np.arange(1000)).all()
    with build_graph(np.zeros((300, 4), np.float32), tmp_path / "zeros") as made:
        assert (np.sort(made.search(np.zeros(4), 300).ids) == np.arange(300)).all()


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 12])
def test_few_vectors(tmp_path: Path, num: int) -> None:
    with build_graph(DATA.corpus[:num], tmp_path / "index") as made:
        assert (np.sort(made.search(DATA.queries, num).ids) == np.arange(num)).all()


@pytest.mark.slow
def test_shards_within_a_small_budget_find_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks() -> Iterator[np.ndarray]:
        yield from np.array_split(DATA.corpus, 7)

    monkeypatch.setattr(graph_build, "_per_shard", lambda *_: 500)
    with build_graph(chunks, tmp_path / "index", ids=OWN_IDS) as made:
        assert made.stats().reached
        nearest = exact_nearest(DATA.queries, DATA.corpus, 10, "l2")
        assert recall(positions(made.search(DATA.queries, 10)), nearest) >= 0.93
        every = made.search(DATA.queries[:1], NUM)
        assert (np.sort(every.ids) == np.sort(OWN_IDS)).all()


def test_wrong_settings(tmp_path: Path) -> None:
    path = tmp_path / "index"
    few = DATA.corpus[:50]
    for wrong, text in (
        ({"degree": 0}, "`degree` is 0"),
        ({"code_bytes": 5}, "it has to divide the 16 elements of a vector. Give one of 1, 2, 4, 8, 16"),
        ({"width": True}, "`width` is True"),
        ({"memory_budget_bytes": 1e4}, r"`memory_budget_bytes` is 10,000: a graph of 50 vectors of 16 elements needs"),
        ({"memory_budget_bytes": "1 GB"}, "give a number of bytes"),
        ({"recall_target": 2}, "above 0 and at most 1"),
        ({"reader": "tape"}, "`reader` is 'tape'"),
        ({"path": tmp_path / "none" / "index"}, "its folder does not exist"),
    ):
        with pytest.raises(SearchError, match=text):
            build_graph(few, **{"path": path, **wrong})
    with pytest.raises(SearchError, match="at least one vector"):
        build_graph(np.zeros((0, 4), np.float32), path)
    with pytest.raises(SearchError, match="give its path as `path=`"):
        vector_search.build(few, index="graphdisk", progress=False)
    with pytest.raises(SearchError, match="has no setting 'lists'"):
        vector_search.build(few, index="graphdisk", path=path, lists=3, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", READERS)
def test_readers_agree_and_a_saved_index_is_the_same(
    index: vector_search.GraphDiskIndex, tmp_path: Path, name: str
) -> None:
    if why := READERS[name].why_not():
        pytest.skip(why)
    index.save(tmp_path / "copy")
    with vector_search.load(tmp_path / "copy", reader=name) as copy:  # pyright: ignore[reportGeneralTypeIssues]
        assert isinstance(copy, vector_search.GraphDiskIndex)
        assert copy.stats().details["reader"] == name
        np.testing.assert_array_equal(copy.search(DATA.queries, 10).ids, index.search(DATA.queries, 10).ids)
    with pytest.raises(SearchError, match="is closed: load it again"):
        copy.search(DATA.queries, 1)


def test_every_damaged_page_is_refused(index: vector_search.GraphDiskIndex, tmp_path: Path) -> None:
    data, path = index.path.read_bytes(), tmp_path / "damaged"
    draw = np.random.default_rng(0)
    for at in [0, 20, PAGE_BYTES, *draw.integers(0, len(data), 12).tolist()]:
        changed = bytearray(data)
        changed[at] ^= 1 << int(draw.integers(8))
        path.write_bytes(changed)
        with pytest.raises(IndexFileError):
            _use(path)
    path.write_bytes(data[:-PAGE_BYTES])
    with pytest.raises(IndexFileError, match="its superblock says"):
        _use(path)


def _use(path: Path) -> None:
    with vector_search.load(path, reader="mmap") as loaded:  # pyright: ignore[reportGeneralTypeIssues]
        loaded.verify()


def test_hostile_directories(
    index: vector_search.GraphDiskIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = open_page_file(index.path)
    path = tmp_path / "hostile"

    def use(changed_settings: dict[str, Any], changed: dict[str, Any]) -> None:
        with PageFileWriter(path) as writer:
            writer.append(np.zeros((pages.num_data_pages * (PAGE_BYTES - 4),), np.uint8))
            writer.finish(pages.kind, {**pages.settings, **changed_settings}, {**pages.arrays, **changed})
        _use(path)

    arrays = pages.arrays
    for settings_, changed, text in (
        ({"per_block": 5000}, {}, "nodes per block"),
        ({"degree": True}, {}, "settings are invalid"),
        ({"dim": -1}, {}, "settings are invalid"),
        ({"width": 0}, {}, "settings are invalid"),
        ({}, {"codes": arrays["codes"][1:]}, "`codes` is"),
        ({}, {"codebooks": arrays["codebooks"][:1]}, "`codebooks` has shape"),
        ({}, {"entries": arrays["entries"] + 10**6}, "`entries` points outside"),
        ({}, {"entry_links": arrays["entry_links"] - 1}, "`entry_links` points outside"),
        ({}, {"entry_links": arrays["entry_links"][1:]}, "`entry_links` is"),
        ({}, {"repeated_of": np.array([5, 3], np.int32), "repeated": np.array([1, 2], np.int32)}, "does not increase"),
    ):
        with pytest.raises(IndexFileError, match=text):
            use(settings_, changed)
    nodes = NodeBlocks(DIM, np.dtype(np.float32), 16)
    per_block = nodes.per_block
    hostile = Nodes(
        np.zeros((1, per_block), np.int32),
        np.zeros((1, per_block, DIM), np.float32),
        np.full((1, per_block, 16), 10**8, np.int32),
    )
    with PageFileWriter(path) as writer:
        for _ in range(pages.num_data_pages):
            writer.append(nodes.stream(hostile))
        writer.finish(pages.kind, pages.settings, arrays)
    with (
        vector_search.load(path, reader="mmap") as loaded,  # pyright: ignore[reportGeneralTypeIssues]
        pytest.raises(IndexFileError, match="a node points outside"),
    ):
        loaded.search(DATA.queries, 3)
    with monkeypatch.context() as patch:
        patch.setattr(page_file, "VERSION", 9)
        with PageFileWriter(path) as writer:
            writer.finish(pages.kind, {}, {})
    with pytest.raises(IndexFileError, match="has version 9"):
        _use(path)
    assert json.dumps(dict(pages.settings))


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "kind"), [(1e9, "exact"), (2e5, "graphdisk"), (4e4, "ivfdisk")])
def test_auto_takes_a_file_if_nothing_else_fits(tmp_path: Path, budget: float, kind: str) -> None:
    corpus = np.tile(DATA.corpus, (4, 1)) + np.arange(4).repeat(NUM)[:, None]
    made = vector_search.build(
        corpus, path=tmp_path / "index", memory_budget_bytes=budget, hardware="cpu-host", reader="mmap", progress=False
    )
    assert made.stats().kind == kind
    assert made.search(corpus[:3], 1).ids[:, 0].tolist() == [0, 1, 2]
    if kind != "exact":
        assert "no other kind fits" in made.stats().details["why"]
        made.close()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_larger_nodes_than_pages(tmp_path: Path) -> None:
    corpus = np.random.default_rng(0).normal(size=(300, 1500)).astype(np.float32)
    with build_graph(corpus, tmp_path / "index", code_bytes=30) as made:
        found = made.search(corpus, 1)
        assert (found.ids[:, 0] == np.arange(300)).mean() > 0.9  # vectors without structure are hard to find
        assert made.stats().details["nodes_per_block"] == 1
        assert made.reads().pages % 2 == 0


@pytest.mark.slow
def test_entry_points_have_a_graph_where_they_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest_points, "GRAPH_FROM", 10)
    monkeypatch.setattr(nearest_points, "_DEGREE", 4)
    monkeypatch.setattr(nearest_points, "_LEAST_BEAM", 8)
    monkeypatch.setattr(graph_build, "PER_ENTRY", 3)
    with build_graph(DATA.corpus, tmp_path / "index") as made:
        assert open_page_file(made.path).arrays["entry_edges"].shape == (500, 4)
        assert made.stats().reached
    with vector_search.load(tmp_path / "index", reader="mmap") as made:  # pyright: ignore[reportGeneralTypeIssues]
        nearest = exact_nearest(DATA.queries, DATA.corpus, 10, "l2")
        assert recall(made.search(DATA.queries, 10).ids, nearest) >= 0.93


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 7), st.integers(0, 1000))
def test_blocks_hold_each_node_once(num: int, degree: int, per_block: int, seed: int) -> None:
    edges = np.random.default_rng(seed).integers(-1, num, (num, degree)).astype(np.int32)
    blocks = packed(edges, per_block)
    assert blocks.shape == (-(-num // per_block), per_block)
    assert (np.sort(blocks[blocks != NO_ID]) == np.arange(num)).all()


def test_near_neighbours_share_a_block_rather_than_far_ones() -> None:
    """Each node has one neighbour in its clique first, and then others of another partition that links as often."""
    near, far = (np.random.default_rng(seed).permutation(400).reshape(50, 8) for seed in range(2))
    edges = np.zeros((400, 16), np.int32)
    for one, other in zip(near, far, strict=True):
        edges[one, :8], edges[other, 8:] = one, other
    blocks = packed(edges, 8)
    assert links_within(edges[:, :8], blocks) > 0.9 * 400 * 8


def test_blocks_hold_nodes_that_link_to_each_other() -> None:
    cliques = np.random.default_rng(0).permutation(400).reshape(50, 8)
    edges = np.zeros((400, 8), np.int32)
    for clique in cliques:
        edges[clique] = clique
    blocks = packed(edges, 8)
    assert links_within(edges, blocks) == edges.size
    in_order = np.arange(400, dtype=np.int32).reshape(50, 8)
    assert links_within(edges, in_order) < edges.size // 4

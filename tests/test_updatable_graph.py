"""`autopar.vector_search.updates.graph`: deletions and insertions are merged into a graph on disk, and nothing is lost."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar import vector_search
from autopar.errors import IndexFileError
from autopar.vector_search.data.inputs import DTYPES
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.updates.graph.edges import chosen
from autopar.vector_search.updates.graph.graph_map import GraphMap
from autopar.vector_search.updates.graph.places import placed
from autopar.vector_search.updates.graph.points import Points, Space
from autopar.vector_search.updates.graph.survivors import _instead
from benchmarks.vector_disk import crashes, rounds
from benchmarks.vector_disk.faulty_files import FaultyFiles
from benchmarks.vector_disk.random_updates import after, fitting, held_by, operations, run, start_graph

PAGE = np.dtype([("page", "<i4")])


def drawn(num: int, dim: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num, dim)).astype(np.float32)


def rows(ids: Any) -> np.ndarray:
    return (np.asarray(ids, np.int32) % 7).astype(PAGE)


def made(path: Path, vectors: np.ndarray, **options: Any) -> vector_search.UpdatableIndex:
    """An index whose ids are positions."""
    metric, degree = options.pop("metric", "l2"), options.pop("degree", 16)
    built = vector_search.build_graph_on_disk(
        vectors, path / "built", metric=metric, degree=degree, reader="mmap", progress=False
    )
    with built:
        given = {"metadata": rows(np.arange(len(vectors))), "reader": "mmap", "background": False}
        return vector_search.make_updatable(built, path / "index", **(given | options))


def loaded(path: Path) -> vector_search.UpdatableIndex:
    index = vector_search.load(path / "index", reader="mmap")
    assert isinstance(index, vector_search.UpdatableIndex)
    return index


def contents(index: vector_search.UpdatableIndex) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for ids, vectors, metadata in index.items():
        assert (metadata["page"] == ids % 7).all()
        for each, vector in zip(ids.tolist(), vectors, strict=True):
            assert each not in found, f"id {each} is there twice"
            found[each] = vector.tobytes()
    return found


def agrees(
    index: vector_search.UpdatableIndex, held: dict[int, np.ndarray], queries: np.ndarray, metric: str = "l2"
) -> float:
    """Whether the index holds these vectors, and an exact search of it finds the nearest; the recall of a usual one."""
    assert contents(index) == {each: vector.tobytes() for each, vector in held.items()}
    assert len(index) == len(held)
    k = min(10, len(held))
    ids = np.array(sorted(held), np.int64)
    exact = vector_search.build(
        np.stack([held[each] for each in ids.tolist()]), metric=metric, index="exact", ids=ids, progress=False
    ).search(queries, k)
    found, usual = index.search(queries, k, effort=10**6), index.search(queries, k)
    wide = (each.distances.astype(np.float32) for each in (found, exact))
    np.testing.assert_allclose(*wide, rtol=2e-2, atol=2e-2)
    assert np.isin(usual.ids, ids).all() and all(len(set(row.tolist())) == k for row in usual.ids)
    near = usual.distances.astype(np.float32) - exact.distances[:, -1:].astype(np.float32)
    return float(((near <= 1e-4) if metric == "l2" else (near >= -1e-4)).mean())


# -- what a user sees ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "dtype"),
    [
        ("l2", "float32"),
        pytest.param("l2", "int8", marks=pytest.mark.slow),
        pytest.param("cosine", "float32", marks=pytest.mark.slow),
        pytest.param("inner_product", "float32", marks=pytest.mark.slow),
        pytest.param("inner_product", "int8", marks=pytest.mark.slow),
        pytest.param("l2", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_rounds_of_changes_agree_with_an_exact_search(tmp_path: Path, metric: str, dtype: str) -> None:
    scale = 20 if dtype == "int8" else 1
    vectors = (scale * drawn(1_700, 12)).astype(DTYPES[dtype])
    queries = (scale * drawn(60, 12, 1)).astype(DTYPES[dtype])
    index, draw = made(tmp_path, vectors[:1_000], metric=metric), np.random.default_rng(2)
    held = dict(enumerate(vectors[:1_000]))
    for number in range(3):
        out = draw.choice(sorted(held), 150, replace=False)
        assert index.delete(out) == 150
        come = 1_000 + 200 * number + np.arange(200)
        index.insert(come, vectors[come], rows(come))
        again = draw.choice(sorted(set(held) - set(out.tolist())), 20, replace=False)
        moved = vectors[1_600:1_620]
        assert index.upsert(again, moved, rows(again)) == 20
        held = {each: vector for each, vector in held.items() if each not in set(out.tolist())}
        held |= dict(zip(come.tolist(), vectors[come], strict=True)) | dict(zip(again.tolist(), moved, strict=True))
        agrees(index, held, queries, metric)
        index.checkpoint()
        assert agrees(index, held, queries, metric) >= 0.9
    details = index.stats().details
    assert details["inserted_nodes"] >= 600 and details["delta_vectors"] == 0 and index.stats().reached
    index.save(tmp_path / "copy")
    index.verify()
    index.close()
    with loaded(tmp_path) as again:
        assert agrees(again, held, queries, metric) >= 0.9
    with vector_search.load(tmp_path / "copy", reader="mmap") as copy:  # pyright: ignore[reportGeneralTypeIssues]
        assert len(copy) == len(held)


def test_filters_metadata_and_deleted_ids(tmp_path: Path) -> None:
    vectors = drawn(600)
    index = made(tmp_path, vectors[:500])
    index.delete(np.arange(0, 500, 3))
    index.insert(np.arange(500, 600), vectors[500:], rows(np.arange(500, 600)))
    live = np.array([each for each in range(600) if each >= 500 or each % 3])
    for _ in range(2):
        found = index.search(vectors[:20], 30, filter=lambda metadata: metadata["page"] == 3).ids
        assert (found % 7 == 3).all() and np.isin(found, live).all()
        assert not np.isin(index.search(vectors[:20], 50).ids, np.arange(0, 500, 3)).any()
        assert sorted(index.search(vectors[0], 600).ids[: len(live)].tolist()) == live.tolist()
        assert set(index.search(vectors[0], 3, filter=[3, 4, 5]).ids.tolist()) == {4, 5, NO_ID}
        assert index.metadata([599])["page"].tolist() == [599 % 7]
        index.checkpoint()
    index.close()
    options: dict[str, Any] = {"reader": "mmap", "memory_budget_bytes": 2**26}
    with vector_search.load(tmp_path / "index", **options) as again:  # pyright: ignore[reportGeneralTypeIssues]
        whole = [again.search(vectors[:20], 10).ids for _ in range(2)]
        np.testing.assert_array_equal(*whole)
        assert again.stats().details["cache"].hits > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num", [1, 2, 10])
def test_a_tiny_graph_grows(tmp_path: Path, num: int) -> None:
    vectors, queries = drawn(700), drawn(40, 8, 1)
    index = made(tmp_path, vectors[:num])
    held = dict(enumerate(vectors[:num]))
    for end in (num + 1, 40, 700):
        come = np.arange(len(held), end)
        index.insert(come, vectors[come], rows(come))
        held |= dict(zip(come.tolist(), vectors[come], strict=True))
        index.checkpoint()
        recall = agrees(index, held, queries)
    assert recall >= 0.9 and index.stats().details["degree"] == 64
    index.close()


@pytest.mark.slow
def test_all_vectors_are_deleted_and_others_come(tmp_path: Path) -> None:
    vectors, queries = drawn(900), drawn(40, 8, 1)
    index = made(tmp_path, vectors[:400])
    index.delete(np.arange(400))
    assert index.search(queries, 3).ids.tolist() == [[NO_ID] * 3] * 40
    index.checkpoint()
    assert index.search(queries, 3).ids.tolist() == [[NO_ID] * 3] * 40 and len(index) == 0
    assert index.stats().details["num_places"] == 0
    index.close()
    index = loaded(tmp_path)
    for begin in (400, 650):
        come = np.arange(begin, begin + 250)
        index.insert(come, 50 + vectors[come], rows(come))
        index.checkpoint()
    held = dict(zip(range(400, 900), 50 + vectors[400:], strict=True))
    assert agrees(index, held, 50 + queries) >= 0.9
    index.delete(np.arange(400, 880))  # most of them: what is left is still found
    index.checkpoint()
    assert agrees(index, {each: held[each] for each in range(880, 900)}, 50 + queries) >= 0.95
    index.close()


@pytest.mark.slow
def test_equal_vectors_outlive_each_other(tmp_path: Path) -> None:
    vectors = drawn(300)
    vectors[10:20] = vectors[0]
    index = made(tmp_path, vectors)
    held = dict(enumerate(vectors))

    def check() -> None:
        index.checkpoint()
        agrees(index, held, vectors[:5])

    index.delete([0, 10, 11])  # one of them owns the node
    held = {each: vector for each, vector in held.items() if each not in (0, 10, 11)}
    check()
    same = np.arange(300, 306)
    index.insert(same, np.concatenate([vectors[[0, 0]], 9 + vectors[[1, 1, 1]], vectors[[2]]]), rows(same))
    held |= dict(zip(range(300, 306), [*vectors[[0, 0]], *(9 + vectors[[1, 1, 1]]), vectors[2]], strict=True))
    check()
    assert index.stats().details["inserted_nodes"] == 1  # 9 + vectors[1]
    index.upsert([2, 302], vectors[[2]].repeat(2, axis=0), rows([2, 302]))  # the same vector, and a node's
    held |= {302: vectors[2]}
    check()
    index.delete([*range(12, 20), 300, 301, 303, 304])
    held = {each: vector for each, vector in held.items() if each not in {*range(12, 20), 300, 301, 303, 304}}
    check()
    assert index.search(vectors[0], 1).ids[0] not in (0, *range(10, 20), 300, 301)
    index.close()


def test_the_users_queries_decide_the_beam(tmp_path: Path) -> None:
    index = made(tmp_path, drawn(400), queries=drawn(100, 8, 3), recall_target=0.8)
    index.insert(np.arange(400, 500), drawn(100, 8, 4), rows(np.arange(400, 500)))
    index.checkpoint()
    assert index.stats().details["censuses"] == 1 and index.stats().reached
    index.close()
    with loaded(tmp_path) as again:
        assert again.stats().reached


@pytest.mark.slow
def test_searches_see_one_state_while_threads_change_it(tmp_path: Path) -> None:
    """Each id is replaced again and again, never deleted: a search finds each once."""
    index, vectors = start_graph(tmp_path / "index", background=True), drawn(60)
    index.insert(np.arange(60), vectors, rows(np.arange(60)))
    is_done, failures = threading.Event(), []

    def change(part: int) -> None:
        draw = np.random.default_rng(part)
        for _ in range(40):
            ids = part * 20 + draw.permutation(20)[:10]
            index.upsert(ids, vectors[ids] + draw.normal(size=(10, 8)), rows(ids))

    def look(effort: int | None) -> None:
        while not is_done.is_set():
            ids = index.search(vectors[0], 60, effort=effort).ids
            if sorted(ids.tolist()) != list(range(60)):
                failures.append(ids)

    writers = [threading.Thread(target=change, args=(part,)) for part in range(3)]
    readers = [threading.Thread(target=look, args=(effort,)) for effort in (None, 10_000)]
    for thread in (*writers, *readers):
        thread.start()
    for _ in range(4):
        index.checkpoint()
    for thread in writers:
        thread.join()
    is_done.set()
    for thread in readers:
        thread.join()
    index.close()
    assert not failures


# -- accidents -------------------------------------------------------------------------------


def test_accidents_lose_nothing() -> None:
    assert crashes.torn(2, of="graph") == 0
    assert crashes.faults(2, of="graph") == 0


@pytest.mark.slow
def test_more_accidents() -> None:
    assert crashes.torn(10, of="graph") == 0
    assert crashes.faults(10, of="graph") == 0
    assert crashes.oracle(300, background=True, of="graph") == 0


@pytest.mark.slow
def test_rounds_of_updates() -> None:
    found = {row["figure"]: row for row in rounds.measure("graph", 3_000, 2)}
    assert found["deleted ids in results"]["met"] and found["recall@10, lowest"]["measured"] > 0.9, found


def test_a_checkpoint_that_fails_leaves_the_state_before(tmp_path: Path) -> None:
    start_graph(tmp_path / "index").close()
    files = FaultyFiles(np.random.default_rng(0))
    index = vector_search.UpdatableIndex(tmp_path / "index", "mmap", files, background=False)
    held: dict[int, tuple[bytes, int]] = {}
    for operation, _ in zip(operations(7), range(12), strict=False):
        run(index, one := fitting(operation, held))
        held = after(held, one)
    for at in (2, 4, 5):
        index.insert([9_000 + at], drawn(1), rows([0]))
        held[9_000 + at] = (drawn(1)[0].tobytes(), 0)
        files.fails_at, files.error, files.times = files.num_operations + at, errno.EIO, 1
        with pytest.raises(IndexFileError, match="nothing is lost"):
            index.checkpoint()
        assert held_by(index) == held
    index.checkpoint()
    assert held_by(index) == held
    index.close()
    with loaded(tmp_path) as again:
        assert held_by(again) == held


def test_damage_is_refused_and_a_graph_is_no_file_of_lists(tmp_path: Path) -> None:
    index = made(tmp_path, drawn(60))
    index.insert([60], drawn(1, 8, 5), rows([60]))
    index.checkpoint()
    held = contents(index)
    index.close()
    path = tmp_path / "index" / "pages"
    pages, refused = path.read_bytes(), 0
    assert max(pages[16], pages[PAGE_BYTES + 16]) == 2  # an autopar that knows lists only refuses it
    for page in range(len(pages) // PAGE_BYTES):
        wrong = bytearray(pages)
        wrong[page * PAGE_BYTES + 11] ^= 1
        path.write_bytes(wrong)
        try:
            with loaded(tmp_path) as again:
                again.verify()
                assert contents(again) == held  # a page that is free, or the older superblock
        except IndexFileError:
            refused += 1
    assert refused > 5


# -- parts -----------------------------------------------------------------------------------


def test_live_neighbours_of_dead_ones_take_their_place() -> None:
    is_dead = np.array([1, 1, 0, 0, 0, 1], bool)
    row_of = np.array([0, 1, NO_ID, NO_ID, NO_ID, 2], np.int32)
    edges = np.array([[2, 1, 3], [4, 0, NO_ID], [1, NO_ID, NO_ID]], np.int32)
    found = [set(row[row != NO_ID].tolist()) for row in _instead(edges, is_dead, row_of)]
    assert found == [{2, 3, 4}, {4, 2, 3}, {4, 2, 3}]


def test_new_nodes_go_to_their_neighbours_or_to_new_blocks() -> None:
    is_free = np.array([1, 0, 0, 0, 0, 1, 0, 0], bool)  # two blocks of four
    none = np.full((6, 2), NO_ID, np.int32)
    neighbours = none.copy()
    neighbours[0] = [6, 1]  # the nearest is in the second block
    neighbours[1] = [7, NO_ID]  # where there is no more room
    numbers = placed(is_free, 4, neighbours, none)
    assert numbers[0] == 5 and sorted(numbers[1:].tolist()) == [8, 9, 10, 11, 12]
    many = placed(np.ones(8, bool), 4, none, none)
    assert sorted(many.tolist()) == [0, 1, 2, 3, 4, 5]


def test_edges_are_pruned_only_where_they_do_not_fit() -> None:
    own, others = np.zeros((1, 2), np.float32), np.array([[1, 0], [1.1, 0], [1.2, 0], [0, 2], [0, 0.5]], np.float32)

    def vectors_of(which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return others[which], np.zeros(len(which), np.float32)

    few = chosen(own, np.zeros(4, int), np.array([3, 0, 1, 0]), vectors_of, 5, 3)
    assert few.edges.tolist() == [[0, 1, 3]] and few.num_pruned == 0
    many = chosen(own, np.zeros(5, int), np.arange(5), vectors_of, 5, 3)
    assert many.edges.tolist() == [[4, 0, NO_ID]] and many.num_pruned == 1


def test_codes_of_equal_nodes_do_not_prune_each_other(tmp_path: Path) -> None:
    with made(tmp_path, drawn(300)) as index, index._state.readers.reading() as snapshot:
        stored = snapshot.stored
        assert isinstance(stored, GraphMap)
        points = Points(stored.graph, Space("l2", stored.graph.centre, 0.0), np.zeros((1, 8), np.float32), 0.5)
        points.number(np.array([3], np.int32), len(stored.graph.codes))
        vectors, errors = points.of(np.array([2, 3]))
        assert errors.tolist() == [0.5, 0] and not vectors[1].any() and vectors[0].any()


@pytest.mark.slow
def test_nodes_larger_than_a_page(tmp_path: Path) -> None:
    vectors = drawn(260, 1_100)
    index, held = made(tmp_path, vectors[:200]), dict(enumerate(vectors[:200]))
    index.delete(np.arange(30))
    index.insert(np.arange(200, 260), vectors[200:], rows(np.arange(200, 260)))
    held = {each: vector for each, vector in (held | dict(enumerate(vectors))).items() if each >= 30}
    index.checkpoint()
    assert agrees(index, held, vectors[:30]) >= 0.8
    with index._state.readers.reading() as snapshot:
        assert isinstance(snapshot.stored, GraphMap) and snapshot.stored.graph.blocks.pages_per_block == 2
    index.close()
    with loaded(tmp_path) as again:
        agrees(again, held, vectors[:30])

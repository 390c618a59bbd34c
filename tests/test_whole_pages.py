"""Lists on disk fill their pages, and their centroids fit the whole corpus."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from nearest import exact_nearest, recall

from autopar import vector_search
from autopar.errors import SearchError
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.on_disk import assignment
from autopar.vector_search.on_disk.chunks import Chunks
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.on_disk.probing import Nearest, without_own
from autopar.vector_search.on_disk.spill import AssignedLists
from autopar.vector_search.on_disk.whole_pages import LEVELS, filled, levels_of, sizes_of
from autopar.vector_search.updates.assign import squared_distances
from benchmarks.synthetic_vectors import faiss_synthetic

DIM = 32
DATA = faiss_synthetic(DIM, 0, 4000, 100)


def candidates(num: int, num_lists: int, copies: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists, of which the last may be missing, and their distances relative to the nearest one."""
    draw = np.random.default_rng(0)
    lists = np.stack([draw.permutation(num_lists)[:copies] for _ in range(num)]).astype(np.int32)
    lists[draw.random(num) < 0.3, -1] = NO_ID
    ratios = np.sort(draw.uniform(1, 1.3, (num, copies)).astype(np.float32), axis=1)
    return lists, ratios / ratios[:, :1]


@pytest.mark.parametrize(("space", "is_whole"), [(1.0, False), (1.02, False), (2.0, True), (9.0, True)])
def test_lists_take_what_fills_their_pages(tmp_path: Path, space: float, is_whole: bool) -> None:
    num, num_lists, copies, per_page = 3000, 50, 4, 23.7
    lists, ratios = candidates(num, num_lists, copies)
    levels = levels_of(ratios, 1.3)
    is_given = lists != NO_ID
    counts = np.zeros((num_lists, 1 + LEVELS), np.int32)
    np.add.at(counts, (lists[is_given], levels[is_given]), 1)
    sizes = sizes_of(counts, per_page, space * num)
    assert sizes.dtype == np.int64
    assert sizes.sum() <= space * num and (sizes >= counts[:, 0]).all() and (sizes <= counts.sum(axis=1)).all()
    if is_whole:
        is_full = (np.floor(np.ceil(sizes / per_page) * per_page) == sizes) | (sizes == counts.sum(axis=1))
        assert is_full.all()
    with closing(AssignedLists(copies, tmp_path)) as given, closing(AssignedLists(copies, tmp_path)) as level:
        given.append(lists)
        level.append(levels)
        with closing(filled(given, level, counts, sizes, tmp_path)) as found:
            taken = found.read(0, num)
    assert ((taken == lists) | (taken == NO_ID)).all()
    assert (taken[:, 0] == lists[:, 0]).all()
    np.testing.assert_array_equal(np.bincount(taken[taken != NO_ID], minlength=num_lists), sizes)
    for which in range(num_lists):  # none that is left out is nearer than one that is taken
        is_taken, is_left = taken == which, (lists == which) & (taken != which)
        assert levels[is_taken].max(initial=0) <= levels[is_left].min(initial=LEVELS)


def test_an_index_fills_its_pages(tmp_path: Path) -> None:
    corpus = np.round(100 * DATA.corpus).astype(np.int8)
    queries = np.round(100 * DATA.queries).astype(np.int8)
    with vector_search.build_on_disk(corpus, tmp_path / "index", reader="mmap", progress=False) as index:
        num_bytes = index.lists.counts * index.lists.entry_bytes
        assert num_bytes.sum() >= 0.88 * PAGE_BYTES * index.num_data_pages
        assert index.lists.counts.sum() <= 2.2 * len(corpus)
        found = [index.search(query, 10).ids for query in queries]
        reads = index.reads()
        assert reads.used_bytes >= 0.86 * reads.num_bytes
        assert recall(np.stack(found), exact_nearest(queries, corpus, 10)) >= 0.94


def test_a_query_of_the_corpus_is_taken_out_of_its_centroid() -> None:
    """The distance is that from the mean of the other vectors, and a centroid of the query alone comes last."""
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(6, 5)).astype(np.float32)
    centroids = np.stack([vectors.mean(axis=0), *draw.normal(size=(3, 5))]).astype(np.float32)
    distances = np.linalg.norm(vectors[:1] - centroids, axis=1).astype(np.float32)
    order = np.concatenate([[0], 1 + np.argsort(distances[1:])])
    near = Nearest(order[None], (distances / distances[0])[order][None], distances[order][None])
    found = without_own(near, np.array([6, 4, 4, 4]))
    without = np.linalg.norm(vectors[0] - vectors[1:].mean(axis=0))
    assert found.distances[found.lists == 0] == pytest.approx(without, rel=1e-5)
    assert (np.diff(found.distances) >= 0).all() and found.ratios[0, 0] == 1
    alone = without_own(near, np.array([1, 4, 4, 4]))
    assert alone.distances[alone.lists == 0] == alone.distances.max()


def test_centroids_of_a_small_sample_fit_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six vectors per list: passes over the corpus make the centroids means of all vectors."""
    chunks = Chunks(DATA.corpus, 512)
    assert sum(len(chunk) for _, chunk in chunks) == chunks.num_vectors
    far = []
    for enough in (256, 0):
        monkeypatch.setattr(assignment, "ENOUGH", enough)
        made = assignment.trained(DATA.corpus[:1200], chunks, "l2", 200, 4, 512)
        assert made.centre is not None
        squares = squared_distances(DATA.corpus - made.centre, made.centroids)
        far.append(float(squares.min(axis=1).mean()))
        assert made.num_trained.sum() == (len(DATA.corpus) if enough else 1200)
    assert far[0] < 0.93 * far[1]


def test_results_that_do_not_fit_in_memory_are_refused(tmp_path: Path) -> None:
    with vector_search.build_on_disk(np.eye(50, 8), tmp_path / "index", num_lists=2, progress=False) as index:
        for made in (index, vector_search.build(np.eye(50, 8), index="exact")):
            assert made.search(np.ones(8), 1000).ids.shape == (1000,)
            with pytest.raises(SearchError, match=r"`k` is 1,099,511,627,776.* give at most that many"):
                made.search(np.ones(8), 2**40)


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "index"
    link.symlink_to(tmp_path / "disk" / "index")
    for _ in range(2):
        vector_search.build_on_disk(np.eye(50, 8), link, num_lists=2, progress=False).close()
        assert link.is_symlink() and (tmp_path / "disk" / "index").is_file()
    vector_search.build(np.eye(50, 8), index="exact").save(link)
    assert link.is_symlink() and [each.name for each in (tmp_path / "disk").iterdir()] == ["index"]

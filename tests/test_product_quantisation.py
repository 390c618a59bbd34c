"""Product quantization: nearest codes, FAISS's distances, and recall of inverted lists with re-ranking."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nearest import exact_nearest, recall

from autopar.vector_search.data.metrics import NO_ID, distances_of, scores
from autopar.vector_search.ivf import search as list_search
from autopar.vector_search.ivf.lists import fill, fill_codes
from autopar.vector_search.ivf.product_quantization import Codebooks, decode, encode, encoded, train_codebooks
from autopar.vector_search.kernels.k_means import k_means
from autopar.vector_search.kernels.rerank import rerank
from benchmarks.synthetic_vectors import faiss_synthetic

search = jax.jit(list_search.search, static_argnums=(2, 3))


def test_a_code_is_the_nearest_centroid_of_each_part_and_decodes_to_it() -> None:
    draw = np.random.default_rng(0)
    centroids, vectors = draw.normal(size=(3, 8, 2)).astype("f"), draw.normal(size=(20, 6)).astype("f")
    books = Codebooks(jnp.asarray(centroids))
    codes = np.asarray(encode(books, jnp.asarray(vectors)))
    for part in range(3):
        apart = ((vectors[:, None, 2 * part : 2 * part + 2] - centroids[part]) ** 2).sum(axis=-1)
        np.testing.assert_array_equal(codes[:, part], apart.argmin(axis=1))
    for num in (0, 1, 20):
        np.testing.assert_array_equal(encoded(books, vectors[:num]), codes[:num])
    again = np.asarray(decode(books, jnp.asarray(codes)))
    np.testing.assert_array_equal(again[:, 2:4], centroids[1][codes[:, 1]])
    np.testing.assert_array_equal(decode(books, jnp.asarray(codes.reshape(4, 5, 3))), again.reshape(4, 5, 6))


@pytest.mark.slow
def test_more_subvectors_reduce_the_error() -> None:
    vectors = jnp.asarray(faiss_synthetic(16, 0, 1200, 0).corpus)
    lost = []
    for num_parts in (2, 4, 8):
        books = train_codebooks(vectors, num_parts, iterations=4, num_codes=64)
        lost.append(float(jnp.mean((decode(books, encode(books, vectors)) - vectors) ** 2)))
    assert lost[0] > 1.5 * lost[1] > 2.25 * lost[2]
    assert lost[2] < 0.1 * float(jnp.var(vectors))


def test_reranked_candidates_are_exact_and_missing_stay_missing() -> None:
    data = faiss_synthetic(8, 0, 100, 6)
    truth = exact_nearest(data.queries, data.corpus, 5)
    shuffled = np.array([np.random.default_rng(0).permutation(row) for row in truth])
    candidates = np.concatenate([np.full((6, 2), NO_ID), shuffled], axis=1).astype(np.int32)
    found = rerank(jnp.asarray(data.corpus), jnp.asarray(data.queries), jnp.asarray(candidates), 7, "l2")
    np.testing.assert_array_equal(found.positions[:, :5], truth)
    assert np.all(np.asarray(found.positions)[:, 5:] == NO_ID)


@pytest.mark.slow
def test_reranked_codes_reach_the_recall_of_vectors() -> None:
    data = faiss_synthetic(32, 0, 2000, 100)
    vectors = jnp.asarray(data.corpus)
    clusters = k_means(vectors, 20, iterations=4)
    centroids, lists = np.asarray(clusters.centroids), np.asarray(clusters.lists)
    books = train_codebooks(vectors - clusters.centroids[clusters.lists], 8, iterations=3)
    coded = fill_codes(data.corpus, centroids, lists, "l2", books)
    whole = fill(data.corpus, centroids, lists, "l2")
    queries = jnp.asarray(data.queries)
    truth = exact_nearest(data.queries, data.corpus, 10)
    flat = recall(np.asarray(search(whole, queries, 10, 10).positions), truth)
    candidates = search(coded, queries, 60, 10).positions
    ranked = recall(np.asarray(rerank(vectors, queries, candidates, 10, "l2").positions), truth)
    assert flat > 0.9
    assert abs(ranked - flat) <= 0.005
    # codes without re-ranking must be worse, or the test shows nothing
    assert recall(np.asarray(candidates)[:, :10], truth) < flat - 0.01
    assert coded.vectors.nbytes * 16 == whole.vectors.nbytes


def test_distances_are_those_of_faiss_with_its_codebooks() -> None:
    faiss = pytest.importorskip("faiss")
    data = faiss_synthetic(32, 0, 2000, 50)
    theirs = faiss.IndexPQ(32, 8, 8)
    theirs.train(data.corpus)
    theirs.add(data.corpus)
    books = Codebooks(jnp.asarray(faiss.vector_to_array(theirs.pq.centroids).reshape(8, 256, 4)))
    codes = encode(books, jnp.asarray(data.corpus))
    their_codes = faiss.vector_to_array(theirs.codes).reshape(-1, 8)
    assert np.mean(np.asarray(codes) != their_codes) < 1e-3  # ties
    expected, ids = theirs.search(data.queries, 20)
    queries = jnp.asarray(data.queries)
    found = distances_of(scores(queries, decode(books, jnp.asarray(their_codes)), "l2"), queries, "l2")
    np.testing.assert_allclose(np.take_along_axis(np.asarray(found), ids, axis=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_lists_of_codes_have_the_distances_of_faiss_ivf_pq() -> None:
    """Codes of residuals, all lists probed: the same neighbours at the same distances."""
    faiss = pytest.importorskip("faiss")
    data = faiss_synthetic(32, 0, 3000, 50)
    quantizer = faiss.IndexFlatL2(32)
    theirs = faiss.IndexIVFPQ(quantizer, 32, 20, 8, 8)
    theirs.train(data.corpus)
    theirs.add(data.corpus)
    theirs.nprobe = 7
    expected, ids = theirs.search(data.queries, 10)
    books = Codebooks(jnp.asarray(faiss.vector_to_array(theirs.pq.centroids).reshape(8, 256, 4)))
    lists = quantizer.search(data.corpus, 1)[1][:, 0]
    index = fill_codes(data.corpus, quantizer.reconstruct_n(0, 20), lists, "l2", books)
    found = search(index, jnp.asarray(data.queries), 10, 7)
    distances = distances_of(found.scores, jnp.asarray(data.queries), "l2")
    np.testing.assert_allclose(distances, expected, rtol=1e-3, atol=1e-3)
    assert recall(np.asarray(found.positions), ids) > 0.98  # equal codes may be in any order

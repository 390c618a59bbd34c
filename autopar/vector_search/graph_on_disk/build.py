"""Build a graph on disk within a memory budget, from a corpus that may be larger than memory.

In: an array, or a function that returns chunks. Out: a page file. The corpus is read twice: for a sample; and to find the
true neighbours of the recall sample, and to give vectors to shards. Then, from temporary files: each shard is connected;
the nodes of each shard are packed into blocks, which numbers them; and the blocks are written, with edges as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data.metrics import NO_ID, Metric, is_integer
from autopar.vector_search.data.progress import Report
from autopar.vector_search.frame.recall_tuning import (
    Measured,
    Recall,
    in_steps,
    least_effort,
    recall_per_query,
    sample_size,
)
from autopar.vector_search.graph.nearest_points import point_graph
from autopar.vector_search.graph_on_disk.block_packing import packed
from autopar.vector_search.graph_on_disk.index import KIND
from autopar.vector_search.graph_on_disk.node_blocks import NodeBlocks, Nodes
from autopar.vector_search.graph_on_disk.searcher import Searcher
from autopar.vector_search.graph_on_disk.shards import ShardNodes, Shards, centroids_of_shards
from autopar.vector_search.graph_on_disk.stored_graph import StoredGraph
from autopar.vector_search.ivf.product_quantization import Codebooks, encoded, train_codebooks
from autopar.vector_search.on_disk.chunks import Chunks, Source
from autopar.vector_search.on_disk.corpus_sample import RecallSample, checked_corpus
from autopar.vector_search.on_disk.mapped_reader import MappedReader
from autopar.vector_search.on_disk.page_file import PageFileWriter
from autopar.vector_search.on_disk.probing import prepared

#: Maximum bytes of a code by default, and maximum codes per codebook.
_MAX_CODE_BYTES, NUM_CODES = 32, 256
#: Nodes per entry point.
PER_ENTRY = 100
#: Beam widths to try for a recall target.
EFFORTS = in_steps(8, 1024)
#: Vectors of a chunk.
_MAX_ROWS = 8192
#: Maximum shards, whose temporary files are open together.
_MAX_SHARDS = 200
#: Bytes that the graph of a shard of any size takes.
_FIXED_BYTES = 3 * 10**7
#: Edges of a shard's graph, of those of a node: a node has edges from two shards.
_SHARD_DEGREE = 2 / 3


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """How to build.

    Args:
        degree: maximum edges per node.
        code_bytes: bytes of a code in memory; 0: the largest divisor of d up to 32.
        width: maximum blocks that a query reads at a time.
        per_block: maximum nodes per block; None: as many as fit.
        budget_bytes: host memory of the build, in addition to that of the process before.
        recall_target, queries: as in `build`.
        why: reason for the choice of this kind.
    """

    degree: int = 64
    code_bytes: int = 0
    width: int = 4
    per_block: int | None = None
    budget_bytes: float = 2**30
    recall_target: float = 0.95
    queries: ArrayLike | None = None
    why: str = ""


class _Written(NamedTuple):
    """The arrays of the nodes that were written, in the order of their numbers."""

    codes: NDArray[np.uint8]
    entries: NDArray[np.int32]
    entry_vectors: NDArray[np.float32]
    entry_links: NDArray[np.int32]


def build_file(
    source: Source, path: Path, metric: Metric, ids: ArrayLike | None, options: GraphOptions, report: Report
) -> None:
    """Write the page file of an index.

    Raises:
        SearchError: invalid vectors, ids or options, or a memory budget that is too small.
        IndexFileError: the file cannot be written.
    """
    chunks = Chunks(source, _MAX_ROWS)
    sampled, queries, own_ids = checked_corpus(chunks, path, ids, options.queries, options.budget_bytes / 16, report)
    num = chunks.num_vectors
    num_parts = _num_parts(chunks.dim, options.code_bytes)
    per_shard = _per_shard(chunks, num_parts, options)
    is_centred = metric == "l2" and not is_integer(chunks.dtype)
    centre = sampled.astype(np.float32).mean(axis=0, dtype=np.float64).astype(np.float32) if is_centred else None
    compared = prepared(sampled, metric, centre)
    books = train_codebooks(jnp.asarray(compared), num_parts, num_codes=min(NUM_CODES, len(compared)))
    centroids = centroids_of_shards(compared, num, per_shard, _MAX_SHARDS)
    sample = RecallSample(sampled, queries, metric, centre, sample_size(options.recall_target), num)
    del compared, sampled
    with Shards(centroids, centre, metric, chunks.dtype, _MAX_ROWS, path.parent) as shards:
        report(f"give {num:,} vectors to {shards.num_shards} shards", 0.1)
        for start, chunk in chunks:
            shards.add(chunk, start)
            sample.add(chunk, start)
        degree = min(options.degree, max(1, num - 1))
        shard_degree = degree if shards.num_shards == 1 else max(1, round(_SHARD_DEGREE * degree))
        for shard in range(shards.num_shards):
            report(f"connect shard {shard + 1} of {shards.num_shards}", 0.2 + 0.6 * shard / shards.num_shards)
            shards.connect(shard, shard_degree, per_shard)
        blocks = NodeBlocks(chunks.dim, chunks.dtype, degree, options.per_block)
        with PageFileWriter(path) as writer:
            report("write the nodes", 0.8)
            written, number_of = _written(shards, blocks, books, metric, centre, num, writer)
            repeated = shards.repeated
            repeated = repeated[np.argsort(number_of[repeated[:, 1]], kind="stable")]
            between = point_graph(written.entry_vectors, metric)
            graph = StoredGraph(
                codes=written.codes,
                codebooks=np.asarray(books.centroids),
                entries=written.entries,
                entry_vectors=written.entry_vectors,
                entry_links=written.entry_links,
                centre=centre,
                ids=own_ids,
                repeated=np.ascontiguousarray(repeated[:, 0]),
                repeated_of=number_of[repeated[:, 1]],
                blocks=blocks,
                metric=metric,
                num_vectors=num,
                entry_edges=None if between is None else between.edges,
                entry_points=None if between is None else between.entries,
            )
            report("measure recall", 0.9)
            own = [number_of[equal[0]] if equal else NO_ID for equal in sample.equal]
            del number_of
            measured = _measured(graph, sample, np.array(own, np.int32), writer, options)
            settings, arrays = graph.saved()
            settings |= {"measured": measured.saved(), "width": options.width, "why": options.why}
            writer.finish(KIND, settings, arrays)


def _num_parts(dim: int, code_bytes: int) -> int:
    divisors = [number for number in range(1, dim + 1) if dim % number == 0]
    if code_bytes and code_bytes not in divisors:
        raise SearchError(
            f"`code_bytes` is {code_bytes}: it has to divide the {dim} elements of a vector. Give one of"
            f" {', '.join(map(str, divisors))}"
        )
    return code_bytes or max(number for number in divisors if number <= _MAX_CODE_BYTES)


def _per_shard(chunks: Chunks, num_parts: int, options: GraphOptions) -> int:
    """The maximum vectors of a shard, so that its graph is built within half of the budget."""
    per_vector = num_parts + 8 + 4 * (chunks.dim + options.degree) // PER_ENTRY
    held = chunks.num_vectors * per_vector  # codes, the number of each position, and entry points
    room = options.budget_bytes / 2 - held / 2
    near = 2 * options.degree + 1
    # the vectors as read, sorted and distinct; in f32, in lists, and as a sample; candidates; edges, and their reversal
    vector_bytes = 3 * chunks.dim * chunks.dtype.itemsize + 20 * chunks.dim + 8 * near + 44 * options.degree
    fixed = _FIXED_BYTES + 4 * 128 * near * (near + 3 * chunks.dim)
    most = int((room - fixed) // vector_bytes)
    least = min(chunks.num_vectors, max(1024, -(-2 * chunks.num_vectors // _MAX_SHARDS)))
    if most < least:
        needed = 2 * (least * vector_bytes + fixed) + held
        raise SearchError(
            f"`memory_budget_bytes` is {options.budget_bytes:,.0f}: a graph of {chunks.num_vectors:,} vectors of"
            f" {chunks.dim} elements needs {needed:,}. Give that much, or a smaller `degree` or `code_bytes`"
        )
    return most


def _written(
    shards: Shards,
    blocks: NodeBlocks,
    books: Codebooks,
    metric: Metric,
    centre: NDArray[np.float32] | None,
    num: int,
    writer: PageFileWriter,
) -> tuple[_Written, NDArray[np.int32]]:
    """Write all nodes; also the number of the node of each position, int32 `[n]`."""
    number_of, places = np.full(num, NO_ID, np.int32), []
    count = 0
    for shard in range(shards.num_shards):
        own = shards.nodes(shard, blocks.degree)
        places.append(packed(_within(own), blocks.per_block))
        flat = places[-1].reshape(-1)
        is_node = flat != NO_ID
        number_of[own.positions[flat[is_node]]] = count + np.flatnonzero(is_node)
        count += flat.size
    repeated = shards.repeated
    number_of[repeated[:, 0]] = number_of[repeated[:, 1]]
    draw = np.random.default_rng(0)
    chosen = np.sort(draw.permutation(np.unique(number_of))[: max(1, -(-num // PER_ENTRY))])
    codes = np.zeros((count, books.num_parts), np.uint8)
    entry_vectors, entry_links, begin = [], [], 0
    for shard in range(shards.num_shards):
        own, which = shards.nodes(shard, blocks.degree), places[shard]
        edges = np.where(own.edges == NO_ID, NO_ID, number_of[np.maximum(own.edges, 0)])
        for start in range(0, len(which), _MAX_ROWS):
            part = which[start : start + _MAX_ROWS]
            is_node, safe = part != NO_ID, np.maximum(part, 0)
            positions = np.where(is_node, own.positions[safe], NO_ID).astype(np.int32)
            vectors = own.vectors[safe]
            writer.append(blocks.stream(Nodes(positions, vectors, np.where(is_node[..., None], edges[safe], NO_ID))))
            flat = prepared(vectors.reshape(-1, blocks.dim), metric, centre)
            codes[begin : begin + len(flat)] = encoded(books, flat)
            here = chosen[(chosen >= begin) & (chosen < begin + len(flat))]
            entry_vectors.append(flat[here - begin])
            entry_links.append(edges[safe.reshape(-1)[here - begin]])
            begin += len(flat)
    entries = chosen.astype(np.int32), np.concatenate(entry_vectors), np.concatenate(entry_links)
    return _Written(codes, *entries), number_of


def _within(own: ShardNodes) -> NDArray[np.int32]:
    """The edges between nodes of one shard, as indices of these nodes."""
    at = np.minimum(np.searchsorted(own.positions, own.edges), len(own.positions) - 1)
    is_here = (own.edges != NO_ID) & (own.positions[at] == own.edges)
    return np.where(is_here, at, NO_ID).astype(np.int32)


def _measured(
    graph: StoredGraph,
    sample: RecallSample,
    own: NDArray[np.int32],
    writer: PageFileWriter,
    options: GraphOptions,
) -> Measured:
    """The least beam that reaches the recall target on the sample.

    Args:
        own: int32 `[num_queries]`, the node of each query that is a vector of the corpus. A search ignores it: its edges
            lead to all neighbours, which no query of a user has.
    """
    truth = sample.truth()
    most = min(graph.num_vectors, EFFORTS[-1])
    if not (truth.positions != NO_ID).any():
        return Measured(most, None, {})
    reader = MappedReader(writer.readable())
    searcher = Searcher(writer.path, writer.file_id, graph, reader, options.width)
    try:

        def recall_at(effort: int) -> Recall:
            if effort >= graph.num_vectors:  # `search` is exact then
                return Recall(1.0, 1.0)
            found = searcher.best(truth.queries, truth.positions.shape[1], effort, None, own)
            return Recall.of(recall_per_query(found, truth[1:], graph.metric))

        efforts = tuple(dict.fromkeys(min(each, most) for each in EFFORTS))
        return least_effort(efforts, options.recall_target, recall_at)
    finally:
        reader.close()

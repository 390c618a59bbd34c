"""Build the graph of a corpus in parts that fit the memory budget, and merge them (DiskANN, NeurIPS 2019, 3.2).

In: chunks of vectors. Out: shard by shard, the nodes' vectors, positions and merged edges. Each vector is in the two
shards whose centroids are nearest; a graph is built for each shard, and the edges of a vector are those of both. So
shards overlap, and the merged graph is connected. Vectors and edges lie in temporary files without names.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError
from autopar.vector_search.data.duplicates import Duplicates
from autopar.vector_search.data.metrics import NO_ID, Metric
from autopar.vector_search.graph.build import connected
from autopar.vector_search.kernels.k_means import k_means_on_host
from autopar.vector_search.on_disk.probing import prepared

#: Shards of a vector, if there are several.
_COPIES = 2
_ITERATIONS = 8
#: Sampled vectors per shard.
_SAMPLED = 4096
#: Sizes of a shard's graph: the programs of each take 3 s to compile and 33 MB, so the sizes of small shards are few.
_MAX_SIZES, _LEAST_STEP = 4, 4096
#: Vectors whose neighbours are searched, and whose edges are pruned, at a time.
_SEARCHED, _PRUNED = 512, 128


class ShardNodes(NamedTuple):
    """The nodes whose nearest shard is one shard.

    Args:
        positions: int64 `[m]`.
        vectors: `[m, d]`.
        edges: int32 `[m, degree]`, positions in the corpus; `NO_ID` for none.
    """

    positions: NDArray[np.int64]
    vectors: NDArray[Any]
    edges: NDArray[np.int32]


def centroids_of_shards(
    sample: NDArray[np.float32], num_vectors: int, most: int, max_shards: int, seed: int = 0
) -> NDArray[np.float32]:
    """f32 `[num_shards, d]`: so many centroids that the largest shard has about `most` vectors.

    Args:
        sample: prepared vectors, in random order.
    """
    num_shards = 1 if num_vectors <= most else max(3, -(-_COPIES * num_vectors // most))
    while num_shards > 1:
        some = sample[: _SAMPLED * num_shards]
        centroids, counts = k_means_on_host(some, num_shards, _ITERATIONS, seed), np.zeros(num_shards, np.int64)
        for start in range(0, len(some), _SAMPLED):
            far = (centroids**2).sum(axis=1) - 2 * some[start : start + _SAMPLED] @ centroids.T
            near = np.argpartition(far, _COPIES - 1, axis=1)[:, :_COPIES]
            counts += np.bincount(near.reshape(-1), minlength=num_shards)
        if counts.max() / len(some) * num_vectors <= most or num_shards >= max_shards:
            return centroids
        num_shards = min(max_shards, num_shards + max(1, num_shards // 3))
    return np.zeros((1, sample.shape[1]), np.float32)


class Shards:
    """Vectors and edges of all shards, in temporary files. Use it as a context.

    Args:
        centroids: f32 `[num_shards, d]`.
        centre: f32 `[d]`, subtracted from vectors; None: not centred.
        dtype: of the vectors.
        rows: vectors that are added at a time.
        folder: for the temporary files.

    Raises:
        IndexFileError: the files cannot be written.
    """

    def __init__(
        self,
        centroids: NDArray[np.float32],
        centre: NDArray[np.float32] | None,
        metric: Metric,
        dtype: np.dtype[Any],
        rows: int,
        folder: Path,
    ) -> None:
        self._centroids, self._centre, self._rows, self._folder = centroids, centre, rows, folder
        self._metric: Metric = metric
        self._dtype, self._dim = dtype, centroids.shape[1]
        self._open = ExitStack()
        try:
            self._vectors = [self._file() for _ in centroids]
            self._edges = [self._file() for _ in centroids]
        except OSError as error:
            self.close()
            raise self._refused(error) from None
        self._repeated: list[NDArray[np.int32]] = []
        self._degree = 0

    @property
    def num_shards(self) -> int:
        return len(self._centroids)

    @property
    def repeated(self) -> NDArray[np.int32]:
        """int32 `[r, 2]`: positions of vectors that equal a node's, and the node's position. Known when every shard is
        connected."""
        return np.concatenate([*self._repeated, np.zeros((0, 2), np.int32)])

    def add(self, vectors: NDArray[Any], first_position: int) -> None:
        """Add the vectors `[m, d]` at consecutive positions; m is at most `rows`."""
        owners = np.zeros((len(vectors), 1), np.int32)
        if self.num_shards > 1:
            padded = np.zeros((self._rows, self._dim), np.float32)  # one program for all chunks
            padded[: len(vectors)] = prepared(vectors, self._metric, self._centre)
            owners = np.asarray(_two_nearest(jnp.asarray(padded), jnp.asarray(self._centroids)))[: len(vectors)]
        records = np.empty((len(vectors), self._vector_bytes), np.uint8)
        records[:, :8] = np.arange(first_position, first_position + len(vectors), dtype="<i8")[:, None].view(np.uint8)
        records[:, 9:] = np.ascontiguousarray(vectors).view(np.uint8).reshape(len(vectors), -1)
        for column in range(owners.shape[1]):
            records[:, 8] = column
            for shard in np.unique(owners[:, column]).tolist():
                self._write(self._vectors[shard], records[owners[:, column] == shard])

    def connect(self, shard: int, degree: int, most: int) -> None:
        """Build the graph of a shard, and add its edges to the shards that own their sources.

        Args:
            degree: edges per node of this graph.
            most: vectors at which a shard is cut into parts, which are connected by the other shards only.
        """
        self._degree = degree
        largest = min(most, max(os.fstat(file.fileno()).st_size for file in self._vectors) // self._vector_bytes)
        positions, is_own, vectors = self._read_vectors(shard)
        for part in np.array_split(np.arange(len(positions)), max(1, -(-len(positions) // most))):
            if part.size:
                self._connect(shard, positions[part], is_own[part], vectors[part], largest)

    def nodes(self, shard: int, degree: int) -> ShardNodes:
        """The nodes that a shard owns, with at most `degree` edges each.

        Every shard is connected.
        """
        positions, is_own, vectors = self._read_vectors(shard)
        positions, vectors = positions[is_own], vectors[is_own]
        width = 8 + 4 * self._degree
        records = self._read(self._edges[shard], width)
        source = np.ascontiguousarray(records[:, :8]).view("<i8")[:, 0]
        targets = np.ascontiguousarray(records[:, 8:]).view("<i4")
        order = np.argsort(source, kind="stable")
        source, targets = source[order], targets[order]
        is_node = ~np.isin(positions, self.repeated[:, 0])
        positions, vectors = positions[is_node], vectors[is_node]
        first = np.searchsorted(source, positions)
        last = np.searchsorted(source, positions, side="right")
        lists = np.full((len(positions), _COPIES, self._degree), NO_ID, np.int32)
        for copy in range(_COPIES):
            has = first + copy < last
            lists[has, copy] = targets[first[has] + copy]
        return ShardNodes(positions, vectors, _first_distinct(lists, degree))

    def close(self) -> None:
        """Delete the temporary files."""
        with suppress(OSError):  # of a full disk, which was reported
            self._open.close()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- private ------------------------------------------------------------------------------

    def _connect(
        self, shard: int, positions: NDArray[np.int64], is_own: NDArray[np.bool_], vectors: NDArray[Any], largest: int
    ) -> None:
        same = Duplicates.of(vectors, self._metric)
        order = np.argsort(positions[same.order], kind="stable")  # of equal vectors, the first position is the node
        group_of = np.repeat(np.arange(same.num_groups), np.diff(same.starts))[order]
        node_of = same.order[order][np.unique(group_of, return_index=True)[1]]
        is_node = np.zeros(len(positions), bool)
        is_node[node_of] = True
        others = np.flatnonzero(~is_node & is_own)
        self._repeated.append(
            np.stack([positions[others], positions[node_of[same.groups[others]]]], axis=1).astype(np.int32)
        )
        compared = vectors[node_of]
        if self._centre is not None:
            compared = compared.astype(np.float32) - self._centre
        num = len(compared)
        step = max(_LEAST_STEP, -(-largest // _MAX_SIZES))
        size = (min(largest, -(-num // step) * step), self._dim)  # with repeats
        graph = connected(
            np.resize(compared, size),
            self._metric,
            self._degree,
            at_once=_SEARCHED,
            chunk=_PRUNED,
            shares_programs=self.num_shards > 1,
        )
        edges = np.asarray(graph.edges)[:num]
        edges = np.where(edges == NO_ID, NO_ID, edges % num)
        edges = np.where((edges == NO_ID) | (edges == np.arange(num)[:, None]), NO_ID, positions[node_of][edges])
        edges = edges.astype("<i4")
        owner = np.full(len(node_of), shard)
        if not is_own[node_of].all():
            nearest = self._nearest(compared)
            owner = np.where(is_own[node_of], shard, nearest)
        records = np.empty((len(node_of), 8 + 4 * self._degree), np.uint8)
        records[:, :8] = positions[node_of].astype("<i8")[:, None].view(np.uint8)
        records[:, 8:] = edges.view(np.uint8)
        for each in np.unique(owner).tolist():
            self._write(self._edges[each], records[owner == each])

    def _nearest(self, compared: NDArray[Any]) -> NDArray[np.int32]:
        """The nearest shard of vectors that are already centred."""
        found = []
        for start in range(0, len(compared), self._rows):
            some = prepared(compared[start : start + self._rows], self._metric, None)
            padded = np.zeros((self._rows, self._dim), np.float32)
            padded[: len(some)] = some
            near = _two_nearest(jnp.asarray(padded), jnp.asarray(self._centroids))
            found.append(np.asarray(near)[: len(some), 0])
        return np.concatenate(found)

    @property
    def _vector_bytes(self) -> int:
        """Position, whether this shard is the nearest (0) or the second (1), and the vector."""
        return 9 + self._dim * self._dtype.itemsize

    def _read_vectors(self, shard: int) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[Any]]:
        records = self._read(self._vectors[shard], self._vector_bytes)
        positions = np.ascontiguousarray(records[:, :8]).view("<i8")[:, 0]
        order = np.argsort(positions, kind="stable")
        vectors = np.ascontiguousarray(records[order, 9:]).view(self._dtype)
        return positions[order], records[order, 8] == 0, vectors.reshape(len(order), self._dim)

    def _file(self) -> Any:
        return self._open.enter_context(tempfile.TemporaryFile(dir=self._folder, buffering=0))

    def _write(self, file: Any, records: NDArray[np.uint8]) -> None:
        left = memoryview(np.ascontiguousarray(records).reshape(-1))
        try:
            while left.nbytes:
                left = left[file.write(left) :]
        except OSError as error:
            raise self._refused(error) from None

    def _read(self, file: Any, width: int) -> NDArray[np.uint8]:
        file.seek(0)
        return np.fromfile(file, np.uint8).reshape(-1, width)

    def _refused(self, error: OSError) -> IndexFileError:
        return IndexFileError(
            f"temporary files in {self._folder} cannot be written: {error.strerror or error}. Give a path in a writable"
            " folder with free space for four times the index"
        )


def _first_distinct(lists: NDArray[np.int32], degree: int) -> NDArray[np.int32]:
    """int32 `[m, degree]`: the first distinct entries of several lists, `[m, copies, w]`, taken in turns."""
    num = len(lists)
    turns = np.swapaxes(lists, 1, 2).reshape(num, -1)
    order = np.argsort(turns, axis=1, kind="stable")
    ordered = np.take_along_axis(turns, order, axis=1)
    again = np.zeros(turns.shape, bool)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    is_kept = (turns != NO_ID) & ~again
    found = np.full((num, degree), NO_ID, np.int32)
    place = np.cumsum(is_kept, axis=1) - 1
    row, column = np.nonzero(is_kept & (place < degree))
    found[row, place[row, column]] = turns[row, column]
    return found


@jax.jit
def _two_nearest(vectors: jax.Array, centroids: jax.Array) -> jax.Array:
    squares = jnp.sum(centroids * centroids, axis=1)
    found = 2 * jnp.matmul(vectors, centroids.T, precision=jax.lax.Precision.HIGHEST) - squares
    return jax.lax.top_k(found, min(_COPIES, centroids.shape[0]))[1].astype(jnp.int32)

"""HNSW (Malkov and Yashunin, 2016) as it is written down: the reference that the fast graph is held against.

In: vectors, one by one. Out: `Hnsw`, to be searched one query at a time; NumPy on the host, nothing compiled. Each
vector is a node of layer 0, and of each layer above with a probability that falls by the same factor. A search goes
down from the top: greedily to the nearest node of a layer, which is where it begins in the next one, and through layer
0 with as many nodes in hand as asked for. `neighbour_graph` and `beam` are one such layer, built and walked for all at
once.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from autopar.vector_search.data.metrics import Metric


class Hnsw:
    """A graph that grows by `add`. `num_scored` counts the vectors that were compared with others, since the start."""

    def __init__(self, dim: int, metric: Metric = "l2", degree: int = 16, beam: int = 100, seed: int = 0) -> None:
        """Empty.

        Args:
            degree: edges of a node in each layer above the lowest, which has twice as many.
            beam: nodes in hand while a vector is put in.
        """
        self.vectors = np.zeros((0, dim), np.float32)
        self.layers: list[dict[int, list[int]]] = []
        self.num_scored = 0
        self._metric: Metric = metric
        self._degree = degree
        self._beam = beam
        self._draw = np.random.default_rng(seed)
        self._entry = -1

    def add(self, vectors: np.ndarray) -> None:
        """Put in `vectors`, `[n, d]`, in their order."""
        first = len(self.vectors)
        self.vectors = np.concatenate([self.vectors, self._prepared(vectors)])
        for node in range(first, len(self.vectors)):
            self._put_in(node)

    def search(self, query: np.ndarray, k: int, beam: int = 64) -> list[int]:
        """The positions, best first, of the best k of a beam: fewer, where there are fewer."""
        if self._entry < 0:
            return []
        query = self._prepared(query[None])[0]
        nearest = [self._entry]
        for layer in range(len(self.layers) - 1, 0, -1):
            nearest = self._walk(query, nearest, layer, 1)
        return self._walk(query, nearest, 0, max(beam, k))[:k]

    def _put_in(self, node: int) -> None:
        # P(a layer above) is 1 / degree, as in the paper
        top = int(-math.log(1 - self._draw.random()) / math.log(self._degree))
        vector, nearest = self.vectors[node], [self._entry]
        for layer in range(len(self.layers) - 1, top, -1):
            nearest = self._walk(vector, nearest, layer, 1)
        for layer in range(min(top, len(self.layers) - 1), -1, -1):
            nearest = self._walk(vector, nearest, layer, self._beam)
            edges = self.layers[layer]
            edges[node] = self._diverse(vector, nearest, self._degree)
            for other in edges[node]:
                edges[other].append(node)
                if len(edges[other]) > self._room(layer):
                    near = self._by_distance(self.vectors[other], edges[other])
                    edges[other] = self._diverse(self.vectors[other], near, self._room(layer))
        if top >= len(self.layers):
            self.layers += [{node: []} for _ in range(len(self.layers), top + 1)]
            self._entry = node

    def _walk(self, query: np.ndarray, start: list[int], layer: int, beam: int) -> list[int]:
        """Algorithm 2: the best `beam` nodes that are met, best first, from `start`, in a layer."""
        edges = self.layers[layer]
        seen = set(start)
        distances = self._distances(query, start).tolist()
        to_look_at = list(zip(distances, start, strict=True))
        heapq.heapify(to_look_at)
        best = [(-distance, node) for distance, node in to_look_at]  # the worst on top
        heapq.heapify(best)
        while to_look_at:
            distance, node = heapq.heappop(to_look_at)
            if len(best) >= beam and distance > -best[0][0]:
                break
            new = [other for other in edges[node] if other not in seen]
            seen.update(new)
            for far, other in zip(self._distances(query, new).tolist(), new, strict=True):
                if len(best) < beam or far < -best[0][0]:
                    heapq.heappush(to_look_at, (far, other))
                    heapq.heappush(best, (-far, other))
                    if len(best) > beam:
                        heapq.heappop(best)
        return [node for _, node in sorted(best, reverse=True)]

    def _diverse(self, vector: np.ndarray, near: list[int], most: int) -> list[int]:
        """Algorithm 4: of `near`, nearest first, those that no kept one is nearer to than the vector is."""
        kept: list[int] = []
        for node, far in zip(near, self._distances(vector, near).tolist(), strict=True):
            if len(kept) == most:
                break
            if not kept or np.all(self._distances(self.vectors[node], kept) >= far):
                kept.append(node)
        return kept

    def _by_distance(self, vector: np.ndarray, nodes: list[int]) -> list[int]:
        return [nodes[place] for place in np.argsort(self._distances(vector, nodes), kind="stable")]

    def _room(self, layer: int) -> int:
        return self._degree if layer else 2 * self._degree

    def _distances(self, vector: np.ndarray, nodes: list[int]) -> np.ndarray:
        self.num_scored += len(nodes)
        held = self.vectors[nodes]
        if self._metric == "l2":
            return ((held - vector) ** 2).sum(axis=1)
        return -(held @ vector)

    def _prepared(self, vectors: np.ndarray) -> np.ndarray:
        """As they are compared: of cosine, of length 1."""
        vectors = vectors.astype(np.float32)
        if self._metric != "cosine":
            return vectors
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(length > 0, length, 1)

"""HNSW (Malkov and Yashunin, 2016), as published: the reference for the batched graph search.

In: vectors, one by one. Out: an `Hnsw` that searches one query at a time, in NumPy on the host. Each vector is a node
of layer 0, and of each layer above with a geometrically decreasing probability. A search descends from the top layer.
In each upper layer it moves greedily to the nearest node, where it enters the next layer; in layer 0 it runs a beam
search. `neighbor_graph` and `beam_search` build and search a single such layer in batches.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from autopar.vector_search.data.metrics import Metric


class Hnsw:
    """A graph that grows by `add`. `num_scored` counts all distances computed so other_distance."""

    def __init__(self, dim: int, metric: Metric = "l2", degree: int = 16, beam: int = 100, seed: int = 0) -> None:
        """Create an empty graph.

        Args:
            degree: edges per node in the upper layers; layer 0 has twice as many.
            beam: beam width during insertion.
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
        """Insert `vectors`, `[n, d]`, in order."""
        first = len(self.vectors)
        self.vectors = np.concatenate([self.vectors, self._prepared(vectors)])
        for node in range(first, len(self.vectors)):
            self._insert(node)

    def search(self, query: np.ndarray, k: int, beam: int = 64) -> list[int]:
        """Positions of the best k nodes of a beam, best first; fewer if the graph has fewer."""
        if self._entry < 0:
            return []
        query = self._prepared(query[None])[0]
        nearest = [self._entry]
        for layer in range(len(self.layers) - 1, 0, -1):
            nearest = self._search_layer(query, nearest, layer, 1)
        return self._search_layer(query, nearest, 0, max(beam, k))[:k]

    def _insert(self, node: int) -> None:
        # each further layer has probability 1 / degree, as in the paper
        top = int(-math.log(1 - self._draw.random()) / math.log(self._degree))
        vector, nearest = self.vectors[node], [self._entry]
        for layer in range(len(self.layers) - 1, top, -1):
            nearest = self._search_layer(vector, nearest, layer, 1)
        for layer in range(min(top, len(self.layers) - 1), -1, -1):
            nearest = self._search_layer(vector, nearest, layer, self._beam)
            edges = self.layers[layer]
            edges[node] = self._select_neighbours(vector, nearest, self._degree)
            for other in edges[node]:
                edges[other].append(node)
                if len(edges[other]) > self._max_degree(layer):
                    near = self._by_distance(self.vectors[other], edges[other])
                    edges[other] = self._select_neighbours(self.vectors[other], near, self._max_degree(layer))
        if top >= len(self.layers):
            self.layers += [{node: []} for _ in range(len(self.layers), top + 1)]
            self._entry = node

    def _search_layer(self, query: np.ndarray, start: list[int], layer: int, beam: int) -> list[int]:
        """Algorithm 2: beam search in a layer from `start`; the best `beam` nodes, best first."""
        edges = self.layers[layer]
        visited = set(start)
        distances = self._distances(query, start).tolist()
        frontier = list(zip(distances, start, strict=True))
        heapq.heapify(frontier)
        best = [(-distance, node) for distance, node in frontier]  # max-heap: the worst first
        heapq.heapify(best)
        while frontier:
            distance, node = heapq.heappop(frontier)
            if len(best) >= beam and distance > -best[0][0]:
                break
            new = [other for other in edges[node] if other not in visited]
            visited.update(new)
            for other_distance, other in zip(self._distances(query, new).tolist(), new, strict=True):
                if len(best) < beam or other_distance < -best[0][0]:
                    heapq.heappush(frontier, (other_distance, other))
                    heapq.heappush(best, (-other_distance, other))
                    if len(best) > beam:
                        heapq.heappop(best)
        return [node for _, node in sorted(best, reverse=True)]

    def _select_neighbours(self, vector: np.ndarray, near: list[int], most: int) -> list[int]:
        """Algorithm 4: of `near`, nearest first, the nodes that are nearer to the vector than to every kept node."""
        kept: list[int] = []
        for node, other_distance in zip(near, self._distances(vector, near).tolist(), strict=True):
            if len(kept) == most:
                break
            if not kept or np.all(self._distances(self.vectors[node], kept) >= other_distance):
                kept.append(node)
        return kept

    def _by_distance(self, vector: np.ndarray, nodes: list[int]) -> list[int]:
        return [nodes[place] for place in np.argsort(self._distances(vector, nodes), kind="stable")]

    def _max_degree(self, layer: int) -> int:
        return self._degree if layer else 2 * self._degree

    def _distances(self, vector: np.ndarray, nodes: list[int]) -> np.ndarray:
        self.num_scored += len(nodes)
        targets = self.vectors[nodes]
        if self._metric == "l2":
            return ((targets - vector) ** 2).sum(axis=1)
        return -(targets @ vector)

    def _prepared(self, vectors: np.ndarray) -> np.ndarray:
        """The vectors as they are compared: normalized for cosine."""
        vectors = vectors.astype(np.float32)
        if self._metric != "cosine":
            return vectors
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(length > 0, length, 1)

"""Partition into stages by minimum cut: the fewest bytes between stages, on equal submeshes.

In: a `PartitionProblem`, the FLOPs of its layers, and the bytes between them. Recursive bisection, as in METIS: cut the
layers where the fewest bytes pass, among the places that leave either side at least a third of its share of the FLOPs;
then cut each part in the same way. In a chain, every minimum cut is a single place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.pipeline.partition.problem import Partition, PartitionProblem
from benchmarks.baselines.stages_equal import best_of_equal

_LEAST_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class MinCut:
    """A `Partitioner`.

    Args:
        flops: FLOPs of each layer.
        cut_bytes: bytes that pass into each layer from those before it.
    """

    flops: Sequence[float]
    cut_bytes: Sequence[float]

    def partition(self, problem: PartitionProblem) -> Partition:
        """The best partition over numbers of stages."""
        return best_of_equal(problem, lambda count: self._bisect(0, problem.num_layers, count))

    def _bisect(self, first: int, end: int, count: int) -> list[int]:
        """The starts of `count` stages over a range of layers."""
        if count == 1:
            return [first]
        ahead = count // 2
        done = np.cumsum(self.flops[first:end])
        share = ahead / count
        cuts = [
            at
            for at in range(first + ahead, end - (count - ahead) + 1)
            if done[at - first - 1] >= _LEAST_SHARE * share * done[-1]
            and done[-1] - done[at - first - 1] >= _LEAST_SHARE * (1 - share) * done[-1]
        ] or [min(max(first + round((end - first) * share), first + ahead), end - (count - ahead))]
        off = [abs(done[at - first - 1] - share * done[-1]) for at in cuts]
        cut = min(zip(cuts, off, strict=True), key=lambda pair: (self.cut_bytes[pair[0]], pair[1]))[0]
        return self._bisect(first, cut, ahead) + self._bisect(cut, end, count - ahead)

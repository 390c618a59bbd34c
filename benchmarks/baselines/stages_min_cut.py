"""Stages by minimum cut: the fewest bytes between them, on equal submeshes.

In: a `PartitionProblem`, the FLOPs of its layers, and the bytes between them. The layers are cut in two where the
fewest bytes pass, of the places that leave either side a third of its share of the FLOPs; then each part likewise
(recursive bisection, as METIS does it; in a chain every minimum cut is one of its places).
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
        flops: of each layer.
        cut_bytes: that pass into each layer from those before it.
    """

    flops: Sequence[float]
    cut_bytes: Sequence[float]

    def partition(self, problem: PartitionProblem) -> Partition:
        """The best number of such stages."""
        return best_of_equal(problem, lambda count: self._bisect(0, problem.num_layers, count))

    def _bisect(self, first: int, end: int, count: int) -> list[int]:
        """Where `count` stages of some layers start."""
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

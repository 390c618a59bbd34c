"""Partition at random: any number of stages, any cuts, any submeshes in line; keep the best partition that fits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.pipeline.partition.cluster import Line, lines
from autopar.pipeline.partition.price_tables import Prices
from autopar.pipeline.partition.problem import Partition, PartitionProblem, Stage
from benchmarks.baselines.stages_equal import best, on_places


@dataclass(frozen=True, slots=True)
class RandomSearch:
    """A `Partitioner`.

    Args:
        num_samples: number of partitions to draw.
        seed: seed of its random numbers.
    """

    num_samples: int = 1000
    seed: int = 0

    def partition(self, problem: PartitionProblem) -> Partition:
        """The best partition found."""
        rng = np.random.default_rng(self.seed)
        every = lines(problem.cluster, problem.all_shapes)
        drawn = [_draw(problem, every[int(rng.integers(len(every)))], rng) for _ in range(self.num_samples)]
        return best(Prices(problem), drawn)


def _draw(problem: PartitionProblem, line: Line, rng: np.random.Generator) -> tuple[Stage, ...]:
    places: list[int] = []
    wanted = int(rng.integers(1, problem.most_stages + 1))
    at = 0
    while len(places) < wanted:
        here = np.flatnonzero(line.start == at)
        if not len(here):
            break
        # Leave at least one device for each later stage if possible.
        room = problem.cluster.num_devices - at - (wanted - len(places) - 1)
        small = [p for p in here.tolist() if line.end[p] - at <= max(room, 1)]
        if not small:
            break
        places.append(int(rng.choice(small)))
        at = int(line.end[places[-1]])
    cuts = rng.choice(np.arange(1, problem.num_layers), len(places) - 1, replace=False)
    return on_places(line, places, [0, *sorted(int(cut) for cut in cuts)], problem.num_layers)

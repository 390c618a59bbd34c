"""Partition into stages with equal numbers of layers, or with equal FLOPs, on equal submeshes, as done by hand.

In: a `PartitionProblem`. Out: the best of these partitions over the possible numbers of stages. On a cluster with two
kinds of devices, each kind gets stages in proportion to its number of devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.pipeline.partition.cluster import Line, lines
from autopar.pipeline.partition.price_tables import Prices
from autopar.pipeline.partition.problem import Partition, PartitionProblem, Stage
from autopar.solve.problem import Status


@dataclass(frozen=True, slots=True)
class EqualLayers:
    """A `Partitioner`: all stages have the same number of layers, give or take one."""

    def partition(self, problem: PartitionProblem) -> Partition:
        """The best partition over numbers of stages."""
        return best_of_equal(problem, lambda count: balanced([1.0] * problem.num_layers, count))


@dataclass(frozen=True, slots=True)
class EqualOperators:
    """A `Partitioner`: minimizes the FLOPs of the largest stage.

    Args:
        flops: FLOPs of each layer.
    """

    flops: Sequence[float]

    def partition(self, problem: PartitionProblem) -> Partition:
        """The best partition over numbers of stages."""
        return best_of_equal(problem, lambda count: balanced(self.flops, count))


def best_of_equal(problem: PartitionProblem, cut: Callable[[int], list[int]]) -> Partition:
    """The best partition over equal submeshes.

    Args:
        cut: function from the number of stages to the first layer of each stage.
    """
    prices = Prices(problem)
    candidates: list[tuple[Stage, ...]] = []
    for line in lines(problem.cluster, problem.all_shapes):
        for places in equal_submeshes(problem, line):
            candidates.append(on_places(line, places, cut(len(places)), problem.num_layers))
    return best(prices, candidates)


def best(prices: Prices, candidates: Sequence[tuple[Stage, ...]]) -> Partition:
    """The cheapest candidate, without a proof."""
    costs = [prices.evaluate(stages) for stages in candidates]
    least = min(costs, default=math.inf)
    if math.isinf(least):
        return Partition((), math.inf, 0.0, Status.NOT_FOUND, prices.num_queries)
    return Partition(candidates[costs.index(least)], least, 0.0, Status.UNPROVEN, prices.num_queries)


def on_places(line: Line, places: Sequence[int], starts: Sequence[int], num_layers: int) -> tuple[Stage, ...]:
    """Stages that start at these layers, on these places of the line."""
    ends = [*starts[1:], num_layers]
    return tuple(
        Stage(first, end - 1, line.submeshes[place]) for first, end, place in zip(starts, ends, places, strict=True)
    )


def equal_submeshes(problem: PartitionProblem, line: Line) -> Iterator[list[int]]:
    """For each possible number of stages, places that divide all devices: with one shape within each kind of device,
    and one option overall."""
    options = sorted({shape.option for shape in problem.all_shapes})
    for count, option in itertools.product(range(1, problem.most_stages + 1), options):
        places: list[int] = []
        at = 0
        while at < problem.cluster.num_devices:
            here = [p for p in np.flatnonzero(line.start == at).tolist() if line.submeshes[p].shape.option == option]
            group = next(g for g in problem.cluster.groups if g.kind == line.submeshes[here[0]].shape.kind)
            stages = count * group.num_devices // problem.cluster.num_devices
            size = group.num_devices // stages if stages else 0
            fitting = [p for p in here if line.end[p] - at == size]
            if not fitting:
                break
            places.append(fitting[0])
            at += size
        if at == problem.cluster.num_devices and len(places) == count:
            yield places


def balanced(weights: Sequence[float], count: int) -> list[int]:
    """Starts of `count` non-empty runs that minimize the weight of the heaviest."""
    n = len(weights)
    done = np.concatenate([[0.0], np.cumsum(weights)])
    worst = np.full((count + 1, n + 1), np.inf)
    came = np.zeros((count + 1, n + 1), int)
    worst[0, 0] = 0.0
    for run in range(1, count + 1):
        for end in range(run, n + 1):
            options = np.maximum(worst[run - 1, :end], done[end] - done[:end])
            came[run, end] = int(options.argmin())
            worst[run, end] = options[came[run, end]]
    starts = [int(came[count, n])]
    for run in range(count - 1, 0, -1):
        starts.append(int(came[run, starts[-1]]))
    return starts[::-1]

"""Choose the sizes of the pipelines on a number of nodes, and divide the microbatches of a batch over unequal pipelines.

In: the seconds of a pipeline of each size for any number of microbatches. Out: sizes and numbers of microbatches that make the slowest
pipeline as fast as possible. All microbatches have the same size, and each is computed by one pipeline, so the global batch is kept.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import ClusterError, MicrobatchError

#: Relative exactness of the time of the slowest pipeline.
_EXACTNESS = 1e-9


@dataclass(frozen=True, slots=True)
class Sizes:
    """The chosen pipelines.

    Args:
        sizes: the nodes of each pipeline, the largest first.
        seconds: of the slowest pipeline.
    """

    sizes: tuple[int, ...]
    seconds: float


def divided(num_microbatches: int, seconds: Sequence[Callable[[int], float]]) -> tuple[int, ...]:
    """The number of microbatches of each pipeline, at least one, so that the slowest takes as little time as possible.

    Args:
        seconds: of each pipeline for a number of microbatches, which do not fall as that number rises.

    Raises:
        MicrobatchError: there are fewer microbatches than pipelines.
    """
    if num_microbatches < len(seconds):
        raise MicrobatchError(
            f"{len(seconds)} pipelines need a microbatch each, and the batch has {num_microbatches}: give at least"
            f" `num_microbatches={len(seconds)}`"
        )
    counts = [1] * len(seconds)
    most = num_microbatches - len(seconds) + 1

    def next_end(n: int) -> tuple[float, int]:
        return (seconds[n](counts[n] + 1) if counts[n] < most else math.inf), n

    # the next microbatch goes where it ends first: exact, because times do not fall with more microbatches
    ends = [next_end(n) for n in range(len(seconds))]
    heapq.heapify(ends)
    for _ in range(num_microbatches - len(seconds)):
        n = ends[0][1]
        counts[n] += 1
        heapq.heapreplace(ends, next_end(n))
    return tuple(counts)


def best_sizes(
    num_nodes: int,
    sizes: Sequence[int],
    num_microbatches: int,
    seconds: Callable[[int, int], float],
    at_least: int = 1,
    sync_s: Callable[[int], float] = lambda num_pipelines: 0.0,
) -> Sizes:
    """The pipelines that use every node, and whose step is the fastest.

    For a limit on the seconds, a pipeline of each size takes a number of microbatches; a dynamic program over nodes and pipelines finds the
    most that all take together. The limit is found by bisection.

    Args:
        sizes: the sizes of templates.
        seconds: of a pipeline of a size with a number of microbatches.
        at_least: the least number of pipelines.
        sync_s: the seconds to add up gradients between a number of pipelines, after the slowest one.

    Raises:
        ClusterError: no sum of so many sizes is the number of nodes.
    """
    most = min(num_nodes // min(sizes), num_microbatches)
    best: tuple[float, tuple[int, ...]] | None = None
    for count in range(at_least, most + 1):
        limit_s = math.inf if best is None else best[0] - sync_s(count)
        found = _fastest(num_nodes, sizes, num_microbatches, seconds, count, limit_s)
        if found is not None and (best is None or found.seconds + sync_s(count) < best[0]):
            best = (found.seconds + sync_s(count), found.sizes)
    if best is None:
        raise ClusterError(
            f"no {at_least} or more pipelines of {sizes[0]} to {sizes[-1]} nodes have {num_nodes} nodes together, with one of"
            f" {num_microbatches} microbatches each: use more nodes or microbatches, or survive fewer failures"
        )
    chosen = best[1]
    shares = divided(num_microbatches, [lambda m, size=size: seconds(size, m) for size in chosen])
    return Sizes(chosen, max(seconds(size, m) for size, m in zip(chosen, shares, strict=True)))


def _fastest(
    num_nodes: int,
    sizes: Sequence[int],
    num_microbatches: int,
    seconds: Callable[[int, int], float],
    count: int,
    limit_s: float,
) -> Sizes | None:
    """The fastest choice of `count` pipelines; None if there is none below the limit."""

    def chosen(within_s: float) -> tuple[int, ...] | None:
        takes = {
            size: _most_within(lambda m, size=size: seconds(size, m), num_microbatches, within_s) for size in sizes
        }
        return _most_microbatches(num_nodes, {size: m for size, m in takes.items() if m}, count, num_microbatches)

    high = max(seconds(size, num_microbatches) for size in sizes)
    if chosen(high) is None:
        return None
    if limit_s < high:
        if limit_s <= 0 or chosen(limit_s) is None:
            return None
        high = limit_s
    low = 0.0
    while high - low > _EXACTNESS * high:
        middle = (low + high) / 2
        low, high = (low, middle) if chosen(middle) is not None else (middle, high)
    found = chosen(high)
    assert found is not None, "the upper end of the bisection can be reached"
    return Sizes(found, high)


def _most_within(seconds: Callable[[int], float], most: int, within_s: float) -> int:
    """The most microbatches that take at most so many seconds."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if seconds(middle) <= within_s else (low, middle - 1)
    return low


def _most_microbatches(num_nodes: int, takes: dict[int, int], count: int, needed: int) -> tuple[int, ...] | None:
    """The sizes of `count` pipelines on all nodes that take the most microbatches; None if that is fewer than needed."""
    table = np.full((count + 1, num_nodes + 1), -1)
    table[0, 0] = 0
    for number in range(1, count + 1):
        for size, m in takes.items():
            before = table[number - 1, : num_nodes + 1 - size]
            np.maximum(table[number, size:], np.where(before >= 0, before + m, -1), out=table[number, size:])
    if table[count, num_nodes] < needed:
        return None
    found: list[int] = []
    left = num_nodes
    for number in range(count, 0, -1):
        total = table[number, left]
        size = next(
            size for size, m in takes.items() if size <= left and table[number - 1, left - size] == total - m >= 0
        )
        found.append(size)
        left -= size
    return tuple(sorted(found, reverse=True))

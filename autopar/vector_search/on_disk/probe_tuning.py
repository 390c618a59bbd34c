"""Find the probing that reaches a recall target and reads the fewest pages.

In: the lists of the true neighbours of a sample of queries. Out: the number of lists and the pruning. Lists of vectors
find every neighbour that a probed list holds, so recall is counted without a search.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.frame.recall_tuning import Measured, Recall, lowest_recall
from autopar.vector_search.on_disk.probing import Nearest

#: Tried distances of a centroid relative to the nearest one, minus 1; None: no pruning.
_PRUNINGS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, None)


class Tuned(NamedTuple):
    """The result of the tuning: effort and recall, and the pruning, as in `Probing`."""

    measured: Measured
    pruning: float | None


def tuned(
    nearest: Nearest,
    truth: NDArray[np.int32],
    pages: NDArray[np.int64],
    num_lists: int,
    recall_target: float,
    samples: Sequence[slice] = (slice(None),),
) -> Tuned:
    """Choose the effort and the pruning.

    Args:
        nearest: lists near each query of the sample; efforts beyond its width are all lists.
        truth: `[num_queries, k, copies]`, the lists that hold each true neighbour; `NO_ID` for fewer.
        pages: pages of each list.
        num_lists: number of lists.
        samples: queries of each sample; each has to reach the target.
    """
    num_queries, width = nearest.lists.shape
    is_known = (truth != NO_ID).any(axis=2)
    wanted = is_known.sum(axis=1)
    near = ranks_of(nearest, truth)
    near = np.where(near == NO_ID, width, near)
    ratios = np.append(nearest.ratios, np.full((num_queries, 1), np.inf, np.float32), axis=1)
    far = np.take_along_axis(ratios[:, None], near, axis=2)
    costs = np.cumsum(pages[nearest.lists], axis=1)

    def recall(effort: int, pruning: float | None) -> Recall:
        is_read = near < effort
        if pruning is not None:
            is_read &= far <= 1 + pruning
        hits = (is_read.any(axis=2) & is_known).sum(axis=1)
        return lowest_recall(hits, wanted, samples, recall_target)

    best: tuple[float, int, float | None, Recall] | None = None
    for pruning in _PRUNINGS:
        reached = lambda effort, pruning=pruning: recall(effort, pruning).at_least >= recall_target  # noqa: E731
        if not reached(width):
            continue
        effort = 1 + bisect_left(range(1, width), True, key=reached)
        bound = np.inf if pruning is None else 1 + pruning
        probed = np.minimum(effort, (nearest.ratios <= bound).sum(axis=1))
        cost = float(np.take_along_axis(costs, np.maximum(probed, 1)[:, None] - 1, axis=1).mean())
        if best is None or cost < best[0]:
            best = (cost, effort, pruning, recall(effort, pruning))
    if best is None:  # all lists find all neighbours
        return Tuned(Measured(num_lists, 1.0, {num_lists: 1.0}, recall_target, 1.0), None)
    _, effort, pruning, found = best
    return Tuned(Measured(effort, found.found, {effort: found.found}, recall_target, found.at_least), pruning)


def ranks_of(nearest: Nearest, truth: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32 `[num_queries, k, copies]`: the rank of each list of `truth` among the nearest; their number for others,
    `NO_ID` for `NO_ID`."""
    width = nearest.lists.shape[1]
    order = np.argsort(nearest.lists, axis=1)
    ranks = np.empty(truth.shape, np.int32)
    for row, lists in enumerate(np.take_along_axis(nearest.lists, order, axis=1)):
        at = np.minimum(np.searchsorted(lists, truth[row]), width - 1)
        ranks[row] = np.where(lists[at] == truth[row], order[row][at], width)
    return np.where(truth == NO_ID, NO_ID, ranks)

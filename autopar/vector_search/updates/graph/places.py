"""Choose the places of new nodes: near their neighbours where a place is free, else in blocks of their own.

In: edges of new nodes, free places. Out: a number for each new node.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.graph_on_disk.block_packing import HALF_STRENGTH, packed

#: Share of the places that may be free, before nodes fill places that are not near.
_MOST_FREE = 0.5


def placed(
    is_free: NDArray[np.bool_], per_block: int, neighbours: NDArray[np.int32], among: NDArray[np.int32]
) -> NDArray[np.int32]:
    """int32 `[m]`, the place of each new node. Places beyond `is_free` are in new blocks.

    Args:
        is_free: bool `[num_places]`.
        neighbours: int32 `[m, degree]`, old nodes that the new ones have edges to, at their rank; `NO_ID` for others.
        among: int32 `[m, degree]`, new nodes that they have edges to, likewise.
    """
    num, degree = neighbours.shape
    free = is_free.reshape(-1, per_block).copy()
    num_free = free.sum(axis=1)
    strengths = 1 / (1 + np.arange(degree) / HALF_STRENGTH)
    found = np.full(num, NO_ID, np.int32)
    for row in range(num if num_free.any() else 0):
        new = among[row]
        near = np.where(new == NO_ID, neighbours[row], found[new])
        blocks, weights = near[near != NO_ID] // per_block, strengths[near != NO_ID]
        has_room = num_free[blocks] > 0
        if not has_room.any():
            continue
        blocks, at = np.unique(blocks[has_room], return_inverse=True)
        best = int(blocks[np.argmax(np.bincount(at, weights[has_room]))])
        found[row] = best * per_block + _take(free, num_free, best)
    left = np.flatnonzero(found == NO_ID)
    if not left.size:
        return found
    row_of = np.full(num + 1, NO_ID, np.int32)  # the last entry is that of `NO_ID`
    row_of[left] = np.arange(len(left), dtype=np.int32)
    groups = packed(row_of[among[left]], per_block)
    at_end = len(free)
    empty = np.flatnonzero(num_free == per_block).tolist()
    for group in groups:
        members = left[group[group != NO_ID]]
        if empty:
            block = empty.pop(0)
            num_free[block] -= len(members)
            found[members] = block * per_block + np.arange(len(members))
            free[block, : len(members)] = False
        elif num_free.sum() > _MOST_FREE * free.size:
            for each in members.tolist():
                block = int(np.argmax(num_free))
                found[each] = block * per_block + _take(free, num_free, block)
        else:
            found[members] = at_end * per_block + np.arange(len(members))
            at_end += 1
    return found


def _take(free: NDArray[np.bool_], num_free: NDArray[np.int64], block: int) -> int:
    """The first free place of a block, which is not free any more."""
    place = int(np.argmax(free[block]))
    free[block, place] = False
    num_free[block] -= 1
    return place

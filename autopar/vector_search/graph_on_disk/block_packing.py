"""Pack graph nodes into blocks so that a block holds nodes that link to each other (Starling, arXiv 2401.02116, 4.1).

In: edges. Out: which nodes share a block. The best packing is NP-hard. Blocks grow greedily, from a node by the free
nodes with the most links to the block; then pairs of nodes change places, as long as this adds links within blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID

#: Rounds of swaps. Each block takes part in at most one swap per round.
_ROUNDS = 40
#: Minimum share of the blocks that a round of swaps has to improve.
_LEAST_SHARE = 0.002


def packed(edges: NDArray[np.int32], per_block: int) -> NDArray[np.int32]:
    """int32 `[num_blocks, per_block]`: the nodes of each block, `NO_ID` for an empty place at the end of the last.

    Args:
        edges: int32 `[n, degree]`, nearest first, `NO_ID` for none.
    """
    num = len(edges)
    if per_block == 1:
        return np.arange(num, dtype=np.int32).reshape(num, 1)
    blocks = np.full(-(-num // per_block) * per_block, NO_ID, np.int32)
    blocks[:num] = _grown(edges, per_block)
    blocks = blocks.reshape(-1, per_block)
    return _swapped(edges, blocks) if len(blocks) > 1 and (edges != NO_ID).any() else blocks


def links_within(edges: NDArray[np.int32], blocks: NDArray[np.int32]) -> int:
    """The number of edges whose two nodes share a block."""
    block_of = _block_of(blocks, len(edges))
    return int(((block_of[np.maximum(edges, 0)] == block_of[:, None]) & (edges != NO_ID)).sum())


def _grown(edges: NDArray[np.int32], per_block: int) -> NDArray[np.int32]:
    """The nodes, block by block. A block starts at the first free neighbour of the block before, else at any."""
    num = len(edges)
    is_free = np.ones(num + 1, bool)
    is_free[num] = False  # NO_ID, as the index -1
    links, order = np.zeros(num + 1, np.int32), np.empty(num, np.int32)
    placed, scan, seed = 0, 0, 0
    while placed < num:
        room = min(per_block, num - placed)
        members = [seed]
        is_free[seed] = False
        touched = [near := edges[seed][is_free[edges[seed]]]]
        links[near] += 2  # of the seed's own neighbours, the block is made first
        while len(members) < room:
            candidates = np.concatenate(touched)
            candidates = candidates[is_free[candidates]]
            if not candidates.size:
                while scan < num and not is_free[scan]:
                    scan += 1
                best = scan
            else:
                best = int(candidates[np.argmax(links[candidates])])
            members.append(best)
            is_free[best] = False
            near = edges[best][is_free[edges[best]]]
            links[near] += 1
            touched.append(near)
        order[placed : placed + room] = members
        placed += room
        every = np.concatenate(touched)
        links[every] = 0
        left = every[is_free[every]]
        if left.size:
            seed = int(left[0])
        else:
            while scan < num and not is_free[scan]:
                scan += 1
            seed = scan
    return order


def _swapped(edges: NDArray[np.int32], blocks: NDArray[np.int32]) -> NDArray[np.int32]:
    """Blocks after swaps that add links within them. A node counts its own edges and those that lead to it."""
    num, num_blocks = len(edges), len(blocks)
    source = np.repeat(np.arange(num, dtype=np.int32), edges.shape[1])
    target = edges.reshape(-1)
    source, target = source[target != NO_ID], target[target != NO_ID]
    blocks, block_of = blocks.copy(), _block_of(blocks, num)
    ends = np.concatenate([source, target]), np.concatenate([target, source])
    for _ in range(_ROUNDS):
        # links of each node to each block that it has links to
        keys = ends[0].astype(np.int64) * num_blocks + block_of[ends[1]]
        keys, links = np.unique(keys, return_counts=True)
        node, block = (keys // num_blocks).astype(np.int32), (keys % num_blocks).astype(np.int32)
        is_own = block == block_of[node]
        own = np.zeros(num, np.int64)
        own[node[is_own]] = links[is_own]
        gain = np.where(is_own, -1, links - own[node])
        best = np.lexsort((-gain, node))
        best = best[np.append(True, np.diff(node[best]) != 0)]  # of each node, its best other block
        best = best[gain[best] > 0]
        # in that block, the node with the fewest links gives way
        weakest = np.argmin(np.where(blocks == NO_ID, -1, own[blocks]), axis=1)
        there = blocks[np.arange(num_blocks), weakest]
        given = there[block[best]]
        lost = np.where(given == NO_ID, 0, own[given])
        back = _links_to(keys, links, num_blocks, given, block_of[node[best]])
        total = gain[best] - lost + np.where(given == NO_ID, 0, back)
        wanted = best[total > 0][np.argsort(-total[total > 0], kind="stable")]
        taken, num_swaps = np.zeros(num_blocks, bool), 0
        for mover, to in zip(node[wanted].tolist(), block[wanted].tolist(), strict=True):
            origin = int(block_of[mover])
            if taken[to] or taken[origin]:
                continue
            taken[[to, origin]] = True
            other, place = int(there[to]), int(weakest[to])
            blocks[to, place] = mover
            blocks[origin, int(np.flatnonzero(blocks[origin] == mover)[0])] = other
            block_of[mover] = to
            if other != NO_ID:
                block_of[other] = origin
            num_swaps += 1
        if num_swaps <= _LEAST_SHARE * num_blocks:
            break
    return blocks


def _links_to(
    keys: NDArray[np.int64],
    links: NDArray[np.int64],
    num_blocks: int,
    nodes: NDArray[np.int32],
    blocks: NDArray[np.int32],
) -> NDArray[np.int64]:
    """The links of each node to a block, from sorted keys `node * num_blocks + block`."""
    wanted = nodes.astype(np.int64) * num_blocks + blocks
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, links[at], 0)


def _block_of(blocks: NDArray[np.int32], num: int) -> NDArray[np.int32]:
    """The block of each node."""
    found = np.full(num + 1, NO_ID, np.int32)
    found[blocks] = np.arange(len(blocks), dtype=np.int32)[:, None]
    return found[:num]

"""Pack graph nodes into blocks so that a block holds nodes that link to each other (Starling, arXiv 2401.02116, 4.1).

In: edges. Out: which nodes share a block. The best packing is NP-hard. Blocks grow greedily, from a node by the free
nodes with the strongest links to the block; then pairs of nodes change places, as long as this adds to the links within
blocks. A link is the stronger, the nearer the neighbour: a search follows a beam of near nodes, and the last edges of a
node lead far away.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID

#: Rounds of swaps. Each block takes part in at most one swap per round.
_ROUNDS = 40
#: Minimum gain of a swap, which is above the errors of the sums; nodes whose links are summed at a time.
_LEAST_GAIN, _NODES_AT_ONCE = 1e-3, 8192
#: Minimum share of the blocks that a round of swaps has to improve.
_LEAST_SHARE = 0.002
#: The edge of rank r has the strength 1 / (1 + r / this).
HALF_STRENGTH = 8.0


class _Links(NamedTuple):
    """Links of nodes in both directions. Those of node v are at `first[v]` to `first[v + 1]`.

    Args:
        first: int64 `[n + 1]`.
        others: int32 `[2 * num_edges]`, the other nodes.
        strengths: f32 `[2 * num_edges]`.
    """

    first: NDArray[np.int64]
    others: NDArray[np.int32]
    strengths: NDArray[np.float32]

    @classmethod
    def of(cls, edges: NDArray[np.int32]) -> _Links:
        """The links of edges; one in each direction is two."""
        num, is_edge = len(edges), edges != NO_ID
        num_out, target = is_edge.sum(axis=1), edges[is_edge]
        strengths = np.broadcast_to(_strengths(edges.shape[1]), edges.shape)[is_edge]
        source = np.repeat(np.arange(num, dtype=np.int32), num_out)
        num_in = np.bincount(target, minlength=num)
        first = np.concatenate([[0], np.cumsum(num_out + num_in)])
        others, strong = np.empty(2 * len(target), np.int32), np.empty(2 * len(target), np.float32)
        at = _within(first[:-1], num_out)
        others[at], strong[at] = target, strengths
        order = np.argsort(target, kind="stable")
        at = _within(first[:-1] + num_out, num_in)
        others[at], strong[at] = source[order], strengths[order]
        return cls(first, others, strong)

    def to_blocks(self, block_of: NDArray[np.int32], num_blocks: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Keys `node * num_blocks + block`, ascending, and the links of the node to the block, where it has any."""
        parts, num = [], len(self.first) - 1
        for start in range(0, num, _NODES_AT_ONCE):
            end = min(start + _NODES_AT_ONCE, num)
            own = slice(self.first[start], self.first[end])
            node = np.repeat(np.arange(start, end), np.diff(self.first[start : end + 1]))
            keys = node * num_blocks + block_of[self.others[own]]
            order = np.argsort(keys)
            keys, strengths = keys[order], self.strengths[own][order]
            begin = np.flatnonzero(np.append(keys.size > 0, keys[1:] != keys[:-1]))
            if keys.size:
                parts.append((keys[begin], np.add.reduceat(strengths, begin)))
        keys, links = zip(*parts, strict=True)
        return np.concatenate(keys), np.concatenate(links)


def packed(edges: NDArray[np.int32], per_block: int) -> NDArray[np.int32]:
    """int32 `[num_blocks, per_block]`: the nodes of each block, `NO_ID` for an empty place at the end of the last.

    Args:
        edges: int32 `[n, degree]`, nearest first, `NO_ID` for none.
    """
    num = len(edges)
    if per_block == 1:
        return np.arange(num, dtype=np.int32).reshape(num, 1)
    links = _Links.of(edges)
    blocks = np.full(-(-num // per_block) * per_block, NO_ID, np.int32)
    blocks[:num] = _grown(links, per_block)
    blocks = blocks.reshape(-1, per_block)
    return _swapped(edges, links, blocks) if len(blocks) > 1 and links.others.size else blocks


def links_within(edges: NDArray[np.int32], blocks: NDArray[np.int32]) -> int:
    """The number of edges whose two nodes share a block."""
    block_of = _block_of(blocks, len(edges))
    return int(((block_of[np.maximum(edges, 0)] == block_of[:, None]) & (edges != NO_ID)).sum())


def _grown(links: _Links, per_block: int) -> NDArray[np.int32]:
    """The nodes, block by block. A block starts at a free neighbour of the block before, else at any."""
    num = len(links.first) - 1
    is_free = np.ones(num, bool)
    found, order = np.zeros(num, np.float32), np.empty(num, np.int32)
    placed, scan, seed = 0, 0, 0

    def join(node: int) -> NDArray[np.int32]:
        """Take a node into the block; its free neighbours."""
        is_free[node] = False
        own = slice(links.first[node], links.first[node + 1])
        near = links.others[own]
        is_near = is_free[near]
        near = near[is_near]
        np.add.at(found, near, links.strengths[own][is_near])
        return near

    while placed < num:
        room = min(per_block, num - placed)
        members, touched = [seed], [join(seed)]
        while len(members) < room:
            candidates = np.concatenate(touched)
            candidates = candidates[is_free[candidates]]
            if candidates.size:
                best = int(candidates[np.argmax(found[candidates])])
            else:
                scan = _first_free(is_free, scan)
                best = scan
            members.append(best)
            touched.append(join(best))
        order[placed : placed + room] = members
        placed += room
        every = np.concatenate(touched)
        found[every] = 0
        left = every[is_free[every]]
        scan = scan if left.size else _first_free(is_free, scan)
        seed = int(left[0]) if left.size else scan
    return order


def _first_free(is_free: NDArray[np.bool_], scan: int) -> int:
    """The first free node from a place on; the number of nodes if there is none."""
    while scan < len(is_free) and not is_free[scan]:
        scan += 1
    return scan


def _swapped(edges: NDArray[np.int32], links: _Links, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
    """Blocks after swaps that add to the links within them."""
    num, num_blocks = len(edges), len(blocks)
    blocks, block_of = blocks.copy(), _block_of(blocks, num)
    for _ in range(_ROUNDS):
        keys, strength = links.to_blocks(block_of, num_blocks)
        node, block = (keys // num_blocks).astype(np.int32), (keys % num_blocks).astype(np.int32)
        is_own = block == block_of[node]
        own = np.zeros(num, np.float32)
        own[node[is_own]] = strength[is_own]
        gain = np.where(is_own, -1, strength - own[node])
        best = np.lexsort((-gain, node))
        best = best[np.append(True, np.diff(node[best]) != 0)]  # of each node, its best other block
        best = best[gain[best] > 0]
        # in that block, the node with the weakest links gives way
        weakest = np.argmin(np.where(blocks == NO_ID, -1, own[blocks]), axis=1)
        there = blocks[np.arange(num_blocks), weakest]
        given = there[block[best]]
        back = _found(keys, strength, given.astype(np.int64) * num_blocks + block_of[node[best]]) - own[given]
        back -= 2 * _between(edges, node[best], given)  # they stay in different blocks
        total = gain[best] + np.where(given == NO_ID, 0, back)
        is_gain = total > _LEAST_GAIN
        wanted = best[is_gain][np.argsort(-total[is_gain], kind="stable")]
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


def _strengths(degree: int) -> NDArray[np.float32]:
    """f32 `[degree]`, of the edges of a node, nearest first."""
    return (1 / (1 + np.arange(degree) / HALF_STRENGTH)).astype(np.float32)


def _within(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places `start` to `start + count` of each part, in one row."""
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(starts - before, counts)


def _between(edges: NDArray[np.int32], some: NDArray[np.int32], others: NDArray[np.int32]) -> NDArray[np.float32]:
    """The links between pairs of nodes, in both directions."""
    found = np.zeros(len(some), np.float32)
    for rank, strength in enumerate(_strengths(edges.shape[1])):
        found += strength * ((edges[some, rank] == others).astype(np.float32) + (edges[others, rank] == some))
    return found


def _found(keys: NDArray[np.int64], links: NDArray[np.float32], wanted: NDArray[np.int64]) -> NDArray[np.float32]:
    """The links of each key, from sorted keys; 0 for others."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, links[at], 0)


def _block_of(blocks: NDArray[np.int32], num: int) -> NDArray[np.int32]:
    """The block of each node."""
    found = np.full(num + 1, NO_ID, np.int32)
    found[blocks] = np.arange(len(blocks), dtype=np.int32)[:, None]
    return found[:num]

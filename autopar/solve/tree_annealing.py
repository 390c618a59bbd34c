"""Improve an assignment by simulated annealing whose moves re-optimise a random tree of nodes at once.

In: a `Pairwise`, an assignment that fits, the price of each strategy's memory. A move grows a random tree in which
only tree edges connect two nodes, keeps all other nodes, and finds the tree's cheapest strategies by dynamic
programming. Memory is priced at a random multiple, and costs get Gumbel noise of the temperature's size, which
approximates a Gibbs sample (perturb-and-minimise). The result is accepted if it fits and by the Metropolis rule.

Moves of single nodes would rarely help, because a node's best strategy usually agrees with its neighbours'. (Trees as
moves: Hamze and de Freitas, "From fields to trees", 2004.)
"""

from __future__ import annotations

import numpy as np

from autopar.solve.flat_problem import Pairwise
from autopar.solve.numba_jit import compiled


@compiled
def _random(state: np.ndarray) -> float:
    """The next random number in (0, 1), by xorshift64*; `state` is one non-zero uint64."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return (np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) + 0.5) / 9007199254740992.0


@compiled
def _shift(p: Pairwise, node: int, old: int, new: int, loads: np.ndarray) -> None:
    """Update `loads` for a node's change from strategy `old` to `new`."""
    for i in range(p.nodes[node].pieces, p.nodes[node + 1].pieces):
        piece = p.pieces[i]
        change = p.amounts[piece.at + new] - p.amounts[piece.at + old]
        if change != 0.0:
            for t in range(piece.first, piece.last):
                loads[t] += change


@compiled
def _exceeds(p: Pairwise, node: int, old: int, new: int, loads: np.ndarray) -> bool:
    """Whether `loads` exceeds the limit at an instant where strategy `new` holds more memory than `old`."""
    for i in range(p.nodes[node].pieces, p.nodes[node + 1].pieces):
        piece = p.pieces[i]
        if p.amounts[piece.at + new] > p.amounts[piece.at + old]:
            for t in range(piece.first, piece.last):
                if loads[t] > p.limit:
                    return True
    return False


@compiled
def _grow(
    p: Pairwise, root: int, size: int, state: np.ndarray, position: np.ndarray, ties: np.ndarray, tree: np.ndarray
) -> int:
    """Grow a random tree into the rows of `tree`: node, position of its parent, edge to it. Returns its size.

    Args:
        position: each node's position in the tree, -1 outside; filled in.
        ties: number of each node's edges into the tree; filled in.
    """
    nodes, edges, edges_of = p.nodes, p.edges, p.edges_of
    pending = np.empty((size * 4 + 64, 2), np.int64)
    pending[0, 0], pending[0, 1] = root, -1
    waiting, count = 1, 0
    while count < size and waiting > 0:
        at = int(_random(state) * waiting)
        node, by = pending[at, 0], pending[at, 1]
        waiting -= 1
        pending[at] = pending[waiting]
        if position[node] >= 0 or ties[node] > 1:
            continue
        position[node] = count
        tree[count, 0], tree[count, 1], tree[count, 2] = node, -1, by
        if by >= 0:
            tree[count, 1] = position[edges[by].tail if edges[by].head == node else edges[by].head]
        count += 1
        for j in range(nodes[node].edges, nodes[node + 1].edges):
            edge = edges[edges_of[j]]
            other = edge.tail if edge.head == node else edge.head
            ties[other] += 1
            if position[other] < 0 and ties[other] == 1 and waiting < len(pending):
                pending[waiting, 0], pending[waiting, 1] = other, edges_of[j]
                waiting += 1
    return count


@compiled
def _forget(p: Pairwise, tree: np.ndarray, count: int, position: np.ndarray, ties: np.ndarray) -> None:
    """Reset `position` and `ties` after `_grow`."""
    for k in range(count):
        node = tree[k, 0]
        position[node] = -1
        for j in range(p.nodes[node].edges, p.nodes[node + 1].edges):
            ties[p.edges[p.edges_of[j]].tail] = 0
            ties[p.edges[p.edges_of[j]].head] = 0


@compiled
def _outside(p: Pairwise, node: int, choices: np.ndarray, position: np.ndarray, own: np.ndarray) -> None:
    """Write the cost of each strategy of a node, with its edges that leave the tree, into `own`."""
    labels, entries = p.labels, p.entries
    start, size = p.nodes[node].start, len(own)
    for s in range(size):
        own[s] = p.costs[start + s]
    for j in range(p.nodes[node].edges, p.nodes[node + 1].edges):
        edge = p.edges[p.edges_of[j]]
        if edge.head == node:
            other, lab = edge.tail, edge.head_labels
            row = edge.core + labels[edge.tail_labels + choices[other]] * edge.num_cols
        else:
            other, lab = edge.head, edge.tail_labels
            row = edge.core_t + labels[edge.head_labels + choices[other]] * edge.num_rows
        if position[other] < 0:
            for s in range(size):
                own[s] += entries[row + labels[lab + s]]


@compiled
def _minimise(
    p: Pairwise, tree: np.ndarray, count: int, starts: np.ndarray, perturbed: np.ndarray, new: np.ndarray
) -> None:
    """Write the cheapest strategies of a tree at the costs `perturbed` (overwritten) into `new`."""
    labels, entries, edges = p.labels, p.entries, p.edges
    least, out = np.empty(len(p.costs)), np.empty(len(p.costs))
    for k in range(count - 1, 0, -1):
        up, edge = tree[k, 1], edges[tree[k, 2]]
        if edge.head == tree[k, 0]:
            lab, other_lab, core, own, other = (
                edge.head_labels,
                edge.tail_labels,
                edge.core_t,
                edge.num_cols,
                edge.num_rows,
            )
        else:
            lab, other_lab, core, own, other = (
                edge.tail_labels,
                edge.head_labels,
                edge.core,
                edge.num_rows,
                edge.num_cols,
            )
        for r in range(own):
            least[r] = np.inf
        for s in range(starts[k + 1] - starts[k]):
            r = labels[lab + s]
            least[r] = min(least[r], perturbed[starts[k] + s])
        for c in range(other):
            out[c] = np.inf
        for r in range(own):
            row, b = core + r * other, least[r]
            for c in range(other):
                x = entries[row + c] + b
                y = out[c]
                out[c] = x if x < y else y
        for s in range(starts[up + 1] - starts[up]):
            perturbed[starts[up] + s] += out[labels[other_lab + s]]
    for k in range(count):
        row, lab = 0, -1
        if k > 0:
            edge, chosen = edges[tree[k, 2]], new[tree[k, 1]]
            if edge.head == tree[k, 0]:
                lab, row = edge.head_labels, edge.core + labels[edge.tail_labels + chosen] * edge.num_cols
            else:
                lab, row = edge.tail_labels, edge.core_t + labels[edge.head_labels + chosen] * edge.num_rows
        cheapest = np.inf
        for s in range(starts[k + 1] - starts[k]):
            x = perturbed[starts[k] + s]
            if lab >= 0:
                x += entries[row + labels[lab + s]]
            if x < cheapest:
                cheapest, new[k] = x, s


@compiled
def _difference(
    p: Pairwise, tree: np.ndarray, count: int, choices: np.ndarray, starts: np.ndarray, own: np.ndarray, new: np.ndarray
) -> float:
    """The increase of the cost if the tree takes the strategies `new`."""
    labels, entries = p.labels, p.entries
    change = 0.0
    for k in range(count):
        change += own[starts[k] + new[k]] - own[starts[k] + choices[tree[k, 0]]]
        if k > 0:
            edge = p.edges[tree[k, 2]]
            at_head = edge.head == tree[k, 0]
            r, c = (new[tree[k, 1]], new[k]) if at_head else (new[k], new[tree[k, 1]])
            change += entries[edge.core + labels[edge.tail_labels + r] * edge.num_cols + labels[edge.head_labels + c]]
            r, c = choices[edge.tail], choices[edge.head]
            change -= entries[edge.core + labels[edge.tail_labels + r] * edge.num_cols + labels[edge.head_labels + c]]
    return float(change)


@compiled
def anneal(
    p: Pairwise,
    held: np.ndarray,
    choices: np.ndarray,
    best: np.ndarray,
    loads: np.ndarray,
    costs: np.ndarray,
    state: np.ndarray,
    moves: int,
    temperature: float,
    largest: int,
) -> None:
    """Make moves at some temperature.

    Args:
        held: price of each strategy's memory.
        choices, best: the assignment and the best so far; both change in place.
        loads: live memory of `choices` at each instant; changes in place.
        costs: costs of `choices` and `best`; change in place.
        state: state of the random number generator.
        largest: largest number of nodes of a tree.
    """
    nodes = p.nodes
    num_nodes = len(choices)
    position, ties = np.full(num_nodes, -1, np.int64), np.zeros(num_nodes, np.int64)
    tree, new, starts = np.empty((largest, 3), np.int64), np.empty(largest, np.int64), np.zeros(largest + 1, np.int64)
    own, perturbed = np.empty(len(p.costs)), np.empty(len(p.costs))
    for _ in range(moves):
        size = int(2.0 * (largest / 2.0) ** _random(state))  # log-uniform
        factor = max(0.0, 2.0 * _random(state) - 0.25)
        count = _grow(p, int(_random(state) * num_nodes), size, state, position, ties, tree)
        for k in range(count):
            node = tree[k, 0]
            start = nodes[node].start
            starts[k + 1] = starts[k] + nodes[node + 1].start - start
            _outside(p, node, choices, position, own[starts[k] : starts[k + 1]])
            for s in range(starts[k + 1] - starts[k]):
                noise = temperature * np.log(-np.log(_random(state)))
                perturbed[starts[k] + s] = own[starts[k] + s] + factor * held[start + s] + noise
        _minimise(p, tree, count, starts, perturbed, new)
        change = _difference(p, tree, count, choices, starts, own, new)
        if change <= 0.0 or change < -temperature * np.log(_random(state)):
            for k in range(count):
                node = int(tree[k, 0])
                _shift(p, node, choices[node], new[k], loads)
            bad = False
            for k in range(count):
                node = int(tree[k, 0])
                bad = bad or _exceeds(p, node, choices[node], new[k], loads)
            if bad:
                for k in range(count):
                    node = int(tree[k, 0])
                    _shift(p, node, new[k], choices[node], loads)
            else:
                for k in range(count):
                    choices[tree[k, 0]] = new[k]
                costs[0] += change
                if costs[0] < costs[1]:
                    costs[1] = costs[0]
                    best[:] = choices
        _forget(p, tree, count, position, ties)

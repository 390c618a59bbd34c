"""Bound a problem from below by sequential tree-reweighted message passing (TRW-S).

In: a `Pairwise`, and a price of each strategy (its cost plus its memory at some prices). Out: messages and a lower
bound. Messages reparametrise the problem: they add to the nodes what they subtract from the edges, so the cost of
every assignment stays the same. A pass visits the nodes in order and sends messages ahead so that the edges behind
have minimum 0; the bound is the sum of the node minima. The next pass goes the other way. (Kolmogorov, "Convergent
tree-reweighted message passing for energy minimization", 2006.)

A message has one entry per class of strategies with equal costs on its edge, so a pass costs as much as the compact
tables are large.
"""

from __future__ import annotations

import numpy as np

from autopar.solve.flat_problem import Pairwise
from autopar.solve.numba_jit import compiled


@compiled
def sweep(p: Pairwise, prices: np.ndarray, messages: np.ndarray, forward: bool) -> float:
    """Run one pass towards higher (`forward`) or lower nodes. Returns the bound, up to rounding."""
    nodes, edges, edges_of, labels, entries = p.nodes, p.edges, p.edges_of, p.labels, p.entries
    num_nodes = len(nodes) - 1
    total, least = np.empty(len(prices)), np.empty(len(prices))  # for one node at a time; sized for any
    bound = 0.0
    for i in range(num_nodes):
        node = i if forward else num_nodes - 1 - i
        first, last = nodes[node].edges, nodes[node + 1].edges
        start, size = nodes[node].start, nodes[node + 1].start - nodes[node].start
        for s in range(size):
            total[s] = prices[start + s]
        for j in range(first, last):
            edge = edges[edges_of[j]]
            at_head = edge.head == node
            at, lab = (edge.to_head, edge.head_labels) if at_head else (edge.to_tail, edge.tail_labels)
            for s in range(size):
                total[s] += messages[at + labels[lab + s]]
        lower = nodes[node].lower
        higher = last - first - lower
        ahead = higher if forward else lower
        share = 1.0 / max(1, lower, higher)
        rest = 1.0 - share * ahead
        if rest > 1e-12:
            cheapest = np.inf
            for s in range(size):
                cheapest = min(cheapest, total[s])
            bound += rest * cheapest
        start = first + lower if forward else first
        for j in range(start, start + ahead):
            edge = edges[edges_of[j]]
            if forward:
                lab, core, own, other = edge.tail_labels, edge.core, edge.num_rows, edge.num_cols
                back, out = edge.to_tail, edge.to_head
            else:
                lab, core, own, other = edge.head_labels, edge.core_t, edge.num_cols, edge.num_rows
                back, out = edge.to_head, edge.to_tail
            for r in range(own):
                least[r] = np.inf
            for s in range(size):
                r = labels[lab + s]
                least[r] = min(least[r], total[s])
            for r in range(own):
                least[r] = share * least[r] - messages[back + r]
            bound += _send(entries[core : core + own * other], least[:own], messages[out : out + other])
    return bound


@compiled
def _send(entries: np.ndarray, own: np.ndarray, message: np.ndarray) -> float:
    """Write the column minima of (table + row costs), shifted to minimum 0, into `message`. Returns the shift."""
    other = len(message)
    message[:] = np.inf
    for r in range(len(own)):
        row, offset = r * other, own[r]
        for c in range(other):
            x, y = entries[row + c] + offset, message[c]
            message[c] = x if x < y else y
    taken = message.min()
    message -= taken
    return taken


@compiled
def decode(p: Pairwise, prices: np.ndarray, messages: np.ndarray, forward: bool, choices: np.ndarray) -> None:
    """Choose strategies node by node into `choices`, from the choices of nodes behind and the messages of nodes ahead."""
    nodes, edges, labels, entries = p.nodes, p.edges, p.labels, p.entries
    num_nodes = len(nodes) - 1
    total = np.empty(len(prices))
    for i in range(num_nodes):
        node = i if forward else num_nodes - 1 - i
        start, size = nodes[node].start, nodes[node + 1].start - nodes[node].start
        for s in range(size):
            total[s] = prices[start + s]
        for j in range(nodes[node].edges, nodes[node + 1].edges):
            edge = edges[p.edges_of[j]]
            at_head = edge.head == node
            lab = edge.head_labels if at_head else edge.tail_labels
            if at_head == forward:
                if at_head:
                    row = edge.core + labels[edge.tail_labels + choices[edge.tail]] * edge.num_cols
                else:
                    row = edge.core_t + labels[edge.head_labels + choices[edge.head]] * edge.num_rows
                for s in range(size):
                    total[s] += entries[row + labels[lab + s]]
            else:
                at = edge.to_head if at_head else edge.to_tail
                for s in range(size):
                    total[s] += messages[at + labels[lab + s]]
        best = 0
        for s in range(size):
            if total[s] < total[best]:
                best = s
        choices[node] = best


@compiled
def evaluate(p: Pairwise, prices: np.ndarray, choices: np.ndarray) -> float:
    """The cost of an assignment at the given prices of strategies."""
    total = 0.0
    for node in range(len(choices)):
        total += prices[p.nodes[node].start + choices[node]]
    for e in range(len(p.edges)):
        edge = p.edges[e]
        r = p.labels[edge.tail_labels + choices[edge.tail]]
        total += p.entries[edge.core + r * edge.num_cols + p.labels[edge.head_labels + choices[edge.head]]]
    return float(total)

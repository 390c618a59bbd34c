"""Compute a lower bound of the cost that is valid in spite of rounding.

In: a `Pairwise`, prices of memory, messages. Messages add to the nodes exactly the costs that they subtract from the
edges. The sum of the minima of all nodes and edges therefore bounds the cost of every assignment, whatever the
messages are. Each term, and their sum, is lowered by the largest possible error of its own rounding.
"""

from __future__ import annotations

import numpy as np

from autopar.solve.flat_problem import Pairwise
from autopar.solve.instant_loads import price
from autopar.solve.numba_jit import compiled

_UNIT = 2.0**-52
_DIGITS = 40  # binary digits of prices: their sums over instants are exact


def certified_bound(p: Pairwise, multipliers: np.ndarray, messages: np.ndarray) -> float:
    """A lower bound of the cost of every assignment that fits.

    Args:
        multipliers: price of memory at each instant, not negative.
        messages: messages of a pass towards higher or lower nodes, at about these prices.
    """
    exact = np.asarray(multipliers, float)
    total = float(exact.sum())
    if total > 0.0:
        unit = 2.0 ** (np.floor(np.log2(total)) - _DIGITS)
        exact = np.round(exact / unit) * unit
    held = np.zeros(len(p.costs))
    price(p, exact, held)
    terms = np.zeros(len(p.nodes) - 1 + len(p.edges))
    _least_terms(p, held, messages, terms)
    spent = float(exact.sum()) * p.limit if total > 0.0 else 0.0
    magnitude = float(np.abs(terms).sum()) + abs(spent)
    return float(terms.sum()) - spent - _UNIT * (len(terms) + 8) * magnitude


@compiled
def _least_terms(p: Pairwise, held: np.ndarray, messages: np.ndarray, terms: np.ndarray) -> None:
    """Write lower bounds of the minimum of each node, then of each edge, into `terms`."""
    nodes, edges, edges_of, labels, entries = p.nodes, p.edges, p.edges_of, p.labels, p.entries
    num_nodes = len(nodes) - 1
    total, least = np.empty(len(held)), np.empty(len(held))
    for node in range(num_nodes):
        first, last = nodes[node].edges, nodes[node + 1].edges
        start, size = nodes[node].start, nodes[node + 1].start - nodes[node].start
        ahead = nodes[node].lower  # the last pass went to lower nodes
        share = 1.0 / max(1, ahead, last - first - ahead)
        rest = max(0.0, 1.0 - share * ahead)
        count = 8 + last - first + nodes[node + 1].pieces - nodes[node].pieces
        cheapest = np.inf
        for s in range(size):
            value = p.costs[start + s] + held[start + s]
            magnitude = abs(p.costs[start + s]) + held[start + s]
            for j in range(first, last):
                edge = edges[edges_of[j]]
                at, lab = (edge.to_head, edge.head_labels) if edge.head == node else (edge.to_tail, edge.tail_labels)
                message = messages[at + labels[lab + s]]
                value += message
                magnitude += abs(message)
            total[s] = value - _UNIT * count * magnitude
            cheapest = min(cheapest, rest * total[s] - _UNIT * 4 * magnitude)
        terms[node] = cheapest
        for j in range(first, first + ahead):
            edge = edges[edges_of[j]]
            for r in range(edge.num_cols):
                least[r] = np.inf
            for s in range(size):
                r = labels[edge.head_labels + s]
                least[r] = min(least[r], total[s])
            cheapest = np.inf
            for r in range(edge.num_cols):
                mine, back = share * least[r], messages[edge.to_head + r]
                for c in range(edge.num_rows):
                    entry, out = entries[edge.core_t + r * edge.num_rows + c], messages[edge.to_tail + c]
                    if entry < np.inf:
                        magnitude = abs(mine) + abs(back) + abs(entry) + abs(out)
                        cheapest = min(cheapest, mine - back + entry - out - _UNIT * 8 * magnitude)
            terms[num_nodes + edges_of[j]] = cheapest

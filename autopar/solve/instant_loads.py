"""Compute the live memory of an assignment at each instant, and the cost of each strategy's memory at given prices."""

from __future__ import annotations

import numpy as np

from autopar.solve.flat_problem import Pairwise
from autopar.solve.numba_jit import compiled


@compiled
def loads_of(p: Pairwise, choices: np.ndarray, loads: np.ndarray) -> None:
    """Write the live memory of an assignment at each instant, in bytes, into `loads`."""
    change = np.zeros(len(loads) + 1)
    for node in range(len(choices)):
        for i in range(p.nodes[node].pieces, p.nodes[node + 1].pieces):
            amount = p.amounts[p.pieces[i].at + choices[node]]
            change[p.pieces[i].first] += amount
            change[p.pieces[i].last] -= amount
    live = 0.0
    for t in range(len(loads)):
        live += change[t]
        loads[t] = p.base[t] + live


@compiled
def price(p: Pairwise, multipliers: np.ndarray, prices: np.ndarray) -> None:
    """Write the cost of each strategy's memory into `prices`, at a price per byte for each instant (`multipliers`)."""
    until = np.zeros(len(multipliers) + 1)
    for t in range(len(multipliers)):
        until[t + 1] = until[t] + multipliers[t]
    prices[:] = 0.0
    for node in range(len(p.nodes) - 1):
        start, size = p.nodes[node].start, p.nodes[node + 1].start - p.nodes[node].start
        for i in range(p.nodes[node].pieces, p.nodes[node + 1].pieces):
            rate = until[p.pieces[i].last] - until[p.pieces[i].first]
            if rate > 0.0:
                for s in range(size):
                    prices[start + s] += rate * p.amounts[p.pieces[i].at + s]

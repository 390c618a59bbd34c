"""Drop memory constraints that another instant's constraint implies.

In: a `Problem`. Out: an equivalent problem without the instants at which another instant holds at least as much memory
under every assignment. With fewer constraints more strategies are dominated.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from autopar.solve.live_instants import instants_of
from autopar.solve.problem import Problem, Usage

_MOST_WORK = 2 * 10**8  # amounts to compare, above which thinning takes more time than it saves


def thin(problem: Problem) -> Problem:
    """The problem with only the instants that can be the first to exceed the limit, numbered in order."""
    if problem.memory_limit is None:
        return problem
    instants = instants_of(problem)
    sizes = [len(c) for c in problem.node_costs]
    starts = np.concatenate(([0], np.cumsum(sizes)))
    num_instants = len(instants.times)
    if num_instants**2 * int(starts[-1]) > _MOST_WORK or not num_instants:
        return problem
    held = np.zeros((num_instants, starts[-1]))
    for usage in instants.usages:
        first, last = np.searchsorted(instants.times, (usage.start, usage.end))
        held[first:last, starts[usage.node] : starts[usage.node + 1]] += usage.amounts
    held = held[_binding(held, starts[:-1])]
    return replace(problem, usages=tuple(_usages(held, starts)))


def _binding(held: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The instants that no other instant dominates, in order."""
    left = np.ones(len(held), bool)
    means = np.add.reduceat(held, starts, axis=1) / np.diff(np.append(starts, held.shape[1]))
    for instant in np.argsort(-means.sum(axis=1), kind="stable").tolist():
        if left[instant]:
            most_above = np.maximum.reduceat(held - held[instant], starts, axis=1).sum(axis=1)  # over assignments
            left &= most_above > 0
            left[instant] = True
    return np.flatnonzero(left)


def _usages(held: np.ndarray, starts: np.ndarray) -> list[Usage]:
    """The fewest usages that give the rows of `held`."""
    usages: list[Usage] = []
    for node, (start, end) in enumerate(itertools.pairwise(starts)):
        own = held[:, start:end]
        bounds = [0, *(np.flatnonzero((own[1:] != own[:-1]).any(axis=1)) + 1).tolist(), len(own)]
        usages += [Usage(node, a, b, own[a].copy()) for a, b in itertools.pairwise(bounds) if own[a].any()]
    return usages

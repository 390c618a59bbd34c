"""`min_cut`: the source side of a minimum cut, compared with OR-Tools."""

from __future__ import annotations

import random

import pytest
from ortools.graph.python import max_flow

from autopar.solve.min_cut import source_side


@pytest.mark.parametrize("seed", range(200))
def test_the_side_is_that_of_or_tools(seed: int) -> None:
    """Ties among capacities, unreachable nodes and capacities beyond 32 bits among them."""
    draw = random.Random(seed)
    num_nodes = draw.randint(2, 30)
    pairs = [(draw.randrange(num_nodes), draw.randrange(num_nodes)) for _ in range(draw.randint(1, 4 * num_nodes))]
    amounts = (0, 1, 2, 3, draw.randint(0, 10**12), 10**15)
    arcs = [(tail, head, draw.choice(amounts)) for tail, head in pairs if tail != head]
    solver = max_flow.SimpleMaxFlow()
    for arc in [*arcs, (0, 1, 0)]:
        solver.add_arc_with_capacity(*arc)
    assert solver.solve(0, 1) == solver.OPTIMAL
    assert source_side(arcs, 0, 1) == {0, *solver.get_source_side_min_cut()}


def test_no_arcs_leave_the_source_alone() -> None:
    assert source_side([], 0, 1) == {0}

"""What a group sends by itself: not to have its operands as it wants them.

In: a group and one of its strategies. Out: operations of the explicit program, over values of the graph. The solver is told
their prices (`formulate.prices`), and they are laid out for the strategy that is chosen (`formulate.explicit`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.cost.halo import extensions_of
from autopar.ir.explicit_program import Communicate, Extend
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.rules.grouping import SMALL_SIZE, Define, Group
from autopar.rules.manual_regions import gather_of
from autopar.rules.strategies import Strategy

#: `operand` of a `Communicate` is the value that is sent. An `Extend` stands for the strips that it puts together, too.
Sent = Communicate | Extend


def sent_by(group: Group, strategy: Strategy, graph: Graph, mesh: MeshShape) -> Iterator[Sent]:
    """All of it under a strategy."""
    gather = gather_of(group, strategy, graph, mesh)
    if gather is not None:
        yield replace(gather, operand=graph.nodes[gather.node].results[0])
    yield from _small_sums(group, strategy, graph)
    yield from extensions_of(group, strategy, graph, mesh)


def sends_itself(group: Group, graph: Graph) -> bool:
    """Whether it does under any strategy."""
    return group.region is not None or any(_is_small_sum(define, graph) for define in group.defines)


def _is_small_sum(define: Define, graph: Graph) -> bool:
    """Reductions to a handful of elements (a loss, a norm) are summed where they are made."""
    return bool(define.pending) and graph.values[define.value].size <= SMALL_SIZE


def _small_sums(group: Group, strategy: Strategy, graph: Graph) -> Iterator[Communicate]:
    for define in group.defines:
        if not _is_small_sum(define, graph):
            continue
        info, axes = graph.values[define.value], strategy.sharding(define.dims, define.pending).unreduced
        if axes:
            one = Communicate(
                "all-reduce", "reduction", define.node, define.value, None, axes, info.num_bytes, info.repeat
            )
            yield replace(one, combinable=True, reduction=define.reduction)

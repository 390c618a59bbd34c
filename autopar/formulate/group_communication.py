"""List the communications of a group itself, as opposed to the resharding of its operands.

In: a group and one of its strategies. Out: operations of the explicit program, over values of the graph.
`formulate.prices` adds their costs to the solver's problem, and `formulate.explicit` inserts those of the chosen
strategy.
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

#: Here `operand` of a `Communicate` is a value. An `Extend` includes the sending of its halo slices.
Sent = Communicate | Extend


def sent_by(group: Group, strategy: Strategy, graph: Graph, mesh: MeshShape) -> Iterator[Sent]:
    """Yield a group's own communications under a strategy."""
    gather = gather_of(group, strategy, graph, mesh)
    if gather is not None:
        yield replace(gather, operand=graph.nodes[gather.node].results[0])
    yield from _small_sums(group, strategy, graph)
    yield from extensions_of(group, strategy, graph, mesh)


def sends_itself(group: Group, graph: Graph) -> bool:
    """Whether a group communicates by itself under any strategy."""
    return group.region is not None or any(_is_small_sum(define, graph) for define in group.defines)


def _is_small_sum(define: Define, graph: Graph) -> bool:
    """Whether a result is a reduction to a few elements (a loss, a norm), which is all-reduced at its producer."""
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

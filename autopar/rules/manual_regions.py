"""Nodes that run as manual regions: the strategies that need a region, and the region's all-gather.

In: a `Group` and a `Strategy`. Out: whether the group's node runs as a manual region, and the all-gather inside it,
with bytes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.explicit_program import Communicate
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.rules.grouping import Group
from autopar.rules.strategies import Strategy


def is_manual(group: Group, strategy: Strategy) -> bool:
    """Whether the group's only node runs as a manual region under this strategy."""
    return group.region is not None and any(strategy.axes[factor] for factor in group.region.manual)


def gather_of(group: Group, strategy: Strategy, graph: Graph, mesh: MeshShape) -> Communicate | None:
    """The all-gather inside a group's node, or None. XLA merges the all-gathers of one node into one."""
    if group.region is None:
        return None
    node = graph.nodes[group.region.node]
    sent_along: tuple[str, ...] = ()
    elements = num_bytes = 0.0
    for one in group.region.exchanges:
        axes = strategy.axes[one.factor]
        if not axes:
            continue
        local = strategy.sharding(one.dims).local_shape(one.shape, mesh)
        kept = [
            min(size, one.most) if dim == (one.factor,) else size for size, dim in zip(local, one.dims, strict=True)
        ]
        side, position = one.elements
        value = (node.operands if side == "operand" else node.results)[position]
        assert value is not None, "an exchange has the dtype of a value"
        assert sent_along in ((), axes), "a node sends along one factor"
        sent_along = axes
        count = float(math.prod(kept) * mesh.sizes(axes))
        elements += count
        num_bytes += count * graph.values[value].itemsize
    if not sent_along:
        return None
    n = group.region.node
    one = Communicate("all-gather", "region", n, None, None, sent_along, num_bytes, node.repeat)
    return replace(one, num_elements=elements)

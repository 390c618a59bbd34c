"""Nodes that are run as manual regions: under which strategies, and what they send by themselves.

In: a `Group` and a `Strategy`. Out: whether its node is run in parts, and the gathers inside it, with bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.graph.ir import Graph
from autopar.mesh import MeshShape
from autopar.rules.groups import Group
from autopar.rules.strategies import Strategy


@dataclass(frozen=True, slots=True)
class Gather:
    """An all-gather inside a node. `num_elements` and `num_bytes` are those of the gathered tensor."""

    node: int
    axes: tuple[str, ...]
    num_elements: float
    num_bytes: float
    dtype: str


def is_manual(group: Group, strategy: Strategy) -> bool:
    """Whether a group's one node is then run as a manual region."""
    return group.region is not None and any(strategy.axes[factor] for factor in group.region.manual)


def gathers(group: Group, strategy: Strategy, graph: Graph, mesh: MeshShape) -> tuple[Gather, ...]:
    """What a group's node then sends by itself."""
    if group.region is None:
        return ()
    found: list[Gather] = []
    node = graph.nodes[group.region.node]
    for one in group.region.exchanges:
        axes = strategy.axes[one.factor]
        if not axes:
            continue
        local = strategy.sharding(one.dims).local_shape(one.shape, mesh)
        kept = [min(size, one.most) if dim == (one.factor,) else size for size, dim in zip(local, one.dims, strict=True)]
        side, position = one.elements
        value = (node.operands if side == "operand" else node.results)[position]
        assert value is not None, "what is sent has the type of a value"
        elements = float(math.prod(kept) * mesh.sizes(axes))
        info = graph.values[value]
        found.append(Gather(group.region.node, axes, elements, elements * info.itemsize, info.dtype))
    return tuple(found)

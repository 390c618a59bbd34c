"""Choose the method of context parallelism for an attention whose tokens are split, and predict its time.

In: a group whose node is an attention, and one of its strategies. Out: `Context`: the cheapest method of `context_parallel`, with what
it sends and the time that it adds to the kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cost.collectives import collective_time
from autopar.cost.context_parallel import (
    METHODS,
    AttentionShape,
    KernelCall,
    Sent,
    collectives,
    kernel_calls,
    memory_bytes,
    refusal,
)
from autopar.hardware.profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.rules.grouping import Group
from autopar.rules.node_view import matrix_efficiency
from autopar.rules.strategies import Strategy


@dataclass(frozen=True, slots=True)
class Context:
    """How devices share the tokens of one attention.

    Args:
        node: the attention.
        method: one of `METHODS`.
        axes: the mesh axes that split the tokens.
        sent: the collectives of a device, in order.
        calls: the kernel calls of a device, in order.
        flops: FLOPs of all calls.
        memory_bytes: bytes read and written outside kernels and collectives.
        added_s: seconds that the method adds to the kernel's: communication that no kernel hides, and memory traffic.
    """

    node: int
    method: str
    axes: tuple[str, ...]
    sent: tuple[Sent, ...]
    calls: tuple[KernelCall, ...]
    flops: float
    memory_bytes: float
    added_s: float


def context_of(
    group: Group, strategy: Strategy, graph: Graph, mesh: MeshShape, profile: HardwareProfile
) -> Context | None:
    """The cheapest method for a strategy; None if the group's node is no attention, or the strategy does not split its tokens.

    All methods apply to these shapes, or `refusal` says why not; a strategy that no method can run is never listed.
    """
    loop = None if group.region is None else group.region.context
    if loop is None or group.region is None or not strategy.axes[loop.factor]:
        return None
    return min(_contexts(group, strategy, graph, mesh, profile), key=lambda one: one.added_s, default=None)


def _contexts(
    group: Group, strategy: Strategy, graph: Graph, mesh: MeshShape, profile: HardwareProfile
) -> Iterator[Context]:
    region = group.region
    assert region is not None and region.context is not None
    loop, node = region.context, graph.nodes[region.node]
    axes = strategy.axes[loop.factor]
    parts = mesh.sizes(axes)
    query, key, value = (
        strategy.sharding(region.operands[i]).local_shape(graph.values[v].shape, mesh)
        for i, v in enumerate(node.operands[:3])
        if v is not None
    )
    tokens = next(d for d, dim in enumerate(region.operands[0]) if dim == (loop.factor,))
    heads = 3 - tokens
    first = graph.values[next(v for v in node.operands if v is not None)]
    shape = AttentionShape(
        batch=query[0],
        num_queries=query[tokens] * parts,
        num_keys=key[tokens] * parts,
        num_heads=query[heads],
        num_key_heads=key[heads],
        head_dim=query[3],
        value_dim=value[3],
        itemsize=round(first.itemsize),
    )
    rate = profile.matrix_rate(first.dtype) * matrix_efficiency(node.params)
    for method in METHODS:
        if refusal(method, shape, parts, is_causal=loop.is_causal) is not None:
            continue
        sent = collectives(method, shape, parts, is_causal=loop.is_causal, is_backward=loop.is_backward)
        calls = kernel_calls(method, shape, parts, is_causal=loop.is_causal)
        traffic = memory_bytes(method, shape, parts, is_causal=loop.is_causal, is_backward=loop.is_backward)
        flops = sum(call.flops(is_backward=loop.is_backward) for call in calls)
        seconds = {one: one.num_times * collective_time(one.kind, one.num_bytes, axes, mesh, profile) for one in sent}
        visible = sum(s for one, s in seconds.items() if not one.is_hidden)
        hidden = sum(s for one, s in seconds.items() if one.is_hidden)
        exposed = visible + max(0.0, hidden - flops / rate)
        launches = sum(call.num_times for call in calls) * profile.kernel_launch_s
        added = exposed + traffic / profile.memory_bytes_per_s + launches
        yield Context(region.node, method, axes, sent, calls, flops, traffic, added)

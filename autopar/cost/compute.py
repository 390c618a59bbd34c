"""Seconds that one device computes a group under a strategy.

In: a group, a strategy, the graph's values. Out: a roofline (Williams, Waterman, Patterson 2009):
the longer of arithmetic at the unit's achievable rate and memory traffic at the memory's. Traffic is
what a fused group reads from outside and writes for outside; what stays inside a fusion is free.
"""

from __future__ import annotations

from autopar.cost.hardware import HardwareProfile
from autopar.graph.ir import Graph
from autopar.mesh import MeshShape
from autopar.rules.groups import Group
from autopar.rules.strategies import Strategy


def group_time(
    group: Group,
    strategy: Strategy,
    written: frozenset[int],
    graph: Graph,
    mesh: MeshShape,
    profile: HardwareProfile,
) -> float:
    """Seconds per step on one device.

    Args:
        written: values of the group that leave it, and so are written to memory.
    """
    if all(graph.nodes[n].primitive == "reshape" for n in group.nodes):  # the same memory under another shape
        return 0.0
    arithmetic = 0.0
    for work in group.works:
        points = strategy.points(group.factors, work.factors, mesh)
        rate = profile.matrix_rate(work.dtype) if work.contraction else profile.vector_flops_per_s
        arithmetic += points * work.flops_per_point / rate
    tensors = [(r.value, r.dims) for r in group.reads]
    tensors += [(d.value, d.dims) for d in group.defines if d.value in written]
    tensors += list(group.inputs)
    traffic = 0.0
    for value, dims in tensors:
        info = graph.values[value]
        traffic += info.itemsize * strategy.sharding(dims).local_size(info.shape, mesh)
    return max(arithmetic, traffic / profile.hbm_bytes_per_s) + profile.kernel_launch_s

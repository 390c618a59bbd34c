"""Determine the halo exchanges of a group under a strategy, and predict their time.

In: a group whose nodes read beyond their own parts, and a strategy. Out: `Extend`s, each an operand with the halo
slices it receives, one collective-permute per slice. Several dims are extended one after the other, so that a later
halo slice includes the corners of the earlier ones.
"""

from __future__ import annotations

from autopar.cost.collectives import collective_time
from autopar.hardware.profile import HardwareProfile
from autopar.ir.explicit_program import Extend, HaloSlice
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.rules.grouping import Group
from autopar.rules.strategies import Strategy


def extensions_of(group: Group, strategy: Strategy, graph: Graph, mesh: MeshShape) -> tuple[Extend, ...]:
    """The halo exchanges of all operands of a group's node, dim by dim."""
    region = group.region
    if region is None or not any(strategy.axes[halo.factor] for halo in region.halos):
        return ()
    found: list[Extend] = []
    shapes: dict[int, tuple[int, ...]] = {}
    for halo in region.halos:
        axes, operand, d = strategy.axes[halo.factor], halo.operand, halo.dim
        value = graph.nodes[region.node].operands[operand]
        if not axes or value is None:
            continue
        info, sharding = graph.values[value], strategy.sharding(region.operands[operand])
        local = halo.window.local(mesh.sizes(axes))
        assert local is not None, f"{halo} cannot be split over {axes}"
        before = shapes.get(operand, sharding.local_shape(info.shape, mesh))
        if local.reads_own(before[d]):
            continue
        halo_slices = tuple(
            HaloSlice(value, sharding, d, after, (*before[:d], width, *before[d + 1 :]), info.itemsize)
            for after, width in ((False, local.low), (True, local.high))
            if width
        )
        shapes[operand] = (*before[:d], local.length, *before[d + 1 :])
        times = graph.nodes[region.node].repeat
        found.append(Extend(region.node, operand, halo_slices, local, shapes[operand], info.itemsize, times))
    return tuple(found)


def extension_time(extension: Extend, mesh: MeshShape, profile: HardwareProfile) -> float:
    """Seconds of the collective-permutes, and of the kernel that concatenates the parts."""
    return (
        sum(collective_time(one.kind, one.num_bytes, one.axes, mesh, profile) for one in extension.slices)
        + 2 * extension.num_bytes / profile.memory_bytes_per_s
        + profile.kernel_launch_s
    )

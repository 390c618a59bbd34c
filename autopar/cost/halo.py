"""What the neighbours of a split loop send: the halos of a group under a strategy, and their price.

In: a group whose nodes read beyond their own parts, a strategy. Out: `Extension`s, each an operand with the strips that
come to it, one collective-permute each. Along several dims they come one after the other, so that a later strip has the
corners of the earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.collectives import collective_time
from autopar.cost.hardware import HardwareProfile
from autopar.graph.ir import Value
from autopar.mesh import MeshShape
from autopar.rules.groups import Group
from autopar.rules.strategies import Strategy

KIND = "collective-permute"


@dataclass(frozen=True, slots=True)
class Extension:
    """One dim of one operand of a node, which a device has extended, or cut, to what it reads.

    Args:
        value: what the operand holds.
        axes: that split the dim.
        strips: elements of each strip that is sent.
        shape: of what the device then reads.
        itemsize: bytes per element.
    """

    node: int
    operand: int
    value: int
    axes: tuple[str, ...]
    strips: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: float

    @property
    def num_bytes(self) -> float:
        """Of what the device then reads."""
        return math.prod(self.shape) * self.itemsize


def extensions_of(
    group: Group, strategy: Strategy, values: Sequence[Value], mesh: MeshShape
) -> tuple[Extension, ...]:
    """Of all operands that need any, dim by dim."""
    if not any(strategy.axes[halo.factor] for _, halo in group.halos):
        return ()
    read_at = {use: (read.value, read.dims) for read in group.reads for use in read.uses}
    found: list[Extension] = []
    shapes: dict[tuple[int, int], tuple[int, ...]] = {}
    for node, halo in group.halos:
        axes = strategy.axes[halo.factor]
        if not axes or (node, halo.operand) not in read_at:  # too small to be planned for
            continue
        value, dims = read_at[node, halo.operand]
        info = values[value]
        local = halo.window.local(mesh.sizes(axes))
        assert local is not None, f"{halo} cannot be split over {axes}"
        before = shapes.get((node, halo.operand), strategy.sharding(dims).local_shape(info.shape, mesh))
        if local.reads_own(before[halo.dim]):
            continue
        others = math.prod(before) // before[halo.dim]
        after = (*before[: halo.dim], local.length, *before[halo.dim + 1 :])
        strips = tuple(others * width for width in (local.low, local.high) if width)
        found.append(Extension(node, halo.operand, value, axes, strips, after, info.itemsize))
        shapes[node, halo.operand] = after
    return tuple(found)


def extension_time(extension: Extension, mesh: MeshShape, profile: HardwareProfile) -> float:
    """Seconds of the collective-permutes, and of the kernel that puts the parts together."""
    return (
        sum(strip_time(extension, strip, mesh, profile) for strip in extension.strips)
        + 2 * extension.num_bytes / profile.hbm_bytes_per_s
        + profile.kernel_launch_s
    )


def strip_time(extension: Extension, strip: int, mesh: MeshShape, profile: HardwareProfile) -> float:
    """Seconds of one collective-permute."""
    return collective_time(KIND, strip * extension.itemsize, extension.axes, mesh, profile)


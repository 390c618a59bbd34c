"""What the neighbours of a split loop send: the halos of a group under a strategy, and their price.

In: a group whose nodes read beyond their own parts, a strategy. Out: `Extension`s, each an operand with the strips that
come to it, one collective-permute each. Along several dims they come one after the other, so that a later strip has the
corners of the earlier ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cost.collectives import collective_time
from autopar.cost.hardware_profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.rules.grouping import Group
from autopar.rules.halo_window import LocalWindow
from autopar.rules.strategies import Strategy

KIND = "collective-permute"


@dataclass(frozen=True, slots=True)
class Strip:
    """What a device gets of one neighbour: elements of a value split so, along a dim. Two nodes that read the same
    strip share it: XLA sends it once.

    Args:
        after: whether it is of the neighbour after, or of the one before.
        shape: of the strip.
    """

    value: int
    sharding: TensorSharding
    dim: int
    after: bool
    shape: tuple[int, ...]
    itemsize: float

    @property
    def axes(self) -> tuple[str, ...]:
        return self.sharding.dims[self.dim]

    @property
    def num_bytes(self) -> float:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Extension:
    """One dim of one operand of a node, which a device has extended, or cut, to what it reads.

    Args:
        strips: what is put beside its own part.
        window: what of that it reads.
        shape: of what it reads.
    """

    node: int
    operand: int
    strips: tuple[Strip, ...]
    window: LocalWindow
    shape: tuple[int, ...]
    itemsize: float

    @property
    def num_bytes(self) -> float:
        """Of what the device then reads."""
        return math.prod(self.shape) * self.itemsize


def extensions_of(group: Group, strategy: Strategy, graph: Graph, mesh: MeshShape) -> tuple[Extension, ...]:
    """Of all operands of a group's node that need any, dim by dim."""
    region = group.region
    if region is None or not any(strategy.axes[halo.factor] for halo in region.halos):
        return ()
    found: list[Extension] = []
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
        strips = tuple(
            Strip(value, sharding, d, after, (*before[:d], width, *before[d + 1 :]), info.itemsize)
            for after, width in ((False, local.low), (True, local.high))
            if width
        )
        shapes[operand] = (*before[:d], local.length, *before[d + 1 :])
        found.append(Extension(region.node, operand, strips, local, shapes[operand], info.itemsize))
    return tuple(found)


def extension_time(extension: Extension, mesh: MeshShape, profile: HardwareProfile) -> float:
    """Seconds of the collective-permutes, and of the kernel that puts the parts together."""
    return (
        sum(strip_time(strip, mesh, profile) for strip in extension.strips)
        + 2 * extension.num_bytes / profile.hbm_bytes_per_s
        + profile.kernel_launch_s
    )


def strip_time(strip: Strip, mesh: MeshShape, profile: HardwareProfile) -> float:
    """Seconds of one collective-permute."""
    return collective_time(KIND, strip.num_bytes, strip.axes, mesh, profile)

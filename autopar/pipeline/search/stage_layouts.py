"""Fix the meshes of stages and the shardings of arguments inside them, as the user gives them.

In: a step's graph, a mesh for every stage, pins by path (`pin`, sharding metadata), and the sizes of submeshes.
Out: `StageLayouts`: the meshes that a stage may have on a submesh, and the pinned inputs of a stage's program. A submesh
on whose devices no mesh has the axes of the pins, or divides the pinned dims, is not searched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import MeshError, PinError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DEFAULT_AXIS_NAMES, MeshShape, factorisations
from autopar.ir.sharding import TensorSharding
from autopar.pipeline.cut.extract_stages import Port
from autopar.planner.pins import axes_of_pins, meshes_of_program, resolve_pins


@dataclass(frozen=True)
class StageLayouts:
    """The meshes and shardings of stages that a user fixes. By default nothing is fixed.

    Args:
        pins: position of an argument of the step -> its sharding in each stage that reads it.
        graph: the step's graph; None if nothing is fixed.
        axes: the mesh axes that the pins and the program name.
        by_size: the meshes that a stage may have, by number of devices; None if any mesh may be used.
        is_one_mesh: whether the user gave the mesh.
    """

    pins: Mapping[int, TensorSharding] = field(default_factory=dict)
    graph: Graph | None = None
    axes: frozenset[str] = frozenset()
    by_size: Mapping[int, tuple[MeshShape, ...]] | None = None
    is_one_mesh: bool = False

    def may_use(self, num_devices: int) -> bool:
        """Whether a stage may be on a submesh with this number of devices."""
        return self.by_size is None or bool(self.by_size.get(num_devices))

    def meshes(self, num_devices: int) -> tuple[MeshShape, ...]:
        """The meshes of a submesh. One device that no stage may use has a mesh too, for bounds of the cost: its axes
        have size 1, so that every pin holds."""
        if self.by_size is None:
            return factorisations(num_devices)
        found = self.by_size.get(num_devices, ())
        if found or num_devices > 1:
            return found
        return (_of_one_device(self.axes),)

    def pinned(self, inputs: Sequence[Port], mesh: MeshShape | None = None) -> dict[int, TensorSharding]:
        """The shardings of the pinned inputs of a stage's program, by position.

        Args:
            inputs: the ports of the program's inputs.
            mesh: the stage's mesh; None for a run of layers that is priced, in which the layers of a stack count as
                unsharded: how many a stage has is not decided.

        Raises:
            PinError: the stage's mesh lacks an axis of a pin, or does not divide what the stage holds of the argument.
        """
        found: dict[int, TensorSharding] = {}
        for position, port in enumerate(inputs):
            if port.kind == "argument" and port.value in self.pins:
                found[position] = sharding = self.pins[port.value]
                if mesh is not None:
                    self._check(port, sharding, mesh)
                elif port.rows is not None:
                    whole = (() if dim == port.rows.dim else axes for dim, axes in enumerate(sharding.dims))
                    found[position] = TensorSharding(tuple(whole))
        return found

    def _check(self, port: Port, sharding: TensorSharding, mesh: MeshShape) -> None:
        assert self.graph is not None, "of what are there pins?"
        shape, rows = self.graph.values[self.graph.inputs[port.value]].shape, port.rows
        held = tuple(rows.stop - rows.start if rows and dim == rows.dim else size for dim, size in enumerate(shape))
        layers = f", of which a stage holds layers {rows.start} to {rows.stop - 1} of dim {rows.dim}" if rows else ""
        at = f"the pin {sharding} of `{self.graph.input_paths[port.value]}` of shape {shape}{layers},"
        for size, axes in zip(held, sharding.dims, strict=True):
            missing = [axis for axis in axes if axis not in mesh.axis_names]
            if missing:
                raise PinError(f"{at} names the mesh axis {missing[0]!r}, but the stage's mesh is {mesh.describe()}")
            if size % mesh.sizes(axes):
                parts = " x ".join(f"{axis}={mesh.size(axis)}" for axis in axes)
                raise PinError(
                    f"{at} splits {size} over {parts}, which does not divide it: pin another dim, or choose a number of"
                    " stages with which it does"
                )


def pins_by_position(pins: Mapping[str, Any], graph: Graph) -> dict[int, TensorSharding]:
    """The shardings of pinned arguments, by position; on which meshes they fit is not checked.

    Args:
        pins: path or glob of arguments -> `PartitionSpec`.

    Raises:
        PinError: a pin names no argument, or more dims than it has.
    """
    return resolve_pins(pins, graph, _of_one_device(axes_of_pins(pins)))


def stage_layouts(
    graph: Graph,
    pins: Mapping[str, Any],
    mesh: MeshShape | None,
    sizes: Collection[int],
    num_devices: int,
    least_submeshes: int = 1,
) -> StageLayouts:
    """Resolve what the user fixes.

    Args:
        graph: the graph of the step.
        pins: path or glob of arguments -> `PartitionSpec`.
        mesh: the mesh of every stage; None for any.
        sizes: the numbers of devices that a submesh may have.
        num_devices: the devices of the cluster.
        least_submeshes: the number of submeshes that the stages need at least.

    Raises:
        MeshError: no submesh has the size of the mesh, or there are too few devices for the submeshes.
        PinError: a pin names no argument, or no mesh fits the pins; with the argument and the axis.
    """
    named = axes_of_pins(pins) | {axis for node in graph.nodes for axis, _ in node.params.get("axis_sizes", ())}
    if mesh is None and not named and not pins:
        return StageLayouts()
    resolved = pins_by_position(pins, graph)
    if mesh is not None and mesh.num_devices not in sizes:
        raise MeshError(
            f"with `stages`, `mesh` is the mesh of each stage, and {mesh.describe()} has {mesh.num_devices} devices, but a"
            f" submesh here has {_any_of(sizes)}: give a mesh of such a size, or another `num_devices`, which is {num_devices}"
        )
    by_size: dict[int, tuple[MeshShape, ...]] = {}
    failures: list[tuple[tuple[int, int], PinError]] = []
    for size in sorted(sizes):
        found: list[MeshShape] = []
        for one in factorisations(size) if mesh is None else (mesh,) if mesh.num_devices == size else ():
            try:
                resolve_pins(pins, graph, *meshes_of_program((one,), graph))
                found.append(one)
            except PinError as error:
                failures.append(((len(named & {*one.axis_names}), len(one.axis_names)), error))
        by_size[size] = tuple(found)
    fitting = [size for size, found in by_size.items() if found]
    if not fitting:
        _, error = max(failures, key=lambda one: one[0])  # on a mesh that has most of the axes
        raise PinError(f"{error}. With `stages`, this is the mesh of a stage; `mesh` chooses it")
    if fitting[0] * least_submeshes > num_devices:
        what = (
            f"each stage has the mesh {mesh.describe()}" if mesh else f"the pins fit meshes of {_any_of(fitting)} only"
        )
        raise MeshError(
            f"{what}, so {least_submeshes} submeshes need {fitting[0] * least_submeshes} devices, but there are"
            f" {num_devices}: give a smaller `mesh` for each stage, fewer stages, or more devices"
        )
    return StageLayouts(resolved, graph, frozenset(named), by_size, mesh is not None)


def _of_one_device(axes: Iterable[str]) -> MeshShape:
    """One device as a mesh that has these axes, so that every pin of them holds."""
    names = tuple(sorted(axes)) or DEFAULT_AXIS_NAMES[:1]
    return MeshShape(names, (1,) * len(names))


def _any_of(sizes: Iterable[int]) -> str:
    *most, last = map(str, sorted(sizes))
    return f"{', '.join(most)} or {last} devices" if most else f"{last} device{'s' * (last != '1')}"

"""Resolve pins, the shardings that a user fixes by path or glob.

In: a mapping from paths or globs to `PartitionSpec`s, the graph, a mesh. Out: the sharding of each pinned input.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autopar.errors import PinError
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop.partition_spec import tensor_sharding
from autopar.rules.table import traits_of


def meshes_with_pinned_axes(meshes: Sequence[MeshShape], pin: Mapping[str, Any]) -> list[MeshShape]:
    """The meshes that have every axis that a pin names.

    Raises:
        PinError: no mesh has them all.
    """
    named = axes_of_pins(pin)
    matching = [mesh for mesh in meshes if named <= set(mesh.axis_names)]
    if not matching:
        known = list(dict.fromkeys(axis for mesh in meshes for axis in mesh.axis_names))
        missing = ", ".join(sorted(named - set(known)) or sorted(named))
        raise PinError(f"a pin names the mesh axis {missing}, but the mesh has {', '.join(known)}: use its names")
    return matching


def meshes_of_program(meshes: Sequence[MeshShape], graph: Graph) -> list[MeshShape]:
    """The meshes that have every axis that the program itself names in a `with_sharding_constraint` or a `shard_map`. An axis
    of a `shard_map` must also have the same size, because the mapped function is written for slices of that size.

    Raises:
        PinError: no mesh has an axis; with its name, and the line that names it.
    """
    matching = list(meshes)
    for node in graph.nodes:
        sizes = dict(node.params.get("axis_sizes", ()))
        sized = traits_of(node.primitive).opaque
        left = [
            m for m in matching if all(a in m.axis_names and (not sized or m.size(a) == n) for a, n in sizes.items())
        ]
        if sizes and not left:
            known = "; ".join(mesh.describe() for mesh in matching[:3])
            named = ", ".join(f"{axis}={size}" if sized else f"`{axis}`" for axis, size in sizes.items())
            raise PinError(
                f"the step itself shards a value over {named} (`{node.primitive}` at {node.source or 'an unknown line'}),"
                f" which the mesh does not have ({known}). Plan for a mesh with these axes, e.g."
                f' mesh="{",".join(f"{axis}={size}" for axis, size in sizes.items())}"'
            )
        matching = left
    return matching


def axes_of_pins(pin: Mapping[str, Any]) -> set[str]:
    """The mesh axes that pins name."""
    return {axis for spec in pin.values() for axis in _axes_named(spec)}


def sharded_by_program(graph: Graph) -> bool:
    """Whether the program itself shards over named axes."""
    return any(node.params.get("axis_sizes") for node in graph.nodes)


def _axes_named(spec: Any) -> set[str]:
    if isinstance(spec, str):
        raise PinError(
            f"a pin is a `jax.sharding.PartitionSpec`, not the string {spec!r}: give one entry for each dim, the name of a"
            ' mesh axis, a tuple of them, or None, e.g. `PartitionSpec(("data", "model"), None)`'
        )
    dims = spec.dims if isinstance(spec, TensorSharding) else tuple(spec)
    return {axis for entry in dims if entry for axis in ((entry,) if isinstance(entry, str) else entry)}


def resolve_pins(pin: Mapping[str, Any], graph: Graph, mesh: MeshShape) -> dict[int, TensorSharding]:
    """The sharding of every pinned input, by position.

    Raises:
        PinError: a pin matches no input, or its sharding does not fit the input.
    """
    resolved: dict[int, TensorSharding] = {}
    exact: dict[str, list[int]] = {}
    for position, path in enumerate(graph.input_paths):
        exact.setdefault(path, []).append(position)
    for pattern, spec in pin.items():
        matched = exact.get(pattern) or [i for p, at in exact.items() if fnmatch.fnmatchcase(p, pattern) for i in at]
        if not matched:
            close = difflib.get_close_matches(pattern, graph.input_paths, n=3, cutoff=0.3)
            raise PinError(
                f"the pin {pattern!r} names no input. Paths look like {', '.join(map(repr, close or graph.input_paths[:3]))};"
                " a glob such as 'state/params/*' may match many"
            )
        for position in matched:
            resolved[position] = _checked_pin(pattern, spec, graph, position, mesh)
    return resolved


def _checked_pin(pattern: str, spec: Any, graph: Graph, position: int, mesh: MeshShape) -> TensorSharding:
    path, shape = graph.input_paths[position], graph.values[graph.inputs[position]].shape
    at = f"the pin {pattern!r} on `{path}` of shape {shape}"
    try:
        sharding = spec if isinstance(spec, TensorSharding) else tensor_sharding(PartitionSpec(*spec), len(shape))
    except PinError as error:
        raise PinError(f"{at}: {error}") from None
    for size, axes in zip(shape, sharding.dims, strict=True):
        for axis in axes:
            if axis not in mesh.axis_names:
                raise PinError(f"{at} names the mesh axis {axis!r}, but the mesh has {', '.join(mesh.axis_names)}")
        if size % mesh.sizes(axes):
            parts = " x ".join(f"{a}={mesh.size(a)}" for a in axes)
            raise PinError(
                f"{at} splits a dim of {size} over {parts}, which does not divide it. Pin another dim, leave it"
                f" unpinned, or make the dim a multiple of {mesh.sizes(axes)}"
            )
    return sharding

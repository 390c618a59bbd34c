"""Read the mesh, shardings and donations of a hand-sharded step.

In: a function jitted with `in_shardings`, or a function with sharded arguments; its arguments, arrays or shapes. Out:
`HandSharded`: the mesh, the sharding of each input and output where the program gives one, the donated inputs; the
program lowered for another platform. Nothing is compiled, and the mesh may have no devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from autopar.errors import MeshError, PinError, StepSignatureError, TraceError
from autopar.frontend.pytree_paths import leaf_paths
from autopar.frontend.step import Step
from autopar.ir.mesh import MeshShape, parse_mesh
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop import compilation
from autopar.jax_interop.partition_spec import partition_spec, tensor_sharding

#: An expected mesh, or its number of devices.
ExpectedMesh = str | int | MeshShape | Mesh | AbstractMesh | None
#: The place of a sharding in the program, and its mesh.
_Found = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class HandSharded:
    """A step with its own shardings. Inputs and outputs are the leaves of its arguments and its result.

    Args:
        args: shapes and dtypes, with a sharding where the argument had one.
        mesh: the mesh of all shardings.
        inputs, outputs: sharding of each; None where the program leaves it to XLA.
        donated: positions of donated inputs.
        names, paths: names of the arguments, paths of the inputs in a plan's notation.
        named_mesh: the program's mesh object.
    """

    step: Any
    args: tuple[Any, ...]
    mesh: MeshShape
    inputs: tuple[TensorSharding | None, ...]
    outputs: tuple[TensorSharding | None, ...]
    donated: tuple[int, ...]
    names: tuple[str, ...]
    paths: tuple[str, ...]
    named_mesh: Any

    def lower(self, platform: str) -> jax.stages.Lowered:
        """Lower the user's program for a platform (`"cuda"`)."""
        return self.step.trace(*self.args).lower(lowering_platforms=(platform,))

    def lower_otherwise(
        self,
        platform: str,
        inputs: Sequence[TensorSharding | None],
        outputs: Sequence[TensorSharding | None],
    ) -> jax.stages.Lowered:
        """Lower the program with other shardings of inputs and outputs; XLA chooses where one is None."""

        def named(one: TensorSharding | None) -> NamedSharding | None:
            return None if one is None else NamedSharding(self.named_mesh, partition_spec(one))

        leaves = [jax_compat.shape_struct(leaf) for leaf in jax.tree.leaves(self.args)]
        flat = jax.jit(
            jax_compat.as_function(self.step.trace(*self.args).jaxpr),
            in_shardings=tuple(map(named, inputs)),
            out_shardings=[named(one) for one in outputs],
            donate_argnums=self.donated,
        )
        return flat.trace(*leaves).lower(lowering_platforms=(platform,))

    @property
    def donated_arguments(self) -> tuple[int, ...]:
        """Positions of the arguments whose leaves are all donated."""
        found, offset = [], 0
        for position, arg in enumerate(self.args):
            leaves = range(offset, offset + len(jax.tree.leaves(arg)))
            if leaves and set(leaves) <= set(self.donated):
                found.append(position)
            offset = leaves.stop
        return tuple(found)


def read_hand_sharded(step: Callable[..., Any], args: Sequence[Any], mesh: ExpectedMesh = None) -> HandSharded:
    """Read the shardings of a step.

    Args:
        step: the result of `jax.jit`, or a function with sharded arguments, which is jitted here.
        args: positional arguments: arrays or `jax.ShapeDtypeStruct`s.
        mesh: expected mesh of the shardings, or its number of devices.

    Raises:
        StepSignatureError: the step has no shardings, or an argument is neither array nor number.
        MeshError: the shardings are over several meshes, or not over the expected one.
        PinError: a sharding is no `NamedSharding`.
        TraceError: JAX cannot trace the step.
    """
    names = Step.of(step).bind(args, {}).names
    paths = tuple(path for name, arg in zip(names, args, strict=True) for path in leaf_paths(arg, name))
    _check_leaves(paths, jax.tree.leaves(tuple(args)))
    name = getattr(step, "__qualname__", None) or type(step).__name__
    jitted: Any = step if _is_jitted(step) else jax.jit(step)
    placed = jax.tree.map(jax_compat.placed_struct, tuple(args))
    with _translated(name):
        call, equations = compilation.jit_call(jitted, placed)
    leaves = jax.tree.leaves(placed)
    found: list[_Found] = []
    inputs = []
    for path, leaf, given in zip(paths, leaves, call.in_shardings, strict=True):
        where, sharding = ("in_shardings", given) if given is not None else ("the argument", leaf.sharding)
        inputs.append(_named(sharding, len(leaf.shape), f"{where} of `{path}`", found))
    outputs = [
        _named(given, len(shape), f"out_shardings of output {n}", found)
        for n, (given, shape) in enumerate(zip(call.out_shardings, call.out_shapes, strict=True))
    ]
    found += jax_compat.meshes_named(equations)
    if not found:
        raise StepSignatureError(_not_sharded(name, jitted is step))
    return HandSharded(
        step=jitted,
        args=placed,
        mesh=_one_mesh(name, found, mesh),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        donated=call.donated,
        names=names,
        paths=paths,
        named_mesh=found[0][1],
    )


def _check_leaves(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    for path, leaf in zip(paths, leaves, strict=True):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise StepSignatureError(
                f"`{path}` is a {type(leaf).__name__}, but the arguments of a hand-sharded step have to be arrays, numbers"
                " and pytrees of them, all positional. Close over it in the step, or leave it out of the pytree"
            )


def _is_jitted(step: Any) -> bool:
    return callable(getattr(step, "trace", None)) and callable(getattr(step, "lower", None))


def _not_sharded(name: str, is_jitted: bool) -> str:
    jitted = "is jitted without shardings" if is_jitted else "is not jitted, and its arguments are not sharded"
    return (
        f"`{name}` {jitted}, so there is nothing to diagnose: no `in_shardings`, no sharded argument, no"
        " `with_sharding_constraint`, no `shard_map`. Give the function that `jax.jit(step, in_shardings=...)` returns,"
        " or find a sharding with `autopar.plan` (`autopar verify`)"
    )


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        text = str(error)
        if "non-empty mesh in context" in text or "mesh context" in text:
            raise MeshError(
                f"`{name}` is sharded by bare `PartitionSpec`s, which need a mesh in context, and there is none: call"
                " it inside `with jax.set_mesh(mesh):`, or use `NamedSharding(mesh, spec)`; for absent GPUs, use"
                ' `jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)`.'
                f" JAX said: {text}"
            ) from error
        raise TraceError(
            f"JAX could not trace `{name}` with its shardings and these arguments. JAX said:\n\n"
            f"{type(error).__name__}: {text}"
        ) from error


def _named(sharding: Any, num_dims: int, where: str, found: list[_Found]) -> TensorSharding | None:
    """Convert a JAX sharding, and append its mesh to `found`."""
    if sharding is None or isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return None
    if not isinstance(sharding, NamedSharding):
        raise PinError(
            f"{where} is a {type(sharding).__name__}, which names no mesh axes: use `NamedSharding(mesh, spec)`"
        )
    found.append((where, sharding.mesh))
    try:
        return tensor_sharding(sharding.spec, num_dims)
    except PinError as error:
        raise PinError(f"{where}: {error}") from None


def _one_mesh(name: str, found: Sequence[_Found], expected: ExpectedMesh) -> MeshShape:
    """The common mesh of all shardings, checked against the expected one."""
    where, first = found[0]
    mesh = MeshShape(tuple(first.axis_names), tuple(first.axis_sizes))
    for other_where, other in found[1:]:
        if (tuple(other.axis_names), tuple(other.axis_sizes)) != (mesh.axis_names, mesh.axis_sizes):
            there = MeshShape(tuple(other.axis_names), tuple(other.axis_sizes))
            raise MeshError(
                f"`{name}` is sharded over two meshes: {where} over {mesh.describe()}, but {other_where} over"
                f" {there.describe()}. A diagnosis supports one mesh: use the same axes, in name, size and order,"
                " everywhere"
            )
    explicit = [
        axis for axis, kind in zip(first.axis_names, first.axis_types, strict=True) if kind == AxisType.Explicit
    ]
    if explicit:
        raise MeshError(
            f"{where} is over a mesh whose axes {', '.join(explicit)} are of type {first.axis_types[0].name}, the"
            " default of `jax.make_mesh`: JAX then shards every operation itself, and XLA's partitioner decides nothing."
            " A diagnosis supports axes of type Auto: make the mesh with"
            f" `axis_types=(jax.sharding.AxisType.Auto,) * {len(first.axis_names)}`"
        )
    if mesh.num_devices == 1:
        raise MeshError(
            f"`{name}` is sharded over mesh {mesh.describe()}, which is one device, so nothing communicates: use a mesh"
            " of several devices"
        )
    if expected is not None:
        _check_mesh(name, mesh, expected)
    return mesh


def _check_mesh(name: str, mesh: MeshShape, expected: str | int | MeshShape | Mesh | AbstractMesh) -> None:
    if isinstance(expected, int):
        same, description = mesh.num_devices == expected, f"`num_devices={expected}`"
    else:
        shape = expected if isinstance(expected, MeshShape) else None
        if isinstance(expected, str):
            shape = parse_mesh(expected)
        elif shape is None:
            shape = MeshShape(tuple(expected.axis_names), tuple(expected.axis_sizes))
        # A mesh given as sizes (2x4) has no axis names to compare.
        unnamed = isinstance(expected, str) and "=" not in expected
        same = shape.axis_sizes == mesh.axis_sizes and (unnamed or shape.axis_names == mesh.axis_names)
        description = f"mesh {expected if unnamed else shape.describe()}"
    if not same:
        raise MeshError(
            f"the shardings of `{name}` are over mesh {mesh.describe()}, of {mesh.num_devices} devices, but"
            f" {description} was given. Leave out the mesh, or change it in the program"
        )

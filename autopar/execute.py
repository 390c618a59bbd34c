"""Run a plan: replay the traced equations under `jax.jit`, with the plan's shardings imposed.

In: `Plan`, `Trace` and a mesh of devices. Out: a jitted function of the step's positional arguments.
XLA's partitioner is told the sharding of every value that crosses from one decision to another, so it
has no room to disagree; name stacks and source lines are kept, donation too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from autopar import jax_compat
from autopar.errors import MeshError
from autopar.mesh import MeshShape
from autopar.partition_spec import check_mesh, named_shardings, partition_spec
from autopar.plan import Plan
from autopar.sharding import TensorSharding
from autopar.trace import LiteralOperand, Rewritten, Trace


class OtherShapesError(TypeError):
    """The jitted replay met arguments it was not planned for; the caller plans again."""


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of devices, by default all the visible ones.

    Raises:
        MeshError: their number is not the mesh's.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) != shape.num_devices:
        kind = devices[0].platform if len(devices) else "no"
        raise MeshError(
            f"mesh {shape.describe()} needs {shape.num_devices} devices, but {len(devices)} ({kind}) are visible. Give a"
            f" mesh of {len(devices)}, pass a `jax.sharding.Mesh` of the devices to use, or make virtual ones with"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={shape.num_devices}"
        )
    types = (AxisType.Auto,) * len(shape.axis_names)
    return jax.make_mesh(shape.axis_sizes, shape.axis_names, axis_types=types, devices=devices)


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """A mesh without devices: enough to lower a planned step."""
    types = (AxisType.Auto,) * len(shape.axis_names)
    return AbstractMesh(shape.axis_sizes, shape.axis_names, axis_types=types)


def jit_plan(plan: Plan, trace: Trace, mesh: Mesh | AbstractMesh) -> Any:
    """The planned step, jitted: takes and returns what the user's step does."""
    check_mesh(plan.mesh, mesh)
    replay = _Replay(plan, trace, mesh)
    in_shardings = jax.tree.unflatten(trace.in_tree, named_shardings([t.sharding for t in plan.inputs], mesh))
    out_shardings = jax.tree.unflatten(trace.out_tree, named_shardings([t.sharding for t in plan.outputs], mesh))
    return jax.jit(
        replay.run,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donated_arguments(plan, trace),
    )


def donated_arguments(plan: Plan, trace: Trace) -> tuple[int, ...]:
    """Positions of the arguments all of whose leaves are donated."""
    donated = set(plan.donated)
    arguments, offset = [], 0
    for position, child in enumerate(trace.in_tree.children()):
        leaves = set(range(offset, offset + child.num_leaves))
        if leaves and leaves <= donated:
            arguments.append(position)
        offset += child.num_leaves
    return tuple(arguments)


class _Replay:
    """Evaluates a trace equation by equation, constraining values as the plan says."""

    def __init__(self, plan: Plan, trace: Trace, mesh: Mesh | AbstractMesh) -> None:
        self.trace, self.mesh = trace, mesh
        self.at_definition: dict[int, tuple[TensorSharding, ...]] = {}
        self.at_operand: dict[tuple[int, int], tuple[TensorSharding, ...]] = {}
        for constraint in plan.constraints:
            if constraint.node is None or constraint.operand is None:
                self.at_definition[constraint.value] = constraint.shardings
            else:
                self.at_operand[constraint.node, constraint.operand] = constraint.shardings
        self.remaining = _last_reads(trace)
        self.as_written = _as_written(plan, trace)

    def run(self, *args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        self._check(args, leaves)
        env: dict[int, Any] = dict(zip(self.trace.inputs, leaves, strict=True))
        env.update(self.trace.constants)
        resharded: dict[int, dict[tuple[TensorSharding, ...], Any]] = defaultdict(dict)
        for n, equation in enumerate(self.trace.equations):
            whole = self.as_written.get(n)
            if whole is None or whole.start == n:
                with jax_compat.equation_context(
                    equation.source.source_info.traceback, equation.name_stack, equation.source.ctx.manager
                ):
                    operands = [self._operand(env, resharded, n, i, atom) for i, atom in enumerate(equation.operands)]
                    if whole is not None:
                        results, made = self.trace.equations[whole.stop - 1].results, _run_whole(whole, operands)
                    else:
                        operands = [self._as_traced(*one) for one in zip(equation.operands, operands, strict=True)]
                        results, made = equation.results, jax_compat.bind(equation.source, operands)
                    for position, value in zip(results, made, strict=True):
                        env[position] = self._constrain(position, value, self.at_definition.get(position, ()))
            for position in self.remaining.get(n, ()):  # forget what no later equation reads
                env.pop(position, None)
                resharded.pop(position, None)
        end = len(self.trace.equations)
        outputs = [self._operand(env, resharded, end, i, atom) for i, atom in enumerate(self.trace.outputs)]
        return jax.tree.unflatten(self.trace.out_tree, outputs)

    def _operand(
        self,
        env: dict[int, Any],
        resharded: dict[int, dict[tuple[TensorSharding, ...], Any]],
        node: int,
        index: int,
        atom: int | LiteralOperand,
    ) -> Any:
        if isinstance(atom, LiteralOperand):
            return atom.value
        path = self.at_operand.get((node, index), ())
        value = env[atom]
        known = resharded[atom]
        for length in range(1, len(path) + 1):  # one constraint per value and target: readers share it
            prefix = path[:length]
            if prefix not in known:
                known[prefix] = self._constrain(atom, value, prefix[-1:])
            value = known[prefix]
        return value

    def _constrain(self, position: int, value: Any, shardings: tuple[TensorSharding, ...]) -> Any:
        shape = self.trace.avals[position].shape if shardings else ()
        for sharding in shardings:
            whole = sharding if value.shape == shape else _seen_whole(sharding, shape, value.shape)
            value = jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, partition_spec(whole)))
        return value

    def _as_traced(self, atom: int | LiteralOperand, value: Any) -> Any:
        """A value in the shape it was traced with; only one with a dim that is two there may have another."""
        if isinstance(atom, LiteralOperand) or value.shape == self.trace.avals[atom].shape:
            return value
        return jax.lax.reshape(value, self.trace.avals[atom].shape)

    def _check(self, args: Any, leaves: Sequence[Any]) -> None:
        if jax.tree.structure(args) != self.trace.in_tree:
            raise OtherShapesError("the arguments have another structure than the planned ones")
        for path, position, leaf in zip(self.trace.input_paths, self.trace.inputs, leaves, strict=True):
            aval = self.trace.avals[position]
            if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
                raise OtherShapesError(
                    f"`{path}` was planned as {aval.dtype}{list(aval.shape)}, got {leaf.dtype}{list(leaf.shape)}"
                )


def lower(jitted: Any, args: Sequence[Any], mesh: Mesh) -> jax.stages.Lowered:
    """Lower for the platform of a mesh's devices, which need not exist in this process."""
    platform = mesh.devices.flat[0].platform
    return lower_for("cuda" if platform == "gpu" else platform, jitted, args)


def lower_for(platform: str, jitted: Any, args: Sequence[Any]) -> jax.stages.Lowered:
    """Lower for a platform (`"cuda"`, `"cpu"`); the mesh may be abstract: then the result is text
    for another process to compile."""
    shapes = jax.tree.map(jax_compat.shape_struct, tuple(args))
    return jitted.trace(*shapes).lower(lowering_platforms=(platform,))


def _as_written(plan: Plan, trace: Trace) -> dict[int, Rewritten]:
    """Equations that see a dim as two which the plan does not split: as it was written, XLA lays the program out
    better."""
    split = {
        (constraint.value, d)
        for constraint in plan.constraints
        for sharding in constraint.shardings
        for d, axes in enumerate(sharding.dims)
        if axes
    }
    whole = [one for one in trace.rewritten if not any({(v, d), (v, d + 1)} & split for v, d in one.pairs)]
    return {n: one for one in whole for n in range(one.start, one.stop)}


def _run_whole(one: Rewritten, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of equations that see a dim as two, by the one that sees it whole."""
    if one.source is None:
        return operands
    whole = [
        operand if shape is None or operand.shape == shape else jax.lax.reshape(operand, shape)
        for operand, shape in zip(operands, one.operand_shapes, strict=True)
    ]
    return jax_compat.bind(one.source, whole)


def _seen_whole(sharding: TensorSharding, shape: Sequence[int], whole: Sequence[int]) -> TensorSharding:
    """A sharding of a tensor as that of the same tensor in another shape, in which what is split is a dim too."""
    axes = {_stride(shape, d): axes for d, axes in enumerate(sharding.dims) if axes}
    dims = tuple(axes.get(_stride(whole, d), ()) if size > 1 else () for d, size in enumerate(whole))
    assert sum(map(bool, dims)) == len(axes), f"{sharding} of {shape} is no sharding of {whole}"
    return TensorSharding(dims, sharding.unreduced)


def _stride(shape: Sequence[int], dim: int) -> tuple[int, int]:
    return shape[dim], math.prod(shape[dim + 1 :])


def _last_reads(trace: Trace) -> dict[int, list[int]]:
    """Equation -> values it is the last to read."""
    last: dict[int, int] = {}
    for n, equation in enumerate(trace.equations):
        for atom in equation.operands:
            if isinstance(atom, int):
                last[atom] = n
    for output in trace.outputs:
        if isinstance(output, int):
            last.pop(output, None)
    by_equation: dict[int, list[int]] = defaultdict(list)
    for value, n in last.items():
        by_equation[n].append(value)
    return by_equation

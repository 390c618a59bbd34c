"""Run a plan: replay the traced equations under `jax.jit`, with the plan's shardings imposed.

In: `Plan`, `Trace` and a mesh of devices. Out: a jitted function of the step's positional arguments.
XLA's partitioner is told the sharding of every value that crosses from one decision to another, so it
has no room to disagree; name stacks and source lines are kept, donation too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from autopar import jax_compat
from autopar.errors import MeshError
from autopar.manual.region import run_region
from autopar.mesh import MeshShape
from autopar.partition_spec import check_mesh, named_shardings, partition_spec
from autopar.plan import Plan
from autopar.sharding import TensorSharding
from autopar.trace import Equation, LiteralOperand, Trace


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
        self.regions = {region.node: region for region in plan.regions}
        self.remaining = _last_reads(trace)

    def run(self, *args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        self._check(args, leaves)
        env: dict[int, Any] = dict(zip(self.trace.inputs, leaves, strict=True))
        env.update(self.trace.constants)
        resharded: dict[int, dict[tuple[TensorSharding, ...], Any]] = defaultdict(dict)
        for n, equation in enumerate(self.trace.equations):
            with jax_compat.equation_context(
                equation.source.source_info.traceback, equation.name_stack, equation.source.ctx.manager
            ):
                operands = [self._operand(env, resharded, n, i, atom) for i, atom in enumerate(equation.operands)]
                results = self._run(n, equation, operands)
                for position, value in zip(equation.results, results, strict=True):
                    path = self.at_definition.get(position, ())  # a region takes all steps but the last itself
                    env[position] = self._constrain(value, path[-1:] if n in self.regions else path)
            for position in self.remaining.get(n, ()):  # forget what no later equation reads
                env.pop(position, None)
                resharded.pop(position, None)
        end = len(self.trace.equations)
        outputs = [self._operand(env, resharded, end, i, atom) for i, atom in enumerate(self.trace.outputs)]
        return jax.tree.unflatten(self.trace.out_tree, outputs)

    def _run(self, n: int, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        """An equation by itself, or each device its own part of it where the plan says so."""
        region = self.regions.get(n)
        if region is None:
            return jax_compat.bind(equation.source, operands)
        paths = [self.at_definition.get(position, ()) for position in equation.results]
        targets = [path[-1] if path else None for path in paths]
        return run_region(region, equation.source, operands, self.mesh, targets)

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
                known[prefix] = self._constrain(value, prefix[-1:])
            value = known[prefix]
        return value

    def _constrain(self, value: Any, shardings: tuple[TensorSharding, ...]) -> Any:
        for sharding in shardings:
            value = jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, partition_spec(sharding)))
        return value

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

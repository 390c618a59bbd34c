"""Run a plan: replay the traced equations under `jax.jit`, with the plan's shardings imposed.

In: `Plan`, `Trace` and a mesh of devices. Out: a jitted function of the step's positional arguments, which
donates what the plan says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from autopar.errors import MeshError, StepSignatureError
from autopar.frontend.trace import Trace
from autopar.ir.mesh import MeshShape
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.partition_spec import check_mesh, named_shardings
from autopar.plans.plan import Plan
from autopar.plans.records import Placement
from autopar.runtime.distributed.device_order import cluster_text, in_host_order
from autopar.runtime.own_arrays import is_own
from autopar.runtime.replay import OtherShapesError, Replay
from autopar.runtime.xla_options import compiler_options


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of devices, by default all the visible ones, of all processes: host after host, so that the inner axes stay
    inside one.

    Raises:
        MeshError: their number is not the mesh's.
    """
    devices = jax.devices() if devices is None else devices
    check_devices(shape, devices)
    types = (AxisType.Auto,) * len(shape.axis_names)
    if devices[0].platform == "tpu":  # whose links make a torus, which JAX knows
        return jax.make_mesh(shape.axis_sizes, shape.axis_names, axis_types=types, devices=devices)
    grid = np.array(in_host_order(devices), dtype=object).reshape(shape.axis_sizes)
    return Mesh(grid, shape.axis_names, axis_types=types)


def check_devices(shape: MeshShape, devices: Sequence[Any]) -> None:
    """Refuse a mesh that these devices do not fill.

    Raises:
        MeshError: with both numbers.
    """
    if len(devices) == shape.num_devices:
        return
    ways = [f"Give a mesh of {len(devices)}", "pass a `jax.sharding.Mesh` of the devices to use"]
    if len({device.process_index for device in devices}) > 1:
        ways.append("start as many processes as it takes")
    else:
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={shape.num_devices}"
        ways.append(f"make virtual ones with {flag}")
    raise MeshError(
        f"mesh {shape.describe()} needs {shape.num_devices} devices, but {cluster_text(devices)} are visible."
        f" {', '.join(ways[:-1])}, or {ways[-1]}"
    )


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """A mesh without devices: enough to lower a planned step."""
    types = (AxisType.Auto,) * len(shape.axis_names)
    return AbstractMesh(shape.axis_sizes, shape.axis_names, axis_types=types)


def jit_plan(plan: Plan, trace: Trace, mesh: Mesh | AbstractMesh) -> Any:
    """The planned step, jitted: takes and returns what the user's step does."""
    check_mesh(plan.mesh, mesh)
    replay = Replay(plan, trace, mesh)
    in_shardings = jax.tree.unflatten(trace.in_tree, named_shardings([t.sharding for t in plan.inputs], mesh))
    out_shardings = jax.tree.unflatten(trace.out_tree, named_shardings([t.sharding for t in plan.outputs], mesh))

    def run(*args: Any) -> Any:
        return trace.out_tree.unflatten(replay.run(flat(trace.in_tree, args)))

    return jax.jit(
        run,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donated_arguments(plan, trace),
        **jit_options(plan, mesh),
    )


def flat(in_tree: Any, args: tuple[Any, ...]) -> list[Any]:
    """The arrays of a step's arguments.

    Raises:
        OtherShapesError: the step was planned for another structure.
    """
    leaves, structure = jax.tree.flatten(args)
    if structure != in_tree:
        raise OtherShapesError("the arguments have another structure than the planned ones")
    return leaves


def jit_options(plan: Plan, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """What `jax.jit` is to tell XLA, where what it compiles is for GPUs that are here: for others, whoever compiles gives
    the options."""
    has_gpus = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu"
    return {"compiler_options": compiler_options(plan)} if has_gpus else {}


def placed(
    plan: Placement, shardings: Sequence[NamedSharding], trees: Sequence[Any], *, may_take: bool = False
) -> tuple[Any, ...]:
    """Arguments as a jitted plan takes them.

    An array that lies otherwise than planned is moved, as a state that another plan has laid out. State that nothing has
    laid out yet is laid out: `jax.jit` would compile once for it, and once more for what comes back. Of what is donated,
    an array that the user made is copied, and so is one that stands at another place too, as an average that begins as
    the parameters.

    Args:
        may_take: whether arrays that the user made may be donated, because the user said so.
    """
    leaves, structure = jax.tree.flatten(tuple(trees))
    count = Counter(id(leaf) for leaf in leaves)
    carried, donated = {position for position, _ in plan.carried}, set(plan.donated)
    for position, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        lies = isinstance(leaf, jax.Array) and leaf.committed
        put = leaf
        if lies and not (leaf.sharding.is_equivalent_to(sharding, leaf.ndim) and is_auto(leaf.sharding)):
            put = jax.device_put(leaf, sharding)
        elif not lies and position in carried:
            put = jax.device_put(leaf, sharding, may_alias=False)
        if position in donated and isinstance(leaf, jax.Array):
            kept = count[id(leaf)] > 1 or not (may_take or is_own(leaf))
            if kept and (put is leaf or _may_share(leaf, put)):
                put = jax.numpy.copy(put)
        leaves[position] = put
    return jax.tree.unflatten(structure, leaves)


def _may_share(leaf: jax.Array, put: jax.Array) -> bool:
    """Whether an array that was moved may have kept a buffer, whatever `may_alias` says: of one device, where a part is
    the whole."""
    return len(leaf.sharding.device_set) > 1 or put.sharding.shard_shape(put.shape) == leaf.shape


def check_not_deleted(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse arrays whose memory an earlier call has taken over.

    Raises:
        StepSignatureError: naming one.
    """
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise StepSignatureError(
                f"`{path}` was donated to an earlier call, which took its memory over, or was deleted. Call the step with the"
                " state that its last call returned; to keep a state, copy it before the call"
                " (`jax.tree.map(jax.numpy.copy, state)`), or give `donate=[]`"
            )


def auto_mesh(mesh: Mesh) -> Mesh:
    """The mesh with axes of type Auto, over which XLA's partitioner splits: `jax.make_mesh` makes Explicit ones."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def is_auto(sharding: Any) -> bool:
    """Whether JAX leaves an array that lies so to XLA's partitioner."""
    return not isinstance(sharding, NamedSharding) or set(sharding.mesh.axis_types) <= {AxisType.Auto}


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


def lower(jitted: Any, args: Sequence[Any], mesh: Mesh) -> jax.stages.Lowered:
    """Lower, given the planned arguments (`Trace.arguments`), for the platform of a mesh's devices, which need not exist in this process."""
    platform = mesh.devices.flat[0].platform
    return lower_for("cuda" if platform == "gpu" else platform, jitted, args)


def lower_for(platform: str, jitted: Any, args: Sequence[Any]) -> jax.stages.Lowered:
    """Lower for a platform (`"cuda"`, `"cpu"`); the mesh may be abstract: then the result is text
    for another process to compile."""
    shapes = jax.tree.map(jax_compat.shape_struct, tuple(args))
    return jitted.trace(*shapes).lower(lowering_platforms=(platform,))

"""Run a plan: replay the traced equations under `jax.jit` with the plan's sharding constraints.

In: a `Plan`, a `Trace`, and a mesh of devices.
Out: a jitted function of the step's positional arguments, which donates the arguments that the plan donates.
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
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.absent_cudnn import attention_without_devices
from autopar.jax_interop.partition_spec import check_mesh, named_shardings
from autopar.plans.plan import Plan
from autopar.plans.records import Placement
from autopar.runtime.distributed.device_order import cluster_text, in_host_order
from autopar.runtime.own_arrays import is_own
from autopar.runtime.replay import OtherShapesError, Replay
from autopar.runtime.xla_options import compiler_options


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None, *, available: int | None = None) -> Mesh:
    """A mesh of devices, by default all devices of all processes, ordered by host, so that the inner axes stay inside a
    host.

    Args:
        available: the number of devices of which the mesh takes the first.

    Raises:
        MeshError: the number of devices differs from the mesh's.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) == available:
        devices = first_devices(shape, devices)
    check_devices(shape, devices)
    types = (AxisType.Auto,) * len(shape.axis_names)
    if devices[0].platform == "tpu":  # JAX knows the torus of its links
        return jax.make_mesh(shape.axis_sizes, shape.axis_names, axis_types=types, devices=devices)
    grid = np.array(in_host_order(devices), dtype=object).reshape(shape.axis_sizes)
    return Mesh(grid, shape.axis_names, axis_types=types)


def first_devices(shape: MeshShape, devices: Sequence[Any]) -> list[Any]:
    """As many devices as a mesh has, the first by host.

    Raises:
        MeshError: a process would have none of them.
    """
    ordered = in_host_order(devices)
    taken, left = ordered[: shape.num_devices], ordered[shape.num_devices :]
    used = {device.process_index for device in taken}
    idle = sorted({device.process_index for device in left} - used)
    if idle:
        raise MeshError(
            f"the plan uses {len(taken)} of {len(ordered)} devices, and process {', '.join(map(str, idle))} would have none of"
            f" them: start {len(used)} {'process' if len(used) == 1 else 'processes'}, or plan for all devices with"
            " `all_devices=True`"
        )
    return taken


def check_devices(shape: MeshShape, devices: Sequence[Any]) -> None:
    """Refuse a mesh whose size differs from the number of devices.

    Raises:
        MeshError: the sizes differ.
    """
    if len(devices) == shape.num_devices:
        return
    remedies = [f"Give a mesh of {len(devices)}", "pass a `jax.sharding.Mesh` of the devices to use"]
    if len({device.process_index for device in devices}) > 1:
        remedies.append("start as many processes as it takes")
    else:
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={shape.num_devices}"
        remedies.append(f"make virtual ones with {flag}")
    raise MeshError(
        f"mesh {shape.describe()} needs {shape.num_devices} devices, but {cluster_text(devices)} are visible."
        f" {', '.join(remedies[:-1])}, or {remedies[-1]}"
    )


def abstract_mesh(shape: MeshShape, gpu: HardwareProfile | None = None) -> AbstractMesh:
    """A mesh without devices, sufficient to lower a planned step; with Pallas kernels, which are lowered for a kind of GPU,
    if `gpu` is given."""
    types = (AxisType.Auto,) * len(shape.axis_names)
    kinds = gpu.device_kinds if gpu is not None and gpu.platform == "gpu" else ()
    device = jax.sharding.AbstractDevice(kinds[0], None, "gpu") if kinds else None
    return AbstractMesh(shape.axis_sizes, shape.axis_names, axis_types=types, abstract_device=device)


def jit_plan(plan: Plan, trace: Trace, mesh: Mesh | AbstractMesh) -> Any:
    """The planned step, jitted, with the arguments and results of the user's step."""
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
        donate_argnums=tuple(donated_arguments(plan, trace)),
        **jit_options(plan, mesh),
    )


def flat(in_tree: Any, args: tuple[Any, ...]) -> list[Any]:
    """The leaves of a step's arguments.

    Raises:
        OtherShapesError: the step was planned for another pytree structure.
    """
    leaves, structure = jax.tree.flatten(args)
    if structure != in_tree:
        raise OtherShapesError("the arguments have another structure than the planned ones")
    return leaves


def jit_options(plan: Plan, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """The options of `jax.jit` for XLA on local GPUs. For other devices, the code that compiles passes them."""
    has_gpus = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu"
    return {"compiler_options": compiler_options(plan)} if has_gpus else {}


def placed(
    plan: Placement, shardings: Sequence[NamedSharding], trees: Sequence[Any], *, may_take: bool = False
) -> tuple[Any, ...]:
    """Place arguments with the shardings that a jitted plan takes.

    An array with another sharding is resharded, for example a state from another plan. State without a sharding is
    placed too; otherwise `jax.jit` would compile once for it and once for the returned state. A donated array is copied
    if the user made it or if it is passed twice, for example an average that starts as the parameters.

    Args:
        may_take: whether donated arrays that the user made may be overwritten, by the user's option.
    """
    leaves, structure = jax.tree.flatten(tuple(trees))
    count = Counter(id(leaf) for leaf in leaves)
    carried, donated = {position for position, _ in plan.carried}, set(plan.donated)
    for position, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        is_placed = isinstance(leaf, jax.Array) and leaf.committed
        put = leaf
        if is_placed and not (leaf.sharding.is_equivalent_to(sharding, leaf.ndim) and is_auto(leaf.sharding)):
            put = jax.device_put(leaf, sharding)
        elif not is_placed and position in carried:
            put = jax.device_put(leaf, sharding, may_alias=False)
        if position in donated and isinstance(leaf, jax.Array):
            must_copy = count[id(leaf)] > 1 or not (may_take or is_own(leaf))
            if must_copy and (put is leaf or _may_share(leaf, put)):
                put = jax.numpy.copy(put)
        leaves[position] = put
    return jax.tree.unflatten(structure, leaves)


def _may_share(leaf: jax.Array, put: jax.Array) -> bool:
    """Whether `device_put` may have kept a buffer in spite of `may_alias`: on one device, if a shard is the whole
    array."""
    return len(leaf.sharding.device_set) > 1 or put.sharding.shard_shape(put.shape) == leaf.shape


def check_not_deleted(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse deleted arrays.

    Raises:
        StepSignatureError: an array was deleted; the text names it.
    """
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise StepSignatureError(
                f"`{path}` was donated to an earlier call, which reused its memory, or was deleted. Call the step with the"
                " state that its last call returned; to keep a state, copy it before the call"
                " (`jax.tree.map(jax.numpy.copy, state)`), or give `donate=[]`"
            )


def auto_mesh(mesh: Mesh) -> Mesh:
    """The mesh with axes of type Auto, for XLA's partitioner; `jax.make_mesh` makes Explicit axes."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def is_auto(sharding: Any) -> bool:
    """Whether JAX leaves an array with this sharding to XLA's partitioner."""
    return not isinstance(sharding, NamedSharding) or set(sharding.mesh.axis_types) <= {AxisType.Auto}


def donated_arguments(plan: Plan, trace: Trace) -> dict[int, range]:
    """The positions of the leaves of each argument that is donated as a whole, by the argument's position."""
    donated = set(plan.donated)
    leaves_of, start = dict[int, range](), 0
    for position, child in enumerate(trace.in_tree.children()):
        leaves = range(start, start + child.num_leaves)
        if leaves and donated.issuperset(leaves):
            leaves_of[position] = leaves
        start = leaves.stop
    return leaves_of


def lower(jitted: Any, args: Sequence[Any], mesh: Mesh) -> jax.stages.Lowered:
    """Lower for the platform of a mesh's devices, given abstract arguments (`Trace.arguments`). The devices need not
    exist in this process."""
    platform = mesh.devices.flat[0].platform
    return lower_for("cuda" if platform == "gpu" else platform, jitted, args)


def lower_for(platform: str, jitted: Any, args: Sequence[Any]) -> jax.stages.Lowered:
    """Lower for a platform (`"cuda"`, `"cpu"`). With an abstract mesh, another process can compile the resulting
    text."""
    shapes = jax.tree.map(jax_compat.shape_struct, tuple(args))
    with attention_without_devices():
        return jitted.trace(*shapes).lower(lowering_platforms=(platform,))

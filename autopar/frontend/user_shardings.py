"""Read the shardings that a program itself specifies: `with_sharding_constraint` and `shard_map`.

In: JAX's equations.
Out: plain parameters for the rules: which dims over which axes, and the local FLOPs and collectives of a `shard_map`;
and the same program on another mesh with the same axes, which may have no devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar.frontend.kernel_flops import WORK, every_equation, flops_of, work_of
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.partition_spec import tensor_sharding

#: The collectives of a `shard_map`'s program: the HLO kind, and whether operand or result is the full buffer.
_COLLECTIVES = {
    "psum": ("all-reduce", "operand"),
    "psum2": ("all-reduce", "operand"),
    "psum_invariant": ("all-reduce", "operand"),
    "pmax": ("all-reduce", "operand"),
    "pmin": ("all-reduce", "operand"),
    "all_gather": ("all-gather", "result"),
    "all_gather_invariant": ("all-gather", "result"),
    "all_gather_reduced": ("all-gather", "result"),
    "reduce_scatter": ("reduce-scatter", "operand"),
    "unreduced_reduce_scatter": ("reduce-scatter", "operand"),
    "all_to_all": ("all-to-all", "operand"),
    "ppermute": ("collective-permute", "operand"),
}


def constraint_params(equation: Any) -> dict[str, Any]:
    """The parameters of a `sharding_constraint`: `dims`, the mesh axes of each dim or None where it is open, and
    `axis_sizes`. Empty if it is not a `NamedSharding`."""
    sharding = equation.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return {}
    rank = equation.invars[0].aval.ndim
    free = equation.params["unconstrained_dims"]
    entries = [None if d in free else entry for d, entry in enumerate(sharding.spec)]
    dims = tensor_sharding(PartitionSpec(*entries), rank).dims
    constrained = tuple(None if d in free else axes for d, axes in enumerate(dims))
    return {"dims": constrained, "axis_sizes": _axis_sizes(sharding.mesh, (axes for axes in constrained if axes))}


def shard_map_params(equation: Any) -> dict[str, Any]:
    """The parameters of a `shard_map`: `in_dims`, `out_dims`, `axis_sizes`, the `flops` and `work` of one device, and
    `collectives` as (kind, axes, bytes of the full local buffer, count)."""
    params = equation.params
    in_dims, out_dims = (
        tuple(tensor_sharding(spec, var.aval.ndim).dims for spec, var in zip(params[specs], variables, strict=True))
        for specs, variables in (("in_specs", equation.invars), ("out_specs", equation.outvars))
    )
    jaxpr, _ = jax_compat.open_jaxpr(params["jaxpr"])
    return {
        "in_dims": in_dims,
        "out_dims": out_dims,
        "axis_sizes": _axis_sizes(params["mesh"], [tuple(params["newly_manual_axes"])]),
        # Only the fingerprint of plans saved before `work` existed reads these.
        "flops": sum(flops_of(one)[1] * times for one, times in every_equation(jaxpr)),
        WORK: work_of(jaxpr),
        "collectives": tuple(_collective(one, times) for one, times in every_equation(jaxpr) if _is_collective(one)),
    }


def run_shard_map(equation: Any, operands: Sequence[Any], mesh: Mesh | AbstractMesh) -> Sequence[Any]:
    """Run a `shard_map` on another mesh with the same axes.

    If that mesh has no devices, the program's own abstract mesh takes its place, because the inner types name it.
    """
    params = equation.params
    if isinstance(mesh, AbstractMesh):
        own = params["mesh"]
        mesh = own if isinstance(own, AbstractMesh) else own.abstract_mesh
    body = jax_compat.as_function(params["jaxpr"])
    mapped = jax.shard_map(
        lambda *parts: tuple(body(*parts)),
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return mapped(*operands)


def _axis_sizes(mesh: Any, named: Any) -> tuple[tuple[str, int], ...]:
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    axes = {axis for axes in named for axis in axes}
    return tuple((axis, sizes[axis]) for axis in mesh.axis_names if axis in axes)


def _is_collective(equation: Any) -> bool:
    return equation.primitive.name in _COLLECTIVES and bool(_axes(equation))


def _axes(equation: Any) -> tuple[str, ...]:
    named = equation.params.get("axes", equation.params.get("axis_name", ()))
    return tuple(axis for axis in ((named,) if isinstance(named, str) else named) if isinstance(axis, str))


def _collective(equation: Any, times: float) -> tuple[str, tuple[str, ...], float, float]:
    kind, whose = _COLLECTIVES[equation.primitive.name]
    variables = equation.invars if whose == "operand" else equation.outvars
    num_bytes = sum(math.prod(var.aval.shape) * jax_compat.itemsize(var.aval) for var in variables)
    return kind, _axes(equation), float(num_bytes), times

"""Run one equation as a manual region: `jax.shard_map` over the plan's mesh.

In: an equation, its operands, and the shardings of operands and results.
Out: reduced results. The reduction is outside the region, so that XLA can turn it into a reduce-scatter for the next
constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autopar.frontend.equations import Equation
from autopar.frontend.from_jaxpr import node_params
from autopar.ir.sharding import TensorSharding, replicated
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.partition_spec import partition_spec
from autopar.plans.records import ManualRegion
from autopar.rules.node_view import NodeView
from autopar.runtime.manual.part import Part
from autopar.runtime.manual.table import local_function

#: The functions that reduce stacked terms along a dim.
_COMBINE: Mapping[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "sum": lax.reduce_sum,
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "prod": lax.reduce_prod,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
}


def run_region(
    region: ManualRegion,
    equation: Any,
    operands: Sequence[Any],
    mesh: Mesh | AbstractMesh,
    targets: Sequence[TensorSharding | None],
) -> Sequence[Any]:
    """Run the region.

    Args:
        equation: JAX's equation.
        targets: the sharding of each result after its reduction; None for that of the region.
    """
    name = equation.primitive.name
    shapes = (tuple(map(jax.numpy.shape, operands)), tuple(tuple(v.aval.shape) for v in equation.outvars))
    view = NodeView(name, node_params(equation), *shapes)
    function = local_function(view)
    bind = partial(jax_compat.bind, equation)
    part = Part(name, equation.params, view, region.operands, region.results, bind, region.method)
    scattered = [
        _scattered(result, target) if target is not None and region.reduction == "sum" else result
        for result, target in zip(region.results, targets, strict=True)
    ]

    def local(*own: Any) -> tuple[Any, ...]:
        results = zip(function(part, *own), region.results, scattered, strict=True)
        return tuple(_stacked(_scatter(value, result, after), after) for value, result, after in results)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(map(partition_spec, region.operands)),
        out_specs=tuple(map(_stacked_spec, scattered)),
        check_vma=False,
    )
    pairs = zip(mapped(*operands), scattered, strict=True)
    return [_combined(value, region.reduction) if after.unreduced else value for value, after in pairs]


def whole_region(node: int, equation: Equation) -> ManualRegion:
    """The region of an equation that every device runs on whole operands."""
    variables = (equation.source.invars, equation.source.outvars)
    operands, results = (tuple(replicated(len(one.aval.shape)) for one in each) for each in variables)
    return ManualRegion(node=node, primitive=equation.primitive, path=equation.path, operands=operands, results=results)


def _scattered(result: TensorSharding, target: TensorSharding) -> TensorSharding:
    """The sharding after the reductions that are done inside the region: XLA would run a full all-reduce for results
    that are scattered over two dims."""
    new = [axes[len(own) :] for axes, own in zip(target.dims, result.dims, strict=True)]
    if sum(map(bool, new)) < 2:
        return result
    return TensorSharding(
        target.dims, tuple(axis for axis in result.unreduced if not any(axis in axes for axes in new))
    )


def _scatter(value: Any, result: TensorSharding, after: TensorSharding) -> Any:
    for dim, (own, axes) in enumerate(zip(result.dims, after.dims, strict=True)):
        if len(axes) > len(own):
            value = lax.psum_scatter(value, axes[len(own) :], scatter_dimension=dim, tiled=True)
    return value


def _stacked(value: Any, sharding: TensorSharding) -> Any:
    """Stack an unreduced term along a new leading dim, which is sharded and needs no communication."""
    return lax.expand_dims(value, (0,)) if sharding.unreduced else value


def _stacked_spec(sharding: TensorSharding) -> PartitionSpec:
    return partition_spec(TensorSharding((sharding.unreduced, *sharding.dims) if sharding.unreduced else sharding.dims))


def _combined(value: Any, reduction: str) -> Any:
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = _combined(jax.random.key_data(value), reduction)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    if value.dtype == bool and reduction == "sum":  # at most one term is not zero
        reduction = "or"
    return _COMBINE[reduction](value, (0,))

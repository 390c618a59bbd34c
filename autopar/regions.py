"""Run one equation as a program of ours on each device: a manual region in the replayed step.

In: a `Region` of the plan, its equation, global operands. Out: global results, summed. In a region XLA's partitioner has
nothing to decide: the collectives are those that are written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from autopar.graph.params import plain_params
from autopar.local_windows import LOCAL, Part
from autopar.partition_spec import partition_spec
from autopar.plan import Region
from autopar.rules.registry import NodeView
from autopar.rules.table import rule_for
from autopar.sharding import TensorSharding
from autopar.trace import Equation, LiteralOperand


def run_region(
    region: Region,
    equation: Equation,
    operands: Sequence[Any],
    steps: Sequence[Sequence[TensorSharding]],
    mesh: Mesh | AbstractMesh,
) -> Sequence[Any]:
    """Results, by the shardings that the region says.

    Args:
        steps: of each result, the shardings it takes on its way as it is summed; those that split it further are taken
            by a reduce-scatter each.
    """
    literal = [isinstance(v, LiteralOperand) for v in equation.operands]
    view = NodeView(
        equation.primitive,
        plain_params(equation.primitive, equation.source.params),
        tuple(() if skip else tuple(v.shape) for v, skip in zip(operands, literal, strict=True)),
        tuple(tuple(v.aval.shape) for v in equation.source.outvars),
    )
    rule = rule_for(view)
    assert rule is not None, f"{view.primitive} has no rule"
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    part = Part(equation.source, view, rule, region, sizes)

    def local(*blocks: Any) -> tuple[Any, ...]:
        given = iter(blocks)
        own = [v if skip else next(given) for v, skip in zip(operands, literal, strict=True)]
        results = LOCAL[view.primitive](part, own)
        return tuple(_summed(v, s, path) for v, s, path in zip(results, region.results, steps, strict=True))

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(partition_spec(s) for s, skip in zip(region.operands, literal, strict=True) if not skip),
        out_specs=tuple(partition_spec(_end(s, path)) for s, path in zip(region.results, steps, strict=True)),
        check_vma=False,
    )(*(v for v, skip in zip(operands, literal, strict=True) if not skip))


def _end(made: TensorSharding, path: Sequence[TensorSharding]) -> TensorSharding:
    """How a result leaves the region."""
    return path[-1] if made.unreduced and path else made.resolved()


def _summed(value: Any, made: TensorSharding, path: Sequence[TensorSharding]) -> Any:
    pending, dims = list(made.unreduced), made.dims
    for target in path if pending else ():
        for d, (now, then) in enumerate(zip(dims, target.dims, strict=True)):
            new = then[len(now) :]
            assert then == (*now, *new) and set(new) <= set(pending), f"{dims} to {target} takes more than a sum"
            if new:
                value = lax.psum_scatter(value, new, scatter_dimension=d, tiled=True)
                pending = [axis for axis in pending if axis not in new]
        dims = target.dims
    return lax.psum(value, tuple(pending)) if pending else value

"""What XLA is told of a plan besides its shardings, as options of the compiler.

In: a plan. Out: what `jax.jit(..., compiler_options=...)` takes.
"""

from __future__ import annotations

from autopar.plans.plan import Plan

_MERGED = ("all_gather", "all_reduce", "reduce_scatter")


def compiler_options(plan: Plan) -> dict[str, int]:
    """Of a plan for GPUs; empty where XLA's defaults do."""
    if plan.merge_bytes is None:
        return {}
    return {f"xla_gpu_{kind}_combine_threshold_bytes": plan.merge_bytes for kind in _MERGED}

"""Translate a plan's settings that are not shardings into XLA compiler options.

In: a plan.
Out: the `compiler_options` of `jax.jit`.
"""

from __future__ import annotations

from autopar.jax_interop.compat import PIPELINED_ALL_GATHERS
from autopar.plans.plan import Plan

_MERGED = ("all_gather", "all_reduce", "reduce_scatter")


def compiler_options(plan: Plan) -> dict[str, int]:
    """The compiler options of a plan for GPUs; empty if XLA's defaults suffice."""
    options = dict(PIPELINED_ALL_GATHERS) if plan.prefetched_gathers else {}
    if plan.combine_threshold_bytes is not None:
        options |= {f"xla_gpu_{kind}_combine_threshold_bytes": plan.combine_threshold_bytes for kind in _MERGED}
    return options

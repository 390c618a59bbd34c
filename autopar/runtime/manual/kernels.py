"""Run a kernel on one device's part: a Pallas kernel with a smaller grid, cuDNN attention on its batch and heads.

In: inside `jax.shard_map`, the local operands.
Out: the local results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.frontend.kernel_loops import LOOPS
from autopar.jax_interop.pallas_kernel import part_of_kernel
from autopar.rules.user_rules import called, no_local
from autopar.runtime.manual.part import Part, num_parts


def pallas(part: Part, *operands: Any) -> Sequence[Any]:
    """The same kernel with the part of the grid that computes this device's part of the results."""
    loops = part.view.params[LOOPS]
    for names, sharding in zip((*loops["operands"], *loops["results"]), (*part.operands, *part.results), strict=True):
        if any(split and not dim for dim, split in zip(names, sharding.dims, strict=True)):
            raise no_local(called(part.view))  # it was planned with a rule of the user's
    pairs = zip(loops["results"][0], part.results[0].dims, strict=True)
    parts = {dim[0]: num_parts(split) for dim, split in pairs if dim}
    results = [
        tuple(size // num_parts(split) for size, split in zip(shape, sharding.dims, strict=True))
        for shape, sharding in zip(part.view.result_shapes, part.results, strict=True)
    ]
    num_inputs = part.params["grid_mapping"].num_inputs
    shapes = [*(operand.shape for operand in operands[len(operands) - num_inputs :]), *results]
    return part.bind(operands, **part_of_kernel(part.params, parts, shapes))

"""Run a kernel on one device's part: a Pallas kernel with a smaller grid, cuDNN attention on its batch and heads.

In: inside `jax.shard_map`, the local operands.
Out: the local results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.frontend.kernel_flops import HEADS_FIRST
from autopar.frontend.kernel_loops import LOOPS, KernelLoops, part_params
from autopar.rules.user_rules import called, no_local
from autopar.runtime.context_parallel.kernels import CUDNN
from autopar.runtime.context_parallel.primitive import run as run_context_parallel
from autopar.runtime.manual.part import Part, num_parts


def pallas(part: Part, *operands: Any) -> Sequence[Any]:
    """The same kernel with the part of the grid that computes this device's part of the results."""
    loops = part.view.params.get(LOOPS)
    if loops is None or not _fits(loops, part):  # it was planned with a user's rule, or another kernel of this name was
        raise no_local(called(part.view))
    results = [
        tuple(size // num_parts(split) for size, split in zip(shape, sharding.dims, strict=True))
        for shape, sharding in zip(part.view.result_shapes, part.results, strict=True)
    ]
    shapes = [jax.numpy.shape(operand) for operand in operands]
    return part.bind(operands, **part_params(part.params, loops, part.view.result_shapes, shapes, results))


def attention(part: Part, *operands: Any) -> Sequence[Any]:
    """cuDNN attention on this device's batch and heads, and by a method of context parallelism on its tokens."""
    if part.method is None:
        return part.bind(operands)
    dim = 2 if part.params["layout"] == HEADS_FIRST else 1
    axes = part.operands[0].dims[dim]
    return run_context_parallel(part.params, operands, method=part.method, axes=axes, kernel=CUDNN)


def _fits(loops: KernelLoops, part: Part) -> bool:
    """Whether the shardings split loops that devices can share, each alike in all tensors, and nothing else."""
    tensors = zip((*loops["operands"], *loops["results"]), (*part.operands, *part.results), strict=True)
    pairs = [pair for dims, sharding in tensors for pair in zip(dims, sharding.dims, strict=True)]
    axes_of = {dim[0]: axes for dim, axes in pairs if dim and dim[0] in loops["shared"]}
    return all(axes == (axes_of.get(dim[0], ()) if dim else ()) for dim, axes in pairs)

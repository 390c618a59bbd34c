"""Attention: which part of a fused kernel each device runs, and plans for long context.

**Kernels** (`cudnn`, `pallas`): a step computes the gradients of one attention layer (8 examples of 1,024 tokens, 16 query heads, 8 heads of
keys and values, or 16 where a kernel takes no groups; causal) and is planned for 8 H100s, with the batch on one mesh axis and the heads on the
other. `share` is the FLOPs of the kernels in one device's program over those of the step's program (0.125 is an eighth). `calls` counts the
kernels in the program that XLA compiles for absent H100s, and `collectives` its collectives. `error` is the largest difference between the
gradients of the sharded and of the unsharded step on 8 virtual CPU devices, relative to the largest gradient, where the kernel runs on CPUs.

**Long context**: LLaMA-3 8B, scanned and rematerialized, one sequence per step, AdamW, on H100s of 96 GB, planned with `attention="auto"`.
`tokens` has the mesh axes that split the tokens of attention, and the method; `heads` those that split its heads. The step time is the
planner's, and the replay's of the program that XLA compiles for absent GPUs. The last column is what torchtitan reports on such cards
(context parallelism over 8 GPUs, PyTorch's ring attention): another implementation, whose order and ratios a plan should have.
"""

from __future__ import annotations

from typing import Any

from benchmarks.attention import kernels, long_context


def measure(program: str) -> list[dict[str, Any]]:
    """The rows of a kernel, or of a case of long context."""
    return (long_context if program in long_context.CASES else kernels).measure(program)

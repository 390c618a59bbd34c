"""Record model FLOPs, examples, tokens and bounds of a step, from which MFU and throughput follow.

In: the graph of a step, its inputs, devices, seconds by bound (compute, memory, ...). Out: `Efficiency`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.formulate.model_flops import model_flops
from autopar.hardware.profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.plans.records import Efficiency, TensorPlan


def efficiency_of(
    graph: Graph,
    inputs: Sequence[TensorPlan],
    devices: Sequence[tuple[int, HardwareProfile]],
    bound_s: Mapping[str, float],
) -> Efficiency:
    """The figures of a step.

    Args:
        graph: the graph of the step as the user wrote it.
        devices: the number of devices of each kind, with their profile.
        bound_s: seconds of a step by the resource that bounds them.
    """
    flops = model_flops(graph)
    peaks = {dtype: sum(number * profile.peak_rate(dtype) for number, profile in devices) for dtype in flops}
    examples, tokens = _batch_size(inputs)
    return Efficiency(
        model_flops=sum(flops.values()),
        ideal_s=sum(amount / peaks[dtype] for dtype, amount in flops.items()),
        num_examples=examples,
        num_tokens=tokens,
        bound_s=dict(bound_s),
    )


def _batch_size(inputs: Sequence[TensorPlan]) -> tuple[int, int]:
    """The numbers of examples and tokens in the batch: dim 0 of its largest array, and the size of its largest integer matrix
    `(examples, positions)`; 0 where the batch has no such array."""
    batch = [tensor for tensor in inputs if tensor.role == "data" and tensor.shape]
    if not batch:
        return 0, 0
    num_examples = max(batch, key=lambda tensor: math.prod(tensor.shape)).shape[0]
    tokens = [
        math.prod(tensor.shape)
        for tensor in batch
        if len(tensor.shape) == 2 and tensor.shape[0] == num_examples and tensor.dtype.startswith(("int", "uint"))
    ]
    return num_examples, max(tokens, default=0)

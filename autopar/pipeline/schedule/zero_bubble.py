"""Order tasks by ZB-H1 (Zero Bubble Pipeline Parallelism, Qi et al., 2023), with a split backward pass.

The preceding stage waits only for the gradients of its outputs; weight gradients can be computed at any time. So the
input part takes the place of 1F1B's backward pass, and submesh i delays i weight parts, which fill the bubble at the
end. No submesh has more in-flight microbatches than 1F1B's first.
"""

from __future__ import annotations

from autopar.pipeline.schedule.kind import EvenPipeline, PipelineShape, ScheduleKind, one_stage_each
from autopar.pipeline.schedule.tasks import Orders, Task


def _delayed_weight_parts(shape: PipelineShape) -> Orders:
    p, m = shape.num_submeshes, shape.num_microbatches
    orders = []
    for stage in range(p):
        warm_up = min(p - 1 - stage, m)
        order = [Task(stage, microbatch, "forward") for microbatch in range(warm_up)]
        for microbatch in range(m):
            if microbatch + warm_up < m:
                order.append(Task(stage, microbatch + warm_up, "forward"))
            order.append(Task(stage, microbatch, "input"))
            if microbatch >= stage:
                order.append(Task(stage, microbatch - stage, "weight"))
        order += [Task(stage, microbatch, "weight") for microbatch in range(max(0, m - stage), m)]
        orders.append(tuple(order))
    return tuple(orders)


def _bubble_s(even: EvenPipeline) -> float:
    """(p - 1)(F + B - W) with B the input part; equally (p - 1)(F + B' - 2W) with B' the whole backward pass."""
    return (even.shape.num_submeshes - 1) * (even.forward_s + even.input_s - even.weight_s)


def _holds(even: EvenPipeline) -> bool:
    """A longer weight part does not fit into the bubble; too few microbatches leave part of the bubble unfilled."""
    enough = even.shape.num_microbatches >= even.shape.num_submeshes
    return enough and even.weight_s <= min(even.forward_s, even.input_s)


ZB_H1 = ScheduleKind(
    name="zb-h1",
    description="1f1b with the backward pass split: weight gradients are put off to where the pipeline would idle.",
    orders=_delayed_weight_parts,
    backward="split",
    requires=one_stage_each,
    bubble="(p - 1)(F + B - 2W)",
    where="m of at least p; W, the weight part of B, no longer than F or than the rest of B",
    bubble_s=_bubble_s,
    holds=_holds,
    in_flight=lambda shape: (min(shape.num_submeshes, shape.num_microbatches),) * shape.num_submeshes,
)

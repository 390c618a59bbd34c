"""Choose between attention as a step writes it and a fused kernel, and report the choice.

In: a traced step, a request. Out: the forms of the step to plan, and notes for the user.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.hardware.profile import HardwareProfile
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.system.units import human_seconds
from autopar.transforms.attention.formula import Formula
from autopar.transforms.program import Program

#: Fused attention kernels in words.
KERNEL_NAMES = {"cudnn": "cuDNN's flash attention"}
#: The gain, as a share of the step time, below which a step as written gets no note.
_WORTH_A_NOTE = 0.03
#: How often scores or their gradients pass through memory where a softmax is a kernel of its own: forward and backward.
_PASSES, _BACKWARD_PASSES = 4, 7
#: The share of a large matmul's rate that a fused kernel reaches, and that a matmul of scores does, roughly.
_KERNEL_SHARE, _MATMUL_SHARE = 0.5, 0.8


def fused_attention(profile: HardwareProfile) -> str | None:
    """The fused attention kernel of a device: cuDNN's from Ampere on; None if it has none."""
    target = profile.xla_target or {}
    return "cudnn" if target.get("cuda_compute_capability", {}).get("major", 0) >= 8 else None


def forms_to_plan(program: Program, request: PlanRequest) -> list[Program]:
    """The step as written, and with a fused kernel if the request allows one and there is attention that it can replace."""
    kernel = fused_attention(request.profile)
    if request.attention == "as_written" or kernel is None:
        return [program]
    fused = program.with_attention(kernel).program
    return [program] if fused is None else [program, fused]


def attention_notes(program: Program, request: PlanRequest, plans: Sequence[Plan], best: Plan) -> Iterator[str]:
    """What became of the attention that a fused kernel may replace.

    Args:
        plans: the plans of the forms that fit.
        best: the chosen one.
    """
    kernel = fused_attention(request.profile)
    if request.attention == "as_written":
        if kernel is not None:
            yield from _gain(program, best, kernel, request.profile)
        return
    if kernel is None:
        yield "attention runs as written: these devices have no fused attention kernel that autopar knows"
        return
    fused = program.with_attention(kernel)
    for reason, count in sorted(fused.reasons.items()):
        yield f"{_places(count)} of attention run as written: {reason}"
    if fused.program is None:
        if not fused.reasons:
            yield "attention runs as written: no softmax(QK^T)V was found, or it has dropout or a score function of its own"
        return
    what = f"{KERNEL_NAMES[kernel]} in {_places(fused.count)}"
    seconds = {plan.attention_kernel: human_seconds(plan.prediction.step_time_s) for plan in plans}
    if best.attention_kernel is None:
        other = f"the step would take {seconds[kernel]}" if kernel in seconds else "no plan would fit"
        yield f"attention runs as written: with {what} {other}"
        return
    other = f"the step as written takes {seconds[None]}" if None in seconds else "no plan of the step as written fits"
    yield f"attention runs in {what}, so that results differ by rounding: {other}"


def _gain(program: Program, plan: Plan, kernel: str, profile: HardwareProfile) -> Iterator[str]:
    """What a fused kernel would save in a step that runs as written, estimated from the sizes of its scores."""
    formulas = [one for one in program.attention() if _is_half(one)]
    saved_s = sum(_saved_s(one, plan.num_devices, profile) for one in formulas)
    step_s = plan.prediction.step_time_s
    if saved_s > _WORTH_A_NOTE * step_s:
        yield (
            f"{KERNEL_NAMES[kernel]} in {_places(len(formulas))} is estimated to save {human_seconds(saved_s)} of"
            f' {human_seconds(step_s)}: `attention="auto"` plans with it, and results differ by rounding'
        )


def _is_half(formula: Formula) -> bool:
    """Whether queries have a dtype of 16 bits, which the kernels compute in."""
    source, _ = formula.roles.sources[formula.roles.operands["query"]][-1]
    return formula.dims.trace.avals[source].dtype.itemsize == 2


def _saved_s(formula: Formula, num_devices: int, profile: HardwareProfile) -> float:
    """Seconds per step on one device, if all devices share the batch and the heads."""
    dims, roles = formula.dims, formula.roles
    scores = math.prod(dims.size(name) for name in (*roles.batch, *roles.rows, roles.keys)) / num_devices
    aval = dims.trace.avals[dims.trace.equations[roles.scores].results[0]]
    repeat = dims.trace.equations[roles.scores].repeat
    forward, backward = "out" in roles.outputs, "d_query" in roles.outputs
    num_matmuls, num_passes = 2 * forward + 4 * backward, _PASSES * forward + _BACKWARD_PASSES * backward
    flops = 2.0 * scores * dims.size(roles.features) * num_matmuls
    rate = profile.matrix_rate("bfloat16")
    written = (
        max(flops / (rate * _MATMUL_SHARE), 0.0)
        + num_passes * scores * aval.dtype.itemsize / profile.memory_bytes_per_s
    )
    fused = flops * (0.5 if formula.is_causal else 1.0) * (3.5 / 3 if backward else 1.0) / (rate * _KERNEL_SHARE)
    return repeat * max(0.0, written - fused)


def _places(count: int) -> str:
    return f"{count} place{'s' * (count > 1)}"

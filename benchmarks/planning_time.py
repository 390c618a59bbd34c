"""Measure planning GPT-2 small's train step for 8 H100s, against XLA's GPU compile of the planned step.

Both run in one process on a machine without a GPU: 64 x 1,024 tokens, 12 unrolled layers, bf16 compute, dropout, AdamW.
Planning includes tracing and tries every mesh of 8 devices; the compile is XLA's alone, with autotuning off. The peak
memory is that of the process, including all imports.
"""

from __future__ import annotations

import resource
import time

import autopar
from autopar.hardware import profile as hardware
from autopar.plans.plan import Plan
from benchmarks.absent_gpus import absent_mesh
from benchmarks.models import gpt2_small_target

Row = dict[str, str | float | bool | None]

NUM_DEVICES = 8
HARDWARE = "h100-sxm"
LIMIT_BYTES = 2e9


def measure(program: str) -> list[Row]:
    """One row: seconds and peak bytes to plan, seconds to compile."""
    assert program == "gpt2_small"
    step, args = gpt2_small_target()
    start = time.perf_counter()
    plan = autopar.plan(step, *args, num_devices=NUM_DEVICES, hardware=HARDWARE)
    plan_s = time.perf_counter() - start
    plan_peak_bytes = _peak_bytes()
    compile_s = _compile_s(plan)
    return [
        {
            "plan_s": plan_s,
            "xla_compile_s": compile_s,
            "plan_over_compile": plan_s / compile_s,
            "plan_peak_bytes": plan_peak_bytes,
            "nodes": plan.outcome.num_nodes,
            "strategies": plan.outcome.num_strategies,
            "solve_s": plan.outcome.solve_time_s,
            "status": plan.outcome.status,
            "gap": plan.outcome.gap,
            "mesh": str(plan.mesh),
            "predicted_step_s": plan.prediction.step_time_s,
            "words": plan.strategy,
            "met": plan_s < compile_s and plan_peak_bytes < LIMIT_BYTES,
        }
    ]


def _compile_s(plan: Plan) -> float:
    """Seconds that XLA takes to compile the planned step for absent GPUs."""
    step, args = gpt2_small_target()
    profile = hardware.load(HARDWARE)
    mesh = absent_mesh(dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)), profile)
    lowered = autopar.parallelize(step, plan=plan).lower(*args, mesh=mesh)
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start


def _peak_bytes() -> float:
    """Peak resident memory of this process; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0

"""Measure planning an 8-billion-parameter LLaMA's train step for 64 H100s, against XLA's compile of the planned step.

The model is Hugging Face's LLaMA with the sizes of LLaMA 3 8B: 32 layers, 64 x 2,048 tokens, bf16 compute, f32
parameters, AdamW. Its layers are unrolled, as in the library, or in a scan with rematerialization. The mesh is given;
the memory budget is the profile's own, 60 GB of 80. The fastest plan of the unrolled step exceeds it, so that step is
solved again under a memory limit, with a solver gap of up to 0.5 %; `half the tokens` is the same step with 64 x 1,024
tokens, whose fastest plan fits.

Planning and the compile run in one process without a GPU. Seconds are wall time; `cpu_s` is CPU time, which other load
on the machine stretches less. Planning includes tracing and is divided into its stages. The compile is XLA's alone, for
absent GPUs, with autotuning off. `gap` is the optimality gap of the final plan.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import autopar
from autopar.api import make_plan
from autopar.hardware import profile as hardware
from autopar.planner import mesh_search, mesh_task, one_mesh, reshard_to_fit
from autopar.plans.plan import Plan
from autopar.solve.ilp import Ilp
from autopar.solve.incumbent import PROVEN
from benchmarks.absent_gpus import absent_mesh
from benchmarks.models import llama_8b_scanned_target, llama_8b_target
from benchmarks.zoo.training import Target

Row = dict[str, str | float | bool]

HARDWARE = "h100-sxm"
#: The step, its mesh, and the gap at which the solver may stop.
PROGRAMS: dict[str, tuple[Callable[[], Target], str, float]] = {
    "scanned, 8x8": (llama_8b_scanned_target, "8x8", PROVEN),
    "scanned, 4x4x4": (llama_8b_scanned_target, "4x4x4", PROVEN),
    "unrolled, half the tokens, 8x8": (lambda: llama_8b_target(seq=1024), "8x8", PROVEN),
    "unrolled, 8x8": (llama_8b_target, "8x8", 5e-3),
    "unrolled, half the tokens, 4x4x4": (lambda: llama_8b_target(seq=1024), "4x4x4", PROVEN),
}
#: Stage of planning -> the functions that it consists of, by the module that calls them.
_STAGES = {
    "trace": ((make_plan, "program_of"),),
    "groups": ((mesh_search, "program_groups"),),
    "formulate": ((one_mesh, "formulate"), (mesh_task, "formulate"), (reshard_to_fit, "formulate")),
    "solve": ((Ilp, "solve"), (reshard_to_fit, "minimum_memory")),
    "assemble": ((mesh_task, "assemble"),),
}


def measure(program: str) -> list[Row]:
    """One row: seconds to plan and to compile."""
    build, mesh, relative_gap = PROGRAMS[program]
    step, args = build()
    start, began = time.perf_counter(), _cpu_s()
    with _stages() as stages:
        plan = autopar.plan(step, *args, mesh=mesh, hardware=HARDWARE, solver=Ilp(relative_gap=relative_gap))
    plan_s, plan_cpu_s = time.perf_counter() - start, _cpu_s() - began
    compile_s, compile_cpu_s = _compile(plan, build)
    return [
        {
            "plan_s": plan_s,
            "xla_compile_s": compile_s,
            "plan_over_compile": plan_s / compile_s,
            "plan_cpu_s": plan_cpu_s,
            "xla_compile_cpu_s": compile_cpu_s,
            **{f"{name}_cpu_s": stages[name] for name in _STAGES},
            "plans": round(stages["plans"]),
            "nodes": plan.outcome.num_nodes,
            "strategies": plan.outcome.num_strategies,
            "status": plan.outcome.status,
            "gap": plan.outcome.gap,
            "predicted_step_s": plan.prediction.step_time_s,
            "predicted_peak_bytes": plan.prediction.peak_bytes,
            "recomputed": len(plan.rematerialized),
            "words": plan.strategy,
        }
    ]


@contextmanager
def _stages() -> Iterator[dict[str, float]]:
    """CPU seconds of each stage while the context lasts, and how many complete plans were built."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = _cpu_s()
            spent["plans"] += name == "assemble"
            try:
                return function(*args, **options)
            finally:
                spent[name] += _cpu_s() - began

        return run

    with ExitStack() as patched:
        for name, functions in _STAGES.items():
            for owner, attribute in functions:
                patched.enter_context(mock.patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        yield spent


def _compile(plan: Plan, build: Callable[[], Target]) -> tuple[float, float]:
    """Wall and CPU seconds that XLA takes to compile the planned step for absent GPUs."""
    step, args = build()
    profile = hardware.load(HARDWARE)
    mesh = absent_mesh(dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)), profile)
    lowered = autopar.parallelize(step, plan=plan).lower(*args, mesh=mesh)
    start, began = time.perf_counter(), _cpu_s()
    lowered.compile()
    return time.perf_counter() - start, _cpu_s() - began


def _cpu_s() -> float:
    """CPU seconds of this process and of its ended child processes."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system

"""Measure how much slower a step becomes as its memory budget shrinks, and whether XLA's program keeps to the budget.

Train steps on 8 H100s, bf16 compute, AdamW: planned without a limit, then for budgets from that plan's peak memory down
to 30 % of it. XLA compiles each plan for absent GPUs. The baseline, `fsdp, every layer checkpointed`, is what users
write by hand: parameters and optimizer state sharded over all GPUs, each layer under `jax.checkpoint`. `what fsdp took`
is the plan whose budget is the memory of XLA's program of that baseline. Bytes are per GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import autopar
from autopar.errors import AutoparError
from autopar.ir.mesh import parse_mesh
from autopar.planner.memory_budget import MemoryBudget
from autopar.planner.planner import plan_program
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.transforms.program import program_of
from benchmarks.baselines import pinned
from benchmarks.baselines.checkpointed import whole_layers
from benchmarks.compile_cache import CachingCompiler, default_folder
from benchmarks.models import llama_1b_target
from benchmarks.zoo import language
from benchmarks.zoo.training import BF16, Target

# isort: split
from transformers import GPT2Config

MESH, NUM_GPUS, HARDWARE = "8", 8, "h100-sxm"
Row = dict[str, Any]
PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True, slots=True)
class Swept:
    """A step whose budget is swept.

    Args:
        target: a step and its arguments.
        layer: module and name of the class of its layers.
    """

    target: Callable[[], Target]
    layer: tuple[str, str]


def _gpt2(batch: int, seq: int, **sizes: Any) -> Target:
    return language.gpt2(GPT2Config(n_positions=seq, **sizes), batch, seq, BF16).target


_GPT2_LAYER = ("transformers.models.gpt2.modeling_flax_gpt2", "FlaxGPT2Block")
_LLAMA_LAYER = ("transformers.models.llama.modeling_flax_llama", "FlaxLlamaDecoderLayer")
PROGRAMS = {
    "gpt2_six_layers": Swept(
        lambda: _gpt2(NUM_GPUS * 16, 512, n_embd=512, n_layer=6, n_head=8, vocab_size=8192), _GPT2_LAYER
    ),
    "gpt2_medium": Swept(lambda: _gpt2(NUM_GPUS * 4, 1024, n_embd=1024, n_layer=24, n_head=16), _GPT2_LAYER),
    "llama_1b": Swept(lambda: llama_1b_target(NUM_GPUS * 2), _LLAMA_LAYER),
}


def measure(program: str) -> list[dict[str, Any]]:
    """A row for each budget, one for the baseline, and one for the budget that equals the baseline's memory."""
    swept = PROGRAMS[program]
    step, args = swept.target()
    with CachingCompiler(default_folder()) as compiler:
        traced = program_of(step, args, carry=None, donate=None)

        def planned(name: str, budget: float | None) -> Row:
            limit = 1e15 if budget is None else budget
            started = time.perf_counter()
            try:
                request = PlanRequest(mesh=MESH, hardware=HARDWARE, memory_budget_bytes=limit)
                plan = plan_program(traced, request)
            except AutoparError as error:
                return _failed(name, limit, time.perf_counter() - started, str(error))
            seconds = time.perf_counter() - started
            row = _row(name, plan, seconds, budget, _compiled(step, args, plan, compiler))
            print(row, flush=True)
            return row

        free = planned("no limit", None)
        whole = MemoryBudget.with_room_for(1e9 * free["predicted_gb"]).total_bytes
        swept_rows = [planned(f"{100 * part:.0f} %", part * whole) for part in PARTS]
        by_hand = _by_hand(swept.target, whole_layers(*swept.layer), compiler)
        as_much = planned("what fsdp took", 1e9 * by_hand["compiled_gb"])
        return [free, *swept_rows, by_hand, as_much]


def _by_hand(target: Callable[[], Target], checkpointed: AbstractContextManager[None], compiler: Any) -> Row:
    with checkpointed:
        step, args = target()
        pins = pinned.fsdp(args, parse_mesh(MESH))
        started = time.perf_counter()
        plan = autopar.plan(step, *args, mesh=MESH, hardware=HARDWARE, pin=pins, memory_budget_bytes=1e15)
        seconds = time.perf_counter() - started
        compiled = _compiled(step, args, plan, compiler)
    return _row("fsdp, every layer checkpointed", plan, seconds, None, compiled)


def _compiled(step: Any, args: Any, plan: Plan, compiler: Any) -> Any:
    return autopar.verify(step, *args, plan=plan, hardware=HARDWARE, compiler=compiler).compiled


def _row(name: str, plan: Plan, plan_s: float, budget: float | None, compiled: Any) -> Row:
    prediction = plan.prediction
    return {
        "budget": name,
        "budget_gb": "" if budget is None else budget / 1e9,
        "predicted_gb": prediction.peak_bytes / 1e9,
        "compiled_gb": compiled.peak_bytes / 1e9,
        "keeps": "" if budget is None else bool(compiled.peak_bytes <= budget),
        "predicted_ms": 1e3 * prediction.step_time_s,
        "predicted_xla_ms": 1e3 * (prediction.xla_step_time_s or 0.0),
        "xla_ms": 1e3 * (compiled.step_time_s or 0.0),
        "recomputed_gb": sum(one.saved_bytes for one in plan.rematerialized) / 1e9,
        "recomputed_ms": 1e3 * sum(one.time_s for one in plan.rematerialized),
        "plan_s": plan_s,
        "strategy": plan.strategy,
    }


def _failed(name: str, budget: float, plan_s: float, words: str) -> Row:
    blank = dict.fromkeys(
        (
            "budget",
            "budget_gb",
            "predicted_gb",
            "compiled_gb",
            "keeps",
            "predicted_ms",
            "predicted_xla_ms",
            "xla_ms",
            "recomputed_gb",
            "recomputed_ms",
            "plan_s",
            "strategy",
        ),
        "",
    )
    return blank | {"budget": name, "budget_gb": budget / 1e9, "plan_s": plan_s, "strategy": words}

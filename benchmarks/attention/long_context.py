"""Plan LLaMA-3 8B at long context on H100s of 96 GB, compile it for absent GPUs, and compare with torchtitan's figures.

One sequence per step; `attention="auto"` and no other option but the memory. `heads` are the mesh axes that split heads of attention,
`tokens` those that split its tokens, with the method.
"""

from __future__ import annotations

from typing import Any

#: A GPU of torchtitan's cards has 96 GB; a tenth is left for the runtime.
BUDGET = "86GB"
#: Tokens, and GPUs.
CASES = {
    "32k tokens, 8 GPUs": (32_768, 8),
    "64k tokens, 8 GPUs": (65_536, 8),
    "128k tokens, 8 GPUs": (131_072, 8),
    "256k tokens, 8 GPUs": (262_144, 8),
    "1M tokens, 64 GPUs": (1_048_576, 64),
}
#: Tokens per second and GPU that torchtitan reports for context parallelism over 8 GPUs (its benchmarks/llama3_h100_202412_torchtitan.md).
PUBLISHED = {32_768: 3_890, 65_536: 2_540, 131_072: 1_071, 262_144: 548}


def measure(program: str) -> list[dict[str, Any]]:
    """One row."""
    import time

    import autopar
    from benchmarks.compile_cache import CachingCompiler, default_folder
    from benchmarks.zoo.llama3 import llama3_8b

    tokens, num_gpus = CASES[program]
    step, args = llama3_8b(1, tokens)
    started = time.process_time()
    plan = autopar.plan(
        step,
        *args,
        num_devices=num_gpus,
        hardware="h100-sxm",
        attention="auto",
        memory_budget_bytes=BUDGET,
        cache=False,
    )
    seconds = time.process_time() - started
    with CachingCompiler(default_folder()) as compiler:
        checked = autopar.verify(step, *args, plan=plan, compiler=compiler)
    memory = {one.name: one for one in checked.memory}["peak"]
    replay = checked.times.replay
    first = plan.regions[0]
    heads, split = ((*first.operands[0].dims[2], ""), (*first.operands[0].dims[1], ""))
    method = first.method or "whole sequences"
    return [
        {
            "mesh": str(plan.mesh),
            "plan": plan.strategy,
            "heads": heads[0],
            "tokens": f"{split[0]} {method}".strip(),
            "predicted_s": plan.prediction.step_time_s,
            "replayed_s": replay.step_time_s if replay is not None else None,
            "peak_GB": memory.predicted / 1e9,
            "compiled_GB": (memory.compiled or 0.0) / 1e9,
            "planned_cpu_s": seconds,
            "tokens_per_s_and_gpu": tokens / num_gpus / plan.prediction.step_time_s,
            "torchtitan": PUBLISHED.get(tokens, ""),
        }
    ]

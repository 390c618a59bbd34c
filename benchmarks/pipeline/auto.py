"""Measure planning in which stages are a choice: `stages="auto"` and `everything="auto"` on every model of the zoo.

Each case is a model on H100s, 8 in a host; its batch grows with their number, as in the benchmark of plans. A row is one
call of `autopar.plan` in a cold process, without a plan cache. *CPU* is the processor time of the call and of its processes,
tracing included; the limit for `stages="auto"` is 60 s, and for `everything="auto"` a minute. *Planned* is what was
chosen: the devices of each stage, or one program and its mesh. *Over one program* is the predicted step over that of one
program on all devices; it is at most 1, and empty where one program does not fit in memory.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import autopar
from autopar import PipelinePlan
from benchmarks.plans.models import MODELS as SPLIT
from benchmarks.zoo import diffusion, lora, real
from benchmarks.zoo.training import Training

#: Models with batch normalization, whose microbatches have their own statistics.
_OWN_STATISTICS = frozenset({"resnet", "unet"})
_OPTIONS = ("stages", "everything")


def _unet(num_gpus: int) -> Training:
    return diffusion.unet((64, 128, 256, 512), 2, 32 * num_gpus, 64)


def _lora(num_gpus: int) -> Training:
    return lora.lora(lora.LoraConfig(128_256, 4096, 14_336, 32, 32, 8, 16), num_gpus, 2048)


MODELS: Mapping[str, Callable[[int], Training]] = {
    **real.REAL,
    **{name: (lambda num_gpus, model=model: model.training(model.per_gpu * num_gpus)) for name, model in SPLIT.items()},
    "unet": _unet,
    "lora": _lora,
}


def measure(case: str) -> list[dict[str, Any]]:
    """The rows of a model and a number of devices, as "gpt2, 8"."""
    name, _, count = case.partition(", ")
    return [_row(name, int(count), option) for option in _OPTIONS]


def _row(name: str, num_devices: int, option: str) -> dict[str, Any]:
    step, args = MODELS[name](num_devices).target
    own = name in _OWN_STATISTICS
    options = {"num_devices": num_devices, "hardware": "h100-sxm", "per_microbatch_statistics": own, option: "auto"}
    used, started = _cpu_s(), time.perf_counter()
    plan = autopar.plan(step, *args, **options)
    used, seconds = _cpu_s() - used, time.perf_counter() - started
    step_s = plan.prediction.step_time_s
    return {
        "call": f'{option}="auto"',
        "CPU_s": used,
        "seconds": seconds,
        "planned": _planned(plan),
        "schedule": plan.schedule if isinstance(plan, PipelinePlan) else "",
        "microbatches": plan.num_microbatches,
        "step_ms": 1e3 * step_s,
        "over one program": _over_one_program(plan, step_s),
    }


def _planned(plan: Any) -> str:
    if isinstance(plan, PipelinePlan):
        return " + ".join(str(stage.submesh.shape.num_devices) for stage in plan.stages)
    return f"one program on {plan.mesh.describe()}"


def _over_one_program(plan: Any, step_s: float) -> float | str:
    if not isinstance(plan, PipelinePlan):
        return 1.0
    others = [tried.step_time_s for tried in plan.tried if tried.num_stages == 1]
    return step_s / min(others) if others else ""


def _cpu_s() -> float:
    """Processor seconds of this process and of its children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime

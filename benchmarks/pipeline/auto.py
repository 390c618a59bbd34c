"""Measure the search for stages, microbatches and schedule together: `stages="auto"` on every model of the zoo.

Each row is a model on H100s, 8 in a host; its batch grows with their number, as in the benchmark of plans. *CPU* is the
processor time of the search, without tracing; the limit is 60 s. *Runs* are the runs of layers that it planned to
price others. *Over one program* is the predicted step with stages over that of one program on all devices, in microbatches
of its own; it is 1 where one stage is chosen, and empty where one program does not fit in memory.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import BudgetError
from autopar.hardware.profile import load
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup
from autopar.pipeline.search.plan_stages import plan_stages
from autopar.pipeline.search.request import StageRequest
from autopar.transforms.program import Program, program_of
from benchmarks.plans.models import MODELS as SPLIT
from benchmarks.zoo import diffusion, lora, real
from benchmarks.zoo.training import Training

_PROFILE = load("h100-sxm")
#: Models with batch normalization, whose microbatches have their own statistics.
_OWN_STATISTICS = frozenset({"resnet", "unet"})


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
    """The row of a model and a number of devices, as "gpt2, 8"."""
    name, _, count = case.partition(", ")
    step, args = MODELS[name](int(count)).target
    program = program_of(step, args, carry=None, donate=None)
    used = _cpu_s()
    plan = plan_stages(program, _request(name, int(count)))
    seconds = _cpu_s() - used
    return [
        {
            "model": name,
            "devices": int(count),
            "CPU_s": seconds,
            "runs": plan.outcome.num_planned,
            "layers": plan.outcome.num_layers,
            "stages": " ".join(str(stage.submesh.shape.num_devices) for stage in plan.stages),
            "schedule": plan.schedule,
            "microbatches": plan.num_microbatches,
            "step_ms": 1e3 * plan.prediction.step_time_s,
            "over one program": _over_one_program(program, name, int(count), plan.prediction.step_time_s),
        }
    ]


def _over_one_program(program: Program, name: str, num_devices: int, step_s: float) -> float | str:
    try:
        one = plan_stages(program, _request(name, num_devices, stages=1))
    except BudgetError:
        return ""
    return step_s / one.prediction.step_time_s


def _request(name: str, num_devices: int, **options: Any) -> StageRequest:
    per_host = min(num_devices, _PROFILE.devices_per_host)
    cluster = Cluster((DeviceGroup(_PROFILE.name, num_devices // per_host, per_host),))
    own = name in _OWN_STATISTICS
    return StageRequest(cluster=cluster, profiles={_PROFILE.name: _PROFILE}, own_statistics=own, **options)


def _cpu_s() -> float:
    """Processor seconds of this process and of its children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime

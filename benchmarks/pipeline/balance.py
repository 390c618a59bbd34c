"""Compare the borders of planned stages with the best of all contiguous cuts between equations, by the same prices.

Each row is a model in 8 microbatches by 1F1B on 2 or 4 H100s, one for each stage; batch normalization has its own statistics
for each microbatch. *Slowest stage* is its time in the bottleneck of the step: 7 of 8 microbatches, forward and backward,
with the transfers to the next stage and back, for which 1F1B waits, and its update. *Best* is the least slowest stage over
every set of cuts between units of the forward pass (single equations, loops, and branches), by bisection. All times are
prices from one plan of the whole step on one device, in which each unit has its share. *Planned* is the slowest stage when
its program is planned by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

from autopar.hardware.profile import load
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.search.plan_stages import plan_stages
from autopar.pipeline.search.request import StageRequest
from autopar.pipeline.search.stage_costs import StageCosts
from autopar.transforms.program import program_of
from benchmarks.zoo import diffusion, language, stacked, vision
from benchmarks.zoo.patches_and_branches import GOOGLENET, inception, mlp_mixer
from benchmarks.zoo.training import BF16, Target

# isort: split
from transformers import BartConfig, GPT2Config, ResNetConfig

MICROBATCHES = 8
_PROFILE = load("h100-sxm")
#: The relative error of the bisection.
_EXACT = 1e-6


def _resnet18() -> Target:
    sizes = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
    return vision.resnet(ResNetConfig(**sizes), 256, 224, BF16).target


MODELS: Mapping[str, Callable[[], Target]] = {
    "ResNet-18": _resnet18,
    "ResNet-50": lambda: vision.resnet(ResNetConfig(), 256, 224, BF16).target,
    "U-Net": lambda: diffusion.unet((64, 128, 256, 512), 2, 32, 64).target,
    "GPT-2": lambda: language.gpt2(GPT2Config(), 32, 1024, BF16).target,
    "GPT-2 scanned": lambda: stacked.stacked(language.gpt2(GPT2Config(), 32, 1024, BF16), stacked.GPT2).target,
    "BART": lambda: language.bart(BartConfig(), 32, 512, BF16).target,
    "Inception": lambda: inception(GOOGLENET, 256, 224, 1000, optax.sgd(0.1)).target,
    "MLP-Mixer": lambda: mlp_mixer(768, 384, 12, 16, 256, 224, 1000).target,
}


def measure(name: str) -> list[dict[str, Any]]:
    """Two rows for a model."""
    step, args = MODELS[name]()
    program = program_of(step, args, carry=None, donate=None)
    units = Units.of(Cuttable.of(program, own_statistics=True))
    rows = []
    for num_stages in (2, 4):
        used = time.process_time()
        plan = plan_stages(program, _request(num_stages))
        seconds = time.process_time() - used
        ours, best = units.slowest(plan), units.least_slowest(num_stages)
        rows.append(
            {
                "model": name,
                "stages": num_stages,
                "units": len(units.before) - 1,
                "layers": plan.outcome.num_layers,
                "slowest stage_ms": 1e3 * ours,
                "best_ms": 1e3 * best,
                "over the best": ours / best,
                "planned_ms": 1e3 * max(bottleneck(stage.cost) for stage in plan.stages),
                "step_ms": 1e3 * plan.prediction.step_time_s,
                "bubble": plan.prediction.bubble_fraction,
                "cpu_s": seconds,
            }
        )
    return rows


def _request(num_stages: int) -> StageRequest:
    cluster = Cluster((DeviceGroup(_PROFILE.name, 1, num_stages),))
    options: dict[str, Any] = {"stages": num_stages, "num_microbatches": MICROBATCHES, "schedule": "1f1b"}
    return StageRequest(cluster=cluster, profiles={_PROFILE.name: _PROFILE}, own_statistics=True, **options)


def bottleneck(cost: StageCost) -> float:
    """Seconds of a stage that every step waits for if it is the slowest one, without transfers."""
    return (MICROBATCHES - 1) * (cost.forward_s + cost.backward_s + cost.weight_s) + cost.update_s


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a chain.

    Args:
        before: the `bottleneck` of all units before each one, float[units + 1].
        border: what a cut before each unit adds to the stages on both sides, float[units + 1].
        sent: what a stage that ends before each unit adds to it for its transfers, float[units + 1].
    """

    before: np.ndarray
    border: np.ndarray
    sent: np.ndarray

    @classmethod
    def of(cls, cuttable: Cuttable) -> Units:
        """Those of a step."""
        chain, count = cuttable.chain, len(cuttable.chain.units)
        layers, together = cuttable.layers(range(count), MICROBATCHES), (0,) * count
        costs = StageCosts(layers, {_PROFILE.name: _PROFILE}, range(count), together=together)
        shape = SubmeshShape(_PROFILE.name, 1, 1)
        first = np.array([0.0, *(bottleneck(costs.cost(0, unit, shape)) for unit in range(count))])
        second = np.array([*(bottleneck(costs.cost(unit, count - 1, shape)) for unit in range(count)), 0.0])
        border = (first + second - first[-1]) / 2
        cuts = np.array([0.0, *chain.cut_bytes, 0.0]) / MICROBATCHES
        link = _PROFILE.host_link
        sent = 2 * (MICROBATCHES - 1) * (cuts / link.bytes_per_s + link.latency_s)
        sent[-1] = 0.0  # nothing is sent from the last stage
        return cls(first - border, border, sent)

    def slowest(self, plan: PipelinePlan) -> float:
        """The slowest stage of a plan."""
        starts = [plan.starts[stage.first_layer] for stage in plan.stages]
        ends = [*starts[1:], len(self.before) - 1]
        until, since = self.before + self.border + self.sent, self.before - self.border
        return float(max(until[j] - since[i] for i, j in zip(starts, ends, strict=True)))

    def least_slowest(self, num_stages: int) -> float:
        """The least slowest stage over all cuts into `num_stages` runs.

        >>> Units(np.array([0.0, 1.0, 3.0, 4.0, 8.0]), np.zeros(5), np.zeros(5)).least_slowest(2)
        4.000004
        """
        low, high = (
            float(self.before[-1]) / num_stages,
            float(self.before[-1] + 2 * self.border.max() + self.sent.max()),
        )
        while high - low > _EXACT * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._are_enough(num_stages, middle) else (middle, high)
        return round(high, 6)

    def _are_enough(self, num_stages: int, most: float) -> bool:
        """Whether so many stages of at most these seconds have all units."""
        until, since = self.before + self.border + self.sent, self.before - self.border
        reached = np.zeros(len(until), bool)  # where a stage can begin
        reached[0] = True
        for _ in range(num_stages):
            latest = np.maximum.accumulate(np.where(reached, since, -np.inf))
            reached = np.append(False, until[1:] - latest[:-1] <= most)
        return bool(reached[-1])

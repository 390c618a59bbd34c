"""Count what a change of placements costs, and after how long it has paid.

In: what runs now, the placement that is found, a trace. Out: `ChangeCost`. All hosts load at once. A device whose group stays and loses
no model serves on while it loads; the others serve nothing until the last weights are there, and the requests that would have met
their bounds on them meanwhile are lost. That is the most a change can cost: other replicas may serve some of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.placement.change import Running, loaded_bytes
from autopar.placement.placements import ModelSpec
from autopar.placement.search import Found
from autopar.placement.simulate import simulate


@dataclass(frozen=True, slots=True)
class ChangeCost:
    """The cost and the gain of a change.

    Args:
        goodput_before: the share of requests within their bounds on what runs now.
        seconds: until the last group has its weights. lost: at most so many requests are lost meanwhile.
        gain_per_s: the requests per second that are within their bounds in addition.
    """

    goodput_before: float
    seconds: float
    lost: float
    gain_per_s: float

    @property
    def pays_after_s(self) -> float:
        """After so many seconds the change has brought as many requests as it has cost; infinite if it brings none."""
        return self.lost / self.gain_per_s if self.gain_per_s > 0 else math.inf


def cost_of_change(
    found: Found,
    current: Running,
    models: Mapping[str, ModelSpec],
    budget_bytes: float,
    load_bytes_per_s: float,
) -> ChangeCost:
    """The cost of a change from what runs now, on the trace of the outcome.

    Args:
        budget_bytes: the memory of one device. load_bytes_per_s: the rate at which the devices of a group get weights.
    """
    trace = found.outcome.trace
    before = simulate(current.placement, models, trace, budget_bytes)
    groups = found.placement.groups
    loaded = loaded_bytes(groups, found.firsts, current, models)
    seconds = max(loaded.values(), default=0.0) / load_bytes_per_s
    new = {(groups[number].layout, first): {*groups[number].models} for number, first in found.firsts.items()}
    good = dict(zip(trace.models, np.bincount(trace.model, before.is_good, len(trace.models)).tolist(), strict=True))
    lost = 0.0
    for number, first in current.firsts.items():
        group = current.placement.groups[number]
        if {*group.models} <= new.get((group.layout, first), set()):
            continue
        lost += sum(good.get(name, 0.0) / len(current.placement.groups_of(name)) for name in group.models)
    gain = (found.outcome.num_good - before.num_good) / trace.duration_s
    return ChangeCost(before.goodput, seconds, lost / trace.duration_s * seconds, gain)

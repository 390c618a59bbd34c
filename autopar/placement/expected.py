"""Estimate the goodput of a placement by formulas, to decide which placements are worth a simulation.

In: the models' times, a trace. Out: `Demand`, and the expected requests per second that meet their bounds. A group is a queue with
general arrivals and service (Kingman's formula): with utilization rho, a mean service time S, and squared coefficients of
variation c_a and c_s of intervals and services,

    mean wait while busy   tau = S (c_a + c_s) / 2 / (1 - rho) / replicas
    late                   P(wait > slack) = rho exp(-slack / tau)

A request is on time if its wait is at most its slack, the time that its bounds leave. The requests of a model are divided among
its replicas so that the groups are equally busy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from autopar.placement.layouts import Layout
from autopar.placement.placements import ModelSpec, Placement
from autopar.placement.traces import Trace

#: The squared coefficient of variation of services.
_SERVICE_CV2 = 0.5
_ROUNDS = 3


class OnLayout(NamedTuple):
    """The average request of a model on a layout.

    Args:
        work_s: the seconds of the slowest stage. on_time: the share of requests that meet their bounds if they are alone.
        slack_s: the seconds that the bounds leave.
    """

    work_s: float
    on_time: float
    slack_s: float


class Demand:
    """The requests of all models, and what they need on each layout.

    Attributes:
        rate_per_s: by model. cv2: the squared coefficient of variation of the intervals, by model.
        needs: by model and layout.
    """

    def __init__(self, models: Mapping[str, ModelSpec], trace: Trace) -> None:
        rates = trace.rates_per_s()
        self.rate_per_s = {name: rates.get(name, 0.0) for name in models}
        self.cv2: dict[str, float] = {}
        self.needs: dict[tuple[str, Layout], OnLayout] = {}
        for name, model in models.items():
            own = trace.model == (trace.models.index(name) if name in rates else -1)
            intervals = np.diff(trace.arrival_s[own])
            mean = float(intervals.mean()) if intervals.size else 0.0
            self.cv2[name] = float(intervals.var()) / mean**2 if mean else 1.0
            pairs = np.stack([trace.prompt_tokens[own], trace.output_tokens[own]], 1)
            sizes, counts = np.unique(pairs, axis=0, return_counts=True)
            for layout in model.times:
                self.needs[name, layout] = _on_layout(model, layout, sizes.tolist(), counts.tolist())

    def expected_per_s(self, placement: Placement) -> float:
        """The expected requests per second that meet their bounds."""
        groups, needs = placement.groups, self.needs
        shares = self._shares(placement)
        late: list[tuple[float, float]] = []
        for number, group in enumerate(groups):
            rates = {name: self.rate_per_s[name] * shares[name][number] for name in group.models}
            rate = sum(rates.values())
            if rate <= 0:
                late.append((0.0, 1.0))
                continue
            load = sum(rates[name] * needs[name, group.layout].work_s for name in group.models)
            arrivals = sum(rates[n] * (1 + shares[n][number] * (self.cv2[n] - 1)) for n in group.models) / rate
            replicas = sum(rates[name] * len(shares[name]) for name in group.models) / rate
            tau = load / rate * (arrivals + _SERVICE_CV2) / 2 / max(1e-3, 1 - load) / replicas
            late.append((load, tau))
        good = 0.0
        for name, of_groups in shares.items():
            for number, share in of_groups.items():
                need, (load, tau) = needs[name, groups[number].layout], late[number]
                waits = max(min(1.0, load) * math.exp(-max(0.0, need.slack_s) / max(tau, 1e-9)), 1 - 1 / max(load, 1.0))
                good += self.rate_per_s[name] * share * need.on_time * (1 - waits)
        return good

    def _shares(self, placement: Placement) -> dict[str, dict[int, float]]:
        """The share of each model's requests that each of its groups gets."""
        groups, shares = placement.groups, dict[str, dict[int, float]]()
        for number, group in enumerate(groups):
            for name in group.models:
                shares.setdefault(name, {})[number] = 1 / max(self.needs[name, group.layout].work_s, 1e-12)
        for _ in range(_ROUNDS):
            for of_groups in shares.values():
                whole = sum(of_groups.values())
                for number in of_groups:
                    of_groups[number] /= whole
            loads = [
                sum(self.rate_per_s[n] * shares[n][number] * self.needs[n, group.layout].work_s for n in group.models)
                for number, group in enumerate(groups)
            ]
            for of_groups in shares.values():
                if len(of_groups) > 1:
                    for number in of_groups:
                        of_groups[number] /= (0.05 + loads[number]) ** 0.5
        for of_groups in shares.values():
            whole = sum(of_groups.values())
            for number in of_groups:
                of_groups[number] /= whole
        return shares


def _on_layout(model: ModelSpec, layout: Layout, sizes: list[list[int]], counts: list[int]) -> OnLayout:
    times, num = model.times[layout], max(1, sum(counts))
    work = on_time = slack = 0.0
    for (prompt, output), count in zip(sizes, counts, strict=True):
        latency = times.latency_s(prompt, output)
        work += count * times.work_s(prompt, output)
        is_served = prompt + output <= times.options.max_length
        on_time += count * (is_served and model.slo.is_met(times.latency_s(prompt, 1), latency, output))
        slack += count * min(1e9, model.slo.deadline_s(output) - latency)
    return OnLayout(work / num, on_time / num, slack / num)

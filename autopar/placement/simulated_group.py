"""Simulate the engines of one group of devices on a fake clock, with the scheduler that real engines run.

In: the times of each model on the group's layout, requests. Out: iterations with the times at which they end.

The host of an engine is simulated as `Engine.step` works: it decides an iteration while the one before runs on the devices, and
reads the results of that one before it decides the next. The devices run the iterations of all engines in the order in which
they were dispatched. A pipeline has as many schedulers as stages, which share pages and take turns: the next token of a
sequence cannot be computed before the last one has left the last stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.page_tables import PagedCache
from autopar.inference.schedule.requests import Iteration, Results, Shape
from autopar.inference.schedule.scheduler import Scheduler
from autopar.placement.layouts import StepTimes
from autopar.placement.placements import Group, ModelSpec, least_bytes

#: The largest cache, as a multiple of what all slots need, as in `inference.serve.layout`.
_MAX_POOL_FACTOR = 4


class SimulatedDevices:
    """The devices of a group, as the stages of a pipeline; one stage without a pipeline.

    Attributes:
        busy_s: the seconds for which each stage has computed.
        queued_s: the work of all requests that have not ended.
    """

    def __init__(self, num_stages: int) -> None:
        self._free_s = [0.0] * num_stages
        self.busy_s = [0.0] * num_stages
        self.queued_s = 0.0

    def run(self, now_s: float, stage_s: tuple[float, ...]) -> float:
        """Queue an iteration behind all earlier ones.

        Returns:
            The time at which it leaves the last stage.
        """
        at, free, busy = now_s, self._free_s, self.busy_s
        for stage, seconds in enumerate(stage_s):
            at = max(at, free[stage]) + seconds
            free[stage] = at
            busy[stage] += seconds
        return at


@dataclass(eq=False, slots=True)
class SimulatedEngine:
    """One scheduler of a replica, and the number of its iterations that run.

    Args:
        most: the number of iterations that may run at once.
    """

    scheduler: Scheduler
    times: StepTimes
    devices: SimulatedDevices
    most: int
    num_running: int = 0
    queued_s: float = 0.0
    _results: dict[Shape, Results] = field(default_factory=dict)

    def dispatch(self, now_s: float) -> tuple[float, Iteration] | None:
        """Decide the next iteration and queue it on the devices.

        Returns:
            The time at which its results are there, and the iteration; None if there is nothing to run yet.
        """
        if self.num_running >= self.most:
            return None
        is_pipeline = self.times.layout.pipeline > 1
        if is_pipeline and self.num_running and self.scheduler.needs_results:
            return None
        iteration = self.scheduler.next()
        if iteration is None:
            return None
        tokens = self.scheduler.num_cached_tokens if self.times.token_s else 0
        self.num_running += 1
        return self.devices.run(now_s, self.times.seconds(iteration.shape, tokens)), iteration

    def results(self, shape: Shape) -> Results:
        """The results of an iteration in which each row generates token 1, which ends no request."""
        if shape not in self._results:
            rows = self.scheduler.options.num_slots + shape.rows
            tokens = np.ones((rows, max(shape.steps, shape.width)), np.int32)
            self._results[shape] = Results(tokens, np.ones(rows, np.int32), np.ones(rows, bool))
        return self._results[shape]


@dataclass(eq=False, slots=True)
class Replica:
    """A model on a group."""

    group: int
    times: StepTimes
    devices: SimulatedDevices
    engines: list[SimulatedEngine]

    def least_loaded(self) -> SimulatedEngine:
        """The engine with the least queued work."""
        return min(self.engines, key=lambda engine: engine.queued_s)


def simulated_group(
    number: int, group: Group, models: Mapping[str, ModelSpec], budget_bytes: float
) -> dict[str, Replica]:
    """The replicas of a group, by model. The memory that weights leave is divided among the caches.

    Args:
        budget_bytes: the memory of one device.
    """
    devices = SimulatedDevices(group.layout.pipeline)
    spare = budget_bytes - least_bytes(group, models)
    replicas: dict[str, Replica] = {}
    for name in group.models:
        times = models[name].times[group.layout]
        pool = PagePool(_num_pages(times, spare / len(group.models)))
        stages = group.layout.pipeline
        options = replace(times.options, num_slots=max(1, times.options.num_slots // stages))
        caches = [PagedCache(pool, times.page_size, shares_prefixes=False, window=times.window) for _ in range(stages)]
        most = 2 if stages == 1 else stages + 1
        engines = [SimulatedEngine(Scheduler(cache, options), times, devices, most) for cache in caches]
        replicas[name] = Replica(number, times, devices, engines)
    return replicas


def _num_pages(times: StepTimes, spare: float) -> int:
    """The pages of one sequence, and as many as fit into `spare` bytes of a device, but no more than are of use."""
    most = _MAX_POOL_FACTOR * times.options.num_slots * times.pages_of_sequence
    page = times.token_bytes * times.page_size
    more = spare / page if page else math.inf
    return most if more >= most else min(most, times.pages_of_sequence + int(more))

"""Simulate a placement on a trace: which requests meet their latency bounds.

In: a placement, models with their times, a trace. Out: `Outcome`. The simulation has a fake clock and the real scheduler of each
engine, so admission, chunked prefill, continuous batching and preemption are those of the engine.

A request that cannot end within its bounds any more is refused while it waits, and aborted when its time is over, as a server
does with a timeout.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.inference.schedule.requests import Iteration, Request
from autopar.placement.placements import ModelSpec, Placement, check
from autopar.placement.router import Choice, choose_replica
from autopar.placement.simulated_group import Replica, SimulatedEngine, simulated_group
from autopar.placement.traces import Trace

#: Kinds of events; at one time, results come first and dispatches see every arrival before them.
_RESULTS, _LATEST_START, _DEADLINE = range(3)
#: Relative room for rounding when a request's end is compared with its bounds.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What has become of the requests of a trace.

    Args:
        ttft_s, latency_s: float64 `[n]`, seconds from arrival to the first and to the last token; NaN without one.
        is_good: bool `[n]`, whether each request met its bounds.
        busy: for each group the share of the trace's time for which its busiest stage computed.
        num_iterations: the iterations of all engines.
        is_whole: whether the simulation went to its end; if not, the requests after it count as not good.
    """

    trace: Trace
    ttft_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    is_good: NDArray[np.bool_]
    busy: tuple[float, ...]
    num_iterations: int
    is_whole: bool = True

    @property
    def num_good(self) -> int:
        return int(self.is_good.sum())

    @property
    def goodput(self) -> float:
        """The share of the requests that met their bounds."""
        return self.num_good / max(1, self.trace.num_requests)

    def attainment(self) -> dict[str, float]:
        """The share of each model's requests that met its bounds; NaN for a model without requests."""
        found = {}
        for number, name in enumerate(self.trace.models):
            own = self.is_good[self.trace.model == number]
            found[name] = float(own.mean()) if own.size else math.nan
        return found

    @property
    def mean_latency_s(self) -> float:
        """The mean over the requests that ended."""
        return float(np.nanmean(self.latency_s)) if not np.isnan(self.latency_s).all() else math.nan


def simulate(
    placement: Placement,
    models: Mapping[str, ModelSpec],
    trace: Trace,
    budget_bytes: float = math.inf,
    *,
    drops_late: bool = True,
    most_lost: int | None = None,
) -> Outcome:
    """Simulate a placement.

    Args:
        models: by the names in the trace. budget_bytes: the memory of one device.
        drops_late: whether requests that cannot meet their bounds are refused or aborted.
        most_lost: the number of requests outside their bounds at which the simulation ends; None for no limit.

    Raises:
        PlacementError: the placement cannot run.
    """
    check(placement, models, budget_bytes)
    groups = [simulated_group(n, group, models, budget_bytes) for n, group in enumerate(placement.groups)]
    return _Simulation(groups, models, trace, drops_late=drops_late, most_lost=most_lost).run()


class _Simulation:
    """The state of a simulation: a clock, and what happens next."""

    def __init__(
        self,
        groups: list[dict[str, Replica]],
        models: Mapping[str, ModelSpec],
        trace: Trace,
        *,
        drops_late: bool,
        most_lost: int | None,
    ) -> None:
        num = trace.num_requests
        self._trace, self._models, self._drops_late = trace, models, drops_late
        self._groups = groups
        self._replicas = {name: [each[name] for each in groups if name in each] for name in models}
        self._events: list[tuple[float, int, int, Any]] = []
        self._order = itertools.count()
        self._first, self._end = np.full(num, np.nan), np.full(num, np.nan)
        self._is_good = np.zeros(num, bool)
        self._has_started = [False] * num
        self._num_iterations = self._num_lost = 0
        self._most_lost = math.inf if most_lost is None else most_lost
        self._sent: dict[int, tuple[Replica, SimulatedEngine, float]] = {}

    def run(self) -> Outcome:
        trace, events = self._trace, self._events
        arrivals = trace.arrival_s.tolist()
        columns = (trace.model.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
        requests = zip(*columns, strict=True)
        for number, (arrival_s, request) in enumerate(zip(arrivals, requests, strict=True)):
            while events and events[0][0] <= arrival_s:
                self._happen(*heapq.heappop(events))
            if self._num_lost > self._most_lost:
                return self._outcome(is_whole=False)
            self._arrive(number, arrival_s, *request)
        while events:
            self._happen(*heapq.heappop(events))
        return self._outcome(is_whole=True)

    def _happen(self, now_s: float, kind: int, _: int, what: Any) -> None:
        if kind == _RESULTS:
            self._take(now_s, *what)
        elif what in self._sent and (kind == _DEADLINE or not self._has_started[what]):
            self._finish(now_s, what, aborts=True)

    def _arrive(self, number: int, now_s: float, model: int, prompt: int, output: int) -> None:
        spec = self._models[self._trace.models[model]]
        replicas = [each for each in self._replicas[spec.name] if prompt + output <= each.times.options.max_length]
        if not replicas:
            self._num_lost += 1
            return
        choices = [Choice(each.devices.queued_s, each.times.latency_s(prompt, output)) for each in replicas]
        at = choose_replica(choices)
        replica, engine = replicas[at], replicas[at].least_loaded()
        work = replica.times.work_s(prompt, output)
        if self._drops_late:
            end = now_s + spec.slo.deadline_s(output) * (1 + _ROUNDING)
            if math.isfinite(end):
                heapq.heappush(self._events, (end, _DEADLINE, next(self._order), number))
                latest = max(now_s, end - choices[at].latency)
                heapq.heappush(self._events, (latest, _LATEST_START, next(self._order), number))
        engine.scheduler.submit(Request(str(number), _prompt(prompt), output))
        replica.devices.queued_s += work
        engine.queued_s += work
        self._sent[number] = replica, engine, work
        self._dispatch(now_s, engine)

    def _dispatch(self, now_s: float, engine: SimulatedEngine) -> None:
        while (dispatched := engine.dispatch(now_s)) is not None:
            end_s, iteration = dispatched
            for started in iteration.started:
                self._has_started[int(started.name)] = True
            heapq.heappush(self._events, (end_s, _RESULTS, next(self._order), (engine, iteration)))

    def _take(self, now_s: float, engine: SimulatedEngine, iteration: Iteration) -> None:
        """Apply the results of an iteration, and dispatch the next one."""
        engine.num_running -= 1
        self._num_iterations += 1
        update = engine.scheduler.update(iteration, engine.results(iteration.shape))
        for name, slot in zip(update.names, update.slots.tolist(), strict=True):
            number = int(name)
            if math.isnan(self._first[number]):
                self._first[number] = now_s
            if slot in update.ended:
                self._end[number] = now_s
                self._is_good[number] = self._is_in_time(number)
                self._num_lost += not self._is_good[number]
                self._finish(now_s, number)
        self._dispatch(now_s, engine)

    def _finish(self, now_s: float, number: int, *, aborts: bool = False) -> None:
        """Remove a request's work, and let other engines have its pages."""
        replica, engine, work = self._sent.pop(number)
        replica.devices.queued_s -= work
        engine.queued_s -= work
        if aborts:
            self._num_lost += 1
            engine.scheduler.abort(str(number))
        for each in replica.engines:
            if aborts or each is not engine:
                self._dispatch(now_s, each)

    def _is_in_time(self, number: int) -> bool:
        """Whether a request that has ended met its bounds."""
        trace, fair = self._trace, 1 - _ROUNDING
        arrival, first, end = trace.arrival_s[number], self._first[number], self._end[number]
        slo = self._models[trace.models[trace.model[number]]].slo
        return slo.is_met((first - arrival) * fair, (end - arrival) * fair, int(trace.output_tokens[number]))

    def _outcome(self, *, is_whole: bool) -> Outcome:
        trace = self._trace
        ttft, latency = self._first - trace.arrival_s, self._end - trace.arrival_s
        whole = max([trace.duration_s, *self._end[~np.isnan(self._end)].tolist()])
        busy = tuple(max(next(iter(group.values())).devices.busy_s) / whole if group else 0.0 for group in self._groups)
        return Outcome(trace, ttft, latency, self._is_good, busy, self._num_iterations, is_whole)


@lru_cache(maxsize=4096)
def _prompt(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens

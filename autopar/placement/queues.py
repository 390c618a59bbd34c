"""Estimate the goodput of many placements at once, by queues that the requests of a trace join.

In: models, a trace, placements. Out: for each placement the expected number of requests within their bounds. A group is a queue in the
order of arrival, from which a request takes the seconds of its slowest stage (`StepTimes.work_s`). A request goes to the replica with
the least queued work and latency together, as the router decides. While other models of the group decode, its chunks and steps wait for
their steps. If it would be late by more than the iterations that are queued before its own, it is refused; if by less, it runs in vain.

So the bursts of the trace count as they are, but not what an engine does with its slots and pages. All placements advance together, with
one array operation for all of them, which takes about a thousandth of the time of their simulations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.inference.schedule.requests import Shape
from autopar.inference.schedule.steady_state import num_chunks
from autopar.placement.placements import ModelSpec, Placement, Slo
from autopar.placement.traces import Trace

#: The largest number of placements, times groups, times models, that are estimated at once.
_MOST_NUMBERS = 4_000_000
#: Of the iterations that the engines of a group may queue before another one, the share that is there on average.
_QUEUED = 0.3
#: The prefill of a model on a group that does not run it.
_NEVER_S = 1e18


class _Kind(NamedTuple):
    """Requests of one model with equal numbers of tokens.

    Args:
        prefill_s, work_s, iteration_s: float64 `[layouts + 1]`, the time to the first token, the work, and the work of one chunk; the
            last is for a group that does not run the model.
        chunks: of the prompt. further: tokens after the first one.
    """

    model: int
    slo: Slo
    prefill_s: NDArray[np.float64]
    work_s: NDArray[np.float64]
    iteration_s: NDArray[np.float64]
    chunks: int
    further: int


class Queues:
    """The requests of a trace, and what each takes on each layout.

    Args:
        models: by the names in the trace.

    Attributes:
        num_arrivals: the requests that have joined queues so far, times the placements of each.
    """

    def __init__(self, models: Mapping[str, ModelSpec], trace: Trace) -> None:
        self._trace = trace
        self.num_arrivals = 0
        columns = np.stack([trace.model, trace.prompt_tokens, trace.output_tokens], 1)
        kinds, number_of_kind = np.unique(columns.reshape(-1, 3), axis=0, return_inverse=True)
        self._kind = number_of_kind.reshape(-1)  # NumPy 2.0 returns it in two dimensions
        layouts = sorted({layout for model in models.values() for layout in model.times})
        self._number = {layout: number for number, layout in enumerate(layouts)}
        self._step_s = np.zeros((len(layouts) + 1, len(trace.models)))
        for number, name in enumerate(trace.models):
            for layout, times in models[name].times.items():
                self._step_s[self._number[layout], number] = sum(times.stage_s[Shape()])
        self._kinds = [self._kind_of(models, *each) for each in kinds.tolist()]
        self._has_decodes = any(each.further for each in self._kinds)

    def _kind_of(self, models: Mapping[str, ModelSpec], model: int, prompt: int, output: int) -> _Kind:
        spec = models[self._trace.models[model]]
        prefill, work, chunks = np.full(len(self._step_s), _NEVER_S), np.zeros(len(self._step_s)), 1
        for layout, times in spec.times.items():
            if prompt + output <= times.options.max_length:
                column = self._number[layout]
                prefill[column], work[column] = times.latency_s(prompt, 1), times.work_s(prompt, output)
                chunks = num_chunks(times.options, prompt)
        return _Kind(model, spec.slo, prefill, work, np.minimum(work, prefill / chunks), chunks, output - 1)

    def goodput(self, placements: Sequence[Placement]) -> NDArray[np.float64]:
        """The expected goodput of placements.

        Returns:
            `[placements, 2]`: the number of requests that meet their bounds, and the sum of the shares of the bounds that they leave.
        """
        self.num_arrivals += len(placements) * self._trace.num_requests
        most_groups = max((len(each.groups) for each in placements), default=0)
        at_once = max(1, _MOST_NUMBERS // max(1, most_groups * len(self._trace.models)))
        starts = range(0, len(placements), at_once)
        parts = [self._goodput(placements[start : start + at_once]) for start in starts]
        return np.concatenate([np.zeros((0, 2)), *parts])

    def _goodput(self, placements: Sequence[Placement]) -> NDArray[np.float64]:
        columns, num_queued = self._of_groups(placements)
        num, shape = len(placements), num_queued.shape
        rows, free_s, found = np.arange(num), np.zeros(shape), np.zeros((num, 2))
        until_s = np.zeros((*shape, len(self._trace.models)))  # until when each model decodes on each group
        for arrival_s, number in zip(self._trace.arrival_s.tolist(), self._kind.tolist(), strict=True):
            kind = self._kinds[number]
            model, slo, further = kind.model, kind.slo, kind.further
            starts = np.maximum(free_s, arrival_s)
            alone_s = kind.prefill_s + further * self._step_s[:, model]
            at = (starts + alone_s[columns[model]]).argmin(1)
            column, start = columns[model, rows, at], starts[rows, at]
            ttft_s, step_s = start - arrival_s + kind.prefill_s[column], self._step_s[column, model]
            if self._has_decodes:
                decodes = until_s[rows, at] > arrival_s
                decodes[:, model] = False
                others_s = (decodes * self._step_s[column]).sum(1)
                ttft_s += kind.chunks * others_s
                step_s = step_s + others_s
            latency_s = ttft_s + further * step_s
            in_time = (kind.work_s[column] > 0) & (ttft_s <= slo.ttft_s) & (latency_s <= slo.latency_s)
            if further:
                in_time &= step_s <= slo.tpot_s
                ends = np.where(in_time, arrival_s + latency_s, 0.0)
                until_s[rows, at, model] = np.maximum(until_s[rows, at, model], ends)
            found[:, 0] += in_time
            found[in_time, 1] += 1 - np.maximum(latency_s[in_time] / slo.latency_s, ttft_s[in_time] / slo.ttft_s)
            late_s = np.maximum(ttft_s - slo.ttft_s, latency_s - slo.latency_s)
            runs = in_time | (late_s <= _QUEUED * num_queued[rows, at] * kind.iteration_s[column])
            free_s[rows, at] = start + runs * kind.work_s[column]
        return found

    def _of_groups(self, placements: Sequence[Placement]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each model of the trace the row of each group in the tables, and for each group the iterations that may be queued before
        another one: two of each engine, without itself."""
        number_of = {name: number for number, name in enumerate(self._trace.models)}
        shape = (len(placements), max([1, *(len(each.groups) for each in placements)]))
        columns = np.full((len(number_of), *shape), len(self._step_s) - 1)
        num_queued = np.zeros(shape, np.int64)
        for row, placement in enumerate(placements):
            for number, group in enumerate(placement.groups):
                num_queued[row, number] = max(0, 2 * len(group.models) - 1)
                for name in group.models:
                    if name in number_of:
                        columns[number_of[name], row, number] = self._number[group.layout]
        return columns, num_queued

"""Define the step time and the in-flight microbatches of each schedule as functions of stage costs.

In: the number of microbatches, m.
Out: `Objective`s for `PartitionProblem`. With equal stages of t = F + B (+ W), each is the schedule's published
makespan, m t + bubble:

    1F1B, GPipe      bubble (p - 1) t                    once t                 repeated (m - 1) t
    ZB-H1            bubble (p - 1) (F + B - 2 W)        once max(0, F + B - 2 W)   repeated m t - once
    interleaved      bubble (p - 1) t / v                see `interleaved.py`
    forward alone    bubble (p - 1) F                    once F                 repeated (m - 1) F
    one at a time    every stage waits for all others    once m t               repeated 0

A stage's update follows its last microbatch and overlaps with other stages, so it counts in the slowest stage. In 1F1B
a stage waits for its neighbor's answer, so the transfer counts for each microbatch; in GPipe and inference it counts
once, because microbatches flow through without waiting.
"""

from __future__ import annotations

import numpy as np

from autopar.pipeline.partition.problem import Objective, StageCost


def one_f_one_b(num_microbatches: int) -> Objective:
    """1F1B: a stage has one microbatch in flight for itself and one for each later stage (Narayanan et al. 2019)."""
    repeats = num_microbatches - 1
    return Objective(
        once_s=_pass_s,
        repeated_s=lambda cost: repeats * _pass_s(cost) + cost.update_s,
        in_flight=lambda after, _: min(after + 1, num_microbatches),
        transfer_repeated=repeats,
    )


def gpipe(num_microbatches: int) -> Objective:
    """GPipe: all forward passes, then all backward passes, so every microbatch is in flight (Huang et al. 2019)."""
    repeats = num_microbatches - 1
    return Objective(
        once_s=_pass_s,
        repeated_s=lambda cost: repeats * _pass_s(cost) + cost.update_s,
        in_flight=lambda after, num_stages: num_microbatches,
    )


def zb_h1(num_microbatches: int) -> Objective:
    """ZB-H1: weight parts of the backward pass fill the bubble (Qi et al. 2023); as many in flight as in 1F1B."""

    def once(cost: StageCost) -> float:
        return np.maximum(0.0, cost.forward_s + cost.backward_s - 2 * cost.weight_s)

    return Objective(
        once_s=once,
        repeated_s=lambda cost: num_microbatches * _pass_s(cost) - once(cost) + cost.update_s,
        in_flight=lambda after, _: min(after + 1, num_microbatches),
        transfer_repeated=num_microbatches - 1,
    )


def forward_only(num_microbatches: int) -> Objective:
    """Inference: forward passes alone, one microbatch in each stage."""
    repeats = num_microbatches - 1
    return Objective(
        once_s=lambda cost: cost.forward_s,
        repeated_s=lambda cost: repeats * cost.forward_s,
        in_flight=lambda after, num_stages: 1,
    )


def one_at_a_time(num_microbatches: int) -> Objective:
    """No pipelining: a microbatch starts when the previous one is done, so one is in flight."""
    return Objective(
        once_s=lambda cost: num_microbatches * _pass_s(cost),
        repeated_s=lambda cost: cost.update_s,
        in_flight=lambda after, num_stages: 1,
        transfer_once=num_microbatches,
    )


def interleaved(num_microbatches: int, virtual: int) -> Objective:
    """Interleaved 1F1B with `virtual` stages per submesh (Narayanan et al. 2021). Costs are those of virtual stages;
    with equal ones, the objective is the published makespan p t / v + (m v - 1) t / v. In-flight microbatches are
    counted per virtual stage, by Megatron-LM's warm-up, and depend on the number of submeshes after this one."""
    repeats = num_microbatches * virtual - 1

    def in_flight(after: int, num_submeshes: int) -> float:
        if virtual == 1:
            return min(after + 1, num_microbatches)
        return min(2 * after + (virtual - 1) * num_submeshes + 1, num_microbatches * virtual)

    return Objective(
        once_s=lambda cost: _pass_s(cost) / virtual,
        repeated_s=lambda cost: repeats * _pass_s(cost) + virtual * cost.update_s,
        in_flight=in_flight,
        transfer_once=1 / virtual,
        transfer_repeated=repeats,
    )


def _pass_s(cost: StageCost) -> float:
    return cost.forward_s + cost.backward_s + cost.weight_s

"""What each schedule makes of the prices of stages: time, and microbatches in flight.

In: the number of microbatches, B. Out: `Objective`s for `PartitionProblem`. With equal stages of t = F + B (+ W) each
is the schedule's published makespan, m t + bubble for m microbatches:

    1F1B, GPipe      bubble (p - 1) t                    once t                 repeated (m - 1) t
    ZB-H1            bubble (p - 1) (F + B - 2 W)        once max(0, F + B - 2 W)   repeated m t - once
    interleaved      bubble (p - 1) t / v                see `interleaved.py`
    forward alone    bubble (p - 1) F                    once F                 repeated (m - 1) F
    one at a time    every stage waits for all others    once m t               repeated 0

An update follows a stage's last microbatch and overlaps with other stages: it counts where the slowest stage does. In
1F1B a stage waits for its neighbour's answer, so the transfer counts as part of the stage each time; where the forward
and backward passes each flow through (GPipe, inference) only once.
"""

from __future__ import annotations

from autopar.pipeline.partition.problem import Objective, StageCost


def one_f_one_b(num_microbatches: int) -> Objective:
    """1F1B: a stage holds as many microbatches as there are stages from it on (Narayanan et al. 2019, PipeDream)."""
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
        return max(0.0, cost.forward_s + cost.backward_s - 2 * cost.weight_s)

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
    """No schedule: a microbatch begins when the one before is through, so one is in flight."""
    return Objective(
        once_s=lambda cost: num_microbatches * _pass_s(cost),
        repeated_s=lambda cost: cost.update_s,
        in_flight=lambda after, num_stages: 1,
        transfer_once=num_microbatches,
    )


def interleaved(num_microbatches: int, virtual: int) -> Objective:
    """Interleaved 1F1B with `virtual` stages on each submesh (Narayanan et al. 2021); the stages that it prices are
    virtual ones, and with equal ones p t / v + (m v - 1) t / v is the published makespan. In flight: virtual stages'
    microbatches on a submesh that has so many submeshes after it, as Megatron-LM warms up; one virtual stage each is
    1F1B."""
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

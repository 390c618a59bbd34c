"""Define the cost of a stage, and a schedule's step time and in-flight microbatches as functions of stage costs.

The partitioners (`pipeline.partition`) minimize   sum_i once_i  +  max_j repeated_j   over stages i. A schedule defines both
terms (`ScheduleKind.objective`). With equal stages of t = F + B (+ W), each is the schedule's published makespan, m t + bubble:

    1F1B, GPipe      bubble (p - 1) t                    once t                 repeated (m - 1) t
    ZB-H1            bubble (p - 1) (F + B - 2 W)        once max(0, F + B - 2 W)   repeated m t - once
    interleaved      bubble (p - 1) t / v                once t / v             repeated (m v - 1) t of a virtual stage
    forward alone    bubble (p - 1) F                    once F                 repeated (m - 1) F
    one at a time    every stage waits for all others    once m t               repeated 0

A stage's update follows its last microbatch and overlaps with other stages, so it counts in the slowest stage. In 1F1B
a stage waits for its neighbor's answer, so the transfer counts for each microbatch; in GPipe and inference it counts
once, because microbatches flow through without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The cost of a run of layers on a submesh; bytes are per device.

    Args:
        forward_s: seconds of the forward pass of one microbatch.
        backward_s: seconds of the backward pass of one microbatch; of its input part if it is split.
        weight_s: seconds of its weight part; 0 if it is not split.
        update_s: seconds once per step after the last microbatch: gradient reductions and the optimizer.
        state_bytes: bytes held all the time: parameters, optimizer state, accumulated gradients.
        flight_bytes: bytes of stashed activations per in-flight microbatch.
        working_bytes: additional bytes while a microbatch is processed.
        kept_bytes: bytes of stashed activations that the weight part reads; the others are freed after the input part.
        passed_bytes: bytes that the input part makes for the weight part.
        accumulated_bytes: bytes that replicas of the stage exchange after their microbatches, such as its gradients; part
            of `state_bytes`, and once more from the arrival of another replica's on.
        num_accumulated: the number of arrays that they exchange.
    """

    forward_s: float
    backward_s: float = 0.0
    weight_s: float = 0.0
    update_s: float = 0.0
    state_bytes: float = 0.0
    flight_bytes: float = 0.0
    working_bytes: float = 0.0
    kept_bytes: float = 0.0
    passed_bytes: float = 0.0
    accumulated_bytes: float = 0.0
    num_accumulated: float = 0.0

    @property
    def pass_s(self) -> float:
        """Seconds of the forward and the whole backward pass of one microbatch."""
        return self.forward_s + self.backward_s + self.weight_s

    def bytes_with(self, in_flight: float) -> float:
        """Bytes per device with this number of in-flight microbatches."""
        return self.state_bytes + self.working_bytes + in_flight * self.flight_bytes


@dataclass(frozen=True, slots=True)
class Objective:
    """A schedule's terms of the objective above, as functions of stage costs. Nothing is negative.

    Args:
        once_s, repeated_s: the terms of a stage, without its transfer to the next; elementwise where a cost's fields are
            arrays.
        in_flight: the peak of in-flight microbatches of the stages of a submesh together, by the number of submeshes
            after it and of all submeshes.
        transfer_once, transfer_repeated: the factors of one microbatch's transfer in the two terms.
    """

    once_s: Callable[[StageCost], float]
    repeated_s: Callable[[StageCost], float]
    in_flight: Callable[[int, int], float]
    transfer_once: float = 1.0
    transfer_repeated: float = 0.0

"""Define the plan of a step that data-parallel workers run under a consistency policy.

In: filled by `api.workers`. Out: `WorkersPlan`: the plans of its parts, and what the policy costs in bytes and waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCost:
    """A policy, simulated with the predicted times of the parts.

    Args:
        straggler: the factor by which one worker, drawn again for each iteration, is slower; 1 if all are equal.
        batches_per_s: batches of which the examples were applied, per second.
        waiting: the share of the workers' time in which they wait for each other.
        most_stale: the largest staleness of all reads, in clocks.
        discarded: the share of the pushes that were discarded.
    """

    policy: str
    straggler: float
    batches_per_s: float
    waiting: float
    most_stale: int
    discarded: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersPlan:
    """The plan of a step for workers. Bytes are those of one worker in one clock, in which it pulls and pushes once.

    Args:
        policy: the name of the consistency policy.
        period: the iterations in a clock.
        devices_per_worker: the size of a worker's submesh.
        parts: by name, the plans: `worker` for each submesh, `update` for that of worker 0.
        message_s: predicted seconds of a pull or a push, if those of all workers share the server's link.
        costs: the policy of the step first, then others to compare.
    """

    program: str
    policy: str
    num_workers: int
    period: int
    hardware: str
    devices_per_worker: int
    parts: Mapping[str, Plan]
    pulled_bytes: int
    pushed_bytes: int
    message_s: float
    costs: tuple[PolicyCost, ...]

    @property
    def worker_s(self) -> float:
        """Predicted seconds of an iteration on a worker."""
        return self.parts["worker"].prediction.step_time_s

    @property
    def update_s(self) -> float:
        """Predicted seconds of an update of the server; 0 where it is only a mean of weights."""
        return self.parts["update"].prediction.step_time_s if "update" in self.parts else 0.0

    @property
    def server_bytes(self) -> int:
        """What the server sends and receives in a clock of all workers."""
        return self.num_workers * (self.pulled_bytes + self.pushed_bytes)

"""Make and cache plans of a hand-sharded step for different sets of pinned shardings.

In: a traced step, the user's pins, the mesh, the hardware. Out: `Plan`s; their prices for the search of
`sharding_changes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopar.diagnosis.hand_sharded import HandSharded
from autopar.diagnosis.sharding_changes import Pins, Priced
from autopar.errors import BudgetError, TimeLimitError
from autopar.hardware.profile import HardwareProfile
from autopar.planner.planner import plan_program
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.transforms.program import Program

#: A memory budget that every plan meets.
_NO_BUDGET = 1e18


@dataclass(frozen=True, slots=True)
class PinnedPlans:
    """Makes plans under pins; its only mutable state is the cache of plans."""

    program: Program
    hand: HandSharded
    profile: HardwareProfile
    budget: float
    time_limit_s: float
    _made: dict[tuple[Any, ...], Plan] = field(default_factory=dict, repr=False)

    @property
    def own(self) -> Pins:
        """The user's pins."""
        return {n: sharding for n, sharding in enumerate(self.hand.inputs) if sharding is not None}

    def plan(self, pins: Pins, *, rematerialize: bool = False) -> Plan:
        """The plan under pins.

        Raises:
            BudgetError: no plan fits the memory budget.
        """
        return self._plan(pins, self.budget, rematerialize)

    def plan_or_unlimited(self, pins: Pins) -> tuple[Plan, bool]:
        """The plan under pins, without a memory budget if none fits; and whether it fits."""
        try:
            return self.plan(pins), True
        except BudgetError:
            return self._plan(pins, _NO_BUDGET, rematerialize=False), False

    def price(self, pins: Pins) -> Priced:
        """The price of a set of pins: `inf` where no plan fits or none is found in time."""
        try:
            plan = self.plan(pins)
        except (BudgetError, TimeLimitError):
            return Priced(float("inf"), ())
        return Priced(plan.prediction.step_time_s, tuple(tensor.sharding for tensor in plan.inputs))

    def _plan(self, pins: Pins, budget: float, rematerialize: bool) -> Plan:
        key = tuple(sorted(pins.items(), key=lambda pin: pin[0])), budget, rematerialize
        if key not in self._made:
            request = PlanRequest(
                mesh=self.hand.mesh,
                hardware=self.profile,
                memory_budget_bytes=budget,
                pin={self.hand.paths[n]: sharding for n, sharding in pins.items()},
                metadata="ignore",  # the pins already contain it
                rematerialize=rematerialize,
                time_limit_s=self.time_limit_s,
            )
            self._made[key] = plan_program(self.program, request)
        return self._made[key]

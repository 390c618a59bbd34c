"""Choose the simplest plan among those tied with the fastest: the one with the fewest sharded arguments.

In: candidates on one mesh. Out: one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate
from autopar.planner.strategy_names import strategy_text
from autopar.plans.records import num_split

#: Relative difference of step times up to which plans are tied: predictions are less accurate than that.
TIE = 5e-3


@dataclass(frozen=True, slots=True)
class Fastest:
    """The fastest plan of a tie, for comparison: its seconds and its description."""

    step_time_s: float
    mesh: MeshShape
    strategy: str
    num_split: int

    @classmethod
    def of(cls, plan: Candidate) -> Fastest:
        inputs, f = plan.parts.inputs, plan.formulation
        strategy = strategy_text(f, plan.solution.choices, inputs)
        return cls(plan.step_time_s, f.mesh, strategy, num_split(inputs))


def simplest(best: Candidate, candidates: Sequence[Candidate], to_beat: float, budget_bytes: float) -> Candidate:
    """The candidate with the fewest sharded arguments, of those that fit and are tied with the fastest.

    Args:
        best: the fastest candidate that fits.
        to_beat: seconds of the fastest plan on any mesh so far.
    """
    limit_s = (1 + TIE) * min(best.step_time_s, to_beat)
    tied = [one for one in candidates if one.step_time_s <= limit_s and one.peak_bytes <= budget_bytes]
    return min(tied, key=lambda one: (num_split(one.parts.inputs), one.step_time_s), default=best)

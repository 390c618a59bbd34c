"""Choose the simplest plan among those tied with the fastest: the one with the fewest sharded arguments.

In: candidates on one mesh. Out: one of them, or the same program with replicated state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate
from autopar.planner.mesh_task import MeshTask
from autopar.planner.overlap_search import lower_bound_s, with_best_overlap
from autopar.planner.strategy_names import strategy_text
from autopar.plans.records import num_split
from autopar.solve.problem import Problem

#: Relative difference of step times up to which plans are tied: predictions are less accurate than that.
TIE = 5e-3
#: The optimality gap of the plan with replicated state, and its share of the solver's time.
_TIE_GAP, _TIE_SHARE = 5e-4, 0.1


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


def simplest(best: Candidate, candidates: Sequence[Candidate], to_beat: float, task: MeshTask) -> Candidate:
    """The candidate with the fewest sharded arguments, of those that fit and are tied with the fastest. A plan with fully
    replicated state is one of the candidates.

    Args:
        best: the fastest candidate that fits.
        to_beat: seconds of the fastest plan on any mesh so far.
    """
    limit_s = (1 + TIE) * min(best.step_time_s, to_beat)
    if best.step_time_s > limit_s or best.peak_bytes > task.budget_bytes:
        return best
    fitting = (
        one
        for one in (*candidates, *_with_replicated_state(best, limit_s, task))
        if one.peak_bytes <= task.budget_bytes
    )
    tied = [one for one in fitting if one.step_time_s <= limit_s]
    return min(tied, key=lambda one: (num_split(one.parts.inputs), one.step_time_s), default=best)


def _with_replicated_state(best: Candidate, limit_s: float, task: MeshTask) -> list[Candidate]:
    """The fastest plan of the same program with replicated parameters and optimizer state (pinned ones stay as they are); empty
    where it does not fit or takes longer than `limit_s`."""
    f = best.formulation
    state = [n for n, tensor in enumerate(best.parts.inputs) if tensor.role != "data" and n not in task.pins]
    if not any(any(best.parts.inputs[n].sharding.dims) for n in state):
        return []
    if sum(f.graph.values[f.graph.inputs[n]].num_bytes for n in state) > task.budget_bytes:
        return []
    problem = _replicating(best, state)
    if problem is None:
        return []
    solution = task.request.solver_within(_TIE_SHARE, relative_gap=_TIE_GAP).solve(problem)
    if len(solution.choices) != len(f.decisions) or problem.evaluate(solution.choices) == math.inf:
        return []
    if solution.cost > (1 + TIE) * best.solution.cost:
        return []  # replicated state costs more, even if overlap hides it in this step
    bound = min(best.solution.lower_bound, solution.cost)  # proven for the problem without the replication
    solution = replace(solution, lower_bound=bound, status=best.solution.status)
    candidate = task.candidate(best.program, f, solution, best.rematerialized)
    if lower_bound_s(candidate) > limit_s:
        return []
    hidden = with_best_overlap(candidate, task.budget_bytes, limit_s)
    return [hidden] if hidden.peak_bytes <= task.budget_bytes else []


def _replicating(best: Candidate, state: Sequence[int]) -> Problem | None:
    """The candidate's problem with some inputs replicated; None where one of them cannot be.

    Args:
        state: positions of the inputs.
    """
    f = best.formulation
    costs = [one.copy() for one in f.problem.node_costs]
    for value in (f.graph.inputs[n] for n in state if n in f.input_decision):
        decision, shardings = f.value_made[value]
        costs[decision][[any(sharding.dims) for sharding in shardings]] = np.inf
        if not np.isfinite(costs[decision]).any():
            return None
    return replace(f.problem, node_costs=tuple(costs), usages=(), memory_limit=None)

"""Plan a program with replicated parameters and optimizer state: the simplest plan, and the fastest where overlap hides its reductions.

In: the fastest candidate on a mesh. Out: a further candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.planner.candidate import Candidate
from autopar.planner.mesh_task import MeshTask
from autopar.planner.overlap_search import is_worth_hiding, lower_bound_s, with_best_overlap
from autopar.planner.simplest_plan import TIE
from autopar.solve.problem import Problem

#: The optimality gap of the plan with replicated state, and its share of the solver's time.
_GAP, _SHARE = 5e-4, 0.1


def with_replicated_state(best: Candidate, to_beat: float, task: MeshTask) -> list[Candidate]:
    """The fastest plan of the same program with replicated parameters and optimizer state (pinned ones stay as they are), if it
    fits, and costs no more than `best` or is faster because overlap hides what it costs more. The solver, whose prices
    know little of overlap, rarely finds the latter. The plan differs little between meshes, so it is planned on those of one
    axis, or on the user's.

    Args:
        best: the fastest candidate on the mesh.
        to_beat: seconds of the fastest plan on any mesh so far.
    """
    axes = sum(size > 1 for size in best.formulation.mesh.axis_sizes)
    if axes > 1 and len(task.request.meshes) > 1:
        return []
    limit_s, may_hide = (1 + TIE) * min(best.step_time_s, to_beat), is_worth_hiding(best, to_beat)
    if best.peak_bytes > task.budget_bytes or not (best.step_time_s <= limit_s or may_hide):
        return []
    f = best.formulation
    state = [n for n, tensor in enumerate(best.parts.inputs) if tensor.role != "data" and n not in task.pins]
    if not any(any(best.parts.inputs[n].sharding.dims) for n in state):
        return []
    if sum(f.graph.values[f.graph.inputs[n]].num_bytes for n in state) > task.budget_bytes:
        return []
    problem = _replicating(best, state)
    if problem is None:
        return []
    solution = task.request.solver_within(_SHARE, relative_gap=_GAP).solve(problem)
    if len(solution.choices) != len(f.decisions) or problem.evaluate(solution.choices) == math.inf:
        return []
    costs_more = solution.cost > (1 + TIE) * best.solution.cost
    if costs_more and not may_hide:
        return []
    bound = min(best.solution.lower_bound, solution.cost)  # proven for the problem without the replication
    solution = replace(solution, lower_bound=bound, status=best.solution.status)
    candidate = task.candidate(best.program, f, solution, best.rematerialized)
    if lower_bound_s(candidate) > limit_s:
        return []
    hidden = with_best_overlap(candidate, task.budget_bytes, limit_s)
    if costs_more and hidden.step_time_s > (1 - TIE) * best.step_time_s:
        return []  # a tie only because overlap hides what it costs more
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

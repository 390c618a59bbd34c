"""Reshard a program so that its predicted peak memory is within a budget.

In: a candidate over the budget. Out: a candidate of the same program within the budget, or a bound of the lowest peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.errors import TimeLimitError
from autopar.formulate.formulation import Formulation, formulate
from autopar.ir.device_program import stored_values
from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate, Planning
from autopar.solve.ilp import minimum_memory
from autopar.solve.problem import Solution, Status

#: How often the problem's memory limit is tightened by the peak of a whole plan.
_MOST_TIGHTENINGS = 4


class TooLargeError(Exception):
    """No plan of a program fits.

    Args:
        least: the plan with the lowest peak. estimate: returns an estimate of the lowest peak on another mesh.
    """

    def __init__(self, least: Candidate, estimate: Callable[[MeshShape], float]) -> None:
        super().__init__()
        self.least, self.estimate = least, estimate


def resharded_to_fit(budget: float, free: Candidate, planning: Planning, *, at_least: bool = True) -> Candidate:
    """A plan of the same program whose predicted peak is within a budget.

    The problem counts the values that the free plan stores. What XLA would really keep is known only for a whole plan. So
    the problem's memory limit is the budget scaled by the ratio of the two, and is tightened while a plan is still over.

    Args:
        at_least: if nothing is found, search for the plan with the lowest peak.

    Raises:
        TooLargeError: no such plan was found.
    """
    stored = stored_values(free.parts.device)
    before, choices, parts = free.formulation, free.solution.choices, free.parts

    def formulation(mesh: MeshShape) -> Formulation:
        graph, groups, profile = before.graph, before.groups, before.profile
        return formulate(
            graph,
            groups,
            mesh,
            profile,
            pins=planning.pins,
            memory_budget_bytes=budget,
            stored=stored,
            held=planning.held,
        )

    f = formulation(before.mesh)
    ratio = f.problem.peak_memory(_with_copies(before, f, choices)) / parts.prediction.peak_bytes
    limit = budget * ratio
    least, status = free, Status.NOT_FOUND
    for _ in range(_MOST_TIGHTENINGS):
        limited = replace(f, problem=replace(f.problem, memory_limit=limit))
        solution = planning.limited.solve(limited.problem)
        status = solution.status
        if len(solution.choices) != len(f.decisions):
            break
        made = planning.made(free.program, limited, solution, free.rematerialized)
        if made.peak_bytes <= budget:
            return made
        least = min(least, made, key=lambda one: one.peak_bytes)
        limit *= 0.995 * budget / made.peak_bytes
    if status is Status.NOT_FOUND:
        raise TimeLimitError(f"planning for mesh {before.mesh} within its memory budget ended without a plan")

    smallest = minimum_memory(f.problem) if at_least else None
    if smallest is not None and smallest.choices:  # XLA may store more of that plan than the problem counts
        solution = Solution(smallest.choices, f.problem.evaluate(smallest.choices), 0.0, Status.FEASIBLE)
        made = planning.made(free.program, f, solution, free.rematerialized)
        if made.peak_bytes <= budget:
            return made
        least = min(least, made, key=lambda one: one.peak_bytes)

    def estimate(mesh: MeshShape) -> float:
        return minimum_memory(formulation(mesh).problem).peak_bytes / ratio

    raise TooLargeError(least, estimate)


def _with_copies(free: Formulation, limited: Formulation, choices: Sequence[int]) -> tuple[int, ...]:
    """Translate choices of the problem without a budget to the problem with one.

    The latter has copies of more values, and each copy also says whether it is its producer's own buffer; those come first.
    """
    copies = {d.value: choice for d, choice in zip(free.decisions, choices, strict=True) if d.kind == "copy"}
    others = iter(choice for d, choice in zip(free.decisions, choices, strict=True) if d.kind != "copy")
    mapped = [-1 if decision.kind == "copy" else next(others) for decision in limited.decisions]
    made = {f.target: f.made[mapped[f.source]] for f in limited.flows if limited.decisions[f.target].kind == "copy"}
    wanted = {f.source: f.wanted[mapped[f.target]] for f in limited.flows if f.source in made}
    for node, own in made.items():
        decision = limited.decisions[node]
        options = decision.shardings[: decision.num_strategies // 2]
        known = copies.get(decision.value)
        choice = options.index(wanted[node]) if known is None else known
        mapped[node] = choice if options[choice] == own else choice + len(options)
    assert all(0 <= c < d.num_strategies for c, d in zip(mapped, limited.decisions, strict=True))
    return tuple(mapped)

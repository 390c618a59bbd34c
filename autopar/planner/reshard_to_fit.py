"""Reshard a program so that its predicted peak memory is within a budget.

In: a candidate over the memory budget. Out: a candidate of the same program within it; or the candidate with the lowest peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.errors import TimeLimitError
from autopar.formulate.formulation import Formulation, formulate
from autopar.ir.device_program import stored_values
from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate
from autopar.planner.mesh_task import MeshTask
from autopar.solve.ilp import minimum_memory
from autopar.solve.problem import Solution, Status

#: How often the problem's memory limit is lowered because the plan's predicted peak exceeds the budget.
_MOST_TIGHTENINGS = 4


class TooLargeError(Exception):
    """No plan of a program fits.

    Args:
        smallest: the plan with the lowest peak.
        estimate: estimates the lowest peak on another mesh, in bytes per device.
    """

    def __init__(self, smallest: Candidate, estimate: Callable[[MeshShape], float]) -> None:
        super().__init__()
        self.smallest, self.estimate = smallest, estimate


def resharded_to_fit(task: MeshTask, unlimited: Candidate, *, minimize_peak: bool = True) -> Candidate:
    """A plan of the same program whose predicted peak is within the memory budget.

    The problem counts only the values that the plan without a limit stores; the predicted peak, which is known only for a
    whole plan, also counts what XLA adds. So the problem's memory limit is the budget times the ratio of the two. It is
    lowered while the plan's peak exceeds the budget.

    Args:
        unlimited: the plan without a memory limit.
        minimize_peak: whether to solve for the lowest peak where no plan under the limit fits.

    Raises:
        TooLargeError: no plan found fits.
        TimeLimitError: the solver found no plan in time.
    """
    budget = task.budget_bytes
    stored = stored_values(unlimited.parts.device)
    before, choices, parts = unlimited.formulation, unlimited.solution.choices, unlimited.parts

    def formulation(mesh: MeshShape) -> Formulation:
        graph, groups, profile = before.graph, before.groups, before.profile
        return formulate(
            graph,
            groups,
            mesh,
            profile,
            pins=task.pins,
            memory_budget_bytes=budget,
            stored=stored,
            held=task.request.held,
        )

    f = formulation(before.mesh)
    ratio = f.problem.peak_memory(_with_copies(before, f, choices)) / parts.prediction.peak_bytes
    limit = budget * ratio
    smallest, status = unlimited, Status.NOT_FOUND
    for _ in range(_MOST_TIGHTENINGS):
        limited = replace(f, problem=replace(f.problem, memory_limit=limit))
        solution = task.approximate_solver.solve(limited.problem)
        status = solution.status
        if len(solution.choices) != len(f.decisions):
            break
        candidate = task.candidate(unlimited.program, limited, solution, unlimited.rematerialized)
        if candidate.peak_bytes <= budget:
            return candidate
        smallest = min(smallest, candidate, key=lambda one: one.peak_bytes)
        limit *= 0.995 * budget / candidate.peak_bytes
    if status is Status.NOT_FOUND:
        raise TimeLimitError(f"planning for mesh {before.mesh} within its memory budget ended without a plan")

    minimum = minimum_memory(f.problem) if minimize_peak else None
    if minimum is not None and minimum.choices:  # the predicted peak may still exceed the problem's
        solution = Solution(minimum.choices, f.problem.evaluate(minimum.choices), 0.0, Status.FEASIBLE)
        candidate = task.candidate(unlimited.program, f, solution, unlimited.rematerialized)
        if candidate.peak_bytes <= budget:
            return candidate
        smallest = min(smallest, candidate, key=lambda one: one.peak_bytes)

    def estimate(mesh: MeshShape) -> float:
        return minimum_memory(formulation(mesh).problem).peak_bytes / ratio

    raise TooLargeError(smallest, estimate)


def _with_copies(unlimited: Formulation, limited: Formulation, choices: Sequence[int]) -> tuple[int, ...]:
    """Translate choices of the problem without a memory limit to the problem with one.

    The problem with a limit has copies of more values. It has each sharding of a copy twice: first as the producer's own
    buffer, then as a buffer of its own.
    """
    copies = {d.value: choice for d, choice in zip(unlimited.decisions, choices, strict=True) if d.kind == "copy"}
    others = iter(choice for d, choice in zip(unlimited.decisions, choices, strict=True) if d.kind != "copy")
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

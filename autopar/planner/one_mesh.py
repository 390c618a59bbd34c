"""Plan on one mesh in two steps: first without a memory limit, then with overlap and within the memory budget.

In: the forms of a program with their groups, a mesh, a `MeshTask`. Out: `Begun`, whose step time decides whether the second step
is worth taking; then `Finished`, which records the plan if it is the fastest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost.resharding_matrix import ReshardingTimes
from autopar.formulate.formulation import formulate
from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate
from autopar.planner.constraints import constraints_of
from autopar.planner.fork_pool import SharedMinimum
from autopar.planner.memory_search import within_budget
from autopar.planner.mesh_task import Form, MeshTask
from autopar.planner.overlap_search import Prices, lower_bound_s, overlaps, search_overlap_prices, with_best_overlap
from autopar.planner.plan_record import plan_of
from autopar.planner.replicated_state import with_replicated_state
from autopar.planner.simplest_plan import Fastest, simplest
from autopar.planner.ways_out import NothingFitsError
from autopar.plans.plan import Plan
from autopar.plans.records import split_dims
from autopar.solve.problem import Status
from autopar.transforms.split_dims.undo import sees_two

#: Score of each mesh axis, relative to the step time: of two meshes with close times, the one with fewer axes comes first.
_PER_AXIS = 0.03
#: A mesh is searched with other prices if its score is higher than the lowest by less than this share, or if its cost in the solver's
#: model is lower by more.
_FAR = 0.1


@dataclass(frozen=True, slots=True)
class Rank:
    """How promising the plan on a mesh is before overlap is searched.

    Args:
        score_s: the step time, plus a share of it for each mesh axis.
        cost_s: the cost in the solver's model, in which nothing overlaps; infinite where nothing can, so that other prices gain nothing.
    """

    score_s: float
    cost_s: float

    def may_beat(self, first: Rank) -> bool:
        """Whether other prices may make the plan on this mesh faster than the one with the lowest score."""
        return self.score_s <= (1 + _FAR) * first.score_s or self.is_cheaper(first)

    def is_cheaper(self, first: Rank) -> bool:
        """Whether the solver, which sees neither overlap nor launches, prefers the plan to the one with the lowest score."""
        return self.cost_s < (1 - _FAR) * first.cost_s < math.inf


@dataclass(frozen=True, slots=True)
class Begun:
    """The plan on one mesh before overlap is searched and the memory budget is enforced.

    Args:
        form: the form of the program that is planned.
        other_forms: the forms to plan if no plan of this one fits.
        times: the resharding times of the problem.
        seconds: planning time so far.
    """

    mesh: MeshShape
    form: Form
    other_forms: Sequence[Form]
    task: MeshTask
    candidate: Candidate
    times: ReshardingTimes
    seconds: float

    @property
    def rank(self) -> Rank:
        """How promising the plan is."""
        axes = sum(size > 1 for size in self.mesh.axis_sizes)
        cost_s = self.candidate.solution.cost if overlaps(self.candidate) else math.inf
        return Rank(self.candidate.step_time_s * (1 + _PER_AXIS * axes), cost_s)


@dataclass(frozen=True, slots=True)
class Finished:
    """The choice on one mesh.

    Args:
        candidate: the chosen candidate.
        fastest: the fastest candidate on the mesh, with which the chosen one may be tied.
        memory_bound: whether the fastest plan without a memory limit exceeds the budget.
        seconds: planning time.
    """

    begun: Begun
    candidate: Candidate
    fastest: Fastest
    memory_bound: bool
    seconds: float

    @property
    def plan(self) -> Plan:
        """The plan, recorded in full: worth its time for the fastest mesh only."""
        (program, grouped), task = self.begun.form, self.begun.task
        return plan_of(
            self.candidate,
            program,
            grouped.unknown,
            task.pins,
            budget_bytes=task.budget_bytes,
            seconds=self.seconds,
            memory_bound=self.memory_bound,
        )


def begin(mesh: MeshShape, forms: Sequence[Form], task: MeshTask) -> Begun:
    """Plan without a memory limit, by the approximate solver: most meshes are far from the fastest.

    A form in which some dims are split in two is kept only if the plan shards such a dim between the two. Otherwise the next
    form is planned, because the step as it was written has shardings that the other form has not.

    Args:
        forms: the forms of the program; the step as it was written comes last.

    Raises:
        TimeLimitError: the solver found no plan in time.
    """
    (program, grouped), *others = forms
    started = time.perf_counter()
    times = ReshardingTimes(mesh, task.profile)
    of = program.graph, grouped.groups, mesh, task.profile
    f = formulate(*of, pins=task.pins, resharding=times, held=task.request.held)
    solution = task.approximate_solver.solve(f.problem)
    candidate = task.candidate(program, f, solution if solution.choices else task.solver.solve(f.problem))
    if others:
        constraints = constraints_of(f, candidate.parts.explicit, task.pins)
        if not sees_two(program.trace, split_dims(constraints)):
            return begin(mesh, others, task)
    return Begun(mesh, forms[0], others, task, candidate, times, time.perf_counter() - started)


def keep(begun: Begun) -> Finished:
    """The plan that was begun, as it is."""
    return Finished(begun, begun.candidate, Fastest.of(begun.candidate), memory_bound=False, seconds=begun.seconds)


def finish(begun: Begun, fastest: SharedMinimum, first: Rank | None) -> Finished:
    """Reduce exposed communication, and keep the plan within the memory budget.

    Args:
        fastest: seconds of the fastest plan so far. A plan that cannot become faster is not improved.
        first: the rank of the mesh with the lowest score; None for this one.

    Raises:
        NothingFitsError: no plan fits.
    """
    try:
        return _finish(begun, fastest, first)
    except NothingFitsError:
        if not begun.other_forms:
            raise
    return finish(begin(begun.mesh, begun.other_forms, begun.task), fastest, first)


def _finish(begun: Begun, fastest: SharedMinimum, first: Rank | None) -> Finished:
    started, task, rank = time.perf_counter(), begun.task, begun.rank
    first = rank if first is None else first
    begun = _proven(begun) if rank.score_s <= first.score_s else begun
    candidates = _with_overlap(begun, fastest, rank, first)
    unlimited = min(candidates, key=_step_time_s)

    def by_time(one: Candidate) -> tuple[bool, float]:
        return one.peak_bytes > task.budget_bytes, one.step_time_s

    memory_bound = unlimited.peak_bytes > task.budget_bytes
    if memory_bound and begun.candidate.peak_bytes > task.budget_bytes and lower_bound_s(unlimited) < fastest.value:
        candidates += _within_budget(candidates, unlimited, task, fastest)
    best = min(candidates, key=by_time)
    chosen = best
    if not task.request.any_that_fits:
        candidates += with_replicated_state(best, fastest.value, task)
        best = min(candidates, key=by_time)
        chosen = simplest(best, candidates, fastest.value, task.budget_bytes)
    fastest_one = Fastest.of(min(best, chosen, key=_step_time_s))
    return Finished(begun, chosen, fastest_one, memory_bound, begun.seconds + time.perf_counter() - started)


def _within_budget(
    candidates: Sequence[Candidate], unlimited: Candidate, task: MeshTask, fastest: SharedMinimum
) -> list[Candidate]:
    """The plan that the memory search finds; empty where it finds none, but one of the candidates fits.

    Raises:
        NothingFitsError: no plan fits.
    """
    try:
        limited = within_budget(task, unlimited, fastest)
    except NothingFitsError:
        if all(one.peak_bytes > task.budget_bytes for one in candidates):
            raise
        return []
    return [with_best_overlap(limited, task.budget_bytes, fastest.value)]


def _proven(begun: Begun) -> Begun:
    """The same by the solver that proves an optimum, where the approximate one ended before."""
    before, task = begun.candidate, begun.task
    if before.solution.status is not Status.CLOSE:
        return begun
    solution = task.solver.solve(before.formulation.problem)
    if solution.cost < before.solution.cost:
        return replace(begun, candidate=task.candidate(begun.form[0], before.formulation, solution))
    if solution.lower_bound <= before.solution.lower_bound:
        return begun
    bound = replace(before.solution, lower_bound=solution.lower_bound, status=solution.status)
    return replace(begun, candidate=replace(before, solution=bound))


def _with_overlap(begun: Begun, fastest: SharedMinimum, rank: Rank, lowest: Rank) -> list[Candidate]:
    """The plan without a memory limit, and plans by prices that anticipate overlap, each with as little exposed communication
    as possible.

    Args:
        rank, lowest: the ranks of this mesh and of the one with the lowest score.
    """
    task, seen = begun.task, {begun.candidate.solution.choices}
    budget, (program, grouped) = task.budget_bytes, begun.form
    graph, groups = program.graph, grouped.groups

    def other(exposed: Prices, to_beat: float) -> Candidate | None:
        times = begun.times.with_exposed(exposed)
        f = formulate(graph, groups, begun.mesh, task.profile, pins=task.pins, resharding=times, held=task.request.held)
        solution = task.approximate_solver.solve(f.problem)  # the exposed shares are estimates
        if not solution.choices or solution.choices in seen:
            return None
        seen.add(solution.choices)
        return with_best_overlap(task.candidate(program, f, solution), budget, to_beat)

    first = with_best_overlap(begun.candidate, budget, fastest.value)
    if not rank.may_beat(lowest):
        return [first]
    too_large = first.peak_bytes > budget  # the memory search will replace the plan
    cheaper = rank.is_cheaper(lowest)
    return [first, *search_overlap_prices(first, other, fastest.value, only_one=too_large, even_slower=cheaper)]


def _step_time_s(candidate: Candidate) -> float:
    return candidate.step_time_s

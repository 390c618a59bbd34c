"""Choose the mesh: solve for every mesh, then refine the plans that may be the fastest, in parallel processes.

In: a program, a `PlanRequest`, layouts of inputs. Out: `Found`: the plan, and the candidate behind it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost.collectives import groupings
from autopar.hardware.profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate
from autopar.planner.fork_pool import Least, Workers, workers
from autopar.planner.mesh_task import Form, MeshTask
from autopar.planner.one_mesh import FAR, Begun, begin, finish
from autopar.planner.pins import meshes_of_program, meshes_with_pinned_axes, resolve_pins
from autopar.planner.program_groups import program_groups
from autopar.planner.request import PlanRequest
from autopar.planner.simplest_plan import TIE, Fastest
from autopar.planner.ways_out import NothingFitsError
from autopar.plans.plan import Plan
from autopar.plans.records import RejectedMesh, Tie, num_split
from autopar.system.gc_pause import seldom_collect
from autopar.transforms.program import Program

#: Worker processes are forked from this number of nodes times meshes on. A worker that uses no CPU for so many seconds beyond the
#: solver's time limit counts as hung.
_WORTH_FORKS, _PATIENCE_S = 4000, 30.0


@dataclass(frozen=True, slots=True)
class Found:
    """A plan.

    Args:
        program: the planned program. made: the candidate of the plan; None if a worker process planned it.
    """

    plan: Plan
    program: Program
    made: Candidate | None

    def with_notes(self, *notes: str) -> Found:
        """A copy with further notes for the user."""
        return replace(self, plan=replace(self.plan, notes=(*self.plan.notes, *notes)))


def search_meshes(
    program: Program,
    request: PlanRequest,
    layouts: Mapping[str, Any] | None = None,
    *,
    may_fork: bool = True,
) -> Found:
    """Plan a program on every mesh, and stop on a mesh once its plan cannot be the fastest.

    Args:
        layouts: shardings of inputs by path or glob, in addition to `request.pin`.
        may_fork: whether to plan in worker processes, too; the candidate of the plan may then be unknown.

    Raises:
        NothingFitsError: no plan fits; its ways out are not priced yet.
    """
    pin = {**(layouts or {}), **(request.pin or {})}
    meshes = meshes_with_pinned_axes(meshes_of_program(request.meshes, program.graph), pin)
    symmetric = not pin and not _names_axes(program.graph)
    distinct, same = distinct_meshes(meshes, request.profile, symmetric=symmetric)
    is_long = len(program.graph.nodes) * (len(distinct) - 1) >= _WORTH_FORKS
    most = len(distinct) if may_fork and is_long else 1
    with seldom_collect():
        search = _Search(program, request, pin, distinct)
        with workers(search.answer, most, patience_s=request.time_limit_s + _PATIENCE_S) as team:
            for job in team.spread(search.to_begin):  # all are begun first: the most promising one prunes others
                team.note(job, search.answer(job))
            for job in search.to_finish(team):
                team.note(job, search.answer(job))
            ends = search.ends(team)
    request.report("done", 1.0)
    best = _simplest_end([end for end in ends if end.plan is not None])
    assert best.plan is not None
    plan = replace(
        best.plan,
        memory_budget_bytes=request.memory_budget_bytes,
        rejected=_rejected(best.plan, dict(zip(distinct, ends, strict=True)), same),
        pins={path: str(spec) for path, spec in (request.pin or {}).items()},
        dims_as_written=request.dims_as_written,
        in_tree=program.trace.in_tree,
        out_tree=program.trace.out_tree,
    )
    return Found(plan, program, best.made)


def distinct_meshes(
    meshes: Sequence[MeshShape], profile: HardwareProfile, *, symmetric: bool
) -> tuple[list[MeshShape], dict[MeshShape, MeshShape]]:
    """Meshes that differ in more than the names of their axes, and for each other mesh its equal among these."""
    seen: dict[Any, MeshShape] = {}
    distinct, same = [], {}
    for mesh in meshes:
        sizes = [groupings((a,), mesh, profile) for a in mesh.axis_names]
        key = tuple(sorted(sizes, key=repr)) if symmetric else mesh
        if key in seen:
            same[mesh] = seen[key]
        else:
            seen[key] = mesh
            distinct.append(mesh)
    return distinct, same


def _names_axes(graph: Graph) -> bool:
    """Whether the program itself shards over named axes: then axes of equal size are not interchangeable."""
    return any(node.params.get("axis_sizes") for node in graph.nodes)


# -- the meshes, one by one --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _End:
    """The outcome of planning on one mesh.

    Args:
        fits: whether the plan is within the budget. compared_s: the seconds by which plans are compared.
        fastest: the fastest plan on this mesh; the outcome is a simpler plan if one is tied with it.
        made: the candidate of the plan.
        failure: why there is no plan.
    """

    plan: Plan | None = None
    fits: bool = False
    compared_s: float = math.inf
    made: Candidate | None = None
    failure: str = ""
    fastest: Fastest | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for another process, without tree structures and the candidate."""
        plan = None if self.plan is None else replace(self.plan, in_tree=None, out_tree=None)
        return _End, (plan, self.fits, self.compared_s, None, self.failure, self.fastest)


#: The position of a mesh, and the least estimate of all meshes to finish its plan, or None to begin it.
_Job = tuple[int, float | None]


class _Search:
    """Plan on the meshes that this process is given; a mesh is known by its position."""

    def __init__(
        self, program: Program, request: PlanRequest, pin: Mapping[str, Any], meshes: Sequence[MeshShape]
    ) -> None:
        first = resolve_pins(pin, program.graph, meshes[0])
        forms = program.forms[-1 if request.dims_as_written else 0 :]
        self._forms: list[Form] = [(form, program_groups(form.graph, first)) for form in forms]
        self._meshes = meshes
        self._tasks = [MeshTask(request, resolve_pins(pin, program.graph, mesh)) for mesh in meshes]
        self._budget_bytes, self._report, self._process = request.budget.plan_bytes, request.report, os.getpid()
        self._begun: dict[int, Begun] = {}
        self._failures: dict[int, NothingFitsError] = {}
        self._fastest = Least()

    @property
    def to_begin(self) -> list[_Job]:
        """The jobs that begin the plan of every mesh."""
        return [(i, None) for i in range(len(self._meshes))]

    def to_finish(self, team: Workers[_Job, Any]) -> Iterator[_Job]:
        """The jobs that finish the plans, each in the process that began it, the most promising mesh first.

        Args:
            team: the workers that have begun them.
        """
        begun = dict(team.answers)
        least = min(promise for _, promise in begun.values())
        by_worker: dict[int, list[_Job]] = {}
        for (i, _), (worker, _) in sorted(begun.items(), key=lambda one: one[1][1]):
            by_worker.setdefault(worker, []).append((i, least))
        near = {i for (i, _), (_, promise) in begun.items() if promise <= (1 + FAR) * least}
        return team.each_by_worker(by_worker, lambda job: job[0] in near)  # worth beginning again elsewhere

    def ends(self, team: Workers[_Job, Any]) -> list[_End]:
        """The outcome on each mesh.

        Raises:
            NothingFitsError: no plan fits on any mesh; it has the ways out of the first mesh.
        """
        ends: dict[int, _End] = {i: end for (i, _), (_, end) in team.answers.items()}
        if not any(end.plan for end in ends.values()):
            if 0 not in self._failures:  # it was found in another process
                self.answer((0, math.inf))
            raise self._failures[0]
        return [ends[i] for i in range(len(self._meshes))]

    def answer(self, job: _Job) -> float | _End:
        """The estimate of a mesh in seconds; or, for a job that finishes it, the outcome."""
        i, least_promise = job
        mesh, count = self._meshes[i], len(self._meshes)
        if i not in self._begun:
            self._show(f"plan {mesh}", 0.1 + 0.6 * i / count)
            self._begun[i] = begun = begin(mesh, self._forms, self._tasks[i])
            if begun.made.peak_bytes <= self._budget_bytes:
                self._fastest.lower(begun.made.compared_s)
        if least_promise is None:
            return self._begun[i].promise
        self._show(f"improve {mesh}", 0.7 + 0.3 * i / count)
        return self._finished(i, least_promise)

    def _finished(self, i: int, least_promise: float) -> _End:
        try:
            done = finish(self._begun[i], self._fastest, least_promise)
        except NothingFitsError as short:
            self._failures[i] = short
            return _End(failure=str(short))
        fits = done.made.peak_bytes <= self._budget_bytes
        if fits:
            self._fastest.lower(done.fastest.compared_s)
        return _End(done.plan, fits, done.made.compared_s, done.made, fastest=done.fastest)

    def _show(self, stage: str, fraction: float) -> None:
        if os.getpid() == self._process:  # not in a worker
            self._report(stage, fraction)


# -- the best of them --------------------------------------------------------------------------


def _simplest_end(ends: Sequence[_End]) -> _End:
    """The outcome with the simplest plan among those that fit and are tied with the fastest: the fewest sharded
    arguments, then the fewest axes. Its plan records the fastest one if they differ."""
    ends = [end for end in ends if end.fits] or ends
    known = [end.fastest for end in ends if end.fastest is not None]
    fastest = min(known, key=lambda one: one.compared_s)

    def simplicity(end: _End) -> tuple[bool, int, int, float]:
        assert end.plan is not None
        axes, own_s = sum(size > 1 for size in end.plan.mesh.axis_sizes), end.plan.prediction.step_time_s
        slower = end.compared_s > (1 + TIE) * fastest.compared_s or own_s > (1 + TIE) * fastest.step_time_s
        return slower, num_split(end.plan.inputs), axes, end.compared_s

    best = min(ends, key=simplicity) if any(end.fits for end in ends) else min(ends, key=lambda end: end.compared_s)
    assert best.plan is not None
    if best.compared_s <= fastest.compared_s:
        return best
    faster = 1 - fastest.compared_s / best.compared_s
    tie = Tie(mesh=fastest.mesh, strategy=fastest.strategy, num_split=fastest.num_split, faster=faster)
    return replace(best, plan=replace(best.plan, tie=tie))


def _rejected(
    best: Plan, ends: Mapping[MeshShape, _End], same: Mapping[MeshShape, MeshShape]
) -> tuple[RejectedMesh, ...]:
    plans = [end.plan for end in ends.values() if end.plan is not None]
    out = [
        RejectedMesh(
            mesh=p.mesh, step_time_s=p.prediction.step_time_s, peak_bytes=p.prediction.peak_bytes, strategy=p.strategy
        )
        for p in plans
        if p is not best
    ]
    by_mesh = {p.mesh: p for p in plans}
    for mesh, equal in same.items():
        if equal in by_mesh:
            p = by_mesh[equal].prediction
            strategy = f"the same as {equal} with the names of the axes exchanged"
            out.append(RejectedMesh(mesh=mesh, step_time_s=p.step_time_s, peak_bytes=p.peak_bytes, strategy=strategy))
    out += [
        RejectedMesh(mesh=mesh, step_time_s=float("inf"), peak_bytes=float("inf"), strategy=end.failure)
        for mesh, end in ends.items()
        if end.failure
    ]
    return tuple(out)

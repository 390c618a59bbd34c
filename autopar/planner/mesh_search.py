"""Choose the mesh: solve for every mesh, then refine the plans that may be the fastest, in parallel processes.

Meshes over a part of the devices are solved only as long as they can be as fast as the fastest plan found (`fewer_devices`).

In: a program, a `PlanRequest`, shardings of inputs. Out: `Found`: the plan, and the candidate behind it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost.collectives import groupings
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate
from autopar.planner.fewer_devices import least_s, reason, smaller_meshes
from autopar.planner.fork_pool import SharedMinimum, Workers, workers
from autopar.planner.mesh_task import Form, MeshTask
from autopar.planner.one_mesh import FAR, Begun, begin, finish
from autopar.planner.pins import meshes_of_program, meshes_with_pinned_axes, resolve_pins, sharded_by_program
from autopar.planner.program_groups import program_groups
from autopar.planner.request import PlanRequest
from autopar.planner.simplest_plan import TIE, Fastest
from autopar.planner.ways_out import NothingFitsError
from autopar.plans.plan import Plan
from autopar.plans.records import RejectedMesh, Tie, num_split
from autopar.system.gc_pause import seldom_collect
from autopar.transforms.program import Program

#: Worker processes are forked if the number of nodes times the number of meshes is at least this.
_WORTH_FORKS = 4000
#: A worker counts as hung after the solver's time limit and this many seconds without CPU use.
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Found:
    """A plan and its origin.

    Args:
        program: the planned program.
        candidate: the candidate behind the plan; None if a worker process planned it.
    """

    plan: Plan
    program: Program
    candidate: Candidate | None

    def with_notes(self, *notes: str) -> Found:
        """The same plan with further notes for the user."""
        return replace(self, plan=replace(self.plan, notes=(*self.plan.notes, *notes)))


def search_meshes(
    program: Program,
    request: PlanRequest,
    layouts: Mapping[str, Any] | None = None,
    *,
    may_fork: bool = True,
) -> Found:
    """The fastest plan of a program over all meshes. A mesh is planned only as far as it may be the fastest.

    Args:
        layouts: shardings of inputs, by path or glob, in addition to `request.pin`.
        may_fork: whether to plan in worker processes too; then the candidate behind the plan may be unknown.

    Raises:
        NothingFitsError: no plan fits; its ways out are not priced yet.
    """
    pin = {**(layouts or {}), **(request.pin or {})}
    meshes = meshes_with_pinned_axes(meshes_of_program(request.meshes, program.graph), pin)
    symmetric = not pin and not sharded_by_program(program.graph)
    distinct, same = distinct_meshes(meshes, request.profile, symmetric=symmetric)
    parts = [
        distinct_meshes(part, request.profile, symmetric=symmetric)[0]
        for part in smaller_meshes(request, program.graph, pin)
    ]
    is_long = len(program.graph.nodes) * (len(distinct) - 1) >= _WORTH_FORKS
    most = len(distinct) if may_fork and is_long else 1
    with seldom_collect():
        search = _Search(program, request, pin, distinct, parts)
        with workers(search.answer, most, patience_s=request.time_limit_s + _PATIENCE_S) as team:
            for jobs in search.to_begin():  # begin all plans first: the fastest of them prunes others
                for job in team.spread(jobs):
                    team.note(job, search.answer(job))
                search.note_begun(team.answers)
            for job in search.to_finish(team):
                team.note(job, search.answer(job))
            ends = search.ends(team)
    request.report("done", 1.0)
    best = _simplest_end([end for end in ends.values() if end.plan is not None])
    assert best.plan is not None
    available = _available(request, best.plan.mesh)
    plan = replace(
        best.plan,
        memory_budget_bytes=request.memory_budget_bytes,
        rejected=_rejected(best.plan, ends, same),
        available_devices=available,
        notes=(*_fewer(program, best.plan, ends.values(), available), *best.plan.notes),
        pins={path: str(spec) for path, spec in (request.pin or {}).items()},
        dims_as_written=request.dims_as_written,
        attention_kernel=program.attention_kernel,
        in_tree=program.trace.in_tree,
        out_tree=program.trace.out_tree,
    )
    return Found(plan, program, best.candidate)


def distinct_meshes(
    meshes: Sequence[MeshShape], profile: HardwareProfile, *, symmetric: bool
) -> tuple[list[MeshShape], dict[MeshShape, MeshShape]]:
    """The meshes that differ in more than the names of their axes; and by each other mesh, the equal one among these.

    Args:
        symmetric: whether axes of equal size are interchangeable.
    """
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


def _available(request: PlanRequest, mesh: MeshShape) -> int | None:
    """The number of devices to plan for, if the mesh uses a part of them."""
    number = request.available_devices or request.meshes[0].num_devices
    return number if mesh.num_devices < number else None


def _fewer(program: Program, plan: Plan, ends: Iterable[_End], available: int | None) -> Iterator[str]:
    """The reason why a plan uses a part of the devices; none if it uses all or follows another plan."""
    on_all = [end for end in ends if end.plan is not None and end.plan.num_devices == available]
    if available is not None and plan.num_devices != available:
        fastest = min(on_all, key=lambda end: (not end.fits, end.step_time_s), default=None)
        yield reason(program, plan, None if fastest is None else fastest.plan, available)


# -- the meshes, one by one --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _End:
    """The outcome of planning on one mesh.

    Args:
        fits: whether the plan is within the memory budget.
        candidate: the candidate behind the plan.
        failure: the reason why there is no plan.
        fastest: the fastest candidate on this mesh, with which the plan may be tied.
    """

    plan: Plan | None = None
    fits: bool = False
    candidate: Candidate | None = None
    failure: str = ""
    fastest: Fastest | None = None

    @property
    def step_time_s(self) -> float:
        """Predicted step time; infinite if there is no plan."""
        return math.inf if self.plan is None else self.plan.prediction.step_time_s

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without tree structures and without the candidate."""
        plan = None if self.plan is None else replace(self.plan, in_tree=None, out_tree=None)
        return _End, (plan, self.fits, None, self.failure, self.fastest)


@dataclass(frozen=True, slots=True)
class _Score:
    """The score of a mesh in seconds, and whether the plan without a memory limit fits the memory."""

    seconds: float
    fits: bool


#: The position of a mesh; and None to begin its plan, or the lowest score of all meshes to finish it.
_Job = tuple[int, float | None]


class _Search:
    """Plan on several meshes, which are identified by their positions. Each process plans those that it is given.

    Args:
        meshes: the meshes over all devices.
        parts: the meshes over a part of the devices, by number of devices, the largest number first; the last is one device.
    """

    def __init__(
        self,
        program: Program,
        request: PlanRequest,
        pin: Mapping[str, Any],
        meshes: Sequence[MeshShape],
        parts: Sequence[Sequence[MeshShape]],
    ) -> None:
        first = resolve_pins(pin, program.graph, meshes[0])
        forms = program.forms[-1 if request.dims_as_written else 0 :]
        self._forms: list[Form] = [(form, program_groups(form.graph, first)) for form in forms]
        self._meshes = [*meshes, *itertools.chain.from_iterable(parts)]
        self._num_whole = len(meshes)
        self._tasks = [MeshTask(request, resolve_pins(pin, program.graph, mesh)) for mesh in self._meshes]
        self._budget_bytes, self._report, self._process = request.budget.plan_bytes, request.report, os.getpid()
        self._begun: dict[int, Begun] = {}
        self._failures: dict[int, NothingFitsError] = {}
        self._fastest = SharedMinimum()
        self._scores: dict[int, tuple[int, _Score]] = {}  # by mesh, the worker that began it

    def to_begin(self) -> Iterator[list[_Job]]:
        """The jobs that begin plans: first for all devices and for one device, whose step time bounds that of the others; then
        for a part of the devices, for one number of them after the other, if it can be as fast as the fastest so far."""
        one_device = len(self._meshes) - 1
        first = [i for i in range(len(self._meshes)) if i < self._num_whole or i == one_device]
        yield [(i, None) for i in first]
        others = [i for i in range(len(self._meshes)) if i not in first]
        for number, part in itertools.groupby(others, lambda i: self._meshes[i].num_devices):
            one_device_s = self._scores[one_device][1].seconds
            if least_s(one_device_s, number) <= (1 + TIE) * self._lowest_s:
                yield [(i, None) for i in part]

    def note_begun(self, answers: Mapping[_Job, tuple[int, Any]]) -> None:
        """Record the scores of plans that were begun."""
        self._scores |= {i: answer for (i, _), answer in answers.items()}

    @property
    def _lowest_s(self) -> float:
        """The lowest score of the meshes over all devices, and of the others that fit."""
        return min(score.seconds for i, (_, score) in self._scores.items() if i < self._num_whole or score.fits)

    def to_finish(self, team: Workers[_Job, Any]) -> Iterator[_Job]:
        """The jobs that finish the plans, each in the process that began it, the mesh with the lowest score first. A mesh over a
        part of the devices is finished only if its score is near the lowest.

        Args:
            team: the workers that have begun the plans.
        """
        lowest = self._lowest_s
        near = {i for i, (_, score) in self._scores.items() if score.seconds <= (1 + FAR) * lowest}
        by_worker: dict[int, list[_Job]] = {}
        for i, (worker, _) in sorted(self._scores.items(), key=lambda one: one[1][1].seconds):
            if i in near or i < self._num_whole:
                by_worker.setdefault(worker, []).append((i, lowest))
        # Another worker must begin the plan again, which only the long search of a near mesh is worth.
        return team.each_by_worker(by_worker, lambda job: job[0] in near)

    def ends(self, team: Workers[_Job, Any]) -> dict[MeshShape, _End]:
        """The outcome on each mesh.

        Raises:
            NothingFitsError: no plan fits on any mesh; with the text for the first mesh.
        """
        ends: dict[int, _End] = {i: end for (i, _), (_, end) in team.answers.items()}
        if not any(end.plan for end in ends.values()):
            if 0 not in self._failures:  # another process has the error
                self.answer((0, math.inf))
            raise self._failures[0]
        return {self._meshes[i]: ends[i] for i in sorted(ends)}

    def answer(self, job: _Job) -> _Score | _End:
        """Do a job.

        Returns:
            The score of the mesh; for a job that finishes the plan, the outcome.
        """
        i, lowest_score_s = job
        mesh, count = self._meshes[i], len(self._meshes)
        if i not in self._begun:
            self._show(f"plan {mesh}", 0.1 + 0.6 * i / count)
            self._begun[i] = begun = begin(mesh, self._forms, self._tasks[i])
            if begun.candidate.peak_bytes <= self._budget_bytes:
                self._fastest.lower(begun.candidate.step_time_s)
        if lowest_score_s is None:
            begun = self._begun[i]
            return _Score(begun.score_s, begun.candidate.peak_bytes <= self._budget_bytes)
        self._show(f"improve {mesh}", 0.7 + 0.3 * i / count)
        return self._finished(i, lowest_score_s)

    def _finished(self, i: int, lowest_score_s: float) -> _End:
        try:
            done = finish(self._begun[i], self._fastest, lowest_score_s)
        except NothingFitsError as error:
            self._failures[i] = error
            return _End(failure=str(error))
        fits = done.candidate.peak_bytes <= self._budget_bytes
        if fits:
            self._fastest.lower(done.fastest.step_time_s)
        return _End(done.plan, fits, done.candidate, fastest=done.fastest)

    def _show(self, stage: str, fraction: float) -> None:
        if os.getpid() == self._process:  # forks show no progress
            self._report(stage, fraction)


# -- the best of them --------------------------------------------------------------------------


def _simplest_end(ends: Sequence[_End]) -> _End:
    """The outcome with the simplest plan of those that fit and are tied with the fastest: the plan on the fewest devices, then with
    the fewest sharded arguments, then with the fewest axes. If another plan is the fastest, the chosen plan records it."""
    ends = [end for end in ends if end.fits] or ends
    known = [end.fastest for end in ends if end.fastest is not None]
    fastest = min(known, key=lambda one: one.step_time_s)

    def simplicity(end: _End) -> tuple[bool, int, int, int, float]:
        assert end.plan is not None
        axes = sum(size > 1 for size in end.plan.mesh.axis_sizes)
        slower = end.step_time_s > (1 + TIE) * fastest.step_time_s
        return slower, end.plan.num_devices, num_split(end.plan.inputs), axes, end.step_time_s

    best = min(ends, key=simplicity) if any(end.fits for end in ends) else min(ends, key=lambda end: end.step_time_s)
    assert best.plan is not None
    if best.step_time_s <= fastest.step_time_s:
        return best
    faster = 1 - fastest.step_time_s / best.step_time_s
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
        if p.mesh != best.mesh
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

"""Choose the mesh: solve for every mesh, then refine the plans that may be the fastest, in parallel processes; record the best.

Meshes over a part of the devices are solved only as long as they can be as fast as the fastest plan found (`fewer_devices`).

In: a program, a `PlanRequest`, shardings of inputs. Out: `Found`: the plan, and the candidate behind it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.cost.collectives import groupings
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate
from autopar.planner.fewer_devices import least_s, reason, smaller_meshes
from autopar.planner.fork_pool import SharedMinimum, Workers, workers
from autopar.planner.mesh_task import Form, MeshTask
from autopar.planner.one_mesh import Begun, Finished, Rank, begin, finish, keep
from autopar.planner.pins import meshes_of_program, meshes_with_pinned_axes, resolve_pins, sharded_by_program
from autopar.planner.program_groups import program_groups
from autopar.planner.request import PlanRequest
from autopar.planner.simplest_plan import TIE, Fastest
from autopar.planner.strategy_names import strategy_text
from autopar.planner.ways_out import NothingFitsError
from autopar.plans.plan import Plan
from autopar.plans.records import RejectedMesh, Tie, num_split
from autopar.system.gc_pause import seldom_collect
from autopar.transforms.program import Program

#: Worker processes are forked if the number of nodes times the number of meshes beyond two is at least this. With two meshes, what
#: the second process does again takes as long as what it saves.
_WORTH_FORKS = 4000
#: By how much more than the meshes over all devices those over a part of them may gain by further axes, as a share of the step.
_FURTHER_GAIN = 0.1
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
    is_long = len(program.graph.nodes) * (len(distinct) - 2) >= _WORTH_FORKS
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
            best = _simplest([end for end in ends.values() if not end.failure])
            for job in search.to_record(best.mesh, team):
                team.note(job, search.answer(job))
            recorded = search.recorded(team)
    request.report("done", 1.0)
    available = _available(request, best.mesh)
    plan = replace(
        recorded,
        memory_budget_bytes=request.memory_budget_bytes,
        rejected=_rejected(best, ends, same),
        tie=best.tie,
        available_devices=available,
        notes=(*_fewer(program, recorded, ends.values(), available), *recorded.notes),
        pins={path: str(spec) for path, spec in (request.pin or {}).items()},
        dims_as_written=request.dims_as_written,
        attention_kernel=program.attention_kernel,
        in_tree=program.trace.in_tree,
        out_tree=program.trace.out_tree,
    )
    return Found(plan, program, search.candidate(best.mesh))


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
    on_all = [end for end in ends if not end.failure and end.mesh.num_devices == available]
    if available is not None and plan.num_devices != available:
        fastest = min(on_all, key=lambda end: (not end.fits, end.step_time_s), default=None)
        yield reason(program, plan, None if fastest is None else (fastest.mesh, fastest.step_time_s), available)


# -- the meshes, one by one --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _End:
    """The outcome of planning on one mesh.

    Args:
        step_time_s, peak_bytes: predictions; infinite if there is no plan.
        strategy: the name of the plan's strategy.
        num_split: the number of sharded arguments.
        fits: whether the plan is within the memory budget.
        fastest: the fastest candidate on this mesh, with which the plan may be tied.
        tie: the fastest candidate on all meshes, if this plan was chosen and is tied with it.
        failure: the reason why there is no plan.
    """

    mesh: MeshShape
    step_time_s: float = math.inf
    peak_bytes: float = math.inf
    strategy: str = ""
    num_split: int = 0
    fits: bool = False
    fastest: Fastest | None = None
    tie: Tie | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Score:
    """The rank of a mesh.

    Args:
        step_time_s: of the plan without a memory limit.
        fits: whether this plan fits the memory.
    """

    rank: Rank
    step_time_s: float
    fits: bool


#: What to do on a mesh (`keep` takes the plan that was begun as it is); the position of the mesh; and the rank of the mesh with the
#: lowest score, which finishing needs.
_Job = tuple[Literal["begin", "finish", "keep", "record"], int, Rank | None]


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
        self._finished: dict[int, Finished] = {}
        self._failures: dict[int, NothingFitsError] = {}
        self._fastest = SharedMinimum()
        self._scores: dict[int, tuple[int, _Score]] = {}  # by mesh, the worker that began it

    def to_begin(self) -> Iterator[list[_Job]]:
        """The jobs that begin plans: first for all devices and for one device, whose step time bounds that of the others; then
        for a part of the devices, for one number of them after the other, if it can be as fast as the fastest so far. The mesh of
        one axis comes first: the others follow if they can be as fast, even with more to gain than those over all devices have."""
        one_device = len(self._meshes) - 1
        first = [i for i in range(len(self._meshes)) if i < self._num_whole or i == one_device]
        yield [("begin", i, None) for i in first]
        others = [i for i in range(len(self._meshes)) if i not in first]
        for number, part in itertools.groupby(others, lambda i: self._meshes[i].num_devices):
            one_device_s = self._scores[one_device][1].rank.score_s
            if least_s(one_device_s, number) > (1 + TIE) * self._first.score_s:
                continue
            flat, *deep = sorted(part, key=self._num_axes)
            yield [("begin", flat, None)]
            if self._may_gain(self._scores[flat][1].rank.score_s):
                yield [("begin", i, None) for i in deep]

    def note_begun(self, answers: Mapping[_Job, tuple[int, Any]]) -> None:
        """Record the scores of plans that were begun."""
        self._scores |= {i: answer for (_, i, _), answer in answers.items()}

    @property
    def _first(self) -> Rank:
        """The rank of the mesh with the lowest score, of those over all devices and of the others that fit."""
        ranks = [score.rank for i, (_, score) in self._scores.items() if i < self._num_whole or score.fits]
        return min(ranks, key=lambda rank: rank.score_s)

    def _may_gain(self, flat_s: float) -> bool:
        """Whether a mesh over a part of the devices may have the lowest score.

        Args:
            flat_s: the score of the mesh of one axis over this part.
        """
        whole = [self._scores[i][1].rank.score_s for i in range(self._num_whole)]
        whole_flat_s = whole[min(range(self._num_whole), key=self._num_axes)]
        return flat_s * min(whole) * (1 - _FURTHER_GAIN) <= (1 + TIE) * self._first.score_s * whole_flat_s

    def _num_axes(self, i: int) -> int:
        return sum(size > 1 for size in self._meshes[i].axis_sizes)

    def to_finish(self, team: Workers[_Job, Any]) -> Iterator[_Job]:
        """The jobs that finish the plans, each in the process that began it, the mesh with the lowest score first. A mesh over a
        part of the devices is finished only if it may become the fastest. If a mesh has the same step time as one of fewer axes, its
        plan is the same, and is not improved again.

        Args:
            team: the workers that have begun the plans.
        """
        first = self._first
        near = {i for i, (_, score) in self._scores.items() if score.rank.may_beat(first)}
        by_worker: dict[int, list[_Job]] = {}
        same = set[float]()
        for i, (worker, score) in sorted(self._scores.items(), key=lambda one: one[1][1].rank.score_s):
            if i in near or i < self._num_whole:
                is_known = score.fits and score.step_time_s in same
                by_worker.setdefault(worker, []).append(("keep" if is_known else "finish", i, first))
                same.add(score.step_time_s)
        # Another worker must begin the plan again, which only the long search of a near mesh is worth.
        return team.each_by_worker(by_worker, lambda job: job[0] == "finish" and job[1] in near)

    def ends(self, team: Workers[_Job, Any]) -> dict[MeshShape, _End]:
        """The outcome on each mesh.

        Raises:
            NothingFitsError: no plan fits on any mesh; with the text for the first mesh.
        """
        ends: dict[int, _End] = {i: end for (_, i, _), (_, end) in team.answers.items()}
        if all(end.failure for end in ends.values()):
            if 0 not in self._failures:  # another process has the error
                self.answer(("finish", 0, None))
            raise self._failures[0]
        return {self._meshes[i]: ends[i] for i in sorted(ends)}

    def to_record(self, mesh: MeshShape, team: Workers[_Job, Any]) -> Iterator[_Job]:
        """The job that records the plan on a mesh, in the process that finished it."""
        at = self._meshes.index(mesh)
        ((job, worker),) = ((job, worker) for job, (worker, _) in team.answers.items() if job[1] == at)
        return team.each_by_worker({worker: [("record", *job[1:])]}, lambda _: False)

    def recorded(self, team: Workers[_Job, Any]) -> Plan:
        """The recorded plan, without tree structures."""
        ((_, plan),) = team.answers.values()
        assert isinstance(plan, Plan)
        return plan

    def candidate(self, mesh: MeshShape) -> Candidate | None:
        """The candidate behind the plan on a mesh, if this process planned it."""
        done = self._finished.get(self._meshes.index(mesh))
        return None if done is None else done.candidate

    def answer(self, job: _Job) -> _Score | _End | Plan:
        """Do a job, and those before it if this process has not done them.

        Returns:
            The score of the mesh, the outcome, or the plan without tree structures, which no process can send.
        """
        step, i, first = job
        mesh, count = self._meshes[i], len(self._meshes)
        if i not in self._begun:
            self._show(f"plan {mesh}", 0.1 + 0.6 * i / count)
            self._begun[i] = begun = begin(mesh, self._forms, self._tasks[i])
            if begun.candidate.peak_bytes <= self._budget_bytes:
                self._fastest.lower(begun.candidate.step_time_s)
        if step == "begin":
            begun, candidate = self._begun[i], self._begun[i].candidate
            return _Score(begun.rank, candidate.step_time_s, candidate.peak_bytes <= self._budget_bytes)
        if i not in self._finished:
            self._show(f"improve {mesh}", 0.7 + 0.3 * i / count)
            try:
                end = keep(self._begun[i]) if step == "keep" else finish(self._begun[i], self._fastest, first)
                self._finished[i] = end
            except NothingFitsError as error:
                self._failures[i] = error
                return _End(mesh, failure=str(error))
        return self._end(i) if step != "record" else replace(self._finished[i].plan, in_tree=None, out_tree=None)

    def _end(self, i: int) -> _End:
        """The outcome of a finished plan."""
        done = self._finished[i]
        chosen, inputs = done.candidate, done.candidate.parts.inputs
        fits = chosen.peak_bytes <= self._budget_bytes
        if fits:
            self._fastest.lower(done.fastest.step_time_s)
        return _End(
            mesh=self._meshes[i],
            step_time_s=chosen.step_time_s,
            peak_bytes=chosen.peak_bytes,
            strategy=strategy_text(chosen.formulation, chosen.solution.choices, inputs),
            num_split=num_split(inputs),
            fits=fits,
            fastest=done.fastest,
        )

    def _show(self, stage: str, fraction: float) -> None:
        if os.getpid() == self._process:  # forks show no progress
            self._report(stage, fraction)


# -- the best of them --------------------------------------------------------------------------


def _simplest(ends: Sequence[_End]) -> _End:
    """The outcome with the simplest plan of those that fit and are tied with the fastest: the plan on the fewest devices, then with
    the fewest sharded arguments, then with the fewest axes. If another plan is the fastest, the outcome has it as its `tie`."""
    ends = [end for end in ends if end.fits] or ends
    known = [end.fastest for end in ends if end.fastest is not None]
    fastest = min(known, key=lambda one: one.step_time_s)

    def simplicity(end: _End) -> tuple[bool, int, int, int, float]:
        axes = sum(size > 1 for size in end.mesh.axis_sizes)
        slower = end.step_time_s > (1 + TIE) * fastest.step_time_s
        return slower, end.mesh.num_devices, end.num_split, axes, end.step_time_s

    best = min(ends, key=simplicity) if any(end.fits for end in ends) else min(ends, key=lambda end: end.step_time_s)
    if best.step_time_s <= fastest.step_time_s:
        return best
    faster = 1 - fastest.step_time_s / best.step_time_s
    tie = Tie(mesh=fastest.mesh, strategy=fastest.strategy, num_split=fastest.num_split, faster=faster)
    return replace(best, tie=tie)


def _rejected(
    best: _End, ends: Mapping[MeshShape, _End], same: Mapping[MeshShape, MeshShape]
) -> tuple[RejectedMesh, ...]:
    def rejected(end: _End, mesh: MeshShape, strategy: str) -> RejectedMesh:
        return RejectedMesh(mesh=mesh, step_time_s=end.step_time_s, peak_bytes=end.peak_bytes, strategy=strategy)

    planned = {end.mesh: end for end in ends.values() if not end.failure}
    equal = [(mesh, planned[other]) for mesh, other in same.items() if other in planned]
    return (
        *(rejected(end, end.mesh, end.strategy) for end in planned.values() if end.mesh != best.mesh),
        *(rejected(end, mesh, f"the same as {end.mesh} with the names of the axes exchanged") for mesh, end in equal),
        *(rejected(end, end.mesh, end.failure) for end in ends.values() if end.failure),
    )

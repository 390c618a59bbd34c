"""Refuse schedules that a step or its stages cannot run.

In: the entry of a schedule, and a step that can be cut, or its stages.
Out: nothing, or an error that says what to choose instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.cut.pieces_by_version import versioned_programs
from autopar.pipeline.cut.replicas import accumulators, check_effects
from autopar.pipeline.cut.stage_programs import Cuttable, StageProgram
from autopar.pipeline.partition.problem import Partitioner
from autopar.pipeline.schedule.kind import PipelineShape, ScheduleKind
from autopar.pipeline.schedule.table import SCHEDULES, build, find, unmet
from autopar.pipeline.schedule.verifier import check_replicas
from autopar.pipeline.search.request import StageRequest


def check_schedule(cuttable: Cuttable, name: str, request: StageRequest) -> None:
    """Refuse a forward-only schedule for a step with a backward pass, one whose orders cannot run, and numbers for which a
    schedule is not defined.

    Args:
        name: the step's name.

    Raises:
        ScheduleError: it is one, or there is no schedule of this name.
    """
    if request.schedule == "auto":
        return
    kind = find(request.schedule)
    if kind.parts > 1 and not kind.token_slices:
        raise ScheduleError(
            f"schedule {kind.name!r} orders parts of microbatches, which can be simulated, but not run: choose another one"
        )
    if reason := unmet_by_partitioner(kind, request.partitioner):
        raise ScheduleError(reason)
    if kind.has_replicas:
        _check_replicas(kind)
    _check_numbers(kind, request)
    if kind.backward == "none" and cuttable.flow.backward:
        training = [repr(one.name) for one in SCHEDULES.values() if one.backward != "none"]
        raise ScheduleError(
            f"schedule {kind.name!r} runs forward passes only, but `{name}` has a backward pass: its gradients and updates"
            f" would never be computed. Leave schedule='auto', or choose one of {', '.join(training)}"
        )


def unmet_by_partitioner(kind: ScheduleKind, partitioner: Partitioner | None) -> str | None:
    """Why a schedule cannot run what a given partitioner finds: that knows nothing of several stages on one submesh."""
    if partitioner is None or min(kind.virtuals) == 1:
        return None
    return (
        f"schedule {kind.name!r} puts several stages on each submesh, and a partitioner of your own puts one there: leave out"
        " partitioner=, or take schedule='1f1b'"
    )


def _check_replicas(kind: ScheduleKind) -> None:
    """Refuse an entry whose replicas cannot run.

    Raises:
        ScheduleError: it is one.
    """
    for p in (2, 3, 4):
        shape = PipelineShape(p, 2 * p, kind.virtuals[0])
        if unmet(kind, shape) is not None:
            continue
        built = build(kind, p, 2 * p, virtual=shape.virtual)
        check_replicas(built)
        if built.replicas != kind.placement(shape) or built.num_stages != p * shape.virtual:
            raise ScheduleError(
                f"schedule {kind.name!r} has replicas of stages, so to run it must have as many stages as submeshes, or a"
                " multiple, and the first submesh of each stage in its `placement` must run microbatch 0"
            )


def _check_numbers(kind: ScheduleKind, request: StageRequest) -> None:
    """Refuse a number of stages, or of microbatches, with which a schedule is not defined."""
    if request.stages in ("auto", 1):
        return
    wanted, num_devices = request.num_microbatches, request.cluster.num_devices
    count = wanted if isinstance(wanted, int) and wanted > 0 else 2 * max(request.stages, num_devices)
    shape = PipelineShape(request.stages, count, kind.virtuals[0])
    if len(kind.placement(shape)) == request.stages and (reason := unmet(kind, shape)):
        raise ScheduleError(reason)


def check_stages(kind: ScheduleKind | None, programs: Sequence[StageProgram]) -> None:
    """Refuse stages that cannot have replicas, for a schedule that has them, or that cannot run asynchronously.

    Raises:
        EffectError, ScheduleError: see `cut.replicas` and `cut.pieces_by_version`.
    """
    if kind is not None and kind.is_asynchronous:
        versioned_programs(programs)
    for one in programs if kind is not None and kind.has_replicas else ():
        layout = Layout(one.program.trace, one.inputs)
        accumulators(layout)
        check_effects(layout)

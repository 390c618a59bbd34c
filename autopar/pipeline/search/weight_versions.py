"""Say which versions of its weights each stage of an asynchronous pipeline keeps, and what they take.

In: a simulated stream of batches, and the programs and plans of its stages.
Out: a `WeightVersions` for each stage. One version is what the passes of microbatches read of the state: parameters as they
are, or, where a step converts them once for all microbatches, what they are converted to. The rest of the state, such as
moments, has one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.cut.pieces_by_version import VersionedStage, versioned_programs
from autopar.pipeline.cut.stage_programs import StageProgram
from autopar.pipeline.partition.streamed_time import StreamedTime
from autopar.pipeline.plan import WeightVersions
from autopar.plans.plan import Plan


def weight_versions(
    streamed: StreamedTime, programs: Sequence[StageProgram], plans: Sequence[Plan], num_microbatches: int
) -> tuple[WeightVersions, ...]:
    """The versions that each stage keeps.

    Args:
        num_microbatches: the number of microbatches per batch.
    """
    found = versioned_programs(programs)
    each = zip(streamed.copies(), streamed.delays(num_microbatches), found.stages, programs, plans, strict=True)
    return tuple(
        WeightVersions(copies=copies, num_bytes=_bytes_read(stage, program, plan), least_delay=least, most_delay=most)
        for copies, (least, most), stage, program, plan in each
    )


def bytes_with_versions(streamed: StreamedTime, kept: Sequence[WeightVersions]) -> tuple[float, ...]:
    """The peak bytes per device of each submesh, with all versions of the weights."""
    return tuple(peak + (one.copies - 1) * one.num_bytes for peak, one in zip(streamed.peak_bytes, kept, strict=True))


def _bytes_read(stage: VersionedStage, program: StageProgram, plan: Plan) -> float:
    """The bytes, on one device, that passes of microbatches read of one version."""
    trace = program.program.trace
    local = {value: tensor.num_bytes for value, tensor in zip(trace.inputs, plan.inputs, strict=True)}
    passed = {
        equation.results[0]: operand
        for equation in trace.equations
        if equation.takes_constant and isinstance(operand := equation.operands[0], int)
    }
    read = {slot.value for piece in stage.pieces.each.values() for slot in piece.takes if slot.kind == "once"}
    of_version = {passed.get(value, value) for value in read if "version" in stage.sources.get(value, ())}
    share = _share(local, program)
    return sum(
        local[value] if value in local else share * trace.avals[value].size * trace.avals[value].dtype.itemsize
        for value in of_version
    )


def _share(local: dict[int, float], program: StageProgram) -> float:
    """The share of a stage's arguments that one device has."""
    trace = program.program.trace
    whole = sum(trace.avals[value].size * trace.avals[value].dtype.itemsize for value in local)
    return sum(local.values()) / whole if whole else 1.0

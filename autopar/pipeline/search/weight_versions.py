"""Say which versions of its weights each stage of an asynchronous pipeline keeps, and what they take.

In: a simulated stream of batches, and the programs and plans of its stages.
Out: a `WeightVersions` for each stage. One version is what the passes of microbatches read of the state: parameters as they
are, or, where a step converts them once for all microbatches, what they are converted to. The rest of the state, such as
moments, has one copy. Where backward passes correct what they read, the weights that these depend on have velocities besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopar.pipeline.cut.extract_stages import LeafKey
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.cut.pieces_by_version import VersionedStage, versioned_programs
from autopar.pipeline.cut.stage_programs import StageProgram, carried_leaves
from autopar.pipeline.cut.updated_weights import read_by_backward, updated_weights
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
    late = streamed.delays(num_microbatches)
    corrected = streamed.corrected()
    carried = carried_leaves(programs)
    each = zip(found.stages, programs, plans, strict=True)
    return tuple(
        _of_stage(_Bytes(stage, program, plan), streamed.copies()[s], late[s], corrected[s], carried)
        for s, (stage, program, plan) in enumerate(each)
    )


def _of_stage(
    held: _Bytes, copies: int, late: tuple[int, int], corrected: int, carried: Mapping[LeafKey, LeafKey]
) -> WeightVersions:
    least, most = late
    velocity, moved = held.when_corrected(carried) if corrected else (0.0, 0.0)
    return WeightVersions(
        copies=copies,
        num_bytes=held.read_by(held.stage.pieces.each),
        least_delay=least,
        most_delay=most,
        velocity_bytes=velocity,
        corrected_bytes=corrected * moved,
    )


def bytes_with_versions(streamed: StreamedTime, kept: Sequence[WeightVersions]) -> tuple[float, ...]:
    """The peak bytes per device of each submesh, with all versions of the weights."""
    return tuple(peak + one.further_bytes for peak, one in zip(streamed.peak_bytes, kept, strict=True))


class _Bytes:
    """The bytes, on one device, of what passes of a stage read of one version."""

    def __init__(self, stage: VersionedStage, program: StageProgram, plan: Plan) -> None:
        self.stage, self.program = stage, program
        self.trace = program.program.trace
        self.local = {v: tensor.num_bytes for v, tensor in zip(self.trace.inputs, plan.inputs, strict=True)}
        whole = sum(self._whole(value) for value in self.local)
        #: The share of a stage's arguments that one device has.
        self.share = sum(self.local.values()) / whole if whole else 1.0
        self.passed = {
            equation.results[0]: operand
            for equation in self.trace.equations
            if equation.takes_constant and isinstance(operand := equation.operands[0], int)
        }

    def read_by(self, names: Iterable[str]) -> float:
        """Bytes that some of the pieces of a microbatch read."""
        return sum(map(self._bytes, self._read_by(names)))

    def when_corrected(self, carried: Mapping[LeafKey, LeafKey]) -> tuple[float, float]:
        """Bytes of velocities, and of one corrected version: what backward passes read, and what that is converted from."""
        layout = Layout(self.trace, self.program.inputs)
        names = dict.fromkeys((port.value for port in self.program.inputs), "weights")
        weights = updated_weights(layout, self.program.outputs, carried, names).values()
        moved = read_by_backward(layout, self.stage.pieces, weights)
        read = self._read_by(name for name in self.stage.pieces.each if name.startswith("backward"))
        converted = {value for value in read if value not in self.local}
        return sum(map(self._bytes, moved), 0.0), sum(map(self._bytes, moved | converted), 0.0)

    def _read_by(self, names: Iterable[str]) -> set[int]:
        pieces = (self.stage.pieces.each[name] for name in names)
        read = {slot.value for piece in pieces for slot in piece.takes if slot.kind == "once"}
        return {self.passed.get(value, value) for value in read if "version" in self.stage.sources.get(value, ())}

    def _bytes(self, value: int) -> float:
        return self.local[value] if value in self.local else self.share * self._whole(value)

    def _whole(self, value: int) -> int:
        aval = self.trace.avals[value]
        return aval.size * aval.dtype.itemsize

"""Say which versions of its weights each stage of an asynchronous pipeline keeps, and what they take.

In: a simulated stream of batches, and the programs and plans of its stages.
Out: a `WeightVersions` for each stage. One version is what the passes of microbatches read of the state: parameters as they
are, or, where a step converts them once for all microbatches, what they are converted to. The rest of the state, such as
moments, has one copy. Where backward passes correct what they read, the weights that these depend on have velocities besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.pipeline.cut.extract_stages import LeafKey
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.cut.pieces_by_version import VersionedStage, versioned_programs
from autopar.pipeline.cut.stage_programs import StageProgram, carried_leaves
from autopar.pipeline.cut.updated_weights import read_by_backward, updated_weights
from autopar.pipeline.partition.streamed_time import ReadBy, StreamedTime
from autopar.pipeline.plan import WeightVersions
from autopar.pipeline.schedule.tasks import Phase
from autopar.plans.plan import Plan


def weight_versions(
    streamed: StreamedTime, programs: Sequence[StageProgram], plans: Sequence[Plan], num_microbatches: int
) -> tuple[WeightVersions, ...]:
    """The versions that each stage keeps.

    Args:
        num_microbatches: the number of microbatches per batch.
    """
    found = versioned_programs(programs)
    late, carried = streamed.delays(num_microbatches), carried_leaves(programs)
    kept: list[WeightVersions] = []
    for s, (stage, program, plan) in enumerate(zip(found.stages, programs, plans, strict=True)):
        held, corrected = _Bytes(stage, program, plan), streamed.corrected()[s]
        sizes = held.by_readers()
        velocity, moved = held.when_corrected(carried) if corrected else (0.0, 0.0)
        kept.append(
            WeightVersions(
                copies=streamed.copies()[s],
                num_bytes=sum(sizes.values(), 0.0),
                kept_bytes=streamed.most_bytes(s, sizes),
                least_delay=late[s][0],
                most_delay=late[s][1],
                velocity_bytes=velocity,
                corrected_bytes=corrected * moved,
            )
        )
    return tuple(kept)


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

    def by_readers(self) -> dict[ReadBy, float]:
        """Bytes of one version, by what reads them."""
        phases: dict[int, set[Phase]] = {}
        for name, phase in self._phases.items():
            for value in self._read_by(name):
                phases.setdefault(value, set()).add(phase)
        found: dict[ReadBy, float] = {}
        for value, readers in phases.items():
            by = ReadBy(frozenset(readers), value not in self.local)
            found[by] = found.get(by, 0.0) + self._bytes(value)
        return found

    def when_corrected(self, carried: Mapping[LeafKey, LeafKey]) -> tuple[float, float]:
        """Bytes of velocities, and of one corrected version: what backward passes read, and what that is converted from."""
        layout = Layout(self.trace, self.program.inputs)
        names = dict.fromkeys((port.value for port in self.program.inputs), "weights")
        weights = updated_weights(layout, self.program.outputs, carried, names).values()
        moved = read_by_backward(layout, self.stage.pieces, weights)
        read = self._read_by(*(name for name, phase in self._phases.items() if phase == "backward"))
        converted = {value for value in read if value not in self.local}
        return sum(map(self._bytes, moved), 0.0), sum(map(self._bytes, moved | converted), 0.0)

    @property
    def _phases(self) -> dict[str, Phase]:
        """The phase of each piece that runs for each microbatch."""
        names = self.stage.pieces.each
        return {name: "backward" if name.startswith("backward") else "forward" for name in names}

    def _read_by(self, *names: str) -> set[int]:
        pieces = (self.stage.pieces.each[name] for name in names)
        read = {slot.value for piece in pieces for slot in piece.takes if slot.kind == "once"}
        return {self.passed.get(value, value) for value in read if "version" in self.stage.sources.get(value, ())}

    def _bytes(self, value: int) -> float:
        """A value that is converted from one argument is sharded like it; another one is taken for sharded like all together."""
        if value in self.local:
            return self.local[value]
        source = self._source(value)
        if source in self.local and self._whole(source):
            return self.local[source] * self._whole(value) / self._whole(source)
        return self.share * self._whole(value)

    def _source(self, value: int) -> int:
        """The argument of the same shape from which a value is computed alone, or a value before which that is not so."""
        while value not in self.local:
            producer = self.trace.producers.get(value)
            reads = self.trace.equations[producer].operands if producer is not None else ()
            if len(reads) != 1 or not isinstance(reads[0], int):
                break
            if self.trace.avals[reads[0]].shape != self.trace.avals[value].shape:
                break
            value = reads[0]
        return value

    def _whole(self, value: int) -> int:
        aval = self.trace.avals[value]
        return aval.size * aval.dtype.itemsize

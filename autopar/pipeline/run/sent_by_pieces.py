"""Make the programs of all pieces, with what they send to other stages.

In: the pieces of all stages, and the placement of arguments.
Out: `ProgramsOfPieces`: for each piece of each instance its program, the values that it sends, and their receivers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh, NamedSharding

from autopar.jax_interop import compat as jax_compat
from autopar.pipeline.cut.extract_stages import Port
from autopar.pipeline.cut.pieces import Slot
from autopar.pipeline.run.arguments import PipelineArguments
from autopar.pipeline.run.instances import Instances
from autopar.pipeline.run.piece_programs import Compiled, Key, Send, StagePieces
from autopar.pipeline.run.transfers import Crossing, wire


@dataclass(frozen=True, slots=True)
class Path:
    """One transfer from a stage to a slot of another stage."""

    target: int
    slot: Slot
    crossing: Crossing


@dataclass(slots=True)
class Sends:
    """The values that a piece sends. A value is resharded once for all receivers that share a wire."""

    sends: list[Send] = field(default_factory=list)
    paths: list[list[Path]] = field(default_factory=list)


class ProgramsOfPieces:
    """The programs of the pieces of all instances, and what they send.

    Args:
        stages: the instances of all stages.
        num_microbatches: of a step.

    Attributes:
        sends, programs: of each instance, by piece.
    """

    def __init__(
        self,
        stages: Sequence[StagePieces],
        instances: Instances,
        arguments: PipelineArguments,
        num_microbatches: int,
        compiler_options: Mapping[str, Any] | None,
    ) -> None:
        self.stages, self.instances, self.arguments = stages, instances, arguments
        self.sends = [{key: self._sends(s, key) for key in stage.whole} for s, stage in enumerate(stages)]
        compiled: dict[Mesh, Compiled] = {}
        self.programs = [
            {
                key: stage.program(
                    key,
                    self.sends[s][key].sends,
                    self._arrivals(s),
                    num_microbatches,
                    compiler_options,
                    compiled.setdefault(stage.stage.mesh, {}),
                )
                for key in stage.whole
            }
            for s, stage in enumerate(stages)
        ]

    def _sends(self, s: int, key: Key) -> Sends:
        """The values that a piece sends, and their receivers."""
        stage = self.stages[s]
        piece, ports = stage.whole[key], stage.stage.program.outputs
        found = Sends()
        outputs: list[tuple[Port, Slot | int]] = [
            (Port("inside", value), slot)
            for value, inner in stage.pieces.gives_inside.items()
            for slot in piece.gives
            if slot.value == inner
        ]
        outputs += [(ports[i], i) for i in piece.outputs if ports[i].kind == "outside"]
        avals = stage.avals()
        for port, what in outputs:
            for t, other in enumerate(self.stages):
                if self.instances.replica(t) != self.instances.replica(s):
                    continue
                inner = other.pieces.takes_inside.get(port.value) if port.kind == "inside" else None
                slot = other.outside.get(port) if inner is None else Slot("each", inner)
                if slot is None or t == s:
                    continue
                raw = jax_compat.raw_struct(avals[port])
                passing = wire(raw.shape, stage.out_shardings[port], other.shardings[port])
                path = Path(t, slot, Crossing(raw.shape, raw.dtype, passing))
                self._add(found, Send(what, stage.out_shardings[port], passing.source), path)
        return found

    def _add(self, found: Sends, send: Send, path: Path) -> None:
        for known, paths in zip(found.sends, found.paths, strict=True):
            if known == send and not (path.crossing.is_here or paths[0].crossing.is_here):
                paths.append(path)
                return
        found.sends.append(send)
        found.paths.append([path])

    def _arrivals(self, t: int) -> dict[Slot, NamedSharding]:
        """The expected shardings of values that arrive at a stage with another sharding or dtype."""
        found = self.arguments.arrivals(t)
        stage = self.stages[t]
        wanted = {Slot("each", inner): Port("inside", value) for value, inner in stage.pieces.takes_inside.items()}
        wanted.update({slot: port for port, slot in stage.outside.items()})
        for sends in self.sends:
            for one in sends.values():
                for path in (path for paths in one.paths for path in paths if path.target == t):
                    sharding = stage.shardings[wanted[path.slot]]
                    if (
                        path.crossing.wire.target != sharding
                        or stage.layout.trace.avals[path.slot.value].dtype != path.crossing.dtype
                    ):
                        found[path.slot] = sharding
        return found

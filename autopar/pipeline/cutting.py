"""From a step to the programs of its stages.

In: a `Program`, where layers begin, which stage each belongs to, and how many microbatches. Out: `StageProgram`s, which
are planned like any other program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.microbatch.classify import classify
from autopar.microbatch.places import Places
from autopar.microbatch.rewrite import check_divides, laid_for_parts, rewritten
from autopar.pipeline.extract import Cut, Port, StageTrace, stage_trace, stage_traces
from autopar.pipeline.flow import Chain, Flow, chain_of
from autopar.pipeline.homes import homes_of, labelled
from autopar.program import Program, program_of_trace
from autopar.trace import Trace


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What one stage runs in a step.

    Args:
        program: to be planned. Its inputs and outputs are `inputs` and `outputs`.
    """

    program: Program
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True)
class Cuttable:
    """A step that may be cut between any two units of its forward pass.

    Args:
        own_statistics: as in `classify`.
    """

    flow: Flow
    places: Places
    own_statistics: bool

    @classmethod
    def of(cls, program: Program, *, own_statistics: bool = False) -> Cuttable:
        """A step as traced.

        Raises:
            MicrobatchError: where its batch cannot be split over time.
        """
        traced = program.as_traced
        form = traced.whole or traced
        trace, graph = laid_for_parts(form.trace, form.graph)
        places = Places(graph)
        split = classify(trace, graph, places, own_statistics=own_statistics)
        return cls(Flow.of(trace, graph, split, places.rules), places, own_statistics)

    @functools.cached_property
    def chain(self) -> Chain:
        """Its forward pass."""
        return chain_of(self.flow)

    def layers(self, starts: Sequence[int], num_microbatches: int) -> Layers:
        """The step with a loop over microbatches, and the layer of all that it does.

        Args:
            starts: of each layer, the position in the chain of its first unit; the first is 0.

        Raises:
            MicrobatchError: where the batch has not so many equal parts.
        """
        flow = self.flow
        check_divides(flow.graph, num_microbatches)
        homes = homes_of(flow, starts)
        trace = labelled(flow, homes.layers)
        split = classify(trace, flow.graph, self.places, own_statistics=self.own_statistics)
        looped = rewritten(trace, flow.graph, self.places, split, num_microbatches)
        inputs = frozenset(flow.graph.inputs) & flow.free_values
        return Layers(looped, inputs, homes.lies, flow.graph.carried, tuple(starts), num_microbatches)


@dataclass(frozen=True)
class Layers:
    """A step in microbatches whose equations know their layers. Made by `Cuttable.layers`.

    Args:
        free: inputs that every stage may have. homes: of the others, the layer.
        carried: positions of inputs and outputs that hold the same state.
    """

    trace: Trace
    free: frozenset[int]
    homes: dict[int, int]
    carried: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    num_microbatches: int

    def stages(self, stage_of: Sequence[int]) -> tuple[StageProgram, ...]:
        """The programs of the stages.

        Args:
            stage_of: of each layer, its stage.
        """
        return tuple(_program(one) for one in stage_traces(self.trace, self._cut(stage_of)))

    def run_of(self, first: int, last: int) -> StageProgram:
        """The program of a stage of the layers from `first` to `last`, wherever the others are."""
        stage_of = [0 if layer < first else 1 if layer <= last else 2 for layer in range(len(self.starts))]
        used = sorted(set(stage_of))
        cut = self._cut([used.index(stage) for stage in stage_of])
        return _program(stage_trace(self.trace, cut, used.index(1)))

    def _cut(self, stage_of: Sequence[int]) -> Cut:
        return Cut(tuple(stage_of), self.free, self.homes, self.carried)


def _program(stage: StageTrace) -> StageProgram:
    positions = tuple(position for position, _ in stage.carried)
    program = program_of_trace(stage.trace, stage.carried, positions, positions)
    return StageProgram(program, stage.inputs, stage.outputs)

"""Build the programs of the stages from a step.

In: a `Program`, where layers begin, the stage of each layer, and the number of microbatches. Out: `StageProgram`s,
planned like any other program. A loop over layers first counts as one unit of the forward pass per iteration. Once it
is known which iterations belong together, it is cut into loops over these.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.errors import MicrobatchError
from autopar.frontend.from_jaxpr import graph_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import flat_border
from autopar.ir.graph import Graph
from autopar.pipeline.cut.assign_layers import Homes, homes_of, labelled
from autopar.pipeline.cut.extract_stages import Cut, LeafKey, Port, StageTrace, stage_trace, stage_traces
from autopar.pipeline.cut.flow import Chain, Flow, chain_of
from autopar.pipeline.cut.hoist_cotangent_sums import added_where_made
from autopar.pipeline.cut.layer_loops import Stack, stack_of, stacks_of
from autopar.pipeline.cut.single_iterations import without_single_iterations
from autopar.pipeline.cut.split_loops import with_split_loops
from autopar.pipeline.cut.token_slices import in_token_slices
from autopar.pipeline.cut.unroll_layers import Unstacked, as_it_is, unstacked
from autopar.transforms.microbatch.batch_dims import Places
from autopar.transforms.microbatch.classify import Split, classify
from autopar.transforms.microbatch.rewrite import check_divides, laid_for_parts, rewritten
from autopar.transforms.program import Program, program_of_trace


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What one stage runs in a step.

    Args:
        program: the program to plan.
        inputs, outputs: the ports of its inputs and outputs.
    """

    program: Program
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """A step before its loops are cut."""

    step: Unstacked
    graph: Graph
    places: Places


@dataclass(frozen=True, slots=True)
class _Labelled:
    """A step whose equations know their layers; the fields are as in `Layers` and `rewritten`."""

    cut: Unstacked
    trace: Trace
    graph: Graph
    places: Places
    split: Split
    free: frozenset[int]
    homes: Homes


@dataclass(frozen=True)
class Cuttable:
    """A step that may be cut between any two units of its forward pass.

    Args:
        whole: the step before its loops are cut.
        stacks: the loops that can be cut.
        cut: the step with its loops cut; `flow` and `places` are of this one.
        own_statistics: as in `classify`.
        refusal: why the step cannot run in several microbatches; None if it can.
    """

    whole: Whole
    stacks: tuple[Stack, ...]
    cut: Unstacked
    flow: Flow
    places: Places
    own_statistics: bool
    refusal: MicrobatchError | None
    #: Layers -> the labelled step, for the latest layers: it is the same for every number of microbatches.
    _labelled: dict[tuple[int, ...], _Labelled] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        program: Program,
        *,
        own_statistics: bool = False,
        read_state: Sequence[int] = (),
        splits_loops: bool = False,
        token_slices: Sequence[int] = (),
    ) -> Cuttable:
        """The step that a program was traced from, with its loops over layers cut.

        Args:
            splits_loops: whether loops of the backward pass are split into an input part and a weight part.
            token_slices: the tokens of each slice, if microbatches are cut into several; loops over layers are unrolled.
            read_state: positions of arguments that are state of another step. The step is cut as if it returned those
                that it reads, unchanged, so that each has one home; and none is taken for the batch.
        """
        form = program.as_written
        trace, graph, positions = _with_read_state(form.trace, form.graph, read_state)
        if splits_loops:
            trace = with_split_loops(trace)
            graph = graph_of(trace, graph.carried)
        with suppress(MicrobatchError):  # it has no batch
            trace, graph = laid_for_parts(trace, graph)
        places = Places(graph)
        stacks = tuple(stacks_of(trace, graph, places))
        whole = Whole(as_it_is(trace, graph, positions), graph, places)
        if len(token_slices) > 1:
            return cls._with(_in_slices(whole, stacks, token_slices), (), (), own_statistics)
        each = [_equal_starts(stack.length) for stack in stacks]
        return cls._with(whole, stacks, each, own_statistics)

    @classmethod
    def _with(
        cls, whole: Whole, stacks: tuple[Stack, ...], starts: Sequence[Sequence[int]], own_statistics: bool
    ) -> Cuttable:
        """A step with its loops cut.

        Args:
            starts: for each stack, the first iteration of each part.
        """
        part = _cut(whole, stacks, starts)
        cut, graph, places = part.step, part.graph, part.places
        refusal = None
        try:
            split = classify(cut.trace, graph, places, own_statistics=own_statistics)
        except MicrobatchError as error:
            split, refusal = classify(cut.trace, graph, places, alone=True), error
        flow = Flow.of(cut.trace, graph, split, places)
        return cls(whole, stacks, cut, flow, places, own_statistics, refusal)

    @functools.cached_property
    def chain(self) -> Chain:
        """Its forward pass."""
        return chain_of(self.flow)

    def layers(self, starts: Sequence[int], num_microbatches: int) -> Layers:
        """The step with a loop over microbatches, whose equations know their layers.

        Args:
            starts: for each layer, the position in the chain of its first unit; the first is 0.

        Raises:
            MicrobatchError: the number does not divide the batch, or the batch cannot be split.
        """
        return self.layered(layers_between(starts, len(self.flow.forward)), num_microbatches)

    def layered(self, layer_of: Sequence[int], num_microbatches: int) -> Layers:
        """Like `layers`, but layers may be any sets of units, such as a model's branches.

        Args:
            layer_of: layer of each unit of the chain. A layer reads no layer with a higher number.
        """
        if num_microbatches > 1:
            if self.refusal is not None:
                raise self.refusal
            check_divides(self.flow.graph, num_microbatches)
        layer_of = tuple(layer_of)
        if layer_of not in self._labelled:
            self._labelled.clear()  # keep one labelled step only
            self._labelled[layer_of] = self._label(layer_of)
        known = self._labelled[layer_of]
        looped = rewritten(known.trace, known.graph, known.places, known.split, num_microbatches)
        return Layers(self, known.cut, looped, known.free, known.homes, layer_of, num_microbatches)

    def settled(
        self, layer_of: Sequence[int], stage_of: Sequence[int], num_microbatches: int
    ) -> tuple[StageProgram, ...]:
        """The programs of the stages, once the stages are chosen.

        Iterations of a loop that share a stage become one loop, and cotangents that branches of one stage send are
        added before they are sent. A chain without loops over layers keeps its layers apart, so that each layer is
        recomputed by itself.

        Args:
            layer_of: as in `layered`.
            stage_of: stage of each layer. A stage reads no stage with a higher number.
        """
        if not self.stacks:
            layers = self.layered(layer_of, num_microbatches)
            if layers.homes.is_chain:
                return layers.stages(stage_of)
        merged = self.layered([stage_of[layer] for layer in layer_of], num_microbatches)
        return merged.stages(range(merged.num_layers))

    def _label(self, layer_of: Sequence[int]) -> _Labelled:
        """The step whose equations know their layers, before it runs in microbatches."""
        coarse, coarsely = self._with_whole_loops(layer_of)
        flow = coarse.flow
        homes = homes_of(flow, coarsely)
        trace, graph, places = labelled(flow, homes), flow.graph, coarse.places
        summed = added_where_made(flow, trace)
        if homes.aliases or summed is not trace:  # equations now read other values
            trace = summed
            graph = graph_of(trace, graph.carried)
            places = Places(graph)
        alone = self.refusal is not None
        split = classify(trace, graph, places, own_statistics=self.own_statistics, alone=alone)
        free = frozenset(flow.graph.inputs) & flow.free_values
        return _Labelled(coarse.cut, trace, graph, places, split, free, homes)

    def _with_whole_loops(self, layer_of: Sequence[int]) -> tuple[Cuttable, Sequence[int]]:
        """The step in which iterations of a loop that share a layer are one loop, and the layer of each unit."""
        if not self.stacks:
            return self, layer_of
        known: dict[tuple[int, int], int] = {}
        for origin, layer in zip(self._chain_origins(), layer_of, strict=True):
            known.setdefault(origin, layer)
        bounds: list[Sequence[int]] = []
        for stack in self.stacks:
            of_trip = {trip: layer for (n, trip), layer in known.items() if n in stack.loops}
            cuts = [b for a, b in itertools.pairwise(sorted(of_trip)) if of_trip[a] != of_trip[b]]
            bounds.append((0, *cuts))
        coarse = Cuttable._with(self.whole, self.stacks, bounds, self.own_statistics)
        layers: list[int] = []
        for origin in coarse._chain_origins():
            layers.append(known.get(origin, layers[-1] if layers else 0))
        return coarse, layers

    def _chain_origins(self) -> list[tuple[int, int]]:
        """For each unit of the chain, its origin in the step before its loops are cut."""
        return [self.cut.origins[self.flow.units[i].start] for i in self.flow.forward]


@dataclass(frozen=True)
class Layers:
    """A step in microbatches whose equations know their layers, made by `Cuttable.layers`.

    Args:
        cuttable: the step.
        cut: the step with its loops cut where layers begin.
        trace: the step in microbatches.
        free: inputs that every stage may have.
        homes: the layers of all else.
        layer_of: layer of each unit of the step's chain.
    """

    cuttable: Cuttable
    cut: Unstacked
    trace: Trace
    free: frozenset[int]
    homes: Homes
    layer_of: tuple[int, ...]
    num_microbatches: int

    @property
    def num_layers(self) -> int:
        return max(self.layer_of) + 1

    def stages(self, stage_of: Sequence[int]) -> tuple[StageProgram, ...]:
        """The programs of the stages. `exchanges_of` returns what they send to each other.

        Args:
            stage_of: stage of each layer. A stage reads no stage with a higher number.
        """
        return tuple(map(self._program, stage_traces(self.trace, self._cut(stage_of))))

    def run_of(self, first: int, last: int) -> StageProgram:
        """The program of a stage with the layers from `first` to `last`, for any assignment of the others."""
        stage_of = [0 if layer < first else 1 if layer <= last else 2 for layer in range(self.num_layers)]
        used = sorted(set(stage_of))
        cut = self._cut([used.index(stage) for stage in stage_of])
        return self._program(stage_trace(self.trace, cut, used.index(1)))

    def _cut(self, stage_of: Sequence[int]) -> Cut:
        return Cut(tuple(stage_of), self.free, self.homes.lies, self.cut.carried)

    def _program(self, stage: StageTrace) -> StageProgram:
        positions = tuple(position for position, _ in stage.carried)
        program = program_of_trace(stage.trace, stage.carried, positions, positions)
        return StageProgram(program, *(tuple(map(self._of_leaf, ports)) for ports in (stage.inputs, stage.outputs)))

    def _of_leaf(self, port: Port) -> Port:
        """A port by its leaf in the step as traced."""
        if port.kind not in ("argument", "result"):
            return port
        leaf = (self.cut.inputs if port.kind == "argument" else self.cut.outputs)[port.value]
        return replace(port, value=leaf.position, rows=leaf.rows)


def carried_leaves(stages: Sequence[StageProgram]) -> dict[LeafKey, LeafKey]:
    """The result that replaces each carried argument."""
    found: dict[LeafKey, LeafKey] = {}
    for stage in stages:
        for position, result in stage.program.graph.carried:
            if stage.inputs[position].kind == "argument":
                found[stage.inputs[position].leaf] = stage.outputs[result].leaf
    return found


def layers_between(starts: Sequence[int], num_units: int) -> list[int]:
    """The layer of each unit, given the first unit of each layer.

    >>> layers_between([0, 2], 3)
    [0, 0, 1]
    """
    return list(itertools.accumulate(int(position in starts[1:]) for position in range(num_units)))


def _with_read_state(
    trace: Trace, graph: Graph, read_state: Sequence[int]
) -> tuple[Trace, Graph, tuple[int, ...] | None]:
    """The step with some arguments as state: those that it reads are further results that it carries, the others are left
    out. Also the positions of the arguments left; None for all."""
    if not read_state:
        return trace, graph, None
    used, state = {*trace.users, *(atom for atom in trace.outputs if isinstance(atom, int))}, set(read_state)
    kept = tuple(n for n, value in enumerate(trace.inputs) if value in used or n not in state)
    at = {n: position for position, n in enumerate(kept)}
    held = [n for n in kept if n in state]
    taken = [(trace.inputs[n], trace.input_paths[n]) for n in kept]
    given = [
        *zip(trace.outputs, trace.output_paths, strict=True),
        *((trace.inputs[n], trace.input_paths[n]) for n in held),
    ]
    carried = list(graph.carried)
    carried += zip(held, range(len(trace.outputs), len(given)), strict=True)
    made = replace(trace, **flat_border(taken, given))
    return made, graph_of(made, tuple((at[n], output) for n, output in carried)), kept


def _cut(whole: Whole, stacks: Sequence[Stack], starts: Sequence[Sequence[int]]) -> Whole:
    """A step with its loops cut.

    Args:
        starts: for each stack, the first iteration of each part.
    """
    cut, graph, places = whole.step, whole.graph, whole.places
    for stack, firsts in zip(stacks, starts, strict=True):
        if len(firsts) > 1:
            loops = [cut.origins.index((loop, 0)) for loop in stack.loops]
            cut = unstacked(cut, places, stack_of(cut.trace, graph, places, loops), firsts)
            graph = graph_of(cut.trace, cut.carried)
            places = Places(graph)
    return Whole(cut, graph, places)


def _in_slices(whole: Whole, stacks: Sequence[Stack], token_slices: Sequence[int]) -> Whole:
    """A step in slices of tokens, with its loops over layers unrolled."""
    single = _cut(whole, stacks, [range(stack.length) for stack in stacks])
    step = without_single_iterations(single.step)
    trace = in_token_slices(step.trace, graph_of(step.trace, step.carried), token_slices)
    graph = graph_of(trace, step.carried)
    step = replace(step, trace=trace, origins=tuple((n, 0) for n in range(len(trace.equations))))
    return Whole(step, graph, Places(graph))


def _equal_starts(length: int) -> Sequence[int]:
    """The starts of the finest parts that a loop is cut into."""
    parts = min(length, _FINEST)
    return sorted({length * i // parts for i in range(parts)})


#: A loop is cut into at most this many parts.
_FINEST = 96

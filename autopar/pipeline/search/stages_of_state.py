"""Assign the forward pass of a step to the stages that hold its state in another step's plan.

In: a step that can be cut, and a `PipelinePlan` of a step with the same state. Out: the stage of each unit. A unit that
reads a leaf of the state is on the leaf's stage; of several that do, at least one. The other units are free within these
bounds: in a chain the least bytes pass where it is cut; with branches a unit runs where its operands are, or joins them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from autopar.errors import PlanMismatchError
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.cut.unroll_layers import Leaf, Rows
from autopar.pipeline.plan import LeafPart, PipelinePlan
from autopar.transforms.program import Program


class StagesOfUnits:
    """Finds the stage of each unit of the forward pass, by the numbers of the other plan's stages.

    Args:
        shared: the parts of each argument that the other plan has too.
    """

    def __init__(self, cuttable: Cuttable, like: PipelinePlan, shared: Mapping[int, Sequence[LeafPart]]) -> None:
        self.cuttable, self.like, self.shared = cuttable, like, shared
        flow = cuttable.flow
        self.at = {unit: position for position, unit in enumerate(flow.forward)}
        #: The positions that a position's stage must not precede.
        self.before = [self._producers(position) for position in range(len(self.at))]
        self.required: dict[int, int] = {}

    def run(self) -> list[int]:
        """The stage of each position in the forward pass.

        Raises:
            PlanMismatchError: the state is read in an order that the other plan's stages have not.
        """
        several: list[tuple[Leaf, int, list[int]]] = []
        for leaf, value in zip(self.cuttable.cut.inputs, self.cuttable.flow.graph.inputs, strict=True):
            if leaf.position not in self.shared:
                continue
            readers = self._readers(value)
            if len(readers) == 1:
                self._require(leaf, self._stage(leaf), readers)
            elif readers:
                several.append((leaf, self._stage(leaf), readers))
        for leaf, stage, readers in several:  # one reader is enough: other stages receive the leaf
            self._require(leaf, stage, readers)
        for _, stage, readers in several:
            for position in readers:
                low, high = self._bounds()
                if low[position] <= stage <= high[position]:
                    self.required[position] = stage
        if not self.required:
            raise PlanMismatchError(
                f"this step reads nothing of the state of `{self.like.program.name}`, the plan given as `like`, in its"
                " forward pass: leave `like` out"
            )
        return self._in_chain() if self.like.is_chain else self._where_operands_are()

    def _require(self, leaf: Leaf, stage: int, readers: Sequence[int]) -> None:
        """Put the first of the readers that can be there on a stage."""
        low, high = self._bounds()
        found = next((position for position in readers if low[position] <= stage <= high[position]), None)
        if found is None:
            first = readers[0]
            other = low[first] if low[first] > stage else high[first]
            raise PlanMismatchError(
                f"`{self._path(leaf)}` is on stage {stage} of the plan of `{self.like.program.name}`, but this step reads it"
                f" together with, {'after' if other > stage else 'before'}, state of stage {int(other)}: leave `like` out,"
                " and its state is resharded"
            )
        self.required[found] = stage

    def _bounds(self) -> tuple[list[int], list[float]]:
        """The first and the last stage of each position, by what is required."""
        low = [0] * len(self.before)
        high = [math.inf] * len(self.before)
        for position, before in enumerate(self.before):
            low[position] = max([self.required.get(position, 0), *(low[one] for one in before)])
        for position in reversed(range(len(self.before))):
            high[position] = min(high[position], self.required.get(position, math.inf))
            for one in self.before[position]:
                high[one] = min(high[one], high[position])
        return low, high

    def _in_chain(self) -> list[int]:
        """Contiguous stages; between two, the least bytes pass."""
        cuts, stages = self.cuttable.chain.cut_bytes, list[int]()
        known = sorted(self.required.items())
        for (last, stage), (first, following) in pairwise(known):
            cut = first
            if following != stage:
                cut = min(range(last + 1, first + 1), key=lambda position: cuts[position - 1])
            stages += [stage] * (cut - len(stages))
        return stages + [known[-1][1]] * (len(self.before) - len(stages))

    def _where_operands_are(self) -> list[int]:
        """Each unit on the stage of its operands; one that reads only data, or joins several stages, on the first stage
        that needs it."""
        low, high = self._bounds()
        stages: list[int] = []
        for position, before in enumerate(self.before):
            read = {stages[one] for one in before}
            is_open = position not in self.required and len(read) != 1 and math.isfinite(high[position])
            stages.append(int(high[position]) if is_open else max([low[position], *read]))
        return stages

    def _producers(self, position: int) -> tuple[int, ...]:
        if self.like.is_chain:
            return (position - 1,) if position else ()
        flow = self.cuttable.flow
        made = (flow.producer.get(value) for value in flow.units[flow.forward[position]].operands)
        return tuple({self.at[unit] for unit in made if unit in self.at})

    def _readers(self, value: int) -> list[int]:
        """The positions that read an input, or what is made of it before the loop or by each stage for itself."""
        flow, waiting, found = self.cuttable.flow, [value], set[int]()
        for one in waiting:
            for unit in flow.readers.get(one, ()):
                if unit in self.at:
                    found.add(self.at[unit])
                elif unit not in flow.backward:
                    waiting += [made for made in flow.units[unit].results if made not in waiting]
        return sorted(found)

    def _stage(self, leaf: Leaf) -> int:
        """The stage of the other plan that holds a leaf."""
        part = next((part for part in self.shared[leaf.position] if holds(part, leaf.rows)), None)
        if part is None:
            raise PlanMismatchError(
                f"the layers of `{self._path(leaf)}` are on several stages of the plan of `{self.like.program.name}`, but this"
                " step reads them together: leave `like` out, and its state is resharded"
            )
        return part.stage

    def _path(self, leaf: Leaf) -> str:
        at = self.cuttable.whole.step.inputs.index(Leaf(leaf.position))
        return self.cuttable.whole.graph.input_paths[at]


def holds(part: LeafPart, rows: Rows | None) -> bool:
    """Whether a part holds some layers of a leaf, or the whole leaf."""
    if part.rows is None or rows is None:
        return part.rows is None
    dim, start, stop = part.rows
    return rows.dim == dim and start <= rows.start and rows.stop <= stop


def shared_state(like: PipelinePlan, program: Program) -> dict[int, tuple[LeafPart, ...]]:
    """The parts of the arguments that are state of another step, by position: of the same path, shape and dtype; where
    the steps name their arguments differently, one path without the argument's name ends in the other.

    Raises:
        PlanMismatchError: there are none.
    """
    state: dict[tuple[tuple[int, ...], str], list[int]] = defaultdict(list)
    for position, tensor in enumerate(like.inputs):
        if tensor.role != "data":
            state[tensor.shape, tensor.dtype].append(position)
    found: dict[int, tuple[LeafPart, ...]] = {}
    for position, (path, shape, dtype) in enumerate(program.as_traced.signature.inputs):
        others = state.get((tuple(shape), dtype), [])
        exact = [n for n in others if like.inputs[n].path == path]
        below = [n for n in others if _is_below(path, like.inputs[n].path)]
        parameters = [n for n in below if like.inputs[n].role == "parameter"]
        matches = next((group for group in (exact, parameters, below) if group), [])
        places = {like.input_parts[n] for n in matches}
        if len(places) == 1:
            found[position] = places.pop()
    if not found:
        carried = ", ".join(f"`{like.inputs[group[0]].path}`" for group in state.values())
        raise PlanMismatchError(
            f"no argument of `{program.signature.name}` is part of the state of `{like.program.name}`, the plan given as"
            f" `like`, which carries {carried or 'nothing'}. Give the step the same state, or leave `like` out"
        )
    return found


def _is_below(path: str, other: str) -> bool:
    """Whether one path ends in the other, both without the argument's name."""
    one, two = path.split("/")[1:], other.split("/")[1:]
    short, long = sorted((one, two), key=len)
    return bool(short) and long[len(long) - len(short) :] == short

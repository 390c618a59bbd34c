"""Unroll loops over layers into several loops, cut at layer boundaries.

In: a trace, a `Stack` of it, and the iterations at which it is cut. Out: `Unstacked`: the same step, in which each loop
of n iterations becomes several shorter loops, one after another. Stacked values are divided into the same parts:
parameters come in and go out in slices, and an optimizer's update runs on each slice. An equation that cannot run on
slices runs on the whole value, concatenated again.

A part reads only its own slices and the loop's carries. A sum over all iterations, such as the gradient of a shared
weight, is accumulated within each part and then added up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from jax import lax

from autopar.frontend.accumulators import sums_of
from autopar.frontend.equations import Atom, Equation, Nest, Region, items_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import flat_border
from autopar.ir.graph import Graph
from autopar.jax_interop import compat as jax_compat
from autopar.pipeline.cut.layer_loops import Stack
from autopar.pipeline.cut.layer_slices import SlicedValues
from autopar.transforms.microbatch.batch_dims import Place, Places
from autopar.transforms.microbatch.resize import is_as_written, resized


@dataclass(frozen=True, slots=True, order=True)
class Rows:
    """Some layers of a stack.

    Args:
        dim: the stacked array's layer dim.
        start, stop: range of the layers.
    """

    dim: int
    start: int
    stop: int

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of these layers of an array."""
        return (*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Leaf:
    """An argument or a result of a step, or some layers of it.

    Args:
        position: position of the argument or result.
        rows: its layers; None for the whole.
    """

    position: int
    rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class Unstacked:
    """A step whose loops over layers are cut.

    Args:
        inputs, outputs: the leaves that the trace's inputs and outputs are.
        carried: pairs (input, output) of positions that hold the same state.
        origins: for each equation, its position in the uncut step, and its first layer; layer 0 if it is not in parts.
    """

    trace: Trace
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    carried: tuple[tuple[int, int], ...]
    origins: tuple[tuple[int, int], ...]


def as_it_is(trace: Trace, graph: Graph, positions: Sequence[int] | None = None) -> Unstacked:
    """A step with no loop cut.

    Args:
        positions: the arguments that the trace's inputs are; by default all in order.
    """
    inputs = tuple(map(Leaf, range(len(trace.inputs)) if positions is None else positions))
    outputs = tuple(map(Leaf, range(len(trace.outputs))))
    return Unstacked(trace, inputs, outputs, graph.carried, tuple((n, 0) for n in range(len(trace.equations))))


def unstacked(before: Unstacked, places: Places, stack: Stack, starts: Sequence[int]) -> Unstacked:
    """The step with the loops of a stack cut.

    Args:
        places: dims of the trace's graph.
        stack: a stack of the trace.
        starts: the first iteration of each part; the first is 0.
    """
    return _Unstacking(before, places, stack, starts).run()


class _Unstacking:
    """Rewrites the step; the one mutable object of this module. Its builder's origins are those of `Unstacked`."""

    def __init__(self, before: Unstacked, places: Places, stack: Stack, starts: Sequence[int]) -> None:
        self.before, self.trace, self.places, self.dims = before, before.trace, places, stack.dims
        self.loops = frozenset(stack.loops)
        self.bounds = tuple(itertools.pairwise((*starts, stack.length)))
        self.values = SlicedValues(self.trace, stack.dims, self.bounds, before.origins)
        self.builder = self.values.builder
        #: Inputs that this stack divides; an input that an earlier stack divided stays as it is.
        self.split = {p for p in stack.dims.inputs if before.inputs[p].rows is None}

    def run(self) -> Unstacked:
        """Rewrite the whole trace."""
        for value in (self.trace.inputs[position] for position in self.split):
            avals = [self.values.part_aval(value, bounds) for bounds in self.bounds]
            self.values.parts[value] = [self.builder.new(aval, self.trace.repeats[value]) for aval in avals]
        items = items_of(self.trace.equations, self.trace.regions)
        for (n, _, region), item in zip(self.trace.walk(), items, strict=True):
            self.values.attribute_to(n)
            if isinstance(item, Equation):
                if not self._in_parts(n, item):
                    self.builder.add(item.reading(self.values.whole))
            elif region is not None and n in self.loops:
                self._loop(region, item)
            elif item.kind == "barrier":
                self._barrier(item)
            else:
                self.builder.add(replace(item, enter=[piece.reading(self.values.whole) for piece in item.enter]))
        return self._finished()

    def _in_parts(self, n: int, equation: Equation) -> bool:
        """Write an equation once per part, if it can run on slices and has an operand in slices. Returns whether it was
        written."""
        dims, places = self.dims, self.places
        held = [isinstance(atom, int) and atom in dims.places for atom in equation.operands]
        if not any(held) and not any(v in dims.places for v in equation.results):
            return False
        factor = places.factor(n, dims)
        if factor is None or places.created(n, factor):
            return False
        if any(held) and not any(isinstance(atom, int) and atom in self.values.parts for atom in equation.operands):
            return False
        kind = places.reduction(n, factor)
        stacked = [] if kind is not None else list(equation.results)
        if any(dims.of(value) is None for value in stacked):
            return False
        if not any(held):  # it creates a stack: also make the whole, for users of the whole
            self.builder.add(equation)
            self.values.wholes.update({v: v for v in equation.results})
        shapes = [self.trace.avals[atom].shape if isinstance(atom, int) else () for atom in equation.operands]
        made = [self._one_part(equation, shapes, i, kind) for i in range(len(self.bounds))]
        if any(one is None for one in made):
            return False
        for j, value in enumerate(equation.results):
            terms = [one[j] for one in made if one is not None]
            if kind is None:
                self.values.parts[value] = terms
            else:
                self.values.wholes[value] = self.values.combined(kind, terms)
        return True

    def _one_part(
        self, equation: Equation, whole: Sequence[tuple[int, ...]], i: int, kind: str | None
    ) -> Sequence[Atom] | None:
        """The results of an equation for one part; None if they have other shapes than the slices."""
        bounds = self.bounds[i]
        types = {v: self.trace.avals[v] if kind else self.values.part_aval(v, bounds) for v in equation.results}
        part = equation.reading(lambda v: self.values.part(v, i) if v in self.dims.places else self.values.whole(v))
        self.values.attribute_to_layer(bounds[0])
        if equation.piece is None and is_as_written(equation.source):
            new = self.builder.copy(part, {}, types=types.__getitem__)
            self.builder.add(new)
            return new.results
        shapes = [aval.shape for aval in types.values()]
        key = "part", equation.params_text, repr(whole), repr(shapes)
        made = self.values.write(key, part.operands, lambda values: resized(equation.source, values, whole, shapes))
        found = [self.builder.avals[one] for one in made if isinstance(one, int)]
        same_types = [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in types.values()]
        return made if same_types else None

    def _loop(self, region: Region, nest: Nest) -> None:
        carries, summed = region.carries(self.trace.equations), sums_of(self.trace, region)
        enters, leaves = [enter for enter, _ in carries], [leave for _, leave in carries]
        adds = [pair in summed for pair in carries]
        carry = [self.values.whole(self.trace.equations[n].operands[0]) for n in enters]
        terms: list[list[Atom]] = [[] for _ in carry]
        stacks: dict[int, list[Atom]] = {}
        order = reversed(self.bounds) if nest.source.params["reverse"] else iter(self.bounds)
        for bounds in order:
            self.values.attribute_to_layer(bounds[0])
            last = self._iterations(nest, bounds, carry, stacks)
            for one, term in zip(terms, last, strict=True):
                one.append(term)
            carry = [start if is_sum else end for start, is_sum, end in zip(carry, adds, last, strict=True)]
        for n, is_sum, one in zip(leaves, adds, terms, strict=True):
            (result,) = self.trace.equations[n].results
            self.values.wholes[result] = self.values.combined("sum", one) if is_sum else one[-1]
        for result, parts in stacks.items():
            in_order = parts[::-1] if nest.source.params["reverse"] else parts
            if self.dims.of(result) == Place(0):
                self.values.parts[result] = in_order
            else:
                (whole,) = self.values.write("join", in_order, lambda values: [lax.concatenate(values, 0)])
                self.values.wholes[result] = whole

    def _iterations(
        self, nest: Nest, bounds: tuple[int, int], carry: Sequence[Atom], stacks: dict[int, list[Atom]]
    ) -> list[Atom]:
        """Write the loop over one part's iterations; returns its carries."""
        share = (bounds[1] - bounds[0]) / self.dims.size
        env: dict[int, Atom] = {}
        starts = iter(carry)
        enter: list[Equation] = []
        for piece in nest.enter:
            (atom,) = piece.operands
            is_slice = piece.takes_slice
            if is_slice and isinstance(atom, int):
                operand = self.values.part_at(atom, Place(0), self.bounds.index(bounds))
            else:
                operand = next(starts) if piece.piece == "enter_carry" else self.values.whole(atom)
            repeat = piece.repeat * (share if is_slice else 1.0)
            enter.append(self.builder.copy(replace(piece, operands=(operand,)), {}, times=share, repeat=repeat))
            env.update(zip(piece.results, enter[-1].results, strict=True))
        sections = [self.builder.copies(section, env, share) for section in nest.sections]
        leave: list[Equation] = []
        last: list[Atom] = []
        for piece in nest.exit:
            (value,) = piece.results
            aval, is_stack = self.trace.avals[value], piece.stacks
            if is_stack:
                aval = aval.update(shape=(bounds[1] - bounds[0], *aval.shape[1:]))
            result, repeat = self.builder.new(aval, self.trace.repeats[value]), share if is_stack else 1.0
            leave.append(piece.reading(env, results=(result,), repeat=piece.repeat * repeat))
            (stacks.setdefault(value, []) if is_stack else last).append(result)
        source = jax_compat.scan_with_length(nest.source, bounds[1] - bounds[0])
        self.builder.add(Nest(nest.kind, source, enter, sections, leave))
        return last

    def _barrier(self, nest: Nest) -> None:
        """Divide a barrier by parts: a slice waits only for slices of the same part."""
        parts = self.values.parts
        nests = [Nest(nest.kind, nest.source) for _ in range(len(self.bounds) + 1)]
        for piece in nest.enter:
            (atom,), (value,) = piece.operands, piece.results
            place = self.dims.of(value)
            if not isinstance(atom, int) or atom not in parts or place is None or place != self.dims.of(atom):
                nests[-1].enter.append(piece.reading(self.values.whole))
                continue
            parts[value] = []
            for part, bounds, one in zip(parts[atom], self.bounds, nests, strict=False):
                types = partial(self.values.part_aval, bounds=bounds)
                one.enter.append(self.builder.copy(piece, {atom: part}, types=types))
                parts[value] += one.enter[-1].results
        for one, (start, _) in zip(nests, (*self.bounds, (0, 0)), strict=True):
            self.values.attribute_to_layer(start)
            if one.enter:
                self.builder.add(one)

    def _finished(self) -> Unstacked:
        self.values.attribute_to(len(self.trace.equations) - 1)
        outputs: list[tuple[Leaf, Atom, str]] = []
        given: list[range] = []
        renews = {b: a for a, b in self.before.carried}
        leaves = zip(self.before.outputs, self.trace.outputs, self.trace.output_paths, strict=True)
        for position, (leaf, atom, path) in enumerate(leaves):
            place, start = self._leaves_in_parts(leaf, atom, renews.get(position)), len(outputs)
            if place is None or not isinstance(atom, int):
                outputs.append((leaf, self.values.whole(atom), path))
            else:
                values = [self.values.part_at(atom, place, i) for i in range(len(self.bounds))]
                outputs += self._rows(leaf, place, values, path)
            given.append(range(start, len(outputs)))
        inputs: list[tuple[Leaf, Atom, str]] = []
        carried: list[tuple[int, int]] = []
        state = dict(self.before.carried)
        leaves = zip(self.before.inputs, self.trace.inputs, self.trace.input_paths, strict=True)
        for position, (leaf, value, path) in enumerate(leaves):
            place, start = self.dims.of(value), len(inputs)
            if position in self.split and place is not None:
                inputs += self._rows(leaf, place, self.values.parts[value], path)
            else:
                inputs.append((leaf, value, path))
            if position in state:
                carried += zip(range(start, len(inputs)), given[state[position]], strict=True)
        taken = [(value, path) for _, value, path in inputs if isinstance(value, int)]
        trace = self.builder.finish(**flat_border(taken, [(atom, path) for _, atom, path in outputs]))
        leaves_in, leaves_out = (tuple(leaf for leaf, *_ in side) for side in (inputs, outputs))
        return Unstacked(trace, leaves_in, leaves_out, tuple(carried), tuple(self.builder.origins_of(trace)))

    def _rows(self, leaf: Leaf, place: Place, values: Sequence[Atom], path: str) -> Iterator[tuple[Leaf, Atom, str]]:
        for (start, stop), value in zip(self.bounds, values, strict=True):
            yield Leaf(leaf.position, Rows(place.dim, start, stop)), value, f"{path}[{':, ' * place.dim}{start}:{stop}]"

    def _leaves_in_parts(self, leaf: Leaf, atom: Atom, renewed: int | None) -> Place | None:
        """The layer dim of a result that is returned in slices: state that comes in slices, or a value made in them."""
        if renewed is not None:
            return self.dims.of(self.trace.inputs[renewed]) if renewed in self.split else None
        if leaf.rows is not None or not isinstance(atom, int) or atom not in self.values.parts:
            return None
        place, shape = self.dims.of(atom), self.trace.avals[atom].shape
        return place if place is not None and shape[place.dim] == self.dims.size else None

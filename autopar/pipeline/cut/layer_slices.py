"""Keep each value of a step whole, in slices along the layer dim, or both, and convert between the two.

In: a trace, the dims of a stack's layers, and the bounds of the slices. Out: `SlicedValues`, which writes slices and
concatenations with a trace builder where an equation needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from autopar.frontend.equations import Atom
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import TraceBuilder
from autopar.transforms.microbatch.batch_dims import Batch, Place
from autopar.transforms.microbatch.slices import COMBINE


@dataclass(frozen=True, slots=True)
class LayerSlices:
    """Slices along the layer dim, as functions of arrays.

    Args:
        num_layers: layers of the whole.
        bounds: first layer of each slice, and the layer after its last.
    """

    num_layers: int
    bounds: tuple[tuple[int, int], ...]

    def local(self, shape: Sequence[int], place: Place, bounds: tuple[int, int]) -> tuple[int, ...]:
        """The shape of a slice."""
        size = shape[place.dim] // self.num_layers * (bounds[1] - bounds[0])
        return (*shape[: place.dim], size, *shape[place.dim + 1 :])

    def _apart(self, shape: Sequence[int], place: Place) -> tuple[tuple[int, ...], int]:
        """The shape with a separate dim for the layers, and the position of that dim."""
        dim, minor = place.dim, place.minor
        of_layers = shape[dim] // minor
        major = max(1, of_layers // self.num_layers)
        outer = (*shape[:dim], *(size for size in (major,) if size > 1))
        inner = (*(size for size in (minor,) if size > 1), *shape[dim + 1 :])
        return (*outer, of_layers // major, *inner), len(outer)

    def cut(self, whole: Any, place: Place, bounds: tuple[int, int]) -> Any:
        """One slice of the whole."""
        shape, at = self._apart(whole.shape, place)
        part = lax.slice_in_dim(lax.reshape(whole, shape), *bounds, axis=at)
        return lax.reshape(part, self.local(whole.shape, place, bounds))

    def assembled(self, slices: Sequence[Any], place: Place, shape: tuple[int, ...]) -> Any:
        """The whole, of this shape, from all slices."""
        apart, at = self._apart(shape, place)
        shapes = [(*apart[:at], stop - start, *apart[at + 1 :]) for start, stop in self.bounds]
        parts = [lax.reshape(value, one) for value, one in zip(slices, shapes, strict=True)]
        return lax.reshape(lax.concatenate(parts, at), shape)


class SlicedValues:
    """The values of a rewritten step.

    Args:
        dims: the layer dim of each value that has one.
        bounds: as for `LayerSlices`. origins: origin of each equation of the trace.

    Attributes:
        parts: value -> its slices. wholes: value -> its replacement.
    """

    def __init__(
        self, trace: Trace, dims: Batch, bounds: tuple[tuple[int, int], ...], origins: Sequence[tuple[int, int]]
    ) -> None:
        self.trace, self.dims, self.bounds, self._origins = trace, dims, bounds, origins
        self.slices = LayerSlices(bounds[-1][1], bounds)
        self.builder = TraceBuilder(trace)
        self.like = trace.equations[0]  # the equation that is being rewritten
        self.parts: dict[int, list[Atom]] = {}
        self.wholes: dict[int, Atom] = {}

    def attribute_to(self, n: int) -> None:
        """Attribute the equations that follow to an equation of the trace."""
        self.like = self.trace.equations[n]
        self.builder.origin = self._origins[n]

    def attribute_to_layer(self, layer: int) -> None:
        """Attribute the equations that follow to the part that begins at this layer."""
        self.builder.origin = self.builder.origin[0], layer

    def whole(self, atom: Atom) -> Atom:
        """The whole value in the rewritten trace."""
        if not isinstance(atom, int) or (atom not in self.wholes and atom not in self.parts):
            return atom
        if atom not in self.wholes:
            place, shape = self.dims.of(atom), self.trace.avals[atom].shape
            assert place is not None
            key, parts = ("join", place, shape), self.parts[atom]
            (self.wholes[atom],) = self.write(key, parts, lambda values: [self.slices.assembled(values, place, shape)])
        return self.wholes[atom]

    def part(self, value: int, i: int) -> Atom:
        """One slice of a value; a value that is not in slices is sliced."""
        if value not in self.parts:
            place = self.dims.of(value)
            assert place is not None
            self.parts[value] = [self.part_at(value, place, j) for j in range(len(self.bounds))]
        return self.parts[value][i]

    def part_at(self, value: int, place: Place, i: int) -> Atom:
        """One slice of a value along a given dim."""
        if value in self.parts and self.dims.of(value) == place:
            return self.parts[value][i]
        bounds, whole, origin = self.bounds[i], self.whole(value), self.builder.origin
        self.attribute_to_layer(bounds[0])
        key = "slice", place, bounds
        (part,) = self.write(key, [whole], lambda values: [self.slices.cut(values[0], place, bounds)])
        self.builder.origin = origin
        return part

    def part_aval(self, value: int, bounds: tuple[int, int]) -> Any:
        """The type of a slice."""
        place, aval = self.dims.of(value), self.trace.avals[value]
        assert place is not None
        return aval.update(shape=self.slices.local(aval.shape, place, bounds))

    def write(self, what: Any, atoms: Sequence[Atom], function: Any) -> list[Atom]:
        """Append a function of arrays; `what` identifies it."""
        return self.builder.write(self.like, what, atoms, function, repeat=1.0)

    def combined(self, kind: str, terms: Sequence[Atom]) -> Atom:
        """Combine the terms of a reduction over all layers, one term per slice."""
        total = terms[0]
        for term in terms[1:]:
            (total,) = self.write(("combine", kind), [total, term], lambda values: [COMBINE[kind](*values)])
        return total
